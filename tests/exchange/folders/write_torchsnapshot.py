"""Write a snapshot of torchsnapshot into OUT/state."""

from __future__ import annotations

import os
import sys

import torchsnapshot

from tests.exchange.folders.net import trained, write_truth


def main(out: str) -> None:
    net, optimizer = trained()
    state = {"model": net, "optimizer": optimizer, "progress": torchsnapshot.StateDict(step=2)}
    torchsnapshot.Snapshot.take(path=os.path.join(out, "state"), app_state=state)
    write_truth(out, net, optimizer, at="progress/step", step=2)


if __name__ == "__main__":
    main(*sys.argv[1:])

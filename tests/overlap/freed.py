"""A process that frees the memory of a tensor while the tensor waits to be copied.

A wild read would kill the process, so it is not the process of the test.

freed.py ROOT
"""

from __future__ import annotations

import sys

import pytest

from ckpt import CheckpointManager
from ckpt.errors import StagingError
from tests.overlap.jobs import train, trained
from tests.overlap.window import Window, assert_restores


def take_away(root: str, left: int, window: Window) -> None:
    state = trained()
    weight = state["model"].two.weight
    with CheckpointManager(root) as manager:
        pending = window.save(manager, state)
        weight.untyped_storage().resize_(left)
        window.close()
        error = pending.exception(60)
        if error is None:
            assert_restores(root, window.reference, trained(seed=5))
        else:
            assert isinstance(error, StagingError), error
            assert "model/two.weight" in str(error), error
        other = trained(seed=1)
        train(other, 3)
        manager.save(other, 2)  # the manager still works


def main(root: str) -> None:
    window = Window()
    window.hold_copies(pytest.MonkeyPatch())
    for left in (4096, 0):
        take_away(f"{root}/{left}", left, window)
        print(f"well: down to {left} bytes", flush=True)


main(*sys.argv[1:])

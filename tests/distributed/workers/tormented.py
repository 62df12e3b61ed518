"""FOLDER: one rank of a job that trains until it is killed or gets a signal to stop.

It notes what it does in FOLDER/notes-RANK.jsonl.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ckpt import CheckpointManager, PendingSave, Tier
from ckpt.errors import CkptError
from ckpt.model.checksum import checksum
from tests.distributed.workers.elastic import Notes, Trainer

SAVE_EVERY = 2
COMMIT_TIMEOUT_SECONDS = 4
GRACE_SECONDS = 4


def digest(trainer: Trainer) -> str:
    """Return a digest of what this rank holds, which is a function of the step and the rank."""
    parts: list[bytes] = [str(trainer.step).encode()]
    for name, net in trainer.nets.items():
        for key, parameter in net.named_parameters():
            for kind, value in sorted(
                {"": parameter, **trainer.optimizers[name].state[parameter]}.items()
            ):
                mine: Any = value.to_local() if isinstance(value, DTensor) else value
                parts += [f"{key}/{kind}".encode(), mine.detach().contiguous().numpy().tobytes()]
    return checksum(b"".join(parts))[:16]


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    faulthandler.register(signal.SIGUSR2)  # it prints the stacks of all threads, to examine a hang
    note = Notes(folder)
    note(up=os.getpid(), agent=os.getppid(), world=dist.get_world_size())
    trainer = Trainer()
    saves: list[PendingSave] = []
    tier = Tier(str(folder / "run"), keep_last=4)
    with CheckpointManager(
        tier, chunk_size=1 << 14, commit_timeout_seconds=COMMIT_TIMEOUT_SECONDS
    ) as manager:
        stop = manager.on_signals(grace_seconds=GRACE_SECONDS)
        report = trainer.restore(manager)
        note(
            restored=trainer.step,
            digest=digest(trainer) if report else "",
            skipped=report.skipped if report else [],
        )
        while True:
            trainer.train()
            note(step=trainer.step)
            last = stop.requested(trainer.step)
            if last or trainer.step % SAVE_EVERY == 0:
                note(saving=trainer.step, digest=digest(trainer))
                try:
                    saves.append(manager.save_async(trainer.state, trainer.step))
                except CkptError as error:  # an earlier save has failed
                    note(failed=trainer.step, error=str(error))
            for save in [save for save in saves if save.done()]:
                saves.remove(save)
                failure = save.exception()
                note(committed=save.step) if failure is None else note(
                    failed=save.step, error=str(failure)
                )
            if last:
                note(stops=trainer.step)
                break


if __name__ == "__main__":
    main()

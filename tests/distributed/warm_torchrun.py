"""LOG ARGUMENT ... [-- ARGUMENT ...]: run torchrun several times in a row.

Its agent has imported what workers import, and forks them. A restart takes tenths of a second,
instead of four times the import of torch.

The script prints a line ``ended N STATUS`` after each run, and all else goes to LOG.
"""

from __future__ import annotations

import gc
import itertools
import os
import sys

import torch._dynamo
import torch.distributed.fsdp  # noqa: F401 - for the forks
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

import ckpt

ckpt.CheckpointManager  # noqa: B018 - imported here, once


def launch(arguments: list[str]) -> int:
    try:
        main(["--start-method=fork", "--run-path", *arguments])
    except ChildFailedError as error:
        return next(iter(error.failures.values())).exitcode or 1
    return 0


if __name__ == "__main__":
    reported = os.fdopen(os.dup(1), "w", buffering=1)
    log = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    runs = [
        list(run)
        for end, run in itertools.groupby(sys.argv[2:], lambda word: word == "--")
        if not end
    ]
    gc.collect()
    gc.freeze()  # as in tests/kit/fork_server.py
    for number, arguments in enumerate(runs):
        print(f"ended {number} {launch(arguments)}", file=reported)

"""How a rank of a test or of a measurement ends."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from typing import NoReturn

import torch.distributed as dist


def exit_rank() -> NoReturn:
    """Destroy the process group, and end the process with status 0.

    The interpreter is not finalized.

    Threads of gloo outlive ``destroy_process_group`` where a DDP or FSDP module has used the group.
    Such a thread may drop the last reference to a tensor that Python has seen, and takes the GIL
    for it. If the interpreter is finalized at this moment, the process aborts with "terminate
    called without an active exception" (https://github.com/pytorch/pytorch/issues/190489,
    https://github.com/pytorch/pytorch/pull/179291).

    Faults of our own still show. The managers that are open are closed and the threads are joined.
    An exception in that makes the process fail, where the interpreter would print it and end with
    status 0. The functions of ``atexit`` run, and their exceptions are printed.

    A process that ``multiprocessing`` has forked does not need this function. Such a process is
    never finalized, and its parent waits for what its function returns.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    threading._shutdown()  # type: ignore[attr-defined]  # as at the end of any script
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)

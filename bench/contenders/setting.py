"""What some contenders ask of the process they run in, given back when they close."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Final, cast

import torch.distributed as dist
import torch.multiprocessing as mp
from torch._C._distributed_c10d import HashStore

from bench.state import Subject

_MANY: Final = 1000
_mp = cast(Any, mp)  # untyped


@contextmanager
def process_group() -> Generator[None]:
    """The job's own if there is one, else one of this process alone."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def shared_memory_for(subject: Subject) -> Generator[None]:
    """Hand tensors in shared memory to another process by name if there are many.

    torch hands over a descriptor of each otherwise: slower for 3,000 tensors, and 30,000 are above
    the usual limit of open files. A helper
    process of torch that comes with it ends when this one does.
    """
    before = _mp.get_sharing_strategy()
    if len(subject.tensors()) > _MANY:
        _mp.set_sharing_strategy("file_system")
    try:
        yield
    finally:
        _mp.set_sharing_strategy(before)

"""What the ranks of the default process group find out together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from torch import distributed as dist

from ckpt.errors import RestoreError

T = TypeVar("T")


def of_all(failure: str, look: Callable[[], T]) -> list[T]:
    """Return on all ranks what ``look`` returns on each of them, by rank.

    If it raises on a rank, all ranks raise, so that none waits for a rank that has failed.

    Args:
        failure: What a rank has not done, in the error of the other ranks.

    Raises:
        RestoreError: Another rank has failed. A rank that has failed raises its own error.
    """
    if not dist.is_initialized():
        return [look()]
    found: list[Any] = [None] * dist.get_world_size()
    try:
        seen = look()
    except Exception as error:
        dist.all_gather_object(found, (None, f"{type(error).__name__}: {error}"))
        raise
    dist.all_gather_object(found, (seen, ""))
    for rank, (_, wrong) in enumerate(found):
        if wrong:
            raise RestoreError(f"rank {rank} {failure}: {wrong}")
    return [each for each, _ in found]


def of_first(failure: str, look: Callable[[], T]) -> T:
    """Return on all ranks what ``look`` returns on rank 0, which alone calls it.

    Ranks that list a folder by themselves may find different steps, and would wait for each other
    in different collectives.

    Raises:
        RestoreError: Rank 0 has failed. It raises its own error.
    """
    first = not dist.is_initialized() or dist.get_rank() == 0
    found = of_all(failure, look if first else lambda: None)
    return cast(T, found[0])

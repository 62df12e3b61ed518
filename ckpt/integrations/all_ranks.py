"""Results and errors that all ranks of the default process group share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from torch import distributed as dist

from ckpt.errors import RestoreError

T = TypeVar("T")


def of_all(failure: str, look: Callable[[], T]) -> list[T]:
    """Call ``look`` on every rank, and return the results of all ranks on each, in rank order.

    All ranks must call this function. If ``look`` raises on a rank, all ranks raise, so that no
    rank waits for one that has failed.

    Args:
        failure: The end of "rank 3 ..." in the error of the other ranks: it says what the rank that
            failed could not do.
        look: The function.

    Raises:
        RestoreError: ``look`` has failed on another rank.
        Exception: ``look`` has failed on this rank, and this is its error.
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
    """Call ``look`` on rank 0 only, and return its result on all ranks.

    All ranks must call this function.

    If each rank listed a folder by itself, the ranks might find different steps, and then wait for
    each other in different collectives.

    Args:
        failure: As for `of_all`.
        look: The function.

    Raises:
        RestoreError: ``look`` has failed on rank 0, which raises the error of ``look`` itself.
    """
    first = not dist.is_initialized() or dist.get_rank() == 0
    found = of_all(failure, look if first else lambda: None)
    return cast(T, found[0])

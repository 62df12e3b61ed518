"""Results and errors that all ranks of the default process group share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from torch import distributed as dist

from ckpt.errors import RestoreError

T = TypeVar("T")


def all_results(failure: str, call: Callable[[], T]) -> list[T]:
    """Call ``call`` on every rank, and return the results of all ranks, in rank order.

    All ranks must call this function, and all get the same list. If ``call`` raises an error on a
    rank, all ranks raise an error, so that no rank waits for a rank that has failed. Without a
    process group, the result has one item.

    Args:
        failure: The words after "rank 3" in the error of the other ranks, such as "cannot write".
        call: The function.

    Raises:
        RestoreError: ``call`` has failed on another rank.
        Exception: ``call`` has failed on this rank, and this is its error.
    """
    if not dist.is_initialized():
        return [call()]
    results: list[Any] = [None] * dist.get_world_size()
    try:
        result = call()
    except Exception as error:
        dist.all_gather_object(results, (None, f"{type(error).__name__}: {error}"))
        raise
    dist.all_gather_object(results, (result, ""))
    for rank, (_, error_text) in enumerate(results):
        if error_text:
            raise RestoreError(f"rank {rank} {failure}: {error_text}")
    return [value for value, _ in results]


def first_result(failure: str, call: Callable[[], T]) -> T:
    """Call ``call`` on rank 0 only, and return its result on all ranks.

    All ranks must call this function. It is for results that might differ between ranks, such as
    the list of a folder. With different results, the ranks might wait for each other in different
    collectives.

    Args:
        failure: As for `all_results`.
        call: The function.

    Raises:
        RestoreError: ``call`` has failed on rank 0. Rank 0 raises the error of ``call`` instead.
    """
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    results = all_results(failure, call if is_first else lambda: None)
    return cast(T, results[0])

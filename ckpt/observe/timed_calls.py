"""Ask file systems that may not answer, such as a network mount whose server is gone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import wait
from typing import TypeVar

from ckpt.pipeline.workers import Workers

T = TypeVar("T")


def results_in_time(calls: Sequence[Callable[[], T]], seconds: float) -> list[T | None]:
    """Run each call on a thread of its own, and return the results.

    The result of a call that has not returned within ``seconds`` is None. Its thread waits on.
    """
    futures = [Workers("ask", 1).submit(call) for call in calls]
    ready = wait(futures, seconds).done
    return [future.result() if future in ready else None for future in futures]

"""Every thread of the package: named, few, of low priority, and owned by whoever opened the group."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from itertools import islice
from typing import Final, ParamSpec, Protocol, Self, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_PR_SET_NAME: Final = 15
_log = logging.getLogger("ckpt")


class Workers:
    """A few threads that run what is submitted, first come first served.

    Threads: ``submit`` from any thread; ``close`` from the owner, once. Threads start with the first work and are joined by ``close``.

    Args:
        name: Shown by ``ps -eT`` and in stack dumps, at most 12 characters.
        count: Number of threads.
        nice: Added to the threads' niceness on Linux, so that training wins the core; ignored where it is not allowed.
        cpus: Cores the threads may use; None for all of the process'.
    """

    def __init__(self, name: str, count: int, *, nice: int = 0, cpus: Iterable[int] | None = None) -> None:
        self.name, self.count = name, count
        self._nice, self._cpus = nice, frozenset(cpus) if cpus is not None else None
        self._pool = ThreadPoolExecutor(count, thread_name_prefix=f"ckpt-{name}", initializer=self._settle)

    def submit(self, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Queue ``work``; its result or error is in the future."""
        return self._pool.submit(work, *args, **kwargs)

    def start(self) -> None:
        """Make the first thread now, which takes a millisecond, rather than with the first work."""
        self._pool.submit(int)

    def run_all(self, work: Iterable[Callable[[], T]]) -> list[T]:
        """Run all of it here and return the results in order. The first error cancels what has not begun, waits for what has, and is raised."""
        futures = [self._pool.submit(item) for item in work]
        _, pending = wait(futures, return_when=FIRST_EXCEPTION)
        for future in pending:
            future.cancel()
        wait(futures)
        for future in futures:  # the first true error, not a cancellation that it caused
            if not future.cancelled() and (error := future.exception()) is not None:
                raise error
        return [future.result() for future in futures]

    def stream(self, work: Iterable[Callable[[], T]]) -> Iterator[T]:
        """Run all of it here; results come in order, and only few of them are kept waiting. What has not begun when one fails, or nobody takes more, never does."""
        ahead: deque[Future[T]] = deque()
        items = iter(work)
        try:
            while True:
                ahead.extend(self._pool.submit(item) for item in islice(items, 4 * self.count - len(ahead)))
                if not ahead:
                    return
                yield ahead.popleft().result()
        finally:
            for future in ahead:
                future.cancel()

    def close(self, *, cancel: bool = False) -> None:
        """Finish what was submitted (or, with ``cancel``, only what has begun) and join the threads."""
        self._pool.shutdown(wait=True, cancel_futures=cancel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close(cancel=exc[0] is not None)

    def _settle(self) -> None:
        """Runs in each new thread. Failing to be nice is no reason to fail."""
        name = threading.current_thread().name
        _set_os_name(f"{self.name}-{name.rsplit('_', 1)[-1]}")
        thread = threading.get_native_id()
        if self._nice:
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + self._nice)
        if self._cpus is not None and hasattr(os, "sched_setaffinity"):
            with contextlib.suppress(OSError):
                os.sched_setaffinity(thread, self._cpus)


def _set_os_name(name: str) -> None:
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_NAME, f"ckpt-{name}"[:15].encode(), 0, 0, 0)


class Closes(Protocol):
    """Something that owns threads, and ends their work properly."""

    def close(self) -> None: ...


def close_at_exit(owner: Closes) -> None:
    """Close ``owner``, if it still lives, when the script ends: what is under way is finished. Later no thread could be started any more.

    An error there is only logged: nobody is left to catch it.
    """
    alive = weakref.ref(owner)

    def close() -> None:
        if (found := alive()) is not None:
            try:
                found.close()
            except Exception as error:  # noqa: BLE001 - see above
                _log.error("ckpt: %s", error)

    threading._register_atexit(close)  # type: ignore[attr-defined]  # as concurrent.futures does, for the same end

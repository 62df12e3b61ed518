"""The threads of the package: each has a name, a low priority, and an owner."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from functools import partial
from itertools import islice
from queue import Empty, SimpleQueue
from typing import Any, Final, ParamSpec, Protocol, Self, TypeVar

from ckpt.errors import ThreadLimit

P = ParamSpec("P")
T = TypeVar("T")

_PR_SET_NAME: Final = 15
_log = logging.getLogger("ckpt")


class _Work:
    """A call that was submitted, and its future."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.future: Future[Any] = Future()
        self._call = call

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(self._call())
        except BaseException as error:  # noqa: BLE001 - it is raised by `result`
            self.future.set_exception(error)
            del self  # Otherwise the error's traceback would keep the future that keeps the error


_Queue = SimpleQueue[_Work | None]


class Workers:
    """A few threads that run what is submitted, first come first served.

    Threads start with the first work, or with ``start``, and are joined by ``close``. They do not
    hold up the end of the process: an owner whose work must be finished closes the group before
    (see ``close_at_exit``).

    Thread safety: any thread may call ``submit``. The owner calls ``close``.

    Args:
        name: Shown by ``ps -eT`` and in stack dumps, at most 12 characters.
        count: Number of threads.
        nice: Added to the threads' niceness on Linux, so that training wins the core; ignored where
            it is not allowed.
        cpus: Cores the threads may use; None for all of the process'.
    """

    def __init__(
        self, name: str, count: int, *, nice: int = 0, cpus: Iterable[int] | None = None
    ) -> None:
        self.name, self.count = name, count
        self._nice, self._cpus = nice, frozenset(cpus) if cpus is not None else None
        self._settle = partial(_settle, name, nice, self._cpus)
        self._queue: _Queue = SimpleQueue()
        self._idle = SimpleQueue[None]()  # One item for each idle thread; see ``ckpt.locks``
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._closed = False
        # This ends the threads of a group that is never closed.
        weakref.finalize(self, self._queue.put, None)

    def beside(self, name: str, count: int) -> Workers:
        """Return another group of the same priority, for work that waits for this one's."""
        return Workers(name, count, nice=self._nice, cpus=self._cpus)

    def submit(self, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Queue ``work``; its result or error is in the future.

        Python 3.12.1 starts no thread once the script has ended. A group without threads then runs
        the work here.

        Raises:
            ThreadLimit: There is no thread for it, and none can be started. It is not queued.
        """
        task = _Work(partial(work, *args, **kwargs))
        with self._lock:
            if self._closed:
                raise RuntimeError(f"the threads of {self.name!r} are closed")
            has_thread = self._take_idle() or self._start_one()
            if has_thread:
                self._queue.put(task)
        if not has_thread:
            task.run()
        return task.future

    def start(self, count: int = 1) -> None:
        """Make the first threads now, which takes a millisecond each, rather than with the first
        work.

        Raises ``ThreadLimit``.
        """
        with self._lock:
            for _ in range(0 if self._closed else count - len(self._threads)):
                self._start_one()
                self._idle.put(None)

    def _take_idle(self) -> bool:
        """Return True if a thread is idle, which gets work now."""
        try:
            self._idle.get_nowait()
        except Empty:
            return False
        return True

    def _start_one(self) -> bool:
        """Start one more thread, if there may be one. The caller holds the lock.

        If the system has no more threads, the present ones must do. Return False if there are none
        because the interpreter ends.
        """
        if len(self._threads) >= self.count:
            return True
        name = f"ckpt-{self.name}_{len(self._threads)}"
        thread = threading.Thread(
            target=_run, args=(self._queue, self._idle, self._settle), name=name, daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:
            if not self._threads and "interpreter shutdown" in str(error):
                return False
            if not self._threads:
                raise ThreadLimit(self.name, str(error)) from None
        else:
            self._threads.append(thread)
        return True

    def run_all(self, work: Iterable[Callable[[], T]]) -> list[T]:
        """Run all of it here and return the results in order.

        The first error cancels what has not begun, waits for what has, and is raised.
        """
        futures: list[Future[T]] = []
        try:
            futures.extend(map(self.submit, work))
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            for future in futures:
                future.cancel()
            wait(futures)
        for future in futures:  # Raise the first true error, not a cancellation that it caused
            if not future.cancelled() and (error := future.exception()) is not None:
                raise error
        return [future.result() for future in futures]

    def stream(self, work: Iterable[Callable[[], T]]) -> Iterator[T]:
        """Run all of it here, and yield the results in order. Only a few results wait.

        Work that has not begun when one item fails, or when the caller stops, is never begun.
        """
        ahead: deque[Future[T]] = deque()
        items = iter(work)
        try:
            while True:
                ahead.extend(
                    self.submit(item) for item in islice(items, 4 * self.count - len(ahead))
                )
                if not ahead:
                    return
                yield ahead.popleft().result()
        finally:
            for future in ahead:
                future.cancel()

    def close(self, *, cancel: bool = False) -> None:
        """Finish what was submitted (or, with ``cancel``, only what has begun) and join the
        threads.
        """
        with self._lock:
            self._closed = True
        if cancel:
            with contextlib.suppress(Empty):
                while True:
                    if (task := self._queue.get_nowait()) is not None and task.future.cancel():
                        # This wakes the threads that wait for the task.
                        task.future.set_running_or_notify_cancel()
        self._queue.put(None)
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close(cancel=exc[0] is not None)


def _run(queue: _Queue, idle: SimpleQueue[None], settle: Callable[[], None]) -> None:
    """Work off the queue. A thread knows the queue and not the group, which may end before it."""
    settle()
    while (task := queue.get()) is not None:
        task.run()
        del task
        idle.put(None)
    queue.put(None)  # The next thread ends, too


def _settle(group: str, nice: int, cpus: frozenset[int] | None) -> None:
    """Set the name, the niceness and the cores of a new thread. It continues where it must not set
    them.
    """
    name = threading.current_thread().name
    _set_os_name(f"{group}-{name.rsplit('_', 1)[-1]}")
    thread = threading.get_native_id()
    if nice:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + nice)
    if cpus is not None and hasattr(os, "sched_setaffinity"):
        with contextlib.suppress(OSError):
            os.sched_setaffinity(thread, cpus)


def _set_os_name(name: str) -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_NAME, f"ckpt-{name}"[:15].encode(), 0, 0, 0)


class Once:
    """A call that happens at most once: either it begins, or ``revoke`` came before.

    Thread safety: any thread may use it.
    """

    def __init__(self, call: Callable[[], object]) -> None:
        self._call, self._taken = call, threading.Lock()

    def __call__(self) -> None:
        """Begin the call, unless it was revoked or has begun."""
        if self._taken.acquire(blocking=False):
            self._call()

    def revoke(self) -> bool:
        """Return True if the call has not begun. It then never does."""
        return self._taken.acquire(blocking=False)


class Closes(Protocol):
    """An owner of threads that can end their work in order."""

    def close_after(self, error: BaseException | None) -> None:
        """Close when the script ends, because of ``error`` if that is not None."""
        ...


def workers_at_exit(name: str, count: int) -> Workers:
    """Return a group whose work may begin after the script has ended.

    Python 3.12.1 starts no thread from then on, and Python 3.11 and 3.13 do. So on 3.12 the group
    has all its threads at once.
    """
    group = Workers(name, count)
    if sys.version_info[:2] == (3, 12):
        group.start(count)
    return group


def has_script_ended() -> bool:
    """Return whether the main thread has ended. Python may start no thread from then on."""
    return not threading.main_thread().is_alive()


def close_at_exit(owner: Closes) -> None:
    """Close ``owner`` when the script ends, if it still lives, so that work under way is finished.

    Threads cannot be started any later than that. An error is only logged, since no caller is left.
    """
    alive = weakref.ref(owner)

    def close() -> None:
        if (found := alive()) is not None:
            try:
                found.close_after(_unhandled())
            except Exception as error:  # noqa: BLE001 - see above
                _log.error("ckpt: %s", error)

    # concurrent.futures registers the end of its threads in the same way.
    threading._register_atexit(close)  # type: ignore[attr-defined]


def await_at_exit(work: Future[Any], seconds: float) -> None:
    """Let the end of the script wait for ``work``, at most for ``seconds``.

    A thread that works while the interpreter is finalized can abort the process, where torch takes
    the GIL in C++.
    """
    threading._register_atexit(wait, [work], seconds)  # type: ignore[attr-defined]


def _unhandled() -> BaseException | None:
    """Return the exception that ends the script, if the interpreter knows it."""
    if hasattr(sys, "ps1") or sys.flags.interactive:
        return None
    # ``last_exc`` exists since Python 3.12.
    return getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)

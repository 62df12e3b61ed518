"""The threads of ckpt. Only this module starts threads.

Each thread has a name and belongs to a group. Each group has an owner that closes it.
"""

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

THREAD_PREFIX: Final = "ckpt-"
"""The begin of the names of all threads of ckpt."""
_PR_SET_NAME: Final = 15  # Of ``prctl``
_log = logging.getLogger("ckpt")


class _Work:
    """A submitted call and the future that gets its result or its error."""

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
            del self  # This breaks the reference cycle of the error, its traceback and the future


_Queue = SimpleQueue[_Work | None]


class Workers:
    """A group of threads that run the submitted calls in the order of submission.

    A thread starts when a call is submitted and no thread is idle, or with ``start``. ``close``
    joins the threads. The process does not wait for these threads when it ends, so an owner whose
    work must be finished closes the group before that (see ``close_at_exit``).

    ``_queue`` has the calls that no thread has begun, and None as the sign to end. ``_open_calls``
    has one item for each call that has not ended, so a thread is idle if there are more threads
    than items. ``_lock`` guards ``_threads`` and ``_closed``.

    Thread safety: any thread may call ``submit``, ``start``, ``run_all`` and ``stream``. The owner
    calls ``close``.

    Args:
        name: The name of the group, which ``ps -eT`` and stack dumps show. A thread has the name of
            its group and a number, cut to 15 characters in ``ps -eT``.
        count: The most threads of the group.
        nice: The number that is added to the niceness of the threads on Linux, so that training has
            the higher priority. It is ignored if the system does not allow the change.
        cpus: The numbers of the cores that the threads may use; None for all cores of the process.
    """

    def __init__(
        self, name: str, count: int, *, nice: int = 0, cpus: Iterable[int] | None = None
    ) -> None:
        self.name, self.count = name, count
        self._nice, self._cpus = nice, frozenset(cpus) if cpus is not None else None
        self._configure_thread = partial(_configure_thread, name, nice, self._cpus)
        self._queue: _Queue = SimpleQueue()
        # One item for each call that has not ended. The queue is written in C, so that Ctrl-C
        # cannot leave its lock taken (see ``ckpt.locks``).
        self._open_calls = SimpleQueue[None]()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._closed = False
        # This ends the threads if the group is garbage collected without having been closed.
        weakref.finalize(self, self._queue.put, None)

    def peer_group(self, name: str, count: int) -> Workers:
        """Return a new group with the same ``nice`` and ``cpus``. The caller closes it.

        The new group is for calls that wait for calls of this group. On the threads of this group,
        they could block all threads.
        """
        return Workers(name, count, nice=self._nice, cpus=self._cpus)

    def submit(self, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Queue the call of ``work`` and return the future of its result or error.

        Python 3.12 starts no thread once the script has ended. If the group has no thread then,
        this method runs the call itself before it returns.

        Raises:
            ThreadLimit: The group has no thread, and the system starts none. Nothing is queued.
            RuntimeError: The group is closed.
        """
        task = _Work(partial(work, *args, **kwargs))
        with self._lock:
            if self._closed:
                raise RuntimeError(f"the threads of {self.name!r} are closed")
            # A thread is idle if there are more threads than calls that have not ended.
            has_thread = self._open_calls.qsize() < len(self._threads) or self._start_one()
            if has_thread:
                self._open_calls.put(None)
                self._queue.put(task)
        if not has_thread:
            task.run()
        return task.future

    def start(self, count: int = 1) -> Self:
        """Start threads until the group has ``count`` of them, and return the group.

        Later calls of ``submit`` then do not spend a millisecond on the start of a thread, and have
        a thread even if the system starts no more. Do nothing if the group is closed.

        Raises:
            ThreadLimit: The group has no thread, and the system starts none.
        """
        with self._lock:
            for _ in range(0 if self._closed else count - len(self._threads)):
                self._start_one()
        return self

    def _start_one(self) -> bool:
        """Start one more thread, unless the group has ``count`` of them or the system starts no
        more. The caller holds the lock.

        Return True if the group has a thread that can run calls. Return False if it has none
        because the interpreter is shutting down.

        Raises:
            ThreadLimit: The group has no thread, and the system starts none.
        """
        if len(self._threads) >= self.count:
            return True
        name = f"{THREAD_PREFIX}{self.name}_{len(self._threads)}"
        thread = threading.Thread(
            target=_run,
            args=(self._queue, self._open_calls, self._configure_thread),
            name=name,
            daemon=True,
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
        """Run all calls on the threads of this group, and return their results in the order of
        ``work``.

        If a call fails, cancel the calls that have not begun, wait for those that have begun, and
        raise the error. If several calls fail, raise the error of the first of them in ``work``.
        """
        futures: list[Future[T]] = []
        try:
            futures.extend(map(self.submit, work))
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            for future in futures:
                future.cancel()
            wait(futures)
        for future in futures:  # Raise an error, and not a cancellation that it caused
            if not future.cancelled() and (error := future.exception()) is not None:
                raise error
        return [future.result() for future in futures]

    def stream(self, work: Iterable[Callable[[], T]]) -> Iterator[T]:
        """Run all calls on the threads of this group, and yield their results in the order of
        ``work``.

        At most ``4 * count`` calls are submitted whose results the caller has not taken yet. If the
        call for the next result has failed, its error is raised. After an error, or when the caller
        closes the iterator, calls that have not begun are cancelled.
        """
        pending_futures: deque[Future[T]] = deque()
        items = iter(work)
        try:
            while True:
                pending_futures.extend(
                    self.submit(item)
                    for item in islice(items, 4 * self.count - len(pending_futures))
                )
                if not pending_futures:
                    return
                yield pending_futures.popleft().result()
        finally:
            for future in pending_futures:
                future.cancel()

    def close(self, *, cancel: bool = False) -> None:
        """Wait until all submitted calls have ended, and join the threads.

        With ``cancel``, cancel the calls that have not begun, and wait only for the others.
        """
        with self._lock:
            self._closed = True
        if cancel:
            with contextlib.suppress(Empty):
                while True:
                    if (task := self._queue.get_nowait()) is not None and task.future.cancel():
                        # This wakes the threads that wait for the future in ``wait``.
                        task.future.set_running_or_notify_cancel()
        self._queue.put(None)
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_details: object) -> None:
        self.close(cancel=kind is not None)


def _run(
    queue: _Queue, open_calls: SimpleQueue[None], configure_thread: Callable[[], None]
) -> None:
    """Run the calls in ``queue`` until None arrives: the body of each thread. ``open_calls`` has
    one item for each call that has not ended.

    A thread has no reference to its group, so that the group can be garbage collected.
    """
    configure_thread()
    while (task := queue.get()) is not None:
        task.run()
        del task
        open_calls.get_nowait()
    queue.put(None)  # Another thread of the group takes this and ends, too


def _configure_thread(group: str, nice: int, cpus: frozenset[int] | None) -> None:
    """Set the name, the niceness and the cores of the calling thread. Ignore settings that the
    system refuses.
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


class SingleCall:
    """A function that runs at most once, and not at all if it was revoked before.

    Thread safety: any thread may call all methods.
    """

    def __init__(self, call: Callable[[], object]) -> None:
        self._call, self._lock = call, threading.Lock()

    def __call__(self) -> None:
        """Run the function, unless it was revoked or has already begun."""
        if self._lock.acquire(blocking=False):
            self._call()

    def revoke(self) -> bool:
        """Keep the function from running, and return True. Return False if it has already begun or
        been revoked.
        """
        return self._lock.acquire(blocking=False)


class Closes(Protocol):
    """An owner of threads that `close_at_exit` can close, as the end of a ``with`` block would."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Close the owner because the script ends.

        ``error`` is the unhandled exception that ends the script, or None.
        """
        ...


def workers_at_exit(name: str, count: int) -> Workers:
    """Return a group that can run calls submitted after the script has ended.

    Python 3.12 starts no thread once the script has ended, but Python 3.11 and 3.13 do. So on
    Python 3.12 all ``count`` threads are started now.
    """
    group = Workers(name, count)
    if sys.version_info[:2] == (3, 12):
        group.start(count)
    return group


def has_script_ended() -> bool:
    """Return True if the main thread has ended, after which Python may start no more threads."""
    return not threading.main_thread().is_alive()


def close_at_exit(owner: Closes) -> None:
    """Arrange that ``owner`` is closed when the script ends, so that work under way is finished.
    Keep only a weak reference to ``owner``.

    The call happens just before Python stops starting new threads. An error of the call is only
    logged, since no caller remains to handle it.
    """
    reference = weakref.ref(owner)

    def close() -> None:
        if (instance := reference()) is not None:
            try:
                error = _last_exception()
                instance.__exit__(type(error) if error else None, error, None)
            except Exception as error:  # noqa: BLE001 - no caller could handle it
                _log.error("ckpt: %s", error)

    # ThreadPoolExecutor of concurrent.futures uses this private function for the same purpose.
    threading._register_atexit(close)  # type: ignore[attr-defined]


def await_at_exit(work: Future[Any], seconds: float) -> None:
    """Arrange that Python waits up to ``seconds`` for ``work`` when the script ends.

    Otherwise a thread may still run while the interpreter is finalized. If code of torch takes the
    GIL in C++ then, the process can abort.
    """
    threading._register_atexit(wait, [work], seconds)  # type: ignore[attr-defined]


def _last_exception() -> BaseException | None:
    """Return the unhandled exception that ends the script, or None if there is none. Return None in
    an interactive session, where an earlier exception does not end the script.
    """
    if hasattr(sys, "ps1") or sys.flags.interactive:
        return None
    # ``last_exc`` exists since Python 3.12.
    return getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)

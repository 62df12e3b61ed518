"""Limit the time that a command waits for a store, and warn about a store that does not answer.

A command opens each store as a `WatchedStore` store, which records since when an answer of the
store is due. If no answer comes for two seconds, a line on standard error says so. The first
requests of a command to a store (``WatchedStore.call_in_time``) fail if the store does not answer
for ``--timeout`` seconds, and so does opening a folder whose file system does not answer. This
limit does not apply to the data that a command transfers afterwards, because a transfer may be slow
for good reasons. Only the retries of the backend and of the pipeline limit such a transfer.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import wait
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, TypeVar, cast

from ckpt.cli import output
from ckpt.errors import ConfigError, StorageError, TransientStorageError, with_root
from ckpt.pipeline.workers import Workers
from ckpt.storage.api import Capabilities, StorageBackend, Upload
from ckpt.storage.registry import open_backend, share_neighbors
from ckpt.storage.urls import is_folder, local_path

T = TypeVar("T")

SILENT_SECONDS: Final = 2.0
"""How long a command waits for a store before it prints a warning."""
_REPEAT_SECONDS: Final = 30.0
"""The least time between two warnings about one store, so that a slow connection does not cause a
warning for each chunk.
"""
_MOST_WAIT_SECONDS: Final = 3600.0
_CHECK_SECONDS: Final = SILENT_SECONDS / 4
"""The time between two checks whether a warning about a store is due."""
_OPTIONAL_METHODS: Final = (  # Of a `StorageBackend`
    "adopt",
    "discard",
    "identity",
    "is_elsewhere",
    "is_replaced",
    "place",
    "read_parts",
    "unfinished_writes",
)
_ITERATOR_METHODS: Final = ("list", "folders", "unfinished_writes")
_END_OF_ITEMS: Final = object()


def open_watched(url: str, options: Mapping[str, object] | None, timeout: float) -> WatchedStore:
    """Open the backend of ``url``, and return it as a watched store.

    Args:
        url: The URL of the store.
        options: The options of the backend.
        timeout: The value of ``--timeout`` in seconds.

    Raises:
        ConfigError: ``timeout`` is negative or nan, or the backend refuses the URL or the options.
        TransientStorageError: The folder ``url`` could not be opened within ``--timeout`` seconds.
    """
    _check_timeout(timeout)
    return watch(
        _open_folder(url, options, timeout) if is_folder(url) else open_backend(url, options),
        timeout,
    )


def _open_folder(url: str, options: Mapping[str, object] | None, timeout: float) -> StorageBackend:
    """Open a folder on a thread of its own. Opening it already waits for its file system, which may
    be on a server that does not answer. The backends of other stores send no request yet.
    """
    future = Workers("open", 1).submit(open_backend, url, options)  # Not closed: it may still wait
    wait([future], min(timeout, SILENT_SECONDS))
    root = os.path.abspath(local_path(url))
    if not future.done() and timeout > SILENT_SECONDS:
        output.warn(f"{root} has not answered yet; {_give_up_text(timeout)}")
        wait([future], min(timeout - SILENT_SECONDS, threading.TIMEOUT_MAX))
    if not future.done():
        raise with_root(TransientStorageError("", _timeout_text(timeout)), root)
    return future.result()


def _check_timeout(timeout: float) -> None:
    if not timeout >= 0:
        raise ConfigError(f"--timeout {timeout}: give a number of seconds, such as 10")


def _give_up_text(timeout: float) -> str:
    return f"it is given up after {timeout:g} s (--timeout)"


def _timeout_text(timeout: float) -> str:
    return f"no answer within {timeout:g} s (--timeout)"


def watch(backend: StorageBackend, timeout: float) -> WatchedStore:
    """Return a watched store that wraps ``backend``.

    The result also has each of the optional methods ``_OPTIONAL_METHODS`` that ``backend`` has.

    Raises:
        ConfigError: ``timeout`` is negative or nan.
    """
    _check_timeout(timeout)
    extras = {name: _watched_method(name) for name in _OPTIONAL_METHODS if hasattr(backend, name)}
    store = cast("WatchedStore", type("WatchedStore", (WatchedStore,), extras)(backend, timeout))
    share_neighbors(store, backend)
    return store


def _watched_method(name: str) -> Any:
    """Return a method that calls the method ``name`` of ``self.backend`` inside of a block ``with
    self.request()``.

    If the method of the backend returns an iterator, the new method returns an iterator that
    fetches each item inside of such a block.
    """

    def method(self: Any, *args: Any, **options: Any) -> Any:
        call = partial(getattr(self.backend, name), *args, **options)
        if name in _ITERATOR_METHODS:
            return self.iterate(call)
        with self.request():
            return call()

    return method


class WatchedStore:
    """A ``StorageBackend`` that wraps another backend, and records for how long that backend has
    not answered.

    An answer has been due since ``_due_since``, which is None if no request is under way.
    ``_failure`` is the error of the last request. A store that does not answer within ``--timeout``
    is given up: all later requests raise ``_timeout_error``.

    Thread safety: the threads that may use the other backend may use this object too. ``_lock``
    guards all attributes that change.
    """

    def __init__(self, backend: StorageBackend, timeout: float) -> None:
        self.backend, self._timeout = backend, timeout
        self._lock = threading.Lock()
        self._request_count = 0  # Requests under way
        self._due_since: float | None = None
        self._warned_at: float | None = None
        self._failure: StorageError | None = None
        self._timeout_error: StorageError | None = None

    def call_in_time(self, work: Callable[[], T]) -> T:
        """Run ``work``, which makes the first requests to this store, and return its result.

        ``work`` runs on a thread of its own. If the store does not answer in time, this call
        raises, while the thread goes on waiting.

        Raises:
            TransientStorageError: The store has not answered for ``--timeout`` seconds. All later
                requests to the store raise the same error.
        """
        future = Workers("ask", 1).submit(work)  # Not closed, as the thread may go on waiting
        while not future.done():
            silent = self.silent_seconds
            self.warn_if_silent(f"has not answered yet; {_give_up_text(self._timeout)}")
            if silent >= self._timeout:
                raise self._give_up()
            deadline_seconds = SILENT_SECONDS if silent < SILENT_SECONDS else self._timeout
            wait(
                [future],
                min(max(min(deadline_seconds, self._timeout) - silent, 0.001), _MOST_WAIT_SECONDS),
            )
        with self._lock:
            self._warned_at = self._due_since = None
        return future.result()

    @property
    def silent_seconds(self) -> float:
        """Return for how many seconds an answer has been due; 0 if no answer is due."""
        with self._lock:
            return 0.0 if self._due_since is None else time.monotonic() - self._due_since

    def warn_if_silent(self, text: str = "") -> None:
        """Print a warning if an answer has been due for two seconds.

        Nothing is printed if the last warning about this store is less than 30 seconds old, or if
        the store was given up.

        Args:
            text: The warning after the URL of the store. The default says for how long the store
                has not answered.
        """
        current_time = time.monotonic()
        with self._lock:
            if (
                self._timeout_error
                or self._due_since is None
                or current_time - self._due_since < SILENT_SECONDS
            ):
                return
            if self._warned_at is not None and current_time - self._warned_at < _REPEAT_SECONDS:
                return
            self._warned_at = current_time
            silent = current_time - self._due_since
        output.warn(f"{self.url} {text or f'has not answered for {silent:.0f} s'}")

    def _give_up(self) -> StorageError:
        """Give the store up, and return the error that all later requests to it raise, too. The
        error also says why the last request has failed.
        """
        with self._lock:
            if self._timeout_error is None:
                detail = (
                    f"; {self._failure.detail}" if self._failure and self._failure.detail else ""
                )
                text = f"{_timeout_text(self._timeout)}{detail}"
                self._timeout_error = with_root(TransientStorageError("", text), self.url)
            return self._timeout_error

    @contextmanager
    def request(self) -> Generator[None]:
        """Record that an answer is due while the block, which makes one request, runs.

        Raises:
            StorageError: The store was given up before. The block does not run.
        """
        with self._lock:
            if self._timeout_error is not None:
                raise self._timeout_error
            self._request_count += 1
            if self._due_since is None:
                self._due_since = time.monotonic()
        failure: StorageError | None = None
        try:
            yield
        except TransientStorageError as error:
            # The pipeline sends the request again, so this error does not count as an answer.
            failure = error
            raise
        finally:
            with self._lock:
                self._request_count -= 1
                self._failure = failure
                if failure is None:
                    self._due_since = time.monotonic() if self._request_count else None

    def iterate(self, items: Callable[[], Iterator[T]]) -> Iterator[T]:
        """Call ``items``, and yield the items of the iterator that it returns. Fetch each item
        inside of a block ``with self.request()``.
        """
        iterator: Iterator[T] | None = None
        while True:
            # A generator makes its first request only in ``next``, so the block includes ``next``.
            with self.request():
                iterator = iterator or items()
                item = next(iterator, _END_OF_ITEMS)
            if item is _END_OF_ITEMS:
                return
            yield cast("T", item)

    # -- the contract of a backend -----------------------------------------------------------------

    @property
    def capabilities(self) -> Capabilities:
        return self.backend.capabilities

    @property
    def url(self) -> str:
        return self.backend.url

    put = _watched_method("put")
    read_into = _watched_method("read_into")
    head = _watched_method("head")
    delete = _watched_method("delete")
    list = _watched_method("list")
    folders = _watched_method("folders")

    def upload(self, key: str, size: int) -> Upload:
        with self.request():
            return _WatchedUpload(self.backend.upload(key, size), self.request)

    def close(self) -> None:
        self.backend.close()


class _WatchedUpload:
    def __init__(self, upload: Upload, request: Callable[[], Any]) -> None:
        self.backend, self.request = upload, request

    @property
    def part_bytes(self) -> int:
        return self.backend.part_bytes

    write = _watched_method("write")
    finish = _watched_method("finish")

    def abort(self) -> None:
        self.backend.abort()


@contextmanager
def warn_of_silence(*stores: StorageBackend) -> Generator[None]:
    """Return a context manager. While its block runs, a warning is printed about each of ``stores``
    that does not answer for two seconds.
    """
    stop = threading.Event()
    watched_stores = [store for store in stores if isinstance(store, WatchedStore)]

    def warn_of_all() -> None:
        while not stop.wait(_CHECK_SECONDS):
            for store in watched_stores:
                store.warn_if_silent()

    with Workers("watch", 1) as workers:
        workers.submit(warn_of_all)
        try:
            yield
        finally:
            stop.set()

"""Stores that a verb waits for: never in silence, and not for ever.

A verb opens each store as a ``Watched`` one, which knows since when it owes an answer. A line on
standard error says so after two seconds. The first look at a store (``ask``) ends when the store
has not answered for ``--timeout`` seconds. Data that is on its way afterwards may be slow for good
reasons, so only the attempts of the backend and of the pipeline limit it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import wait
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, TypeVar, cast

from ckpt.cli import output
from ckpt.errors import ConfigError, StorageError, TransientStorageError, placed
from ckpt.pipeline.workers import Workers
from ckpt.storage.api import Capabilities, StorageBackend, Upload
from ckpt.storage.registry import open_backend

T = TypeVar("T")

SILENT_SECONDS: Final = 2.0
"""How long a store is waited for without a line to the user."""
_REPEAT_SECONDS: Final = 30.0
"""How long after such a line about data on its way there is no other one: a slow line is not
worth one for each chunk.
"""
_MOST_WAIT_SECONDS: Final = 3600.0
_TICKS: Final = 4
_EXTRAS: Final = ("adopt", "identity", "is_replaced", "unfinished", "discard", "read_parts")
_ITERATORS: Final = ("list", "folders", "unfinished")
_END: Final = object()


def open_watched(url: str, options: Mapping[str, object] | None, timeout: float) -> Watched:
    """Open a backend as a watched store. ``timeout`` is the value of ``--timeout``."""
    return watch(open_backend(url, options), timeout)


def watch(backend: StorageBackend, timeout: float) -> Watched:
    """Return ``backend`` as a watched store.

    It has the optional methods of ``ckpt.storage.api`` that ``backend`` has.
    """
    if not timeout >= 0:
        raise ConfigError(f"--timeout {timeout}: give a number of seconds, such as 10")
    extras = {name: _passed_on(name) for name in _EXTRAS if hasattr(backend, name)}
    return cast("Watched", type("Watched", (Watched,), extras)(backend, timeout))


def _passed_on(name: str) -> Any:
    """Return the method ``name`` of the wrapped object. Each call, and each item of an iterator, is
    a request that is watched.
    """

    def method(owner: Any, *args: Any, **options: Any) -> Any:
        call = partial(getattr(owner.backend, name), *args, **options)
        if name in _ITERATORS:
            return owner.iterate(call)
        with owner.asking():
            return call()

    return method


class Watched:
    """A ``StorageBackend`` that knows for how long it has not answered.

    The same threads may use it as the backend that it wraps.
    """

    def __init__(self, backend: StorageBackend, timeout: float) -> None:
        self.backend, self._timeout = backend, timeout
        self._lock = threading.Lock()
        self._pending = 0
        self._asked_at: float | None = None  # The time since which an answer is due
        self._warned_at: float | None = None
        self._failure: StorageError | None = None
        self._gone: StorageError | None = None

    def ask(self, work: Callable[[], T]) -> T:
        """Return what ``work``, the first look at this store, returns.

        It runs on a thread of its own, which is left alone if the store is given up.

        Raises:
            TransientStorageError: The store has not answered for ``--timeout`` seconds. Later calls
                raise the same.
        """
        future = Workers("ask", 1).submit(work)  # Not closed: it may still wait for the store
        while not future.done():
            silent = self.silent_seconds
            self.note(f"has not answered yet; it is given up after {self._timeout:g} s (--timeout)")
            if silent >= self._timeout:
                raise self._give_up()
            due = SILENT_SECONDS if silent < SILENT_SECONDS else self._timeout
            wait([future], min(max(min(due, self._timeout) - silent, 0.001), _MOST_WAIT_SECONDS))
        with self._lock:
            self._warned_at = self._asked_at = None
        return future.result()

    @property
    def silent_seconds(self) -> float:
        """For how long an answer has been due; 0 if none is."""
        with self._lock:
            return 0.0 if self._asked_at is None else time.monotonic() - self._asked_at

    def note(self, text: str = "") -> None:
        """Warn if an answer has been due for two seconds and no such line was printed recently.

        The line says ``text``, or for how long the store has been silent.
        """
        now = time.monotonic()
        with self._lock:
            if self._gone or self._asked_at is None or now - self._asked_at < SILENT_SECONDS:
                return
            if self._warned_at is not None and now - self._warned_at < _REPEAT_SECONDS:
                return
            self._warned_at = now
            silent = now - self._asked_at
        output.warn(f"{self.url} {text or f'has not answered for {silent:.0f} s'}")

    def _give_up(self) -> StorageError:
        with self._lock:
            if self._gone is None:
                why = f"; {self._failure.detail}" if self._failure and self._failure.detail else ""
                late = f"no answer within {self._timeout:g} s (--timeout){why}"
                self._gone = placed(TransientStorageError("", late), self.url)
            return self._gone

    @contextmanager
    def asking(self) -> Generator[None]:
        """Watch the request that the block makes."""
        with self._lock:
            if self._gone is not None:
                raise self._gone
            self._pending += 1
            if self._asked_at is None:
                self._asked_at = time.monotonic()
        failure: StorageError | None = None
        try:
            yield
        except TransientStorageError as error:
            # The pipeline tries again, so this is no answer.
            failure = error
            raise
        finally:
            with self._lock:
                self._pending -= 1
                self._failure = failure
                if failure is None:
                    self._asked_at = time.monotonic() if self._pending else None

    def iterate(self, items: Callable[[], Iterator[T]]) -> Iterator[T]:
        """Watch each request of an iterator."""
        found: Iterator[T] | None = None
        while True:
            # Making a generator is not yet an answer of the store, so the block includes ``next``.
            with self.asking():
                found = found or items()
                item = next(found, _END)
            if item is _END:
                return
            yield cast("T", item)

    # -- the contract of a backend -----------------------------------------------------------------

    @property
    def capabilities(self) -> Capabilities:
        return self.backend.capabilities

    @property
    def url(self) -> str:
        return self.backend.url

    put = _passed_on("put")
    read_into = _passed_on("read_into")
    head = _passed_on("head")
    delete = _passed_on("delete")
    list = _passed_on("list")
    folders = _passed_on("folders")

    def upload(self, key: str, size: int) -> Upload:
        with self.asking():
            return _WatchedUpload(self.backend.upload(key, size), self.asking)

    def close(self) -> None:
        self.backend.close()


class _WatchedUpload:
    def __init__(self, upload: Upload, asking: Callable[[], Any]) -> None:
        self.backend, self.asking = upload, asking

    @property
    def part_bytes(self) -> int:
        return self.backend.part_bytes

    write = _passed_on("write")
    finish = _passed_on("finish")

    def abort(self) -> None:
        self.backend.abort()


@contextmanager
def noting(*stores: StorageBackend) -> Generator[None]:
    """While the block runs, a line says of each store that it has not answered for two seconds."""
    over = threading.Event()
    watched = [store for store in stores if isinstance(store, Watched)]

    def look() -> None:
        while not over.wait(SILENT_SECONDS / _TICKS):
            for store in watched:
                store.note()

    with Workers("watch", 1) as workers:
        workers.submit(look)
        try:
            yield
        finally:
            over.set()

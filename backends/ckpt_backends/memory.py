"""The backend for named stores in the memory of this process, for tests and examples.

The URL of a backend is ``memory://name/prefix``. Two backends of one process with the same name
share one store, in which each of them sees only the objects below its own prefix. Backends with
different names, or in different processes, share no objects.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from ckpt.errors import ConfigError, ObjectExists, ObjectNotFound, StorageError
from ckpt.storage.api import (
    Buffer,
    Capabilities,
    ObjectInfo,
    Upload,
    check_key,
    check_prefix,
    check_read,
    check_written,
)

_PART_BYTES: Final = 8 << 20


class _Store:
    """The objects of the store of one name.

    Attributes:
        lock: Guards ``objects``.
        objects: The bytes of each object, by its prefix and key. These bytes never change, so
            readers copy them without the lock.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.objects: dict[str, bytes | bytearray] = {}


_stores: Final[dict[str, _Store]] = {}
_stores_lock: Final = threading.Lock()


def open_memory(url: str, options: Mapping[str, object]) -> MemoryBackend:
    """Return a backend for the store that ``url`` names. Create the store if this process has no
    store of that name.

    Args:
        url: ``memory://name`` or ``memory://name/prefix``. The root is the prefix.
        options: ``shared`` (bool, default false): the value of ``Capabilities.shared``. Set it in
            tests whose ranks are threads of one process.

    Raises:
        ConfigError: An option is unknown or has a wrong value.
    """
    if set(options) - {"shared"} or not isinstance(options.get("shared", False), bool):
        text = ", ".join(
            f"{name} of type {type(value).__name__}" for name, value in options.items()
        )
        raise ConfigError(f"memory:// takes the option shared (true or false), not {text}")
    name, _, prefix = url.partition("://")[2].partition("/")
    prefix = prefix.strip("/")
    with _stores_lock:
        store = _stores.setdefault(name, _Store())
    return MemoryBackend(
        store,
        f"memory://{name}/{prefix}".rstrip("/"),
        prefix,
        is_shared=bool(options.get("shared", False)),
    )


def forget_memory(name: str) -> None:
    """Remove the store of this name, so that the name can be used for a new, empty store.

    Open backends keep the removed store and its objects.
    """
    with _stores_lock:
        _stores.pop(name, None)


class MemoryBackend:
    """A backend whose root is a prefix in a named store.

    Thread safety: several threads may call all methods at the same time.
    """

    def __init__(self, store: _Store, url: str, prefix: str, *, is_shared: bool) -> None:
        self._store, self.url = store, url
        self._prefix = f"{prefix}/" if prefix else ""
        self.capabilities = Capabilities(
            put_if_absent=True, shared=is_shared, part_bytes=_PART_BYTES, takes_parts=True
        )

    def put(self, key: str, parts: Sequence[Buffer], *, if_absent: bool = False) -> ObjectInfo:
        return self.place(key, b"".join(parts), if_absent=if_absent)

    def upload(self, key: str, size: int) -> Upload:
        return _MemoryUpload(self, check_key(key), size)

    def read_into(self, key: str, offset: int, out: memoryview) -> None:
        value = self._find(key)
        check_read(key, offset, min(len(value) - offset, out.nbytes), out.nbytes)
        out.cast("B")[:] = memoryview(value)[offset : offset + out.nbytes]

    def head(self, key: str) -> ObjectInfo:
        return ObjectInfo(key=key, size=len(self._find(key)))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        start = self._prefix + check_prefix(prefix)
        with self._store.lock:
            entries = [
                (key, len(value))
                for key, value in self._store.objects.items()
                if key.startswith(start)
            ]
        for key, size in entries:
            yield ObjectInfo(key=key.removeprefix(self._prefix), size=size)

    def folders(self, prefix: str) -> Iterator[str]:
        start = check_prefix(prefix).removesuffix("/")
        start = f"{start}/" if start else ""
        names = (info.key.removeprefix(start) for info in self.list(start))
        yield from sorted({rest.partition("/")[0] for rest in names if "/" in rest})

    def delete(self, key: str) -> None:
        with self._store.lock:
            self._store.objects.pop(self._prefix + check_key(key), None)

    def close(self) -> None:
        """Do nothing. The store and its objects remain until ``forget_memory``."""

    def place(self, key: str, value: bytes | bytearray, *, if_absent: bool = False) -> ObjectInfo:
        """Make ``value`` itself, without a copy, the object ``key``.

        Raises:
            ObjectExists: ``if_absent`` is True and the key has an object.
        """
        path = self._prefix + check_key(key)
        with self._store.lock:
            if if_absent and path in self._store.objects:
                raise ObjectExists(key)
            self._store.objects[path] = value
        return ObjectInfo(key=key, size=len(value))

    def _find(self, key: str) -> bytes | bytearray:
        with self._store.lock:
            value = self._store.objects.get(self._prefix + check_key(key))
        if value is None:
            raise ObjectNotFound(key)
        return value


class _MemoryUpload:
    """An upload that copies each part into the object's memory during ``write``.

    Thread safety: several threads may call ``write`` at the same time. See ``Upload`` for the other
    methods.
    """

    def __init__(self, backend: MemoryBackend, key: str, size: int) -> None:
        self._backend, self._key, self._value = backend, key, bytearray(size)
        self.part_bytes = _PART_BYTES
        self._part_sizes: dict[int, int] = {}

    def write(self, offset: int, data: memoryview) -> None:
        if offset < 0 or offset + data.nbytes > len(self._value):
            raise StorageError(
                self._key,
                f"bytes {offset} to {offset + data.nbytes} of an upload of {len(self._value)}",
            )
        memoryview(self._value)[offset : offset + data.nbytes] = data.cast("B")
        self._part_sizes[offset] = data.nbytes

    def finish(self, size: int | None = None) -> ObjectInfo:
        size = check_written(self._key, sum(self._part_sizes.values()), len(self._value), size)
        del self._value[size:]
        return self._backend.place(self._key, self._value)

    def abort(self) -> None:
        self._value = bytearray()

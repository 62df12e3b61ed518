"""The contract of a storage backend, and helpers for authors of backends.

All methods of a backend block, and any thread may call them. Keys are relative to the root and use
'/' as the separator. A backend only moves bytes. Its callers own the threads, the checksums and the
memory, and retry calls. A backend maps every error of a library or of the system to one of the
storage errors of :mod:`ckpt.errors`. Callers retry a call only if it raises
``TransientStorageError``.

To add a backend:

1. Write a class with the methods of `StorageBackend`. It need not inherit from `StorageBackend`.
2. Register a factory ``open(url, options) -> StorageBackend`` as an entry point of the group
   ``ckpt.backends``. The name of the entry point is the URL scheme.
3. Run the tests of :mod:`ckpt.storage.testing` on the backend.

If you add the backend of an object store to ckpt itself, also add its scheme to ``OBJECT_STORES``
in ``ckpt.storage.urls``. Then a tier of that scheme cannot be ``local``.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import BinaryIO, Protocol, TypeVar, runtime_checkable

import msgspec

from ckpt.errors import (
    IntegrityError,
    LinkRefused,
    ManifestCorrupt,
    ObjectNotFound,
    StorageError,
)

T = TypeVar("T")
Buffer = memoryview | bytes | bytearray

# S3 and GCS allow 1024 bytes for a whole key. The other bytes are for the prefix of the root.
MAX_KEY_BYTES = 900
_SEGMENT_BYTES = 255
_HUGE_PAGE_BYTES = 2 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """The description of one object, as the store gives it.

    Attributes:
        key: The key of the object, relative to the root.
        size: The size in bytes.
        modified: When the object was put, in seconds since 1970 by the store's clock. It is None if
            the method that returned this description does not report the time. Comparisons ignore
            this field.
    """

    key: str
    size: int
    modified: float | None = field(default=None, compare=False)

    @property
    def name(self) -> str:
        """The last part of the key."""
        return self.key.rpartition("/")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnfinishedWrite:
    """A write that was begun and neither finished nor aborted.

    Its bytes take space in the store, but ``StorageBackend.list`` does not list them.

    Attributes:
        key: The key of the object that the write was to create.
        name: The store's name for the write, such as an upload id or a temporary file.
        size: The bytes that the write takes in the store; 0 if the store does not report them.
        modified: When the write began or last received bytes, in seconds since 1970.
        abandoned: True if the write is so old that no process can still be working on it.
    """

    key: str
    name: str
    size: int
    modified: float
    abandoned: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """The abilities of a store, which a caller reads instead of trying a call.

    Attributes:
        put_if_absent: True if exactly one of several concurrent ``put(if_absent=True)`` calls for
            a key succeeds, also between machines. False if such calls can both succeed.
        shared: True if all nodes see the same objects.
        part_bytes: The preferred number of bytes of one ``Upload.write``.
        alignment: Reads and writes whose offset, length and memory address are multiples of this
            number of bytes avoid a copy. 1 if alignment makes no difference.
        max_concurrency: The number of concurrent calls beyond which more calls bring no more
            throughput.
        parallel_parts: True if ``Upload.write`` calls of one upload may run at the same time.
        takes_parts: True if the caller may change or free the memory of a part as soon as
            ``Upload.write`` returns. False if that memory must stay unchanged until the upload
            ends.
    """

    put_if_absent: bool
    shared: bool
    part_bytes: int = 8 << 20
    alignment: int = 1
    max_concurrency: int = 8
    parallel_parts: bool = True
    takes_parts: bool = False


@runtime_checkable
class Upload(Protocol):
    """The write of one large object in parts.

    The object appears under its key only when ``finish`` succeeds. The owner of the upload ends it
    with ``finish`` or with ``abort``, and calls ``abort`` also after a ``finish`` that raised. A
    ``write`` that raised may be repeated with the same arguments, and so may a ``finish`` that
    raised ``TransientStorageError``.

    Thread safety: any thread may call ``write``. Several threads may call ``write`` at the same
    time if ``Capabilities.parallel_parts`` is True. The owner calls ``finish`` and ``abort`` while
    no ``write`` runs.
    """

    @property
    def part_bytes(self) -> int:
        """The size in bytes of every part but the last. It may be larger than
        ``Capabilities.part_bytes`` for very large objects.
        """
        ...

    def write(self, offset: int, data: memoryview) -> None:
        """Write ``data``, one part of the object, at the byte ``offset`` of the object.

        ``offset`` is a multiple of ``part_bytes``. The memory of ``data`` must stay unchanged until
        ``finish`` or ``abort`` returns, unless ``Capabilities.takes_parts`` is True.
        """
        ...

    def finish(self, size: int | None = None) -> ObjectInfo:
        """Make the whole object visible and durable, and replace an earlier object of this key.

        ``size`` is the final size in bytes. It may be smaller than the size given to
        ``StorageBackend.upload``, and must be where the last written part ends. None means the size
        given to ``StorageBackend.upload``.
        """
        ...

    def abort(self) -> None:
        """Discard the upload and free the space that its parts take in the store. Never raise."""
        ...


class ReadableStore(Protocol):
    """The part of a `StorageBackend` that reads objects whose keys are known."""

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def url(self) -> str: ...

    def read_into(self, key: str, offset: int, out: memoryview) -> None: ...

    def head(self, key: str) -> ObjectInfo: ...


@runtime_checkable
class StorageBackend(Protocol):
    """A store of objects under one root. An object is only written, replaced or deleted as a whole.

    Thread safety: any thread may call any method.
    """

    @property
    def capabilities(self) -> Capabilities:
        """The abilities of the store, which never change."""
        ...

    @property
    def url(self) -> str:
        """The location of the root for display, without credentials."""
        ...

    def put(self, key: str, parts: Sequence[Buffer], *, if_absent: bool = False) -> ObjectInfo:
        """Store the concatenation of ``parts`` as one small object, in a single request if the
        store allows that.

        The object is durable when the call returns. No reader ever sees a part of it. An existing
        object of the key is replaced unless ``if_absent`` is True.

        Raises:
            ObjectExists: ``if_absent`` is True and the key has an object, which stays unchanged.
        """
        ...

    def upload(self, key: str, size: int) -> Upload:
        """Begin to write a large object and return its ``Upload``.

        ``size`` is the most bytes that the object can have. The final size, which is an argument of
        ``Upload.finish``, may be smaller. The store reserves ``size`` bytes if it can.

        Raises:
            OutOfSpace: The store can already tell that the object does not fit.
        """
        ...

    def read_into(self, key: str, offset: int, out: memoryview) -> None:
        """Fill all of ``out`` with the object's bytes from the byte ``offset`` on.

        Raises:
            ObjectNotFound: The key has no object.
            StorageError: The object ends before ``out`` is full.
        """
        ...

    def head(self, key: str) -> ObjectInfo:
        """Return the key and the size of an object.

        Raises:
            ObjectNotFound: The key has no object.
        """
        ...

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Yield all objects whose key starts with ``prefix``, in any order.

        Temporary files of unfinished writes are not objects.
        """
        ...

    def folders(self, prefix: str) -> Iterator[str]:
        """Yield the names of the folders directly below ``prefix``, without a slash, in any order.

        ``prefix`` is empty or ends in '/'.
        """
        ...

    def delete(self, key: str) -> None:
        """Remove an object. Do nothing if the key has none.

        The store may also remove abandoned temporary files from the folder of the object, and the
        folder itself if it becomes empty.
        """
        ...

    def close(self) -> None:
        """Close the connections. Calls of other methods may fail afterwards."""
        ...


@runtime_checkable
class AdoptsFiles(Protocol):
    """A store in this machine's memory that can make a file in memory an object without a copy."""

    def adopt(self, key: str, path: str, size: int) -> ObjectInfo:
        """Truncate the file at ``path`` to ``size`` bytes and make it the object ``key``.

        The file also keeps its own name. The object and the file share their memory, so delete the
        object before you write to the file again.
        """
        ...


@runtime_checkable
class FetchesObjects(Protocol):
    """A store that gives a small object as a whole by one request."""

    def fetch(self, key: str, *, limit: int) -> bytes:
        """Return all bytes of an object.

        Raises:
            ObjectNotFound: The key has no object.
            ManifestCorrupt: The object is larger than ``limit`` bytes. No memory is reserved for
                it.
            StorageError: The object cannot be read, or the answer has ended before its end.
        """
        ...


@runtime_checkable
class HasRoot(Protocol):
    """A store that is a folder.

    The URL does not identify the store: the same path can name different folders on two nodes, or
    before and after a mount.
    """

    def identity(self) -> str:
        """Return a string that is unique among all roots that this machine sees.

        Two backends on this machine with the same identity see the same files. The root is created
        if it does not exist.

        Raises:
            StorageError: The root cannot be created or examined.
        """
        ...

    def is_replaced(self) -> bool:
        """Return True if the root no longer exists, or if its path now names another folder than
        when this backend opened or created it.

        For example, this happens when the disk of the root is unmounted.
        """
        ...


@runtime_checkable
class HoldsRoot(HasRoot, Protocol):
    """A folder that another process can be told to use only as long as it is the same folder."""

    def mark(self) -> str:
        """Return the text with which ``is_replaced`` recognizes the root. The root is created if it
        does not exist.

        Raises:
            RootLost: The root has existed before, and is gone.
            StorageError: The root cannot be created or examined.
        """
        ...

    def hold(self, mark: str) -> None:
        """From now on, create no root, and treat a root with another mark as replaced.

        If ``mark`` is empty, the root counts as replaced if it does not exist now.
        """
        ...


@runtime_checkable
class HasPlace(Protocol):
    """A folder that tells itself from its copies, also if it has several paths."""

    def place(self) -> str:
        """Return a text that describes where the root is. The root is created if it does not exist.

        Raises:
            StorageError: The root cannot be created or examined.
        """
        ...

    def is_elsewhere(self, place: str) -> bool:
        """Return True if ``place``, which another process of this machine got from ``place``, is
        certainly the place of another folder.

        The result is False if that cannot be known, such as for a folder that two file systems may
        show.

        Raises:
            StorageError: The root cannot be created or examined.
        """
        ...


@runtime_checkable
class HasSpace(Protocol):
    """A store that can report its free space."""

    def free_bytes(self) -> int:
        """Return the number of bytes that can still be written.

        Raises:
            StorageError: The store cannot report its free space.
        """
        ...


@runtime_checkable
class KeepsUnfinishedWrites(Protocol):
    """A store in which a killed process leaves unfinished writes: temporary files, or the parts of
    an upload.
    """

    def unfinished_writes(self, prefix: str) -> Iterator[UnfinishedWrite]:
        """Yield the unfinished writes of all processes to keys that start with ``prefix``, in any
        order.

        ``prefix`` is empty or ends in '/'.
        """
        ...

    def discard(self, write: UnfinishedWrite) -> None:
        """Remove the unfinished write ``write`` and free its space. Do nothing if it no longer
        exists.

        A process that is still working on that write gets an error.
        """
        ...


@runtime_checkable
class OpensFiles(Protocol):
    """A store whose objects are files in memory. The kernel can send these files to a socket
    without a copy of the bytes in this process.
    """

    def open_file(self, key: str) -> BinaryIO:
        """Open the file of an object for reading and return it. The caller closes the file.

        Raises:
            ObjectNotFound: The key has no object.
            StorageError: The file cannot be opened.
        """
        ...


@runtime_checkable
class ScatterReads(Protocol):
    """A store that can fill several pieces of memory with one read."""

    def read_parts(self, key: str, offset: int, outs: Sequence[memoryview]) -> None:
        """Fill ``outs``, one after another, with the object's consecutive bytes from the byte
        ``offset`` on. Raise the same errors as ``StorageBackend.read_into``.
        """
        ...


def check_key(key: str) -> str:
    """Return ``key`` unchanged if it is valid on every store and names an object inside of the
    root.

    A key has 1 to 900 bytes and does not begin with a slash. It has no control character, and no
    character that Windows does not allow in names (a backslash, or one of ':*?"<>|'). Slashes
    divide a key into segments. A segment has 1 to 255 bytes, and does not end in a dot or a blank.

    Raises:
        StorageError: The key breaks one of these rules.
    """
    if not key or len(key.encode()) > MAX_KEY_BYTES:
        raise StorageError(key[:80], "a key must have 1 to 900 bytes")
    if any(char in '\\:*?"<>|' or ord(char) < 32 for char in key):
        raise StorageError(
            key, "a key may not hold backslashes, colons, wildcards or control characters"
        )
    for segment in key.split("/"):
        if (
            segment in ("", ".", "..")
            or segment[-1] in ". "
            or len(segment.encode()) > _SEGMENT_BYTES
        ):
            raise StorageError(key, f"segment {segment!r} of the key is not allowed")
    return key


def check_prefix(prefix: str) -> str:
    """Check a prefix by the rules of ``check_key`` and return it unchanged. A prefix may also be
    empty or end in '/'.
    """
    if prefix:
        check_key(prefix.removesuffix("/"))
    return prefix


def check_read(key: str, offset: int, count: int, nbytes: int) -> None:
    """Raise ``StorageError`` if a read from ``offset`` has returned only ``count`` of the
    ``nbytes`` bytes.
    """
    if count != nbytes:
        raise StorageError(
            key, f"ends at byte {offset + count}, bytes up to {offset + nbytes} were asked for"
        )


def check_written(key: str, total: int, limit: int, size: int | None) -> int:
    """Return the final size of an upload in bytes: ``size``, or ``limit`` if ``size`` is None.

    Args:
        key: The key of the object, for the error.
        total: The sum of the bytes of all parts.
        limit: The size that was given to ``StorageBackend.upload``.
        size: The size that was given to ``Upload.finish``.

    Raises:
        StorageError: The final size is not ``total``, or is larger than ``limit``.
    """
    final_size = limit if size is None else size
    if total != final_size or final_size > limit:
        raise StorageError(
            key, f"{total} of {final_size} bytes were written, {limit} were announced"
        )
    return final_size


class PutUpload:
    """An ``Upload`` for a store that cannot take an object in parts. It keeps references to the
    parts, and stores all of them with one ``put`` at ``finish``.

    If ``Capabilities.takes_parts`` is True, the upload keeps copies of the parts instead.

    Thread safety: several threads may call ``write`` at the same time.
    """

    def __init__(self, backend: StorageBackend, key: str, size: int) -> None:
        self._backend, self._key, self._size = backend, key, size
        self._parts: dict[int, memoryview] = {}

    @property
    def part_bytes(self) -> int:
        return self._backend.capabilities.part_bytes

    def write(self, offset: int, data: memoryview) -> None:
        # With ``takes_parts``, the caller may change the memory as soon as this call returns.
        takes_parts = self._backend.capabilities.takes_parts
        self._parts[offset] = memoryview(bytes(data)) if takes_parts else data

    def finish(self, size: int | None = None) -> ObjectInfo:
        parts = [self._parts[offset] for offset in sorted(self._parts)]
        check_written(self._key, sum(part.nbytes for part in parts), self._size, size)
        return self._backend.put(self._key, parts)

    def abort(self) -> None:
        self._parts.clear()


def aligned_memory(nbytes: int) -> memoryview:
    """Return ``nbytes`` of new zeroed private memory for direct reads and writes. The memory starts
    at the boundary of a huge page, and consists of huge pages if the system has them.

    A direct read into huge pages is up to twice as fast as one into small pages, since the disk
    fills fewer and longer pieces of memory. The first write to huge pages takes a fifth of the time
    of the first write to small pages. The memory is freed with its last view.
    """
    memory = mmap.mmap(-1, nbytes + _HUGE_PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    padding = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % _HUGE_PAGE_BYTES
    return memoryview(memory)[padding : padding + nbytes]


def fresh_memory(nbytes: int) -> memoryview:
    """Return ``nbytes`` of new zeroed private memory for short use. The memory starts at the
    boundary of a page, which direct reads need. It is freed with its last view.

    If ``nbytes`` is at least the size of a huge page, the memory comes from ``aligned_memory``.
    With small pages, the first write to each page took half of the processor time of a copy from
    tier to tier.
    """
    if nbytes >= _HUGE_PAGE_BYTES:
        return aligned_memory(nbytes)
    return memoryview(mmap.mmap(-1, max(1, nbytes)))[:nbytes]


def is_there(backend: StorageBackend, key: str) -> bool:
    """Return True if the store has an object of that key, also if the object is a symbolic link
    that the store refuses to follow.
    """
    try:
        backend.head(key)
    except ObjectNotFound:
        return False
    except LinkRefused:
        return True
    return True


def check_limit(key: str, size: int, limit: int) -> None:
    """Raise ``ManifestCorrupt`` if an object is larger than ``limit`` bytes."""
    if size > limit:
        raise ManifestCorrupt(key, f"has {size} bytes, more than the {limit} allowed here")


def read_object(backend: StorageBackend, key: str, *, limit: int) -> bytes:
    """Return all bytes of a small object.

    Raises:
        ObjectNotFound: The key has no object.
        ManifestCorrupt: The object is larger than ``limit`` bytes. No memory is reserved for it.
        StorageError: The object cannot be read.
    """
    if isinstance(backend, FetchesObjects):
        return backend.fetch(key, limit=limit)
    size = backend.head(key).size
    check_limit(key, size, limit)
    out = bytearray(size)
    if size:
        backend.read_into(key, 0, memoryview(out))
    return bytes(out)


def read_record(
    backend: StorageBackend, key: str, decode: Callable[[bytes], T], *, limit: int
) -> T:
    """Return what ``decode`` makes of a record, which is a small object that ckpt has put.

    If the record is shorter than the store says, or ``decode`` finds it damaged, this is believed
    only after a second read. A client may know an old size of a file that another client has just
    replaced: the first read through sshfs then gives the new bytes at the old length.

    Raises:
        The errors of ``read_object``, and those of ``decode``.
    """
    try:
        return decode(read_object(backend, key, limit=limit))
    except StorageError as error:
        if type(error) is not StorageError:  # A missing object or a denial is no cut record
            raise
    except (IntegrityError, msgspec.MsgspecError, UnicodeError):
        pass
    return decode(read_object(backend, key, limit=limit))

"""The contract of a storage backend: blocking, thread-safe, keys relative and separated by '/'.

A backend moves bytes and nothing else. The pipeline owns threads, retries, checksums and memory. A
backend maps every foreign error to one of the storage errors of :mod:`ckpt.errors`. Only
``TransientStorageError`` is tried again.

To add a backend, implement these methods without subclassing, register a factory
``open(url, options) -> StorageBackend`` as an entry point of the group ``ckpt.backends`` under the
URL scheme, and run :mod:`ckpt.storage.testing` over it. The scheme of an object store that comes
with ckpt is also named in ``storage.places``, so that a tier there cannot be ``local``.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import BinaryIO, Protocol, runtime_checkable

from ckpt.errors import LinkRefused, ObjectNotFound, StorageError

Buffer = memoryview | bytes | bytearray

# S3 and GCS allow 1024 bytes for the whole key, and the prefix of the root needs its share.
MAX_KEY_BYTES = 900
_SEGMENT_BYTES = 255
_HUGE_PAGE_BYTES = 2 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """One object as a store describes it.

    Attributes:
        size: In bytes.
        modified: When it was put, in seconds since 1970 by the store's clock; None if a listing
            does not say.
    """

    key: str
    size: int
    modified: float | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfinished:
    """A write that was begun and is neither finished nor aborted. It takes space and is not listed.

    Attributes:
        key: The object that was to be written.
        name: The store's name for the write.
        size: The bytes that it takes; 0 if the store does not say.
        modified: When it was begun or last written to, in seconds since 1970.
        abandoned: Whether it is so old that no process can still be writing it.
    """

    key: str
    name: str
    size: int
    modified: float
    abandoned: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a store can do. Callers look here before a call, and need no exception to find out.

    Attributes:
        put_if_absent: ``put(if_absent=True)`` has one winner, which the store decides across
            machines.
        shared: All nodes see the same objects.
        part_bytes: The preferred size of one ``Upload.write``.
        alignment: Offsets, lengths and addresses that are multiples of this avoid a copy; 1 if it
            does not matter.
        max_concurrency: How many concurrent calls still help.
        parallel_parts: ``Upload.write`` calls of one upload may run at the same time.
        takes_parts: ``Upload.write`` has consumed the bytes when it returns. Otherwise their memory
            must stay until the end of the upload.
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
    """One large object on its way. Nothing is visible under its key before ``finish`` returns.

    Thread safety: any thread may call ``write``, and several at the same time if
    ``Capabilities.parallel_parts`` is set. The owner calls ``finish`` when no ``write`` runs, or
    ``abort`` to give the upload up, also after a ``finish`` that raised. A ``write`` that raised
    may be repeated with the same arguments, and so may a ``finish`` that raised
    ``TransientStorageError``.
    """

    @property
    def part_bytes(self) -> int:
        """Size of every part but the last. May exceed the capability's for very large objects."""
        ...

    def write(self, offset: int, data: memoryview) -> None:
        """Take ``data`` at ``offset`` (a multiple of ``part_bytes``).

        The memory must stay unchanged until ``finish`` or ``abort``, unless
        ``Capabilities.takes_parts``.
        """
        ...

    def finish(self, size: int | None = None) -> ObjectInfo:
        """Make the whole object visible and durable, replacing what the key held.

        ``size`` in bytes, if it is less than was announced: then the last part is the one that ends
        there.
        """
        ...

    def abort(self) -> None:
        """Forget the upload and free what the store holds of it. Never raises."""
        ...


@runtime_checkable
class StorageBackend(Protocol):
    """A flat store of immutable objects under one root."""

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def url(self) -> str:
        """The location of the root for display, without credentials."""
        ...

    def put(self, key: str, parts: Sequence[Buffer], *, if_absent: bool = False) -> ObjectInfo:
        """Store the parts as one small object, in a single request where the store has such; all or
        nothing is visible, durable on return.

        Raises:
            ObjectExists: ``if_absent`` and the key is taken; what was there is untouched.
        """
        ...

    def upload(self, key: str, size: int) -> Upload:
        """Begin a large object of ``size`` bytes, or of fewer if ``finish`` says so.

        Room is reserved where the store can.

        Raises:
            OutOfSpace: It is known already that the object does not fit.
        """
        ...

    def read_into(self, key: str, offset: int, out: memoryview) -> None:
        """Fill ``out`` with the object's bytes from ``offset``, or raise.

        Raises:
            ObjectNotFound: No such object.
            StorageError: The object ends before ``out`` is full.
        """
        ...

    def head(self, key: str) -> ObjectInfo:
        """Return the size of an object. Raises ``ObjectNotFound``."""
        ...

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Return all objects whose key starts with ``prefix``, in no order.

        Temporary files of unfinished writes are not objects.
        """
        ...

    def folders(self, prefix: str) -> Iterator[str]:
        """Return the names of the folders directly below ``prefix`` (empty, or ending in '/'), in
        no order, without the slash.
        """
        ...

    def delete(self, key: str) -> None:
        """Remove an object; no error if there is none. A folder left empty may go too."""
        ...

    def close(self) -> None:
        """Give back connections. Further calls may fail."""
        ...


@runtime_checkable
class Adopting(Protocol):
    """A store in this machine's memory, which takes an image from a file there without a copy."""

    def adopt(self, key: str, path: str, size: int) -> ObjectInfo:
        """Make the file, cut to ``size`` bytes, the object ``key``.

        The file keeps its own name. Delete the object before you write to the file again.
        """
        ...


@runtime_checkable
class Rooted(Protocol):
    """A store whose name may stand for several places: a folder."""

    def identity(self) -> str:
        """Return a name of the root that is unique among all roots that this machine sees.

        Two backends with the same identity see the same files. The root is created if it does not
        exist.

        Raises:
            StorageError: The root cannot be created or examined.
        """
        ...

    def is_replaced(self) -> bool:
        """Return True if the root is gone, or is another folder than the one that was opened or
        created.

        That happens when its disk is unmounted.
        """
        ...


@runtime_checkable
class HasSpace(Protocol):
    """A store that knows how much it can still take."""

    def free_bytes(self) -> int:
        """Return how many bytes are free.

        Raises:
            StorageError: The store does not answer.
        """
        ...


@runtime_checkable
class KeepsUnfinished(Protocol):
    """A store that keeps what a process had written before it was killed: temporary files, or
    the parts of an upload.
    """

    def unfinished(self, prefix: str) -> Iterator[Unfinished]:
        """Yield the unfinished writes to keys that start with ``prefix`` (empty, or ending in '/'),
        of any process, in no order.
        """
        ...

    def discard(self, found: Unfinished) -> None:
        """Free what an unfinished write takes; no error if there is none any more.

        The process that is at it, if any, gets an error.
        """
        ...


@runtime_checkable
class OpensFiles(Protocol):
    """A store whose objects are files in memory. The system sends them to a socket without a copy
    in this process.
    """

    def open_file(self, key: str) -> BinaryIO:
        """Return the file of an object, open for reading. The caller closes it.

        Raises:
            ObjectNotFound: There is no such object.
            StorageError: It cannot be opened.
        """
        ...


@runtime_checkable
class ScatterReads(Protocol):
    """An optional ability of a backend: one request fills many places."""

    def read_parts(self, key: str, offset: int, outs: Sequence[memoryview]) -> None:
        """Fill ``outs`` one after another from ``offset``. Raises what ``read_into`` raises."""
        ...


def check_key(key: str) -> str:
    """Return ``key`` if it cannot leave the root on any store or system, else raise
    ``StorageError``.

    Refused: empty, absolute, '.', '..', empty segments, backslashes, colons (Windows drives and
    streams), control characters,
    segments that end in a dot or blank, and what is too long for common file systems or object
    stores.
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
    """Check a prefix as ``check_key`` does. A prefix may also be empty or end in '/'."""
    if prefix:
        check_key(prefix.removesuffix("/"))
    return prefix


def check_read(key: str, offset: int, done: int, asked: int) -> None:
    """Raise ``StorageError`` if a read from ``offset`` has given less than it asked for."""
    if done != asked:
        raise StorageError(
            key, f"ends at byte {offset + done}, bytes up to {offset + asked} were asked for"
        )


def check_written(key: str, written: int, announced: int, size: int | None) -> int:
    """Return the size of a finished upload.

    Raises ``StorageError`` if it is not the size that was written, or is larger than announced.
    """
    whole = announced if size is None else size
    if written != whole or whole > announced:
        raise StorageError(
            key, f"{written} of {whole} bytes were written, {announced} were announced"
        )
    return whole


class PutUpload:
    """An ``Upload`` for stores without parts. It remembers the memory and puts all of it at
    ``finish``.

    The caller's memory must stay until then, as the contract asks. A copy is made only if the
    capabilities of the store promise ``takes_parts``.
    """

    def __init__(self, backend: StorageBackend, key: str, size: int) -> None:
        self._backend, self._key, self._size = backend, key, size
        self._parts: dict[int, memoryview] = {}

    @property
    def part_bytes(self) -> int:
        return self._backend.capabilities.part_bytes

    def write(self, offset: int, data: memoryview) -> None:
        # With ``takes_parts``, the caller may change the memory at once, so keep a copy.
        taken = self._backend.capabilities.takes_parts
        self._parts[offset] = memoryview(bytes(data)) if taken else data

    def finish(self, size: int | None = None) -> ObjectInfo:
        parts = [self._parts[offset] for offset in sorted(self._parts)]
        check_written(self._key, sum(part.nbytes for part in parts), self._size, size)
        return self._backend.put(self._key, parts)

    def abort(self) -> None:
        self._parts.clear()


def aligned_memory(nbytes: int) -> memoryview:
    """Return fresh private memory for direct reads and writes. It starts at a huge page, and is in
    huge pages if the system has them.

    A disk serves few long pieces of memory up to twice as fast as many short ones, and the first
    touch of a huge page costs a fifth. Freed with its last view.
    """
    memory = mmap.mmap(-1, nbytes + _HUGE_PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    lead = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % _HUGE_PAGE_BYTES
    return memoryview(memory)[lead : lead + nbytes]


def fresh_memory(nbytes: int) -> memoryview:
    """Return zeroed private memory that starts at a page, which direct reads need. It is for short
    use, and is freed with its last view.

    Memory as large as a huge page is in huge pages: the first touch of small ones took half of the
    processor time of a copy from tier to tier.
    """
    if nbytes >= _HUGE_PAGE_BYTES:
        return aligned_memory(nbytes)
    return memoryview(mmap.mmap(-1, max(1, nbytes)))[:nbytes]


def is_there(backend: StorageBackend, key: str) -> bool:
    """Return True if the store has an object of that name, even one whose bytes cannot be
    reached.
    """
    try:
        backend.head(key)
    except ObjectNotFound:
        return False
    except LinkRefused:
        return True
    return True


def read_object(backend: StorageBackend, key: str, *, limit: int) -> bytes:
    """Return a whole small object.

    Raises ``StorageError`` before any memory is reserved if it is larger than ``limit`` bytes.
    """
    size = backend.head(key).size
    if size > limit:
        raise StorageError(key, f"{size} bytes, more than the {limit} allowed here")
    out = bytearray(size)
    if size:
        backend.read_into(key, 0, memoryview(out))
    return bytes(out)

"""Errors of stores: a store has failed, or the stored bytes are not those that were written. An
``OSError`` of a file becomes one of them by its ``errno``.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import ClassVar, Final, ParamSpec, TypeVar

from ckpt.errors.base import CkptError
from ckpt.errors.sanitize import clean


class StorageError(CkptError):
    """A store has refused a request, or has failed.

    ``key`` is the key of the object relative to ``root``, the URL of the tier. A backend leaves
    ``root`` empty, and the callers of the backend set it (see ``with_root``).
    """

    exit_code = 3
    what: ClassVar[str] = "storage failed"
    root: str = ""

    def __init__(self, key: str, detail: str = "") -> None:
        # Many are caught and never read, so only ``__str__`` makes and cleans the message.
        Exception.__init__(self)
        self.key, self.detail = key, detail

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    def __str__(self) -> str:
        place = repr(self.key) if self.key else ""
        if self.root:
            place = f"{place} in {self.root}" if place else repr(self.root)
        text = self.what + (f": {place}" if place else "")
        return clean(text + (f" ({self.detail})" if self.detail else ""))


class ObjectNotFound(StorageError):
    """There is no object under this key."""

    what = "no such object"


class ObjectExists(StorageError):
    """``put(if_absent=True)`` found the key taken. The existing object is untouched."""

    what = "object already exists"


class AccessDenied(StorageError):
    """The store does not know this user, or forbids the request. Check the credentials and the
    permissions.
    """

    what = "access denied"


class LinkRefused(AccessDenied):
    """The path of the object contains a symbolic link that leads out of the root. The link is
    not followed.

    Only this object is affected. The other objects of the store can be used.
    """

    what = "a link leads out of the root"


class RootLost(StorageError):
    """The root is no longer the folder that the manager found when it was built, or when its first
    save began. The manager writes nothing to a folder that has taken the place of the root.
    """

    what = "the root is gone"

    def __init__(self, key: str, detail: str = "") -> None:
        way = (
            "its disk was unmounted, or the folder was removed or replaced: bring it back and "
            "saves go on, or build a new manager"
        )
        super().__init__(key, detail or way)


class OutOfSpace(StorageError):
    """The store is full. Free space or prune. Older checkpoints are intact."""

    what = "no space left"


class TransientStorageError(StorageError):
    """A request has timed out, has lost its connection, or was answered with a 5xx status or
    SlowDown. Another try of the request may succeed.
    """

    what = "storage did not answer properly"


class IntegrityError(CkptError):
    """The stored bytes are not those that were written.

    ``root`` is the URL of the tier that has them; '' if a reader does not say it.
    """

    exit_code = 4
    root: str = ""


class ChecksumMismatch(IntegrityError):
    """A range of bytes in a file differs from the bytes that were written."""

    def __init__(self, key: str, offset: int, nbytes: int) -> None:
        self.key, self.offset, self.nbytes = key, offset, nbytes
        super().__init__(
            f"checksum mismatch in {key!r}, bytes {offset} to {offset + nbytes}: the data was "
            "damaged after it was written"
        )


class FileDamaged(IntegrityError):
    """A data file is missing, or has another size than that with which it was written.

    ``size`` is None if the file is missing, and ``wanted`` is the size that the manifest
    says.
    """

    def __init__(self, key: str, size: int | None, expected_size: int) -> None:
        self.key, self.size, self.wanted = key, size, expected_size
        self.detail = "is missing"
        if size is not None:
            change = "cut" if size < expected_size else "added to"
            self.detail = f"has {size} bytes, should have {expected_size}: it was {change}"
        super().__init__(f"{key!r}: {self.detail}")


class ForeignFileMismatch(IntegrityError):
    """A file of another program is not the file any more that a step was adopted from.

    ``key`` is the location of the file, and ``detail`` says in which way it differs. ``offset`` is
    the byte from which on it differs, if that is known. ``way`` says what to do.
    """

    way = (
        "put the file back as it was and where it was; or, if the folder was moved or is right as "
        "it is now, adopt it again under the number of the step: ckpt adopt FOLDER ROOT --step N"
    )

    def __init__(self, key: str, detail: str, offset: int | None = None, *, way: str = "") -> None:
        self.key, self.detail, self.offset = key, detail, offset
        self.way = way or self.way
        super().__init__(f"{key!r}, from which a step was adopted, {detail}: {self.way}")


class ManifestCorrupt(IntegrityError):
    """A manifest or fragment is damaged, or has content that ckpt never writes."""

    def __init__(self, key: str, detail: str) -> None:
        self.key, self.detail = key, detail
        super().__init__(f"{key!r} is not a valid manifest: {detail}")


class FormatUnsupported(IntegrityError):
    """This version of ckpt cannot read a manifest or fragment, or the data files that the manifest
    or fragment describes. All of these files may be intact.
    """

    def __init__(self, key: str, reason: str) -> None:
        self.key = key
        super().__init__(f"{key!r} {reason}")


class FormatTooNew(FormatUnsupported):
    """A later version of ckpt wrote the manifest or fragment."""

    def __init__(self, key: str, version: int, own_version: int) -> None:
        self.found, self.supported = version, own_version
        way = "upgrade with pip install -U ckpt-stream"
        super().__init__(key, f"has format {version}, this ckpt reads format {own_version}: {way}")


class FormatTooOld(FormatUnsupported):
    """An earlier version of ckpt wrote the manifest or fragment, in a format that is no longer
    read.
    """

    def __init__(self, key: str, version: int, own_version: int) -> None:
        self.found, self.supported = version, own_version
        way = "restore it with the ckpt that wrote it, and save it again with this one"
        super().__init__(key, f"has format {version}, this ckpt reads format {own_version}: {way}")


class CodecMissing(FormatUnsupported):
    """The codec of the data files is not installed here."""

    def __init__(self, key: str, codec: str) -> None:
        self.codec = codec
        super().__init__(
            key,
            f"has data files with the codec {codec!r}, which is not installed here: install the "
            "package that provides it, or upgrade with pip install -U ckpt-stream",
        )


E = TypeVar("E", bound=BaseException)


def with_root(error: E, root: str) -> E:
    """Return ``error``. If it is a `StorageError` without a root, first set its ``root``."""
    if isinstance(error, StorageError) and not error.root:
        error.root = root
    return error


@contextmanager
def errors_of(root: str) -> Generator[None]:
    """Set ``root`` of a `StorageError` that leaves the ``with`` block without a root."""
    try:
        yield
    except StorageError as error:
        with_root(error, root)
        raise


P = ParamSpec("P")
T = TypeVar("T")


def without_frames(error: CkptError) -> CkptError:
    """Return ``error``, for a caller that raises it, without the frames of the thread that met a
    store.
    """
    return error.with_traceback(None) if isinstance(error, StorageError) else error


def with_short_traceback(function: Callable[P, T]) -> Callable[P, T]:
    """Let ``function`` raise errors of stores without the frames below it: dozens of frames of
    clients and threads say nothing of the store, and hide the message.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except StorageError as error:
            raise without_frames(error) from error.__cause__

    return call


BY_ERRNO: Final[Mapping[int, type[StorageError]]] = {
    errno.ENOENT: ObjectNotFound,
    errno.ENOTDIR: ObjectNotFound,
    errno.EISDIR: ObjectNotFound,
    errno.EEXIST: ObjectExists,
    errno.EACCES: AccessDenied,
    errno.EPERM: AccessDenied,
    errno.EROFS: AccessDenied,
    errno.ENOSPC: OutOfSpace,
    errno.EDQUOT: OutOfSpace,
    errno.EFBIG: OutOfSpace,
    # An NFS server no longer knows the handle of the file. Opening the file again gets a new one.
    errno.ESTALE: TransientStorageError,
    errno.ETIMEDOUT: TransientStorageError,
    errno.EAGAIN: TransientStorageError,
    errno.EBUSY: TransientStorageError,
    errno.EINTR: TransientStorageError,
    errno.ECONNRESET: TransientStorageError,
    errno.ECONNREFUSED: TransientStorageError,
    errno.ECONNABORTED: TransientStorageError,
    errno.EHOSTUNREACH: TransientStorageError,
    errno.ENETUNREACH: TransientStorageError,
    errno.EPIPE: TransientStorageError,
    errno.EREMOTEIO: TransientStorageError,
    # EIO is not a transient error. After a failed fsync the kernel may have dropped the pages. A
    # second fsync would then succeed although the bytes are lost.
}


def storage_error(
    key: str, error: OSError, *, missing: type[StorageError] = ObjectNotFound
) -> StorageError:
    """Return the storage error about ``key`` that ``error`` means.

    ``missing`` is the class that replaces ``ObjectNotFound``. It is for calls such as the creation
    of a file, where a missing file or folder does not mean a missing object.
    """
    kind, detail = BY_ERRNO.get(error.errno or 0, StorageError), error.strerror
    if error.errno == errno.ENOENT and missing is StorageError:
        detail = f"{detail}: its folder cannot be made there, so give a folder on a disk"
    return (missing if kind is ObjectNotFound else kind)(key, detail or type(error).__name__)


def is_full_disk(error: OSError) -> bool:
    """Return True if ``error`` says that a disk or a quota has no room."""
    return BY_ERRNO.get(error.errno or 0) is OutOfSpace


@contextmanager
def storage_errors(key: str, *, missing: type[StorageError] = ObjectNotFound) -> Generator[None]:
    """Return a context manager that turns an ``OSError`` into the storage error about ``key`` that
    ``storage_error`` returns.
    """
    try:
        yield
    except OSError as error:
        raise storage_error(key, error, missing=missing) from error

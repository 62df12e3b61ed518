"""The translation of ``OSError`` into the storage errors of ckpt, by ``errno``."""

from __future__ import annotations

import errno
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Final

from ckpt.errors import (
    AccessDenied,
    ObjectExists,
    ObjectNotFound,
    OutOfSpace,
    StorageError,
    TransientStorageError,
)

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


@contextmanager
def storage_errors(key: str, *, missing: type[StorageError] = ObjectNotFound) -> Generator[None]:
    """Return a context manager that turns an ``OSError`` into the storage error about ``key`` that
    ``storage_error`` returns.
    """
    try:
        yield
    except OSError as error:
        raise storage_error(key, error, missing=missing) from error

"""Which of our errors an ``errno`` means: one table for every backend that meets ``OSError``."""

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
    # An NFS server has forgotten the handle. A new open gets another one.
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
    # EIO is left out: after a failed fsync the kernel may have dropped the pages, and a second try
    # would seem to succeed.
}


def storage_error(
    key: str, error: OSError, *, missing: type[StorageError] = ObjectNotFound
) -> StorageError:
    """Return our error for ``error``.

    ``missing`` stands in for ``ObjectNotFound`` where the call was not about an object.
    """
    kind = BY_ERRNO.get(error.errno or 0, StorageError)
    return (missing if kind is ObjectNotFound else kind)(
        key, error.strerror or type(error).__name__
    )


@contextmanager
def mapped(key: str, *, missing: type[StorageError] = ObjectNotFound) -> Generator[None]:
    """Inside, every ``OSError`` leaves as one of our errors about ``key``."""
    try:
        yield
    except OSError as error:
        raise storage_error(key, error, missing=missing) from error

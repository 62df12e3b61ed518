"""Errors of stores with a traceback that ends where ckpt was called.

Dozens of frames of clients and threads say nothing of the store, and hide the message.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from ckpt.errors.base import CkptError
from ckpt.errors.storage import StorageError

P = ParamSpec("P")
T = TypeVar("T")


def without_frames(error: CkptError) -> CkptError:
    """Return ``error``, for a caller that raises it, without the frames of the thread that met a
    store.
    """
    return error.with_traceback(None) if isinstance(error, StorageError) else error


def frameless(function: Callable[P, T]) -> Callable[P, T]:
    """Let ``function`` raise errors of stores without the frames below it."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except StorageError as error:
            raise without_frames(error) from error.__cause__

    return call

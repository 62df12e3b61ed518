"""Calls of CUDA that ``torch.accelerator`` does not offer: to page-lock host memory, and to set the
mode of graph captures for a thread.
"""

from __future__ import annotations

import ctypes
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from typing import Any, Final

import torch

# cudaHostRegisterPortable: the memory counts as page-locked for every device of the process
_PORTABLE: Final = 1
_RELAXED_MODE: Final = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


def register(address: int, nbytes: int) -> int:
    """Page-lock host memory, so that copies from the GPU to it are asynchronous. Return the error
    code of CUDA, which is 0 for success.
    """
    return int(_runtime().cudaHostRegister(address, nbytes, _PORTABLE))


def unregister(address: int) -> None:
    """Undo ``register`` for the memory at ``address``."""
    _runtime().cudaHostUnregister(address)


@contextmanager
def beside_captures() -> Generator[None]:
    """Return a context manager in which calls of this thread do not invalidate a graph that another
    thread captures.

    During a capture in CUDA's default mode, no thread may make calls such as ``cudaHostRegister``
    or query an event, unless the thread has chosen the relaxed mode.
    """
    exchange = _capture_mode_exchange()
    # Each call sets the mode of the thread to the value of ``mode``, and stores the mode before in
    # ``mode``. So the second call restores what the first one has found.
    mode = ctypes.c_int(_RELAXED_MODE)
    if exchange is not None:
        exchange(ctypes.byref(mode))
    try:
        yield
    finally:
        if exchange is not None:
            exchange(ctypes.byref(mode))


@cache
def _capture_mode_exchange() -> Any:
    """Return the function ``cuThreadExchangeStreamCaptureMode`` of the CUDA driver; None without a
    driver.
    """
    try:
        return ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):
        return None


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]

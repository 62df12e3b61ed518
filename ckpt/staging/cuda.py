"""CUDA's own calls, which ``torch.accelerator`` has no name for: page-locked host memory, and
graph captures of other threads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from typing import Any, Final

import torch

# cudaHostRegisterPortable: the memory is page-locked for every device of the process
_PORTABLE: Final = 1
_RELAXED: Final = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


def register(address: int, nbytes: int) -> int:
    """Page-lock host memory, so that copies to it are asynchronous. Returns CUDA's error code."""
    return int(_runtime().cudaHostRegister(address, nbytes, _PORTABLE))


def unregister(address: int) -> None:
    """Undo ``register``."""
    _runtime().cudaHostUnregister(address)


@contextmanager
def beside_captures() -> Generator[None]:
    """Inside, calls of this thread do not invalidate a graph that another thread captures.

    A capture in CUDA's default mode forbids calls such as ``cudaHostRegister`` or the query of an
    event to every thread that has not asked for the relaxed mode.
    """
    exchange = _capture_mode_exchange()
    mode = ctypes.c_int(_RELAXED)
    if exchange is not None:
        exchange(ctypes.byref(mode))
    try:
        yield
    finally:
        if exchange is not None:
            exchange(ctypes.byref(mode))


@cache
def _capture_mode_exchange() -> Any:
    """Return the driver's ``cuThreadExchangeStreamCaptureMode``, if there is a driver."""
    try:
        return ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):
        return None


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]

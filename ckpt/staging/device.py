"""Functions for streams, events and graph captures of any accelerator, based on
``torch.accelerator``.

A device is *ordered* if it has streams and events. A copy from an ordered device can run on a side
stream, after all work that the training has queued. Sources on an accelerator that is not ordered
are copied before the call of the save returns.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache

import torch

from ckpt.errors import StagingError
from ckpt.staging import cuda

Devices = Sequence[torch.device]


@cache
def side_stream(device: torch.device) -> torch.Stream | None:
    """Return the side stream for all late copies from ``device``; None if the device is not
    ordered.

    Each device has only one side stream, so that torch's caching allocator keeps only one pool for
    the temporary memory of copies.
    """
    if not _is_accelerator(device):
        return None
    try:
        stream = torch.Stream(device=device)
        stream.record_event().synchronize()
        # A backend may return its only stream, which is no side stream.
        return stream if stream != torch.accelerator.current_stream(device) else None
    except (RuntimeError, NotImplementedError):
        # The device has no streams, or no events.
        return None


def is_ordered(device: torch.device) -> bool:
    """Return True if late copies from ``device`` are possible: it is the CPU or is ordered."""
    return device.type == "cpu" or side_stream(device) is not None


def is_capturing(device: torch.device) -> bool:
    """Return True if the calling thread's current stream is capturing a graph, and ``device`` is an
    accelerator.

    This is the stream of the current device, which may have another index than ``device``. The
    result is False if torch cannot tell. The call does not create a context on a device that has
    none.
    """
    if device.type == "cpu" or not _is_accelerator(device):
        return False
    # CUDA, XPU, MTIA and NPU have this function. ``Stream.is_capturing()`` exists since torch 2.13
    # only, and creates a context.
    query = getattr(torch.get_device_module(device), "is_current_stream_capturing", None)
    return query is not None and bool(query())


def refuse_capture(devices: Iterable[torch.device], method: str) -> None:
    """Raise ``StagingError`` if one of the ``devices`` is capturing a graph, since the graph would
    include the copies of a save or restore.

    Args:
        method: The name of the method that the user called, for the error.
    """
    if device := next(filter(is_capturing, devices), None):
        advice = f"call {method}() before the capture, or after it"
        raise StagingError(f"{method}() was called while a graph is captured on {device}: {advice}")


@contextmanager
def use_stream(stream: torch.Stream | None) -> Generator[None]:
    """Return a context manager in which ``stream`` and its device are current for this thread. For
    None, it does nothing.

    Several threads may use it for one stream at once, which ``with stream`` does not allow.
    """
    if stream is None:
        yield
        return
    with torch.accelerator.device_index(stream.device_index):
        previous = torch.accelerator.current_stream(stream.device)
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(previous)


@contextmanager
def background(device: torch.device) -> Generator[None]:
    """Return the context manager for a background thread that uses ``device``.

    Within the ``with`` block, calls of the thread create no CUDA context on another device, and do
    not invalidate a graph that another thread captures.
    """
    beside_captures = cuda.beside_captures() if device.type == "cuda" else nullcontext()
    with beside_captures, torch.accelerator.device_index(device.index):
        yield


def drain(devices: Iterable[torch.device]) -> None:
    """Wait until all work that is queued on any stream of ``devices`` is complete. Skip devices for
    which torch has no ``synchronize``.
    """
    for device in devices:
        if _is_accelerator(device):
            torch.accelerator.synchronize(device)
        elif synchronize := getattr(getattr(torch, device.type, None), "synchronize", None):
            synchronize()


def _is_accelerator(device: torch.device) -> bool:
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == device.type

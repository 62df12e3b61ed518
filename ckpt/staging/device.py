"""What staging needs of an accelerator, in terms of ``torch.accelerator``: streams, events,
captures.

A device is *ordered* if it has streams and events. A copy from it can then run beside the training,
after all work that the training has queued. Sources on any other device but the CPU are copied
while the caller waits.
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
    """Return the stream of all late copies from ``device``; None if the device is not ordered.

    There is one for each device, so that the temporary memory of copies comes from one pool.
    """
    if not _is_accelerator(device):
        return None
    try:
        stream = torch.Stream(device=device)
        stream.record_event().synchronize()
        return stream if stream != torch.accelerator.current_stream(device) else None
    except (RuntimeError, NotImplementedError):
        # The device has no streams, or no events.
        return None


def is_ordered(device: torch.device) -> bool:
    """Return True if a copy from ``device`` may end after the call that began it."""
    return device.type == "cpu" or side_stream(device) is not None


def is_capturing(device: torch.device) -> bool:
    """Return True if the current stream captures a graph of ``device``.

    The call makes no context on a device that has none.
    """
    if device.type == "cpu" or not _is_accelerator(device):
        return False
    # CUDA, XPU, MTIA and NPU have this function. ``Stream.is_capturing()`` came with torch 2.13 and
    # makes a context.
    ask = getattr(torch.get_device_module(device), "is_current_stream_capturing", None)
    return ask is not None and bool(ask())


def refuse_capture(devices: Iterable[torch.device], what: str) -> None:
    """Raise ``StagingError`` if one of the ``devices`` is capturing a graph, which would take
    our copies into it.
    """
    if found := next(filter(is_capturing, devices), None):
        way = f"call {what}() before the capture, or after it"
        raise StagingError(f"{what}() was called while a graph is captured on {found}: {way}")


@contextmanager
def on(stream: torch.Stream | None) -> Generator[None]:
    """Inside, work of this thread goes to ``stream`` and its device; None changes nothing.

    Several threads may be inside at once, which ``with stream`` does not allow.
    """
    if stream is None:
        yield
        return
    with torch.accelerator.device_index(stream.device_index):
        before = torch.accelerator.current_stream(stream.device)
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)


@contextmanager
def background(device: torch.device) -> Generator[None]:
    """Return the context of a thread that works for ``device``. Its calls make no context on
    another device, and disturb no capture.
    """
    captures = cuda.beside_captures() if device.type == "cuda" else nullcontext()
    with captures, torch.accelerator.device_index(device.index):
        yield


def drain(devices: Iterable[torch.device]) -> None:
    """Return when all that was queued on ``devices``, on any stream, is done."""
    for device in devices:
        if _is_accelerator(device):
            torch.accelerator.synchronize(device)
        elif synchronize := getattr(getattr(torch, device.type, None), "synchronize", None):
            synchronize()


def _is_accelerator(device: torch.device) -> bool:
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == device.type

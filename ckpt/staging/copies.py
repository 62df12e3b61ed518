"""Copy tensors to their places in an image.

One call of torch copies many tensors. An *image* is a rank's part of the state in host memory,
which is in a reusable buffer, a *slot*. A *late* copy is made while training goes on, and runs on a
side stream if its source is on an accelerator.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Final, NamedTuple, Self

import torch

from ckpt.staging.device import background, side_stream, use_stream

PIECE_BYTES: Final = 32 << 20
"""The most bytes of a part of a large copy, and of a group of small copies.

After each group, the copied bytes can be written to a tier. In an image that passes through a ring,
a piece has the size of a frame, which is less for a small image.
"""


class Copy(NamedTuple):
    """One source tensor, or a part of it, and its place in the image.

    Attributes:
        name: The name of the tensor.
        source: The tensor to copy from.
        target: The memory to copy to. If the image passes through a ring, a tensor without memory
            stands for it (see ``staging.image.Target``).
        guarded: The tensor whose version counter moves when the source is changed.
        end: The offset in the image at which the copy ends, in bytes.
        part: The range of elements of the flattened source that is copied; None for all.
        address: The address of the source when the copy was planned; 0 if the address is not to be
            checked. If the source has another address later, its storage was resized or freed, and
            the source must not be read.
    """

    name: str
    source: torch.Tensor
    target: torch.Tensor
    guarded: torch.Tensor
    end: int = 0
    part: slice | None = None
    address: int = 0

    @property
    def has_moved(self) -> bool:
        """Return True if the source is no longer at its address."""
        return bool(self.address) and self.source.data_ptr() != self.address

    @property
    def start(self) -> int:
        return self.end - self.target.nbytes

    @property
    def elements(self) -> torch.Tensor:
        """Return the elements to copy. For a part of a source that is not contiguous, this makes a
        copy of the part.
        """
        return self.source if self.part is None else _flat_part(self.source, self.part)


def _flat_part(source: torch.Tensor, part: slice) -> torch.Tensor:
    """Return the elements ``part`` of the flattened ``source``.

    If ``source`` is not contiguous, only the rows that have these elements are copied, since the
    whole tensor may not fit into the memory that is left.
    """
    while not source.is_contiguous():
        row = source[0].numel()
        start, end = part.start // row, -(-part.stop // row)
        part = slice(part.start - start * row, part.stop - start * row)
        if end - start > 1 or source.dim() == 1:
            source = source[start:end]
            break
        source = source[start]
    return source.reshape(-1)[part]


def groups(copies: Iterable[Copy], piece_bytes: int) -> Iterator[list[Copy]]:
    """Yield groups of consecutive copies that have at most ``piece_bytes`` together, or one larger
    copy.
    """
    group: list[Copy] = []
    size = 0
    for copy in copies:
        nbytes = copy.target.nbytes
        if group and size + nbytes > piece_bytes:
            yield group
            group, size = [], 0
        group.append(copy)
        size += nbytes
    if group:
        yield group


Events = Mapping[torch.device, torch.Event]
"""For each device with copies under way, an event that is recorded after them."""


def copy_now(copies: Sequence[Copy], devices: Iterable[torch.device] = ()) -> None:
    """Make the copies, and wait until they are complete.

    Args:
        copies: The copies.
        devices: The devices of the sources. Copies from a device run on its current stream, and
            therefore after all work that the caller has queued there.
    """
    if not copies:
        return
    streams = {
        device: torch.accelerator.current_stream(device)
        for device in devices
        if side_stream(device) is not None
    }
    try:
        _copy(copies, streams)
    finally:
        # Wait even after an error. Another save gets the slot next, and copies that are still
        # under way would overwrite the image of that save.
        _wait(streams.values())


def devices_of(copies: Iterable[Copy]) -> frozenset[torch.device]:
    """Return the devices of all sources that are not in host memory."""
    return frozenset({copy.source.device for copy in copies if not copy.source.is_cpu})


class LateCopies:
    """Make late copies from accelerators on side streams, while training goes on.

    ``run`` completes copies of sources in host memory before it returns. Copies from an ordered
    device (see ``ckpt.staging.device``) run on the side stream of the device. They begin after all
    work that is in the device's *current* stream when this object is created.

    Thread safety: the training thread creates the object and calls ``hold_current_streams``. Any
    thread may call ``synchronize``. The copying thread calls all other methods.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        streams = {device: side_stream(device) for device in sorted(devices, key=str)}
        self._streams = {device: stream for device, stream in streams.items() if stream is not None}
        self._begin_events = {
            device: torch.accelerator.current_stream(device).record_event()
            for device in self._streams
        }
        self._end_events: Events = {}

    @classmethod
    def of(cls, devices: Iterable[torch.device]) -> Self | None:
        """Return an object for late copies from ``devices``. Return None if none of the devices has
        a side stream, because every copy is then complete when its call returns.
        """
        copies = cls(devices)
        return copies if copies.has_streams else None

    @property
    def has_streams(self) -> bool:
        """Return True if any of the devices has a side stream."""
        return bool(self._streams)

    def thread_context(self) -> AbstractContextManager[None]:
        """Return the context manager in which the copying thread must call the methods of this
        object (see ``ckpt.staging.device.background``).
        """
        return background(next(iter(self._streams)))

    def wait_for_queued_work(self) -> None:
        """Make the side streams wait for the work that was in the current streams when this object
        was created.
        """
        for device, stream in self._streams.items():
            stream.wait_event(self._begin_events[device])

    def run(self, copies: Sequence[Copy]) -> None:
        """Make copies of sources in host memory, and launch the other copies on the side
        streams.
        """
        _copy(copies, self._streams)

    def on_stream(self, tensor: torch.Tensor) -> AbstractContextManager[None]:
        """Return a context manager in which work runs on the side stream of the tensor's device, so
        that it reads the same values as the copies. For a device without a side stream, the context
        manager does nothing.
        """
        return use_stream(self._streams.get(tensor.device))

    def events(self) -> Events:
        """Return an event for each device, recorded after all copies that were launched so far."""
        return {device: stream.record_event() for device, stream in self._streams.items()}

    def mark_launched(self) -> None:
        """Record the events that ``hold_current_streams`` waits for. Call this after all copies
        were launched.
        """
        self._end_events = self.events()

    def hold_current_streams(self) -> None:
        """Make the current streams of the calling thread wait until all copies have read their
        sources. This does not block the thread.

        The call has no effect before ``mark_launched``.
        """
        for device, event in self._end_events.items():
            torch.accelerator.current_stream(device).wait_event(event)

    def synchronize(self) -> None:
        """Wait until all work on the side streams is complete."""
        _wait(self._streams.values())


def _wait(streams: Iterable[torch.Stream]) -> None:
    for stream in streams:
        stream.synchronize()


def _copy(copies: Sequence[Copy], streams: Mapping[torch.device, torch.Stream]) -> None:
    """Make the copies with one call of torch for each device. The call loops over thousands of
    tensors without the interpreter.

    Copies from the devices in ``streams`` are launched on these streams, and may still run when the
    function returns. All other copies are complete.
    """
    with torch.no_grad():
        if (
            host_copies := [copy for copy in copies if copy.source.device not in streams]
            if streams
            else copies
        ):
            torch._foreach_copy_(
                [copy.target for copy in host_copies],
                [copy.source if copy.part is None else copy.elements for copy in host_copies],
            )
        for device, stream in streams.items():
            if device_copies := [copy for copy in copies if copy.source.device == device]:
                with use_stream(stream):
                    torch._foreach_copy_(
                        [copy.target for copy in device_copies],
                        [_resolve(copy.elements) for copy in device_copies],
                        non_blocking=True,
                    )


def _resolve(source: torch.Tensor) -> torch.Tensor:
    """Return the tensor with its lazy conjugation or negation carried out.

    Otherwise torch would conjugate or negate the target, before an asynchronous copy has filled the
    target.
    """
    return source.resolve_conj().resolve_neg()

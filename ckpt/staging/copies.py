"""Moving tensors to their places in an image: few large calls on the CPU, a side stream for each
accelerator.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Final, NamedTuple, Self

import torch

from ckpt.staging.device import background, on, side_stream

PIECE_BYTES: Final = 32 << 20
"""Copies are cut to this size, and issued in groups of it: what has been copied can be written,
and none holds up a shutdown for long.
"""


class Copy(NamedTuple):
    """One source and its place in the image.

    Attributes:
        guarded: The tensor whose version is watched.
        end: Where the copy ends in the image, in bytes.
        part: The elements of the flattened source that are copied; None for all.
        address: The address of the source. If the storage was resized since, the source has another
            address or none, and must not be read.
    """

    name: str
    source: torch.Tensor
    target: torch.Tensor
    guarded: torch.Tensor
    end: int = 0
    part: slice | None = None
    address: int = 0

    @property
    def moved(self) -> bool:
        """Whether the source has lost its memory."""
        return bool(self.address) and self.source.data_ptr() != self.address

    @property
    def start(self) -> int:
        return self.end - self.target.nbytes

    @property
    def elements(self) -> torch.Tensor:
        """The elements to copy. A source that is not contiguous is flattened into a copy."""
        return self.source if self.part is None else self.source.reshape(-1)[self.part]


def groups(copies: Iterable[Copy]) -> Iterator[list[Copy]]:
    """Yield neighbours that have about ``PIECE_BYTES`` together."""
    group: list[Copy] = []
    size = 0
    for copy in copies:
        nbytes = copy.target.nbytes
        if group and size + nbytes > PIECE_BYTES:
            yield group
            group, size = [], 0
        group.append(copy)
        size += nbytes
    if group:
        yield group


Events = Mapping[torch.device, torch.Event]
"""For each device with copies under way, an event behind them."""


def copy_now(copies: Sequence[Copy], devices: Iterable[torch.device] = ()) -> None:
    """Copy while the caller waits.

    From ``devices`` on its current streams, so after all that it has queued there.
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
        # Wait after an error, too, since another save gets the slot then.
        _wait(streams.values())


def devices_of(copies: Iterable[Copy]) -> frozenset[torch.device]:
    """Return the devices of the sources that are not in host memory."""
    return frozenset({copy.source.device for copy in copies if not copy.source.is_cpu})


class Late:
    """Copies beside the training: of host memory at once, from each ordered device on its side
    stream.

    The side streams come after what the *current* streams of the thread that builds this hold by
    then.

    Thread safety: the training thread builds it and calls ``hold_current_streams``. The thread that
    copies calls the rest.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        found = {device: side_stream(device) for device in sorted(devices, key=str)}
        self._streams = {device: stream for device, stream in found.items() if stream is not None}
        self._begin = {
            device: torch.accelerator.current_stream(device).record_event()
            for device in self._streams
        }
        self._done: Events = {}

    @classmethod
    def of(cls, devices: Iterable[torch.device]) -> Self | None:
        """Return the late copies from ``devices``; None if none of them has a stream, so that every
        copy is complete when its call returns.
        """
        late = cls(devices)
        return late if late.has_streams else None

    @property
    def has_streams(self) -> bool:
        """Whether any of the devices has a stream."""
        return bool(self._streams)

    def thread(self) -> AbstractContextManager[None]:
        """Return the context of all work of a background thread here."""
        return background(next(iter(self._streams)))

    def begin(self) -> None:
        """Let the side streams wait for what the training had queued."""
        for device, stream in self._streams.items():
            stream.wait_event(self._begin[device])

    def run(self, copies: Sequence[Copy]) -> None:
        """Make the copies; those of the side streams are only launched."""
        _copy(copies, self._streams)

    def beside(self, tensor: torch.Tensor) -> AbstractContextManager[None]:
        """Return the side stream of a tensor's device, for work that sees what copies see."""
        return on(self._streams.get(tensor.device))

    def events(self) -> Events:
        """Return events behind all copies that were launched so far."""
        return {device: stream.record_event() for device, stream in self._streams.items()}

    def mark_launched(self) -> None:
        """Note that all copies have been launched."""
        self._done = self.events()

    def hold_current_streams(self) -> None:
        """Let the current streams of the calling thread wait until the sources have been read."""
        for device, event in self._done.items():
            torch.accelerator.current_stream(device).wait_event(event)

    def synchronize(self) -> None:
        """Return when nothing of it is under way any more."""
        _wait(self._streams.values())


def _wait(streams: Iterable[torch.Stream]) -> None:
    for stream in streams:
        stream.synchronize()


def _copy(copies: Sequence[Copy], streams: Mapping[torch.device, torch.Stream]) -> None:
    """Copy with one call for each device. The loop over thousands of tensors is in torch, without
    the interpreter.
    """
    with torch.no_grad():
        if (
            here := [copy for copy in copies if copy.source.device not in streams]
            if streams
            else copies
        ):
            torch._foreach_copy_(
                [copy.target for copy in here],
                [copy.source if copy.part is None else copy.elements for copy in here],
            )
        for device, stream in streams.items():
            if there := [copy for copy in copies if copy.source.device == device]:
                with on(stream):
                    torch._foreach_copy_(
                        [copy.target for copy in there],
                        [_resolved(copy.elements) for copy in there],
                        non_blocking=True,
                    )


def _resolved(source: torch.Tensor) -> torch.Tensor:
    """Return the tensor without a lazy conjugation or negation. Torch would resolve it in the
    target, before an asynchronous copy has filled the target.
    """
    return source.resolve_conj().resolve_neg()

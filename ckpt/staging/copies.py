"""Moving tensors to their places in an image: few large calls on the CPU, a side stream per device on CUDA."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, NamedTuple

import torch

PIECE_BYTES: Final = 32 << 20
"""Copies are cut to this size, and issued in groups of it: what has been copied can be written, and none holds up a shutdown for long."""


class Copy(NamedTuple):
    """One source and its place in the image.

    Attributes:
        guarded: The tensor whose version is watched.
        end: Where it ends in the image, in bytes.
        part: Which elements of the flattened source it is; None for all.
        address: Where the source lies. One whose storage was resized since lies elsewhere, or nowhere, and must not be read.
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
        """Whether the memory was taken away from the source."""
        return bool(self.address) and self.source.data_ptr() != self.address

    @property
    def start(self) -> int:
        return self.end - self.target.nbytes

    @property
    def elements(self) -> torch.Tensor:
        """What is copied. A source that is not contiguous is flattened by a copy of its own."""
        return self.source if self.part is None else self.source.reshape(-1)[self.part]


def groups(copies: Iterable[Copy]) -> Iterator[list[Copy]]:
    """Neighbours of together about ``PIECE_BYTES``."""
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


def run(copies: Sequence[Copy], cuda: CudaCopies | None) -> None:
    """Make the copies; those from CUDA are only launched."""
    here = copies if cuda is None else [copy for copy in copies if not copy.source.is_cuda]
    with torch.no_grad():
        if here:
            torch._foreach_copy_(
                [copy.target for copy in here],
                [copy.source if copy.part is None else copy.elements for copy in here],
            )
        if cuda and len(here) < len(copies):
            cuda.launch([copy for copy in copies if copy.source.is_cuda])


class CudaCopies:
    """Device to host on one side stream per device, after what the compute stream held when the snapshot was made."""

    def __init__(self, copies: Sequence[Copy]) -> None:
        devices = sorted({copy.source.device.index for copy in copies if copy.source.is_cuda})
        self._streams = {index: _stream(index) for index in devices}
        self._done: Mapping[int, Any] = {}
        for index, stream in self._streams.items():
            stream.wait_event(torch.cuda.current_stream(index).record_event())

    @property
    def has_work(self) -> bool:
        return bool(self._streams)

    def launch(self, copies: Sequence[Copy]) -> None:
        """One call per device: the loop over thousands of tensors is torch's own, without the interpreter."""
        for index, stream in self._streams.items():
            there = [copy for copy in copies if copy.source.device.index == index]
            if there:
                with torch.cuda.device(index), torch.cuda.stream(stream):
                    torch._foreach_copy_(
                        [copy.target for copy in there],
                        [copy.elements for copy in there],
                        non_blocking=True,
                    )

    def beside(self, tensor: torch.Tensor) -> AbstractContextManager[None]:
        """The side stream of a tensor's device, for work that must see what the copies see."""
        return torch.cuda.stream(self._streams.get(tensor.device.index)) if tensor.is_cuda else nullcontext()

    def events(self) -> dict[int, Any]:
        """One event per device, behind all that was launched so far."""
        return {index: stream.record_event() for index, stream in self._streams.items()}

    def mark_launched(self) -> None:
        self._done = self.events()

    def hold_current_stream(self) -> None:
        for index, event in self._done.items():
            torch.cuda.current_stream(index).wait_event(event)

    def synchronize(self) -> None:
        for stream in self._streams.values():
            stream.synchronize()


def _stream(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

"""Whether an image holds what the late sources held at the call, also where no version counter has
moved.

Code that writes through ``parameter.data``, through a NumPy view, with ``torch._foreach_*`` on
DTensors or with a kernel of its own moves no counter. A *witness* reads the late sources at the
call, and the image once it is filled; a difference names the tensor. ``Sampled`` reads a small part
of each source, ``Full`` all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from itertools import groupby
from typing import Any, Final, Protocol
from zlib import crc32

import torch

from ckpt.staging.copies import Copy
from ckpt.staging.digest import exact_digest, host_bytes

LINE_BYTES: Final = 256
"""What is compared at each place of a sample."""
SPACING_BYTES: Final = 1021 * LINE_BYTES
"""From one place to the next.

The factor is a prime, so that the places drift through the columns of rows of any usual length.
"""
WHOLE_BYTES: Final = 1024
"""A copy of this size or less is compared as a whole."""
_ELEMENTS: Final = 16  # places for each that a contiguous source has, of one element each

Beside = Callable[[torch.Tensor], AbstractContextManager[None]]


class Witness(Protocol):
    """What the late sources were at the call, which is when it was built."""

    def changed(self, copies: Sequence[Copy] | None, beside: Beside) -> str | None:
        """The name of a tensor whose image is not what it was at the call.

        To be asked when the copies have landed.

        Args:
            copies: Those to look at; None for all.
            beside: The stream on which a tensor on a device may be read.
        """
        ...


Place = tuple[int, int, int]
"""Bytes that are compared: where they begin in the source, and in the target, and how many they
are.
"""


class Sample:
    """The places at which the late copies of a batch are looked at.

    They are found once, and read by every save of the batch.

    They are kept as bare addresses. These stay valid because the sample holds the copies, and
    because a batch is only used while its sources lie where they lay.
    """

    def __init__(self, copies: Sequence[Copy]) -> None:
        self._copies = copies
        self._built = False
        self._host: list[Any] = []
        self._on_devices: list[list[torch.Tensor]] = []
        self._places: list[tuple[Copy, list[Place]]] = []
        self._targets: list[Any] = []
        self._spans: dict[int, tuple[slice, slice]] = {}

    def build(self) -> None:
        """Find the places in the sources, if that was not done before."""
        if self._built:
            return
        self._built = True
        elsewhere = [copy for copy in self._copies if not copy.source.is_cpu]
        here = [copy for copy in self._copies if copy.source.is_cpu] if elsewhere else self._copies
        for copy in here:
            places = _places(copy)
            self._places.append((copy, places))
            address = copy.source.data_ptr()
            for begin, _, nbytes in places:
                self._host.append(host_bytes(address + begin, nbytes))
        for _, together in groupby(sorted(elsewhere, key=_kind), key=_kind):
            self._on_devices.append([])
            for copy in together:
                places = _places(copy)
                self._places.append((copy, places))
                self._on_devices[-1] += _views(copy, places)

    def read(self) -> tuple[bytes, list[torch.Tensor]]:
        """The bytes of all places of the sources now: those in host memory, and of each device
        and kind those on it, in the order of its current stream.
        """
        with torch.no_grad():
            return b"".join(self._host), [torch.cat(views).flatten() for views in self._on_devices]

    def differs(self, taken: bytes, copies: Sequence[Copy] | None) -> str | None:
        """The name of one of ``copies`` whose image is not as ``taken``; of all copies if None."""
        if not self._targets:
            self._build_targets()
        if copies is None and b"".join(self._targets) == taken:
            return None
        for copy in self._copies if copies is None else copies:
            if (span := self._spans.get(id(copy))) is not None:
                targets, places = span
                if b"".join(self._targets[targets]) != taken[places]:
                    return copy.name
        return None

    def _build_targets(self) -> None:
        """Find the places in the image: only now, since that is not the training thread's time."""
        end = 0
        for copy, places in self._places:
            first, begin, address = len(self._targets), end, copy.target.data_ptr()
            for _, at, nbytes in places:
                self._targets.append(host_bytes(address + at, nbytes))
                end += nbytes
            self._spans[id(copy)] = slice(first, len(self._targets)), slice(begin, end)


class Sampled:
    """A witness of the places of samples.

    Built by the training thread; asked by the one that copies.
    """

    def __init__(self, samples: Iterable[Sample]) -> None:
        self._taken = [(sample, *sample.read()) for sample in samples]

    def changed(self, copies: Sequence[Copy] | None, beside: Beside) -> str | None:
        self._taken = [
            (sample, host + _fetched(there, beside), []) for sample, host, there in self._taken
        ]
        found = (sample.differs(taken, copies) for sample, taken, _ in self._taken)
        return next((name for name in found if name is not None), None)


class Full:
    """A witness of every byte: a pass over the sources at the call, and one over the image."""

    def __init__(self, copies: Iterable[Copy]) -> None:
        self._copies = list(copies)
        self._digests = {id(copy): exact_digest(copy.elements) for copy in self._copies}

    def changed(self, copies: Sequence[Copy] | None, beside: Beside) -> str | None:
        del beside  # the image is in host memory
        for copy in self._copies if copies is None else copies:
            taken = self._digests.get(id(copy))
            if taken is not None and exact_digest(copy.target) != taken:
                return copy.name
        return None


def _places(copy: Copy) -> list[Place]:
    name, source, target, _, end, part, _ = copy
    nbytes = target.nbytes
    if not source.is_contiguous():
        return _elements(copy)
    begin = 0 if part is None else part.start * target.itemsize
    if nbytes <= WHOLE_BYTES:
        return [(begin, 0, nbytes)]
    count = max(1, nbytes // SPACING_BYTES)
    free = nbytes - (count - 1) * SPACING_BYTES - LINE_BYTES
    at = crc32(name.encode(), end) % (free + 1) // 64 * 64
    return [
        (begin + offset, offset, LINE_BYTES)
        for offset in range(at, at + count * SPACING_BYTES, SPACING_BYTES)
    ]


def _elements(copy: Copy) -> list[Place]:
    """Single elements of a source that is not contiguous."""
    source, itemsize, count = copy.source, copy.target.itemsize, copy.target.numel()
    first = 0 if copy.part is None else copy.part.start
    seed = crc32(copy.name.encode(), copy.end)
    places = min(count, _ELEMENTS * max(1, count * itemsize // SPACING_BYTES))
    found: list[Place] = []
    for number in range(places):
        position = (seed + number * count // places) % count
        at, offset = first + position, 0
        for length, stride in zip(reversed(source.shape), reversed(source.stride()), strict=True):
            at, index = divmod(at, length)
            offset += index * stride
        found.append((offset * itemsize, position * itemsize, itemsize))
    return found


def _kind(copy: Copy) -> tuple[str, bool]:
    """What is read together on a device: places of ``LINE_BYTES`` apart from others."""
    return str(copy.source.device), copy.source.is_contiguous() and copy.target.nbytes > WHOLE_BYTES


def _views(copy: Copy, places: list[Place]) -> list[torch.Tensor]:
    """The places of a source on a device: as one view if they are equally spaced."""
    source = copy.source
    if not source.is_contiguous():
        at = [source.storage_offset() + begin // source.itemsize for begin, _, _ in places]
        return [source.as_strided((1,), (1,), offset).view(torch.uint8) for offset in at]
    flat = source.reshape(-1).view(torch.uint8)
    begin, _, nbytes = places[0]
    if copy.target.nbytes <= WHOLE_BYTES:
        return [flat[begin : begin + nbytes]]
    shape = (len(places), LINE_BYTES)
    return [flat.as_strided(shape, (SPACING_BYTES, 1), flat.storage_offset() + begin)]


def _fetched(tensors: Iterable[torch.Tensor], beside: Beside) -> bytes:
    found = b""
    for tensor in tensors:
        with beside(tensor):
            host = tensor.cpu()
        found += bytes(host_bytes(host.data_ptr(), host.nbytes))
    return found

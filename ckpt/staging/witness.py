"""Whether an image holds what the late sources held at the call, also where no version counter has
moved.

Code that writes through ``parameter.data``, through a NumPy view, with ``torch._foreach_*`` on
DTensors or with a kernel of its own moves no counter. A *witness* reads the late sources at the
call, and the image once it is filled; a difference names the tensor. ``Sampled`` reads a small part
of each source, ``Full`` all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
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
PLACES_AT_ONCE: Final = 512
"""Places of a sample that one call reads, beside one of each tensor.

A place costs about 0.1 µs, which is a miss in the processor's caches.
"""
_HOST: Final = ("", False)
# Places of one element each, for each place that a contiguous source would have.
_ELEMENTS: Final = 16

Beside = Callable[[torch.Tensor], AbstractContextManager[None]]


class Witness(Protocol):
    """What the late sources were at the call, which is when it was built."""

    def changed(self, copies: Sequence[Copy] | None, beside: Beside) -> str | None:
        """Return the name of a tensor whose image is not what it was at the call; None if there is
        none.

        It may be called when the copies have landed.

        Args:
            copies: Those to look at; None for all.
            beside: The stream on which a tensor on a device may be read.
        """
        ...


Place = tuple[int, int, int]
"""Bytes that are compared: where they begin in the source, and in the target, and how many they
are.
"""


@dataclass(frozen=True, slots=True)
class Spaced:
    """Places of one size, equally spaced: ``offsets`` in the target, ``begin`` further on in the
    source.

    It makes each place only while it is iterated over. A list would have thousands of objects for
    each slot, made again after each restore. The garbage collector would then run more often, and
    one full run stops all threads for 0.1 s or more.
    """

    begin: int
    offsets: range
    nbytes: int

    def __len__(self) -> int:
        return len(self.offsets)

    def __iter__(self) -> Iterator[Place]:
        return ((self.begin + offset, offset, self.nbytes) for offset in self.offsets)

    def __getitem__(self, which: slice) -> Spaced:
        return Spaced(self.begin, self.offsets[which], self.nbytes)


Places = Spaced | list[Place]


class Sample:
    """The places at which the late copies of a batch are looked at.

    The call has to wait for each place, so it reads a part of them if there are many: the next one
    of the sample's subsets. Each subset has a place of every tensor.
    """

    def __init__(self, copies: Sequence[Copy]) -> None:
        self._copies = copies
        self._turn = 0
        self.subsets: tuple[Subset, ...] = ()

    def build(self) -> None:
        """Find the places of the next subset in the sources, if that was not done before."""
        if not self.subsets:
            places = [(copy, _places(copy)) for copy in sorted(self._copies, key=_kind)]
            more = sum(len(found) - 1 for _, found in places)
            count = 1 + more // PLACES_AT_ONCE
            self.subsets = tuple(
                Subset(
                    [
                        (copy, found[k::count] or found[k % len(found) :][:1])
                        for copy, found in places
                    ]
                )
                for k in range(count)
            )
        self.subsets[self._after()].build()

    def next(self) -> Subset:
        """Return the subset for this save."""
        self.build()
        self._turn = self._after()
        return self.subsets[self._turn]

    def _after(self) -> int:
        return (self._turn + 1) % len(self.subsets)


class Subset:
    """Places of a sample that are read together.

    They are kept as bare addresses. These stay valid because the subset holds the copies, and
    because a batch is only used while its sources are where they were.
    """

    def __init__(self, places: Sequence[tuple[Copy, Places]]) -> None:
        """``places``: of each copy those to read. Copies of one kind stand together."""
        self._places = places
        self._addresses: list[tuple[int, Places]] = []
        self._host: list[Any] = []
        self._on_devices: list[list[torch.Tensor]] = []
        self._targets: list[Any] = []
        self._spans: dict[int, tuple[slice, slice]] = {}
        for kind, together in groupby(places, key=lambda pair: _kind(pair[0])):
            if kind == _HOST:
                self._addresses = [(copy.source.data_ptr(), found) for copy, found in together]
            else:
                self._on_devices.append(
                    [view for copy, found in together for view in _views(copy, found)]
                )

    def build(self) -> None:
        """Make what reads the places in host memory, if that was not done before."""
        # Two threads may be here at once: each works on what it has seen.
        if addresses := self._addresses:
            self._host = [
                host_bytes(address + at, nbytes)
                for address, found in addresses
                for at, _, nbytes in found
            ]
            self._addresses = []

    def __len__(self) -> int:
        """Return how many places it has."""
        return sum(len(found) for _, found in self._places)

    def read(self) -> tuple[bytes, list[torch.Tensor]]:
        """Return the bytes of all places of the sources now: those in host memory, and those on
        devices in the order of their current streams.
        """
        self.build()
        return b"".join(self._host), list(map(_gathered, self._on_devices))

    def differs(self, taken: bytes, copies: Sequence[Copy] | None) -> str | None:
        """Return the name of one of ``copies`` whose image is not as ``taken``; of any copy if that
        is None.
        """
        if not self._targets:
            self._build_targets()
        if copies is None and b"".join(self._targets) == taken:
            return None
        for copy in (copy for copy, _ in self._places) if copies is None else copies:
            if (span := self._spans.get(id(copy))) is not None:
                targets, places = span
                if b"".join(self._targets[targets]) != taken[places]:
                    return copy.name
        return None

    def _build_targets(self) -> None:
        """Find the places in the image. That waits until now, so that it costs the training thread
        nothing.
        """
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
        self._samples = list(samples)
        subsets = [sample.next() for sample in self._samples]
        self._taken = [(subset, *subset.read()) for subset in subsets]

    def changed(self, copies: Sequence[Copy] | None, beside: Beside) -> str | None:
        self._taken = [
            (subset, host + _fetched(there, beside), []) for subset, host, there in self._taken
        ]
        for sample in self._samples:
            sample.build()  # So that the training thread need not, at the next save
        found = (subset.differs(taken, copies) for subset, taken, _ in self._taken)
        return next((name for name in found if name is not None), None)


class Full:
    """A witness of every byte: a pass over the sources at the call, and one over the image."""

    def __init__(self, copies: Iterable[Copy]) -> None:
        self._copies = list(copies)
        self._digests = {id(copy): exact_digest(copy.elements) for copy in self._copies}

    def changed(self, copies: Sequence[Copy] | None, beside: Beside) -> str | None:
        del beside  # The image is in host memory
        for copy in self._copies if copies is None else copies:
            taken = self._digests.get(id(copy))
            if taken is not None and exact_digest(copy.target) != taken:
                return copy.name
        return None


def _places(copy: Copy) -> Places:
    name, source, target, _, end, part, _ = copy
    nbytes = target.nbytes
    if not source.is_contiguous():
        return _elements(copy)
    begin = 0 if part is None else part.start * target.itemsize
    if nbytes <= WHOLE_BYTES:
        return Spaced(begin, range(1), nbytes)
    count = max(1, nbytes // SPACING_BYTES)
    free = nbytes - (count - 1) * SPACING_BYTES - LINE_BYTES
    at = crc32(name.encode(), end) % (free + 1) // 64 * 64
    return Spaced(begin, range(at, at + count * SPACING_BYTES, SPACING_BYTES), LINE_BYTES)


def _elements(copy: Copy) -> list[Place]:
    """Return single elements of a source that is not contiguous."""
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
    """Return what is read together: host memory, which is the first kind, or lines or other places
    of a device.
    """
    if copy.source.is_cpu:
        return _HOST
    return str(copy.source.device), copy.source.is_contiguous() and copy.target.nbytes > WHOLE_BYTES


def _views(copy: Copy, places: Places) -> list[torch.Tensor]:
    """Return the places of a source on a device, as one view if they are equally spaced."""
    source = copy.source
    if not isinstance(places, Spaced):
        at = [source.storage_offset() + begin // source.itemsize for begin, _, _ in places]
        return [source.as_strided((1,), (1,), offset).view(torch.uint8) for offset in at]
    flat = source.reshape(-1).view(torch.uint8)
    begin = places.begin + places.offsets.start
    if copy.target.nbytes <= WHOLE_BYTES:
        return [flat[begin : begin + places.nbytes]]
    shape = (len(places), LINE_BYTES)
    return [flat.as_strided(shape, (places.offsets.step, 1), flat.storage_offset() + begin)]


def _gathered(views: list[torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat(views).flatten()


def _fetched(tensors: Iterable[torch.Tensor], beside: Beside) -> bytes:
    found = b""
    for tensor in tensors:
        with beside(tensor):
            host = tensor.cpu()
        found += bytes(host_bytes(host.data_ptr(), host.nbytes))
    return found

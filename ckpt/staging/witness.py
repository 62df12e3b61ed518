"""Detect changes of late sources that move no version counter.

Code that writes through ``parameter.data``, through a NumPy view, with ``torch._foreach_*`` on
DTensors or with its own kernels moves no version counter. A *witness* reads the late sources at the
call of the save, and compares them with the image after the copies. If a tensor differs, the
witness returns its name. `SampledWitness` reads a small part of each source, and `FullWitness`
reads all bytes.

A *place* is a few bytes of a tensor that are compared. Its *kind* decides which places are read by
one call. A *placement* is a pair: a copy of a batch, and the same copy with the memory that it has
in this save.

A `Grid` is places at equal distances.
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
"""The bytes that are compared at each place of a sample."""
SPACING_BYTES: Final = 1021 * LINE_BYTES
"""The distance from one place of a tensor to the next.

The factor 1021 is a prime number, so that the places fall into different columns of the tensor for
any usual length of its rows.
"""
WHOLE_BYTES: Final = 1024
"""The most bytes of a copy that is compared as a whole."""
PLACES_AT_ONCE: Final = 512
"""The most places that one save reads from the sample of a batch, besides one place of each tensor.

The read of a place misses the processor's caches and takes about 0.1 µs.
"""
_HOST: Final = ("", False)
"""The kind of copies from host memory (see ``_kind``). It sorts before all others."""
_ELEMENT_PLACES: Final = 16
"""A source that is not contiguous has up to this many places of one element where a contiguous
source would have one place of ``LINE_BYTES``.
"""

OnStream = Callable[[torch.Tensor], AbstractContextManager[None]]
Placement = tuple[Copy, Copy]
"""A copy of a batch, and the same copy with the memory that it has in this save."""


class Witness(Protocol):
    """A record of the values of the late sources at the time when the witness was created."""

    def changed_name(
        self, placements: Sequence[Placement] | None, on_stream: OnStream
    ) -> str | None:
        """Return the name of a tensor whose bytes in the image differ from the record; None if
        there is no difference.

        The copies must have landed.

        Args:
            placements: The copies to compare, if the image passes through a ring. None for all, if
                the image is in memory as a whole.
            on_stream: A function that returns for a tensor on an accelerator the context manager in
                which it may be read.
        """
        ...


Place = tuple[int, int, int]
"""Bytes of a copy that are compared: their offset in the source, their offset in the target, and
their number.
"""


@dataclass(frozen=True, slots=True)
class Grid:
    """A sequence of equally spaced places of ``nbytes`` bytes each.

    ``offsets`` are the offsets in the target. The offsets in the source are larger by ``begin``.

    The places are created only during iteration. A list would have thousands of objects for each
    slot, and each restore would create them again. The garbage collector would then run more often,
    and one full collection stops all threads for 0.1 s or more.
    """

    begin: int
    offsets: range
    nbytes: int

    def __len__(self) -> int:
        return len(self.offsets)

    def __iter__(self) -> Iterator[Place]:
        return ((self.begin + offset, offset, self.nbytes) for offset in self.offsets)

    def __getitem__(self, part: slice) -> Grid:
        return Grid(self.begin, self.offsets[part], self.nbytes)


Places = Grid | list[Place]


class Sample:
    """The places at which a `SampledWitness` witness compares the late copies of a batch.

    The places are divided into subsets, and each save reads one of them, since the call of the save
    has to wait for the reads. Each subset has a place of every tensor.
    """

    def __init__(self, copies: Sequence[Copy]) -> None:
        self._copies = copies
        self._index = 0
        self.subsets: tuple[Subset, ...] = ()

    def build(self) -> None:
        """Divide the places into subsets, and prepare the next subset for reading, unless this was
        done before.
        """
        if not self.subsets:
            places = [(copy, _places(copy)) for copy in sorted(self._copies, key=_kind)]
            extra_places = sum(len(copy_places) - 1 for _, copy_places in places)
            count = 1 + extra_places // PLACES_AT_ONCE
            # Subset k has every count-th place of a copy, or one place of a copy with fewer places.
            self.subsets = tuple(
                Subset(
                    [
                        (copy, copy_places[k::count] or copy_places[k % len(copy_places) :][:1])
                        for copy, copy_places in places
                    ]
                )
                for k in range(count)
            )
        self.subsets[self._next_index()].build()

    def next(self) -> Subset:
        """Go on to the next subset and return it, so that successive saves compare all places in
        turn.
        """
        self.build()
        self._index = self._next_index()
        return self.subsets[self._index]

    def _next_index(self) -> int:
        return (self._index + 1) % len(self.subsets)


class Subset:
    """Places of a sample that one save reads together.

    Places in host memory are stored as addresses. The addresses stay valid because the subset
    references the copies, and because a batch is used only while its sources have the same
    addresses.

    ``_places_and_slices`` has for each copy, by its id, its places, and the slice of its bytes
    among the bytes of all places. ``_image_views`` are the same places in the image.
    """

    def __init__(self, places: Sequence[tuple[Copy, Places]]) -> None:
        """Create the subset.

        Args:
            places: Copies, each with its places to read. Copies of one kind (see ``_kind``) must
                follow each other.
        """
        self._places = places
        self._addresses: list[tuple[int, Places]] = []
        self._host_views: list[Any] = []
        self._device_views: list[list[torch.Tensor]] = []
        self._image_views: list[Any] = []
        self._places_and_slices: dict[int, tuple[Places, slice]] = {}
        for kind, group in groupby(places, key=lambda pair: _kind(pair[0])):
            if kind == _HOST:
                self._addresses = [
                    (copy.source.data_ptr(), copy_places) for copy, copy_places in group
                ]
            else:
                self._device_views.append(
                    [view for copy, copy_places in group for view in _views(copy, copy_places)]
                )

    def build(self) -> None:
        """Create the views of those places that are in host memory, unless this was done before.

        ``__init__`` has created the views of the places on accelerators.
        """
        # Two threads may run this at once. Each works on the list that it has read.
        if addresses := self._addresses:
            self._host_views = [
                host_bytes(address + offset, nbytes)
                for address, places in addresses
                for offset, _, nbytes in places
            ]
            self._addresses = []

    def __len__(self) -> int:
        """Return the number of places."""
        return sum(len(places) for _, places in self._places)

    def read(self) -> tuple[bytes, list[torch.Tensor]]:
        """Read all places of the sources now.

        Returns:
            The bytes of the places in host memory, and tensors with the bytes of the places on
            accelerators. Reads on accelerators are only queued, on the current streams.
        """
        self.build()
        return b"".join(self._host_views), list(map(_gather, self._device_views))

    def changed_name(
        self, source_bytes: bytes, placements: Sequence[Placement] | None
    ) -> str | None:
        """Return the name of a copy whose bytes in the image differ from ``source_bytes``, or None.

        Args:
            source_bytes: The bytes of all places of the sources, in the order of the places.
            placements: The copies to compare; None for all.
        """
        if not self._places_and_slices:
            self._find_slices()
        if placements is not None:
            return next(
                (
                    copy.name
                    for copy, placed_copy in placements
                    if self._differs(copy, placed_copy, source_bytes)
                ),
                None,
            )
        if not self._image_views:
            self._image_views = [
                view for copy, _ in self._places for view in self._views_in_image(copy, copy)
            ]
        if b"".join(self._image_views) == source_bytes:
            return None
        return next(
            (copy.name for copy, _ in self._places if self._differs(copy, copy, source_bytes)), None
        )

    def _differs(self, copy: Copy, placed_copy: Copy, source_bytes: bytes) -> bool:
        """Return True if the places of a copy differ between the image and ``source_bytes``.
        ``placed_copy`` is the copy with the memory that it has in this save.
        """
        if id(copy) not in self._places_and_slices:
            return False
        _, source_slice = self._places_and_slices[id(copy)]
        return b"".join(self._views_in_image(copy, placed_copy)) != source_bytes[source_slice]

    def _views_in_image(self, copy: Copy, placed_copy: Copy) -> Iterator[Any]:
        """Yield the bytes of the places of a copy in the memory of ``placed_copy``."""
        address, (places, _) = placed_copy.target.data_ptr(), self._places_and_slices[id(copy)]
        return (host_bytes(address + offset, nbytes) for _, offset, nbytes in places)

    def _find_slices(self) -> None:
        """Find the places of each copy, and the slice of their bytes among those of all places. The
        copying thread calls this, so that the training thread spends no time on it.
        """
        end = 0
        for copy, places in self._places:
            begin, end = end, end + sum(nbytes for _, _, nbytes in places)
            self._places_and_slices[id(copy)] = places, slice(begin, end)


class SampledWitness:
    """A witness that compares the next subset of each sample.

    The training thread creates it, and the copying thread calls ``changed_name``, which takes the
    placements to compare (None for all) and returns the name of a tensor that differs.
    """

    def __init__(self, samples: Iterable[Sample]) -> None:
        self._samples = list(samples)
        subsets = [sample.next() for sample in self._samples]
        self._reads = [(subset, *subset.read()) for subset in subsets]

    def changed_name(
        self, placements: Sequence[Placement] | None, on_stream: OnStream
    ) -> str | None:
        # A second call, for other placements, has nothing left to fetch.
        self._reads = [
            (subset, host_bytes_read + _fetch(tensors, on_stream), [])
            for subset, host_bytes_read, tensors in self._reads
        ]
        for sample in self._samples:
            sample.build()  # This saves the training thread the work at the next save
        names = (
            subset.changed_name(source_bytes, placements) for subset, source_bytes, _ in self._reads
        )
        return next((name for name in names if name is not None), None)


class FullWitness:
    """A witness that compares all bytes: it reads all sources when it is created, and the image
    after the copies.

    ``changed_name`` takes the placements to compare (None for all), and returns the name of a
    tensor that differs.
    """

    def __init__(self, copies: Iterable[Copy]) -> None:
        self._copies = list(copies)
        self._digests = {id(copy): exact_digest(copy.elements) for copy in self._copies}

    def changed_name(
        self, placements: Sequence[Placement] | None, on_stream: OnStream
    ) -> str | None:
        del on_stream  # The image is in host memory
        copies = zip(self._copies, self._copies, strict=True)
        for copy, placed_copy in copies if placements is None else placements:
            source_digest = self._digests.get(id(copy))
            if source_digest is not None and exact_digest(placed_copy.target) != source_digest:
                return copy.name
        return None


def _places(copy: Copy) -> Places:
    """Return all places of a copy. Those of a large one begin at an offset that its name and its
    end in the image decide, so that the places of like tensors differ.
    """
    name, source, target, _, end, part, _ = copy
    nbytes = target.nbytes
    if not source.is_contiguous():
        return _element_places(copy)
    begin = 0 if part is None else part.start * target.itemsize
    if nbytes <= WHOLE_BYTES:
        return Grid(begin, range(1), nbytes)
    count = max(1, nbytes // SPACING_BYTES)
    # The places may begin up to ``slack`` bytes later.
    slack = nbytes - (count - 1) * SPACING_BYTES - LINE_BYTES
    start = crc32(name.encode(), end) % (slack + 1) // 64 * 64  # At the begin of a cache line
    return Grid(begin, range(start, start + count * SPACING_BYTES, SPACING_BYTES), LINE_BYTES)


def _element_places(copy: Copy) -> list[Place]:
    """Return the places of a source that is not contiguous. Each is a single element."""
    source, itemsize, count = copy.source, copy.target.itemsize, copy.target.numel()
    start = 0 if copy.part is None else copy.part.start
    seed = crc32(copy.name.encode(), copy.end)
    place_count = min(count, _ELEMENT_PLACES * max(1, count * itemsize // SPACING_BYTES))
    places: list[Place] = []
    for number in range(place_count):
        position = (seed + number * count // place_count) % count
        # The offset of the element in memory, from its index in the flattened source
        rest, offset = start + position, 0
        for length, stride in zip(reversed(source.shape), reversed(source.stride()), strict=True):
            rest, index = divmod(rest, length)
            offset += index * stride
        places.append((offset * itemsize, position * itemsize, itemsize))
    return places


def _kind(copy: Copy) -> tuple[str, bool]:
    """Return the kind of a copy. Places of copies of the same kind are read together.

    Sources in host memory are one kind, which sorts first. Each accelerator has two kinds: copies
    with places of ``LINE_BYTES``, and copies with places of other sizes.
    """
    if copy.source.is_cpu:
        return _HOST
    return str(copy.source.device), copy.source.is_contiguous() and copy.target.nbytes > WHOLE_BYTES


def _views(copy: Copy, places: Places) -> list[torch.Tensor]:
    """Return views of the bytes of a source on an accelerator at ``places``. One view has all
    places that are equally spaced.
    """
    source = copy.source
    if not isinstance(places, Grid):
        offsets = [source.storage_offset() + begin // source.itemsize for begin, _, _ in places]
        return [source.as_strided((1,), (1,), offset).view(torch.uint8) for offset in offsets]
    flat = source.reshape(-1).view(torch.uint8)
    begin = places.begin + places.offsets.start
    if copy.target.nbytes <= WHOLE_BYTES:
        return [flat[begin : begin + places.nbytes]]
    shape = (len(places), LINE_BYTES)
    return [flat.as_strided(shape, (places.offsets.step, 1), flat.storage_offset() + begin)]


def _gather(views: list[torch.Tensor]) -> torch.Tensor:
    """Queue a read of the bytes of all ``views`` on their device."""
    with torch.no_grad():
        return torch.cat(views).flatten()


def _fetch(tensors: Iterable[torch.Tensor], on_stream: OnStream) -> bytes:
    """Return the bytes of ``tensors``, copied to host memory."""
    data = b""
    for tensor in tensors:
        with on_stream(tensor):
            host = tensor.cpu()
        data += bytes(host_bytes(host.data_ptr(), host.nbytes))
    return data

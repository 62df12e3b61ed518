"""Decides which chunks of an image an increment leaves out, since an older step has them.

The image of a state with frozen tensors begins with them. Before the data file is written, the
first chunks are hashed and compared with those of the base, which is the last whole file of the
same save plan that this rank has committed to the tier. Everything before the first difference
stays out of the new file. So one pass over the image is enough, also if the image passes through a
ring.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Final

from msgspec.structs import replace

from ckpt.catalog.index import is_committed
from ckpt.errors import CkptError
from ckpt.model.checksum import checksum
from ckpt.model.keys import StepRef
from ckpt.model.manifest import Chunk, Encoding, Increment
from ckpt.pipeline.image_writer import Source, loss_reports
from ckpt.pipeline.tail_image import TailImage
from ckpt.plan.save import SavePlan, tail_header
from ckpt.save.save_request import SaveRequest
from ckpt.storage.api import StorageBackend

_MOST_BASES: Final = 4
MOST_INCREMENTS: Final = 1000
"""After this number of increments of one base, a file is written as a whole. If the base is
damaged, no more steps than this are lost.
"""


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A data file that was written: its chunk table, its encoding or None if it is not encoded, and
    its increment or None if it is whole.
    """

    chunks: tuple[Chunk, ...]
    encoding: Encoding | None = None
    increment: Increment | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseFile:
    """A whole data file of a committed step.

    Attributes:
        ref: The step.
        plan: The save plan of the file.
        file: The file.
        increments: How many committed files refer to it.
    """

    ref: StepRef
    plan: SavePlan
    file: WrittenFile
    increments: int = 0

    @property
    def size(self) -> int:
        """Return the size of the file on its tier in bytes."""
        return self.file.encoding.size if self.file.encoding else self.plan.size


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """The part of an image that an increment holds.

    Attributes:
        base: The file that holds the chunks before.
        start: The number of bytes before.
        header: The bytes with which the file begins; empty if it is encoded.
        count: The number of chunks before.
    """

    base: BaseFile
    start: int
    header: bytes
    count: int

    def part_of(self, job: SaveRequest) -> tuple[Source, tuple[int, ...], tuple[Chunk, ...]]:
        """Return the bytes of the file for the image of ``job``, the lengths of its chunks, and the
        chunk table if it is known. The header is the first chunk.
        """
        lengths, chunks = job.plan.chunks[self.count :], job.known_chunks[self.count :]
        if self.header:
            header_chunk = Chunk(len(self.header), checksum(self.header))
            lengths = (header_chunk.nbytes, *lengths)
            chunks = (header_chunk, *chunks) if chunks else ()
        return TailImage(job.image, self.start, self.header), lengths, chunks

    def file(
        self, rank: int, chunks: tuple[Chunk, ...], own_encoding: Encoding | None
    ) -> WrittenFile:
        """Return the increment that was written.

        Args:
            rank: The rank of the image.
            chunks: The chunks of the file, with the header.
            own_encoding: Their encoding; None if they are not encoded.
        """
        base, encoding, own_chunks = self.base.file, None, chunks[bool(self.header) :]
        if own_encoding is not None and base.encoding is not None:
            lengths = (*base.encoding.lengths[: self.count], *own_encoding.lengths)
            encoding = replace(own_encoding, lengths=lengths)
        data_size = own_encoding.size if own_encoding else sum(chunk.nbytes for chunk in own_chunks)
        header_bytes = len(self.header)
        increment = Increment(
            rank,
            self.base.ref.folder,
            self.base.size,
            self.count,
            header_bytes,
            checksum(self.header) if header_bytes else "",
            header_bytes + data_size,
        )
        return WrittenFile((*base.chunks[: self.count], *own_chunks), encoding, increment)


def base_of(plan: SavePlan, bases: Sequence[BaseFile]) -> BaseFile | None:
    """Return the base of the next file of ``plan``: the whole file in ``bases`` of an equal plan;
    None if there is none. A job that alternates between saves of the whole state and of a part has
    a plan for each.
    """
    return next((base for base in bases if _has_equal_layout(base.plan, plan)), None)


def bases_after(job: SaveRequest, file: WrittenFile, bases: Sequence[BaseFile]) -> list[BaseFile]:
    """Return the bases of the next saves, the last one first, after ``file`` was committed.

    Args:
        job: The save that was committed.
        file: Its data file.
        bases: The bases before.
    """
    base = base_of(job.plan, bases)
    other_bases = [other_base for other_base in bases if other_base is not base]
    if file.increment is None:
        return [BaseFile(ref=job.ref, plan=job.plan, file=file), *other_bases][:_MOST_BASES]
    if base is None or file.increment.count < _most_chunks(job.plan):
        return other_bases  # Something has changed that was frozen, so the next file is whole
    return [dataclasses.replace(base, plan=job.plan, increments=base.increments + 1), *other_bases]


def _has_equal_layout(a: SavePlan, b: SavePlan) -> bool:
    """Return True if two plans lay out equal images."""
    return a is b or (
        (a.header, a.chunks, a.frozen_chunks, a.tensors)
        == (b.header, b.chunks, b.frozen_chunks, b.tensors)
    )


def tail_of(job: SaveRequest, base: BaseFile, backend: StorageBackend, rank: int) -> Tail | None:
    """Return the part of the image of ``job`` that differs from ``base``. Return None if the file
    must be written as a whole.

    The bytes of the image that are left out are reported to the image as written and as hashed.

    Raises:
        CkptError: The image has raised this error.
    """
    plan = job.plan
    if base.increments >= MOST_INCREMENTS:
        return None
    try:
        if not is_committed(backend, base.ref):
            return None
    except CkptError:
        return None
    limit = _most_chunks(plan)
    if job.known_chunks:
        pairs = zip(base.file.chunks[:limit], job.known_chunks, strict=False)
        count = next((i for i, (old, new) in enumerate(pairs) if old != new), limit)
    else:
        count = _count_equal(job.image, plan.chunks[:limit], base.file.chunks)
    if count < 2:  # Only the header is equal
        return None
    is_encoded = base.file.encoding is not None
    header = b"" if is_encoded else tail_header(plan.tensors, plan.chunks, count, rank)
    return Tail(base=base, start=sum(plan.chunks[:count]), header=header, count=count)


def _most_chunks(plan: SavePlan) -> int:
    """Return how many chunks an increment may leave out. It has the last chunk in any case."""
    return min(plan.frozen_chunks, len(plan.chunks) - 1)


def _count_equal(image: Source, lengths: Sequence[int], chunks: Sequence[Chunk]) -> int:
    """Return how many of the first chunks of an image are equal to ``chunks``."""
    edges = pairwise(accumulate(lengths, initial=0))
    with loss_reports(image.note_loss):
        for index, ((start, end), chunk) in enumerate(zip(edges, chunks, strict=False)):
            if checksum(*image.parts(start, end)) != chunk.checksum:
                return index
            if index:  # If nothing else is equal, the header is written
                image.note_hashed(start, end)
                image.note_written(start, end)
    return len(lengths)

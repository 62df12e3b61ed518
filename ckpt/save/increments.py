"""Decides which chunks of an image an increment leaves out, since another step has them.

The image of a state with frozen tensors begins with them. Before the data file is written, the
first chunks are hashed and compared with those of the base, which is the last whole file of the
same save plan that this rank has committed to the tier, or a file in another root (see
``save.base_in_other_root``). Everything before the first difference stays out of the new file. So
one pass over the image is enough, also if the image passes through a ring.

The header of an image names all tensors, and another run may train others. So an increment of a
file in another root has the header of its image itself, and only what follows is compared.

The step of another program is *adopted* if a manifest names its files, which then serve as a base.
An increment of such files has an *adoption*, the places of the chunks in them. The *lead* of a file
is the bytes before its own chunks, which are its headers. An *image* is a rank's part of the state,
laid out as its file, and a *plan* of a save says where each tensor is in it. The image is told
which of its bytes were hashed and written. If an error ends the work on a part, the image is told
that the part is lost (``note_loss``).
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Final

from msgspec.structs import replace

from ckpt.catalog.step_listing import is_committed
from ckpt.errors import CkptError, ForeignFileMismatch, StorageError
from ckpt.model.checksum import checksum
from ckpt.model.keys import BaseRef, StepRef
from ckpt.model.manifest import Chunk, Encoding, Increment
from ckpt.pipeline.image_writer import Source, report_errors_to
from ckpt.pipeline.tail_image import TailImage
from ckpt.plan.save import SavePlan, boxes_of_chunks, tail_header
from ckpt.save.adopted_base import AdoptedFiles
from ckpt.save.save_request import SaveRequest
from ckpt.storage.api import StorageBackend
from ckpt.storage.outside_files import root_at

_MOST_BASES: Final = 4
MOST_INCREMENTS: Final = 1000
"""After this number of increments of one base, a file is written as a whole. If the base is
damaged, no more steps than this are lost.
"""

_log = logging.getLogger("ckpt")


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
        plan: The save plan of the file. Of a file in another root, that of its increments.
        file: The file.
        increments: How many committed files refer to it.
        root: The path to the root that has the step (see ``BaseRef``); empty if it is the same
            root.
        adopted_files: The files of the step if it was adopted; else None. Then ``file`` has no
            chunks.
    """

    ref: StepRef
    plan: SavePlan
    file: WrittenFile
    increments: int = 0
    root: str = ""
    adopted_files: AdoptedFiles | None = None

    @property
    def size(self) -> int:
        """Return the size of the file on its tier in bytes."""
        encoding = self.file.encoding
        return encoding.size if encoding else sum(chunk.nbytes for chunk in self.file.chunks)

    @property
    def lead(self) -> int:
        """Return the size of the first chunk on its tier in bytes."""
        encoding = self.file.encoding
        return encoding.lengths[0] if encoding else self.file.chunks[0].nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """The part of an image that an increment holds.

    Attributes:
        base: The file that holds the chunks before.
        start: The number of bytes before.
        header: The bytes with which the file begins: a header of its own, unless it is encoded, and
            ``image_header``.
        count: The number of chunks before.
        image_header: The first chunk of the image, if the base is in another root; else empty.
    """

    base: BaseFile
    start: int
    header: bytes
    count: int
    image_header: bytes = b""

    def own_widths(self, widths: Sequence[int]) -> Sequence[int]:
        """Return those entries of ``widths`` that belong to chunks in the file. ``widths`` has the
        bytes of a number for each chunk of the image.
        """
        return [*(widths[:1] if self.image_header else ()), *widths[self.count :]]

    def part_of(self, request: SaveRequest) -> tuple[Source, tuple[int, ...], tuple[Chunk, ...]]:
        """Return the bytes of the file for the image of ``request``, the lengths of its chunks, and
        the chunk table if it is known. The header is the first chunk.
        """
        lengths, chunks = request.plan.chunks[self.count :], request.hashed_chunks[self.count :]
        if self.header:
            header_chunk = Chunk(len(self.header), checksum(self.header))
            lengths = (header_chunk.nbytes, *lengths)
            chunks = (header_chunk, *chunks) if chunks else ()
        return TailImage(request.image, self.start, self.header), lengths, chunks

    def file(
        self, rank: int, chunks: tuple[Chunk, ...], own_encoding: Encoding | None
    ) -> WrittenFile:
        """Return the increment that was written.

        Args:
            rank: The rank of the image.
            chunks: The chunks of the file, with the header.
            own_encoding: Their encoding; None if they are not encoded.
        """
        base_file, encoding, image_header = self.base.file, None, self.image_header
        # The bytes in the file before its own chunks
        lead, header_count = len(self.header), 1 if self.header else 0
        if own_encoding is not None and base_file.encoding is not None:
            own_lengths, base_lengths = (
                own_encoding.lengths,
                base_file.encoding.lengths[: self.count],
            )
            lead = own_lengths[0] if image_header else 0
            if image_header:
                base_lengths = (lead, *base_lengths[1:])
            lengths = (*base_lengths, *own_lengths[header_count:])
            encoding = replace(own_encoding, lengths=lengths)
        own_chunks = chunks[header_count:]
        size = own_encoding.size if own_encoding else sum(chunk.nbytes for chunk in chunks)
        files = self.base.adopted_files
        adoption = files.places(base_file.chunks[1 : self.count]) if files else None
        increment = Increment(
            rank=rank,
            base=BaseRef(self.base.root, self.base.ref).name,
            base_size=adoption.end if adoption else self.base.size,
            count=self.count,
            lead=lead,
            checksum=checksum(self.header) if lead and own_encoding is None else "",
            size=size,
            base_lead=self.base.lead if image_header and not adoption else 0,
            adoption=adoption,
        )
        base_chunks = base_file.chunks[: self.count]
        if image_header:
            base_chunks = (Chunk(len(image_header), checksum(image_header)), *base_chunks[1:])
        return WrittenFile((*base_chunks, *own_chunks), encoding, increment)


def base_of(plan: SavePlan, bases: Sequence[BaseFile]) -> BaseFile | None:
    """Return the base of the next file of ``plan``: the whole file in ``bases`` of an equal plan;
    None if there is none. A job that alternates between saves of the whole state and of a part has
    a plan for each.
    """
    return next((base for base in bases if has_equal_layout(base.plan, plan)), None)


def bases_after(
    request: SaveRequest, file: WrittenFile, bases: Sequence[BaseFile]
) -> list[BaseFile]:
    """Return the bases of the next saves, the last one first, after ``file`` was committed.

    Args:
        request: The save that was committed.
        file: Its data file.
        bases: The bases before.
    """
    base = base_of(request.plan, bases)
    other_bases = [other_base for other_base in bases if other_base is not base]
    if file.increment is None:
        return [BaseFile(ref=request.ref, plan=request.plan, file=file), *other_bases][:_MOST_BASES]
    if base is None or file.increment.count < most_chunks(request.plan):
        return other_bases  # Something has changed that was frozen, so the next file is whole
    return [
        dataclasses.replace(base, plan=request.plan, increments=base.increments + 1),
        *other_bases,
    ]


def has_equal_layout(plan: SavePlan, other_plan: SavePlan) -> bool:
    """Return True if two plans lay out equal images."""
    return plan is other_plan or (
        (plan.header, plan.chunks, plan.frozen_chunks, plan.tensors)
        == (other_plan.header, other_plan.chunks, other_plan.frozen_chunks, other_plan.tensors)
    )


def tail_of(
    request: SaveRequest, base: BaseFile, backend: StorageBackend, rank: int
) -> Tail | None:
    """Return the part of the image of ``request`` that differs from ``base``. Return None if the
    file must be written as a whole.

    The bytes of the image that are left out are reported to the image as written and as hashed.

    Raises:
        CkptError: The image has raised this error.
    """
    plan = request.plan
    if base.increments >= MOST_INCREMENTS:
        return None
    try:
        if not is_committed(root_at(backend, base.root), base.ref):
            return None
    except CkptError:
        return None
    # In another root, the first chunk of the base is the header of another image.
    begin, limit = 1 if base.root else 0, most_chunks(plan)
    if base.adopted_files is not None:
        base = _adopted_base_of(request, base, base.adopted_files, limit)
        count = len(base.file.chunks)
    elif request.hashed_chunks:
        count = _first_difference(base.file.chunks[:limit], request.hashed_chunks[:limit], begin)
    else:
        count = _count_equal(request.image, plan.chunks[:limit], base.file.chunks, begin)
    if count < 2:  # Only the header is equal
        return None
    # No header is written from the image: that of the increment is in other memory.
    request.image.note_hashed(0, plan.chunks[0])
    request.image.note_written(0, plan.chunks[0])
    image_header = plan.header if base.root else b""
    header = image_header
    if base.file.encoding is None:
        has_header = bool(image_header)
        header = (
            tail_header(plan.tensors, plan.chunks, count, rank, has_image_header=has_header)
            + image_header
        )
    start = sum(plan.chunks[:count])
    return Tail(base=base, start=start, header=header, count=count, image_header=image_header)


def _adopted_base_of(
    request: SaveRequest, base: BaseFile, files: AdoptedFiles, limit: int
) -> BaseFile:
    """Return an adopted base for the image of ``request``. It has the header of the image and the
    chunks before the first one that ``files`` do not hold, at most ``limit`` in all.
    """
    header, hashed_chunks = request.plan.header, request.hashed_chunks
    chunks = [Chunk(len(header), checksum(header))]
    edges = list(pairwise(accumulate(request.plan.chunks[:limit], initial=0)))[1:]
    boxes = boxes_of_chunks(request.plan, limit)
    with report_errors_to(request.image.note_loss), _log_errors_of(base):
        files.recheck()
        for start, end in edges:
            chunk = (
                hashed_chunks[len(chunks)]
                if hashed_chunks
                else Chunk(end - start, checksum(*request.image.parts(start, end)))
            )
            if not files.has_part(chunk, *boxes[len(chunks)]):
                break
            if not hashed_chunks:
                request.image.note_hashed(start, end)
                request.image.note_written(start, end)
            chunks.append(chunk)
    lengths = tuple(chunk.nbytes for chunk in chunks)
    encoding = base.file.encoding and replace(base.file.encoding, lengths=lengths)
    return dataclasses.replace(base, file=WrittenFile(tuple(chunks), encoding))


@contextmanager
def _log_errors_of(base: BaseFile) -> Generator[None]:
    """Log the error of a file of ``base`` instead of raising it: the save goes on without it."""
    try:
        yield
    except (ForeignFileMismatch, StorageError) as error:
        text = "ckpt: this save writes what step %d of %s does not hold any more: %s"
        _log.warning(text, base.ref.step, base.root, error)


def has_equal_begin(request: SaveRequest, chunks: Sequence[Chunk]) -> bool:
    """Return True if the first chunk after the header is the same in the image of ``request`` and
    in ``chunks``.
    """
    nbytes = request.plan.chunks[1]
    return bool(chunks[1:]) and chunks[1].nbytes == nbytes and first_chunk(request) == chunks[1]


def first_chunk(request: SaveRequest) -> Chunk:
    """Return the first chunk of the image of ``request`` after the header."""
    if request.hashed_chunks:
        return request.hashed_chunks[1]
    start, nbytes = request.plan.chunks[:2]
    with report_errors_to(request.image.note_loss):
        return Chunk(nbytes, checksum(*request.image.parts(start, start + nbytes)))


def most_chunks(plan: SavePlan) -> int:
    """Return how many chunks an increment may leave out. It has the last chunk in any case."""
    return min(plan.frozen_chunks, len(plan.chunks) - 1)


def _first_difference(chunks: Sequence[Chunk], other_chunks: Sequence[Chunk], begin: int) -> int:
    """Return the index of the first chunk, from ``begin`` on, that differs or that only one of them
    has.
    """
    count = min(len(chunks), len(other_chunks))
    chunk_pairs = enumerate(zip(chunks[begin:], other_chunks[begin:], strict=False), begin)
    return next((index for index, (old, new) in chunk_pairs if old != new), count)


def _count_equal(image: Source, lengths: Sequence[int], chunks: Sequence[Chunk], begin: int) -> int:
    """Return the index of the first chunk of an image, from ``begin`` on, that differs from that in
    ``chunks``.
    """
    edges = list(pairwise(accumulate(lengths, initial=0)))[begin:]
    with report_errors_to(image.note_loss):
        edges_and_chunks = zip(edges, chunks[begin:], strict=False)
        for index, ((start, end), chunk) in enumerate(edges_and_chunks, begin):
            is_equal = end - start == chunk.nbytes
            if not is_equal or checksum(*image.parts(start, end)) != chunk.checksum:
                return index
            if index:  # If nothing else is equal, the header is written
                image.note_hashed(start, end)
                image.note_written(start, end)
    return min(len(lengths), len(chunks))

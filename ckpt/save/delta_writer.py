"""Writes the deltas of one rank on one tier: the differences between the chunks of a step
and those of the step that the rank has written before. An *image* is the rank's part of the state,
laid out as its data file, and a *plan* says where each tensor is in it.

The bytes of the last step stay in memory, for the part of the state that has deltas. While a step
is written, its chunks are compared with them as they are hashed, since their bytes are in memory
then. A delta is a shorter way to a checkpoint, and no part of it: whatever goes wrong here costs
the delta, and never the save.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Final

import numpy as np

from ckpt.catalog.fragments import Parts, load_fragment
from ckpt.catalog.step_listing import read_packed
from ckpt.catalog.tensor_reader import ReadRequest, StepReader
from ckpt.codec.word_difference import difference
from ckpt.errors import CkptError
from ckpt.model.delta import is_in_part, pack_delta, unpack_delta
from ckpt.model.dtype import DTYPES, float_width
from ckpt.model.keys import StepRef
from ckpt.model.manifest import Tensor
from ckpt.pipeline.image_wrapper import ImageWrapper
from ckpt.pipeline.image_writer import Source
from ckpt.pipeline.retry import RetryPolicy
from ckpt.pipeline.workers import Workers
from ckpt.plan.leaf import Leaf
from ckpt.plan.save import SavePlan
from ckpt.save.save_request import SaveRequest
from ckpt.staging.memory_budget import Reservation
from ckpt.storage.api import StorageBackend, read_object

_MOST_SHARE: Final = 0.5
"""The largest size of a delta, as a share of the bytes that it stands for. A longer one is not put.
"""
_READERS: Final = 2
_log = logging.getLogger("ckpt")


@dataclass(frozen=True, slots=True)
class _DeltaChunk:
    """A chunk that has a delta.

    Attributes:
        index: The index of the chunk in the file.
        start, end: The bytes of the chunk in the image.
        width: The bytes of a word, which is one number of its tensor.
        position: The place of the chunk in the bytes of the last step.
    """

    index: int
    start: int
    end: int
    width: int
    position: int


@dataclass(frozen=True, slots=True)
class _Layout:
    """The chunks of a plan that have deltas, by their start, and the tensors that they belong to.
    Steps of equal layouts have equal chunks.
    """

    chunks: dict[int, _DeltaChunk]
    tensors: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        return sum(chunk.end - chunk.start for chunk in self.chunks.values())


_NO_LAYOUT: Final = _Layout({}, ())


def delta_memory(plan: SavePlan, part: str) -> int:
    """Return the bytes that a writer of deltas of ``part`` keeps in memory after a save."""
    return sum(
        shard.box.numel * DTYPES[tensor.dtype].itemsize
        for tensor in _tensors_of(plan, part)
        for shard in tensor.shards
    )


class DeltaWriter:
    """Writes the deltas of one rank on one tier.

    Args:
        part: The name of the part of the state that has deltas, such as "model".
        rank: The rank.
        backend: The tier.
        reservation: Gets the bytes that this writer keeps in memory.

    Thread safety: one save at a time. The threads that write the image use the source that
    ``record`` returns, and each calls it for other chunks.

    The base of a delta (``_base_ref``) is the step to which it is the difference. ``_bytes_ref`` is
    the step whose bytes are in memory (``_last_bytes``), or are put there while its image is
    hashed; the base was in memory before. ``_last_ref`` is the last step that was written here.
    ``_layout`` has the chunks of ``_plan`` that have deltas. ``_compared_indices`` are the chunks
    of the present step that were compared with the base, ``_differences`` what they differ in, and
    ``_error`` is what has made the comparison fail.
    """

    def __init__(
        self, part: str, rank: int, backend: StorageBackend, reservation: Reservation
    ) -> None:
        self._part, self._rank, self._backend = part, rank, backend
        self._reservation = reservation
        self._plan: SavePlan | None = None
        self._layout = _NO_LAYOUT
        self._last_bytes = np.empty(0, dtype=np.uint8)
        self._last_ref: StepRef | None = None
        self._bytes_ref: StepRef | None = None
        self._base_ref: StepRef | None = None
        self._differences: dict[int, Sequence[memoryview]] = {}
        self._compared_indices: set[int] = set()
        self._error: Exception | None = None
        self._lock, self._has_warned = threading.Lock(), False

    def key(self, ref: StepRef) -> str:
        """Return the key of the delta of a step."""
        return ref.delta(self._rank)

    def record(self, request: SaveRequest) -> Source:
        """Return the image of ``request``, which compares each chunk with the last step when it is
        hashed. If a write is repeated, a chunk is compared once.
        """
        try:
            if self._bytes_ref != request.ref:
                self._begin_step(request)
        except Exception as error:  # noqa: BLE001 - of no consequence for the save
            self._plan, self._layout, self._bytes_ref, self._error = (
                None,
                _NO_LAYOUT,
                request.ref,
                error,
            )
            return request.image
        return _ComparedImage(request.image, self._compare_hashed)

    def put(self, request: SaveRequest, retry: RetryPolicy) -> None:
        """Put the delta of ``request``, whose file is durable. Errors are only logged."""
        try:
            if request.source is not None:
                self._copy_delta(request, request.source.backend, retry)
            elif self._compare_rest(request) and self._base_ref is not None:
                self._put(
                    pack_delta(request.ref, self._rank, self._base_ref, self._differences),
                    request.ref,
                    retry,
                )
            elif self._base_ref is not None and self._error is None:
                self._warn(
                    "ckpt: %s has no delta of step %d: too many words of %r change in a step, as "
                    "those of float32 weights do. Save bfloat16 copies under a name of their own "
                    "and give this name to deltas=, or leave deltas= out",
                    self._backend.url,
                    request.ref.step,
                    self._part,
                )
        except (CkptError, MemoryError) as error:
            _log.info(
                "ckpt: step %d has no delta on %s: %s", request.ref.step, self._backend.url, error
            )
        finally:
            self._differences, self._last_ref = {}, request.ref

    def _warn(self, text: str, *arguments: object) -> None:
        """Log a warning, and then nothing more at this level."""
        _log.log(logging.DEBUG if self._has_warned else logging.WARNING, text, *arguments)
        self._has_warned = True

    def _begin_step(self, request: SaveRequest) -> None:
        """Prepare to compare the chunks of ``request``. The step in memory becomes the base of its
        delta if memory has all bytes of that step.
        """
        if self._plan is not request.plan:
            layout = _layout_of(request.plan, self._part)
            if layout != self._layout:
                self._reservation.used_bytes += layout.nbytes - self._layout.nbytes
                self._layout, self._bytes_ref = layout, None
                self._last_bytes = np.empty(layout.nbytes, dtype=np.uint8)
            self._plan = request.plan
            if not layout.chunks and self._rank == 0:
                self._warn(
                    "ckpt: deltas=%r fits no tensor that this rank writes: `ckpt show` lists the "
                    "names",
                    self._part,
                )
        is_whole = self._bytes_ref is not None and self._error is None
        self._base_ref = (
            self._bytes_ref
            if is_whole and len(self._compared_indices) == len(self._layout.chunks)
            else None
        )
        self._bytes_ref, self._error, self._compared_indices, self._differences = (
            request.ref,
            None,
            set(),
            {},
        )
        if self._base_ref is None and self._last_ref is None and request.restored_ref is not None:
            self._read_restored(request.restored_ref)

    def _read_restored(self, ref: StepRef) -> None:
        """Read the bytes of the step that the job has restored, so that its first step has a delta
        too. Whatever ranks have written the step, the bytes are those of the boxes of this rank.
        """
        requests: list[ReadRequest] = []
        leaves: list[Leaf] = []
        for tensor in self._layout.tensors:
            for shard in tensor.shards:
                if chunk := self._layout.chunks.get(shard.offset):
                    nbytes = shard.box.numel * DTYPES[tensor.dtype].itemsize
                    out = self._last_bytes[chunk.position : chunk.position + nbytes]
                    requests.append(ReadRequest(tensor.name, shard.box, out.data))
                    leaves.append(Leaf(tensor.name, tensor.dtype, tensor.shape, (shard.box,)))
        try:
            manifest, _ = read_packed(self._backend, ref)
            parts = Parts(
                manifest, lambda *arguments: load_fragment(self._backend, ref, *arguments)[0]
            )
            # With the fragments of the ranks that have written parts of ``leaves``
            manifest = parts.fill_for(leaves, key=ref.manifest)
            with Workers("delta", _READERS) as workers:
                StepReader(self._backend, ref, manifest, workers).read(requests)
        except CkptError as error:
            _log.info("ckpt: the first step of the job has no delta: %s", error)
        else:
            self._base_ref = ref

    def _compare_hashed(self, start: int, parts: Callable[[], Sequence[memoryview]]) -> None:
        """Compare the chunk that begins at ``start``, and keep its bytes. An error is kept, since
        the save must go on.
        """
        chunk = self._layout.chunks.get(start)
        if chunk is None or chunk.index in self._compared_indices or self._error is not None:
            return
        try:
            self._compare(chunk, parts())
            with self._lock:
                self._compared_indices.add(chunk.index)
        except Exception as error:  # noqa: BLE001 - of no consequence for the save
            self._error = error

    def _compare(self, chunk: _DeltaChunk, parts: Sequence[memoryview]) -> None:
        """Keep the difference of a chunk to the last step, and then its bytes as those of the last
        step.
        """
        data = parts[0] if len(parts) == 1 else memoryview(b"".join(parts))
        last_bytes = self._last_bytes[chunk.position : chunk.position + chunk.end - chunk.start]
        if self._base_ref is not None:
            pieces = difference(last_bytes.data, data, chunk.width)
            if pieces is not None:
                with self._lock:
                    self._differences[chunk.index] = pieces
        last_bytes[:] = np.frombuffer(data, dtype=np.uint8)

    def _compare_rest(self, request: SaveRequest) -> bool:
        """Compare the chunks of an image that was not hashed here, since a nearer tier has done it.
        Return True if there is a delta worth to put.
        """
        chunks = self._layout.chunks.values()
        if len(self._compared_indices) < len(chunks) and request.image.rereadable:
            for chunk in chunks:
                self._compare_hashed(
                    chunk.start, partial(request.image.parts, chunk.start, chunk.end)
                )
        if self._error is not None:
            _log.info("ckpt: step %d has no delta: %r", request.ref.step, self._error)
        nbytes = sum(piece.nbytes for pieces in self._differences.values() for piece in pieces)
        return (
            bool(self._differences)
            and not self._error
            and nbytes <= _MOST_SHARE * self._layout.nbytes
        )

    def _copy_delta(self, request: SaveRequest, source: StorageBackend, retry: RetryPolicy) -> None:
        """Copy the delta from a nearer tier if its base is the last step that was written here."""
        key = self.key(request.ref)
        data = retry.call(partial(read_object, source, key, limit=request.plan.size))
        if unpack_delta(data, request.ref, self._rank).base == self._last_ref:
            self._put([memoryview(data)], request.ref, retry)

    def _put(self, parts: Sequence[memoryview], ref: StepRef, retry: RetryPolicy) -> None:
        retry.call(partial(self._backend.put, self.key(ref), parts))


@dataclass(frozen=True, slots=True)
class _ComparedImage(ImageWrapper):
    """An image that calls ``note`` with the start of each chunk that is hashed, and with a function
    that returns its bytes.
    """

    note: Callable[[int, Callable[[], Sequence[memoryview]]], None]

    def note_hashed(self, start: int, end: int) -> None:
        self.note(start, partial(self.image.parts, start, end))
        self.image.note_hashed(start, end)


def _tensors_of(plan: SavePlan, part: str) -> tuple[Tensor, ...]:
    return tuple(tensor for tensor in plan.tensors if is_in_part(part, tensor.name))


def _layout_of(plan: SavePlan, part: str) -> _Layout:
    """Return the chunks of the tensors in ``part``."""
    tensors = _tensors_of(plan, part)
    ends_and_widths = {
        shard.offset: (
            shard.offset + shard.box.numel * DTYPES[tensor.dtype].itemsize,
            float_width(tensor.dtype),
        )
        for tensor in tensors
        for shard in tensor.shards
        if shard.box.numel
    }
    chunks: dict[int, _DeltaChunk] = {}
    shard_end, width, position = 0, 1, 0
    for index, (start, nbytes) in enumerate(
        zip(accumulate(plan.chunks, initial=0), plan.chunks, strict=False)
    ):
        shard_end, width = ends_and_widths.get(start, (shard_end, width))
        if start < shard_end:
            chunks[start] = _DeltaChunk(index, start, start + nbytes, width, position)
            position += nbytes
    return _Layout(chunks, tensors)

"""Finds the chunks of an image in the files of an adopted step, which increments may refer to.

The files are those of another program, with other tensors in another order. So each chunk of an
image is looked up by its digest, wherever it is. A rank that holds a part of a tensor cuts it into
other chunks. These are read from tensors of the same shape, those with the most similar name first.

Such a file may be written to at any time, and the records say only what it held at the adoption. So
each chunk is read and compared before the first increment refers to it, and again if the files were
written to since.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from heapq import nlargest
from itertools import accumulate
from typing import Final

from ckpt.errors import ChecksumMismatch
from ckpt.model.box import Box
from ckpt.model.checksum import checksum, verify
from ckpt.model.dtype import DTYPES
from ckpt.model.keys import BaseRef
from ckpt.model.manifest import (
    FILE_SPACE,
    AdoptedBase,
    AdoptedFile,
    Chunk,
    Fragment,
    Manifest,
    StoredFile,
    Tensor,
)
from ckpt.model.validate import MAX_CHUNK_BYTES
from ckpt.pipeline.retry import RetryPolicy
from ckpt.storage.api import StorageBackend, aligned_memory
from ckpt.storage.outside_files import AdoptedBaseStore, as_fault_of, root_at

_MOST_FILES: Final = 4096
_MOST_NAMES: Final = 8
"""How many tensors of the same shape are compared with a part at most."""

_SEPARATORS: Final = re.compile(r"[./]")

_Kind = tuple[str, tuple[int, ...]]
"""The dtype and the shape of a tensor."""


class AdoptedFiles:
    """The files of an adopted step, for the increments of one rank.

    A *position* is an offset in one of the files, plus the index of the file times ``FILE_SPACE``.
    ``_places`` has the position of each chunk, and ``_boxes`` the positions of the boxes of each
    tensor. ``_names`` maps a tensor of the image to the equal tensor of the files. ``_times`` has
    the time at which each file was last changed, as of the last check. ``_intact_chunks`` are the
    chunks that were read and compared since the last change.

    Thread safety: one thread at a time.

    Args:
        backend: The root of the increments.
        base: The adopted step.
        manifest: Its manifest.
        fragments: Its fragments.
    """

    def __init__(
        self,
        backend: StorageBackend,
        base: BaseRef,
        manifest: Manifest,
        fragments: Iterable[Fragment],
    ) -> None:
        self._places: dict[Chunk, int] = {}
        self._boxes: dict[_Kind, dict[str, list[tuple[Box, int]]]] = {}
        self._names: dict[str, str] = {}
        files: list[AdoptedFile] = []
        locations = {location.rank: location.path for location in manifest.locations}
        for fragment in fragments:
            if fragment.file is None or fragment.rank not in locations:
                continue
            if len(files) == _MOST_FILES:
                break
            chunks, begin = fragment.file.chunks, len(files) * FILE_SPACE
            starts = accumulate((chunk.nbytes for chunk in chunks), initial=begin)
            places = zip(chunks, starts, strict=False)
            # No chunk of an image is longer, and no more memory is taken for what records say.
            self._places |= {
                chunk: start for chunk, start in places if chunk.nbytes <= MAX_CHUNK_BYTES
            }
            for tensor in fragment.tensors:
                boxes = self._boxes.setdefault((tensor.dtype, tensor.shape), {})
                starts_of_boxes = [(shard.box, begin + shard.offset) for shard in tensor.shards]
                boxes.setdefault(tensor.name, []).extend(starts_of_boxes)
            files.append(AdoptedFile(locations[fragment.rank], fragment.file.size))
        adoption = AdoptedBase(tuple(files))
        self._file = StoredFile(  # It stands for all files, which follow one another
            ref=base.ref,
            file=manifest.files[0],
            encoding=None,
            size=adoption.end,
            root=base.root,
            adoption=adoption,
        )
        self._store = AdoptedBaseStore(root_at(backend, base.root).url, base.root, adoption)
        self._intact_chunks: set[Chunk] = set()
        self._adopted_at = manifest.created_at
        self._times: tuple[float, ...] | None = None

    def recheck(self) -> None:
        """Check that the files are there. If one was written to since the last check, or since the
        adoption, read the chunks again that increments refer to. If there are no increments yet,
        read all chunks again.

        Raises:
            ForeignFileMismatch: A file is gone, or has other bytes than at the adoption.
            StorageError: A file cannot be read.
        """
        times = RetryPolicy().call(self._store.times)
        is_new = self._times is None and max(times) > self._adopted_at
        if is_new or self._times not in (None, times):
            chunks = self._intact_chunks or self._places.keys()
            self._intact_chunks = set()
            for chunk in chunks:
                self.has(chunk)
        self._times = times

    def has(self, chunk: Chunk) -> bool:
        """Return True if the files hold the chunk, by its digest. It is read unless it was read
        before.

        Raises:
            ForeignFileMismatch: A file has other bytes than at the adoption.
            StorageError: A file cannot be read.
        """
        position = self._places.get(chunk)
        if position is None or chunk in self._intact_chunks:
            return position is not None
        try:
            verify(self._read(chunk, position), chunk.checksum, key=self._file.key, offset=position)
        except ChecksumMismatch as error:
            raise as_fault_of(error, self._file) from None  # Names the file of the other program
        self._intact_chunks.add(chunk)
        return True

    def has_part(self, chunk: Chunk, tensor: Tensor, box: Box) -> bool:
        """Return True if the files hold the chunk, which has ``box`` of ``tensor``.

        Raises:
            ForeignFileMismatch: A file is gone, or has other bytes than at the adoption.
            StorageError: A file cannot be read.
        """
        if self.has(chunk):
            return True
        for name in self._similar_names(tensor):
            for shard_box, start in self._boxes[tensor.dtype, tensor.shape][name]:
                offset = _offset_in(shard_box, box)
                if offset is None:
                    continue
                position = start + offset * DTYPES[tensor.dtype].itemsize
                if checksum(self._read(chunk, position)) == chunk.checksum:
                    self._places[chunk], self._names[tensor.name] = position, name
                    self._intact_chunks.add(chunk)
                    return True
        return False

    def _similar_names(self, tensor: Tensor) -> Sequence[str]:
        """Return the names of tensors that may be equal to ``tensor``."""
        if tensor.name in self._names:
            return [self._names[tensor.name]]
        parts = _parts_of(tensor.name)
        boxes_by_name = self._boxes.get((tensor.dtype, tensor.shape), {})
        return nlargest(_MOST_NAMES, boxes_by_name, lambda name: (parts & _parts_of(name)).total())

    def _read(self, chunk: Chunk, position: int) -> memoryview:
        memory = aligned_memory(chunk.nbytes)
        RetryPolicy().call(partial(self._store.read_into, self._file.key, position, memory))
        return memory

    def places(self, chunks: Iterable[Chunk]) -> AdoptedBase:
        """Return the files that hold ``chunks``, and the positions of the chunks in these files."""
        positions = [divmod(self._places[chunk], FILE_SPACE) for chunk in chunks]
        indices = sorted({index for index, _ in positions})
        new_index = {index: number for number, index in enumerate(indices)}
        assert self._file.adoption is not None
        return AdoptedBase(
            tuple(self._file.adoption.files[index] for index in indices),
            tuple(new_index[index] * FILE_SPACE + offset for index, offset in positions),
        )


def _parts_of(name: str) -> Counter[str]:
    return Counter(_SEPARATORS.split(name))


def _offset_in(shard_box: Box, box: Box) -> int | None:
    """Return the number of elements in ``shard_box`` before ``box``; None if ``box`` is not in it,
    or is not one range of its row-major order.
    """
    if not shard_box.contains(box):
        return None
    lengths = list(zip(box.shape, shard_box.shape, strict=True))
    # After the first dimension in which ``box`` is wider than 1, it must be as wide as the other.
    wide_dim = next((dim for dim, (length, _) in enumerate(lengths) if length != 1), 0)
    if any(length != shard_length for length, shard_length in lengths[wide_dim + 1 :]):
        return None
    offset, starts = 0, box.relative_to(shard_box).offsets
    for start, shard_length in zip(starts, shard_box.shape, strict=True):
        offset = offset * shard_length + start
    return offset

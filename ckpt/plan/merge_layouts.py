"""Merge the shards of all fragments into the tensors and layouts of the manifest.

The *layout* of a tensor says which rank holds which box. It consists of *runs*, each of which
describes boxes at equal distances (see `ckpt.model.box_layouts`). A *form* is the part of a
fragment that most ranks have in common, unpacked to columns (see `ckpt.model.fragment_columns`).

For speed, this module keeps the shards as rows of arrays, and makes objects of them only for
errors. It processes equal forms, equal trees and equal layouts only once. It reuses the results for
data that has not changed since the last save. Each shard takes the memory of a few numbers. A
property test compares the result, and the errors for invalid fragments, with a merge that uses
objects.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from ckpt.errors import ReplicasDiverged, TensorIncomplete
from ckpt.model.box import Box, tiling_fault
from ckpt.model.box_layouts import Ints, Run, Runs, compress
from ckpt.model.checksum import CHECKSUM_BYTES, checksum
from ckpt.model.fragment_columns import (
    Columns,
    Heading,
    Tables,
    check_packed,
    columns_of,
    offsets_of,
)
from ckpt.model.manifest import FragmentRef, Packed, Shard, Tensor
from ckpt.plan.merge_errors import forms_text, ranks_text

_MOST_CELLS = 1 << 26  # Of the grid of ``_tiles``
_MOST_GRID_DIMS = 4
_NULL_JSON = msgspec.Raw(b"null")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFragment:
    """The fields of one fragment that the merge keeps. If several fragments have an equal value,
    they share one object.

    Attributes:
        ref: The reference to the fragment.
        content: The fragment without ``tree``, ``replicas`` and ``metadata``. If ``in_manifest`` is
            False, ``per_rank`` is left out, too.
        form_key: The key of the fragment's form in ``Fragments.forms``.
        layout_key: A key that two fragments share if they have the same tensors, boxes, positions
            in the file and chunk lengths.
        tree: The JSON of the tree.
        replicas: The compressed ``Packed.replicas``.
        metadata: The JSON of the metadata.
    """

    ref: FragmentRef
    content: Packed
    form_key: str
    layout_key: str
    tree: bytes
    replicas: bytes
    metadata: bytes


class Fragments:
    """The fragments that were added so far, reduced to the fields that the merge needs.

    Args:
        forms: The forms of the last merge.

    Attributes:
        rank_fragments: The fragments, in the order in which they were added.
        forms: The unpacked forms. The key consists of the chunk size and the checksum of
            ``Packed.form``.

    The other attributes let equal data of several fragments share memory: ``_packed_forms`` has the
    bytes of each form, and ``_tables`` what all forms with the same tensors have in common.
    """

    def __init__(self, forms: Mapping[str, Columns]) -> None:
        self.rank_fragments: list[RankFragment] = []
        self.forms: dict[str, Columns] = {}
        self._previous_forms = forms
        self._packed_forms: dict[str, bytes] = {}
        self._tables: Tables = {}
        self._bytes_by_checksum: dict[str, bytes] = {}

    def add(self, content: Packed, ref: FragmentRef) -> None:
        """Check a fragment and keep the fields that the merge needs.

        Raises:
            ManifestCorrupt: The fragment has contents that ckpt never writes.
            CodecMissing: The codec of the data file is not installed here.
        """
        form_key = f"{content.chunk_bytes}/{checksum(content.form)}"
        if form_key not in self.forms:
            columns = self._previous_forms.get(form_key)
            if columns is None:
                columns = columns_of(
                    content.form, content.chunk_bytes, key=ref.name, tables=self._tables
                )
            self.forms[form_key] = columns
        check_packed(content, self.forms[form_key], key=ref.name)
        per_rank = msgspec.Raw(bytes(content.per_rank)) if content.in_manifest else _NULL_JSON
        reduced_content = replace(
            content, form=self._packed_forms.setdefault(form_key, content.form),
            tree=_NULL_JSON, replicas=b"", metadata=_NULL_JSON, per_rank=per_rank,
        )  # fmt: skip
        self.rank_fragments.append(
            RankFragment(
                ref=ref,
                content=reduced_content,
                form_key=form_key,
                layout_key=form_key + checksum(content.offsets),
                tree=self._shared_bytes(content.tree),
                replicas=self._shared_bytes(content.replicas),
                metadata=self._shared_bytes(content.metadata),
            )
        )

    def _shared_bytes(self, raw: msgspec.Raw | bytes) -> bytes:
        """Return a copy of the bytes. For equal bytes, every call returns the same object.

        A ``Raw`` would keep the bytes of its whole fragment in memory.
        """
        text = bytes(raw)
        return self._bytes_by_checksum.setdefault(checksum(text), text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """The chunks of one tensor that several ranks have stored, as pairs of chunks that must be
    equal.

    A number stands for each chunk: its index among the chunks of all ranks, in rank order.

    Attributes:
        name: The name of the tensor.
        first: The first chunk of each pair, which the manifest names.
        second: The second chunk of each pair.
        first_rank: The rank of each first chunk.
        second_rank: The rank of each second chunk.
    """

    name: str
    first: Ints
    second: Ints
    first_rank: Ints
    second_rank: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Layouts:
    """The result of merging the boxes of all ranks.

    Attributes:
        layout_keys: ``RankFragment.layout_key`` of each rank. If the next merge has the same
            values, its result is the same.
        tensors: The tensors of the manifest, sorted by name.
        layouts: The different layouts. Tensors that are cut alike share a layout.
        layout_of: For each tensor the index of its layout in ``layouts``.
        copies: The chunks that must be equal, which each merge compares again.
    """

    layout_keys: Sequence[str] = ()
    tensors: tuple[Tensor, ...] = ()
    layouts: tuple[Runs, ...] = ()
    layout_of: tuple[int, ...] = ()
    copies: tuple[Copies, ...] = ()


def merge_layouts(
    fragments: Fragments, rank_fragments: Sequence[RankFragment], previous: Layouts | None
) -> Layouts:
    """Return the tensors and layouts of all ranks.

    If several ranks have stored the same box, the function also compares their copies of the box.

    Args:
        fragments: All fragments.
        rank_fragments: ``fragments.rank_fragments``, sorted by rank.
        previous: The result of the last merge; None if there is none. The function returns it again
            if the layouts of all ranks are the same.

    Raises:
        ReplicasDiverged, TensorIncomplete: See ``plan.merge.merge``.
        ManifestCorrupt: The offsets of a fragment are invalid.
    """
    layout_keys = [fragment.layout_key for fragment in rank_fragments]
    if previous is not None and layout_keys == previous.layout_keys:
        if previous.copies:
            checksums = _checksums(rank_fragments)
            for copies in previous.copies:
                _compare(copies, checksums)
        return previous
    return _ShardTable(fragments, rank_fragments).merge(layout_keys)


def distinct_values(rank_fragments: Sequence[RankFragment], field: str) -> list[tuple[int, bytes]]:
    """Return the different values that the field called ``field`` has in ``rank_fragments``, each
    with the lowest rank that has it.
    """
    rank_of: dict[bytes, int] = {}
    ids: set[int] = set()
    for fragment in rank_fragments:
        text: bytes = getattr(fragment, field)
        if id(text) not in ids:  # Equal values are one object
            ids.add(id(text))
            rank_of.setdefault(text, fragment.content.rank)
    return [(rank, text) for text, rank in rank_of.items()]


def holders_of(fragments: Fragments, rank_fragments: Sequence[RankFragment]) -> Mapping[str, int]:
    """Return the names of all tensors, each with a rank whose fragment has it."""
    last_ranks = {fragment.form_key: fragment.content.rank for fragment in rank_fragments}
    form_keys = sorted(last_ranks, key=last_ranks.__getitem__)
    return {
        name: last_ranks[form_key]
        for form_key in form_keys
        for name, *_ in fragments.forms[form_key].headings
    }


@dataclass(frozen=True, slots=True)
class _Rows:
    """The part of a rank's rows in a `_ShardTable` that all ranks with the same form share.

    Attributes:
        tensor: For each shard the index of its tensor among all tensors, sorted by name.
        nth: For each shard the number of earlier shards of the same tensor.
        shard_counts: The indices of the tensors that have shards, and the number of shards of each.
        boxes: The rows. `_ShardTable` writes the position and the offsets of a rank into these
            rows, and then copies them to its table.
        chunks: For each shard the index of its first chunk and the number of its chunks.
    """

    tensor: Ints
    nth: Ints
    shard_counts: tuple[Ints, Ints]
    boxes: Ints
    chunks: npt.NDArray[np.int32]

    @classmethod
    def of(cls, form: Columns, index_of: Mapping[str, int], dims: int) -> _Rows:
        """Return the rows of all ranks with ``form``.

        ``index_of`` has the index of each tensor by name, and ``dims`` is the number of dimensions
        to which the offsets and shapes of all tensors are padded.
        """
        indices = np.array([index_of[name] for name, *_ in form.headings], dtype=np.int64)
        tensor = indices[form.tensor_index]
        # Sort the shards by tensor, and number those of each tensor.
        order = np.argsort(tensor, kind="stable")
        tensors, starts, counts = np.unique(tensor[order], return_index=True, return_counts=True)
        nth = np.empty_like(tensor)
        nth[order] = np.arange(len(tensor)) - np.repeat(starts, counts)
        boxes = np.zeros((len(tensor), 1 + 2 * dims), dtype=np.int64)
        boxes[:, 1 + dims :] = 1  # The padding of the shapes
        boxes[:, 1 + dims : 1 + dims + form.dims] = form.shape
        return cls(
            tensor,
            nth,
            (tensors, counts),
            boxes,
            np.stack([form.starts, form.counts], axis=1).astype(np.int32),
        )


class _ShardTable:
    """The table of all shards of all ranks.

    Each row of ``_boxes`` describes a shard: the position of its rank in ``_rank_fragments``, its
    offsets and its shape. Rows are ordered by the name of the tensor, then by rank. The rows of
    tensor ``index`` begin at ``_row_bounds[index]``. A second table, ``_chunks``, has the index of
    the first chunk and the number of chunks of each shard. A *heading* has the dtype, shape and
    order of dimensions of a tensor.
    """

    def __init__(self, fragments: Fragments, rank_fragments: Sequence[RankFragment]) -> None:
        self._rank_fragments = rank_fragments
        forms = self._forms = [fragments.forms[fragment.form_key] for fragment in rank_fragments]
        # The conflicts are the names of tensors whose dtype or shape differs between ranks.
        self._headings, self._conflicts = _headings(fragments, rank_fragments)
        self._names = sorted(self._headings)
        self._dims = max((form.dims for form in forms), default=0)
        # For each rank the index of its first chunk among the chunks of all ranks
        self._first_chunks = np.cumsum([0, *(len(form.chunks) for form in forms)])
        index_of = {name: index for index, name in enumerate(self._names)}
        rank_counts = Counter(fragment.form_key for fragment in rank_fragments)
        rows_of = {
            form_key: _Rows.of(fragments.forms[form_key], index_of, self._dims)
            for form_key in rank_counts
        }
        shard_counts = np.zeros(len(index_of), dtype=np.int64)
        for form_key, rows in rows_of.items():
            tensors, counts = rows.shard_counts
            shard_counts[tensors] += rank_counts[form_key] * counts
        self._row_bounds = np.cumsum([0, *shard_counts.tolist()])
        self._boxes = np.empty((self._row_bounds[-1], 1 + 2 * self._dims), dtype=np.int64)
        self._chunks = np.empty((self._row_bounds[-1], 2), dtype=np.int32)
        self._fill(rows_of)
        self._layout_cache: dict[tuple[tuple[int, ...], str], tuple[int, Ints]] = {}
        self._layouts: dict[Runs, int] = {}
        self._chunk_checksums: Ints | None = None

    def _fill(self, rows_of: Mapping[str, _Rows]) -> None:
        """Write the rows of all ranks to the table.

        Each row is written directly to its final position, which is faster than sorting the rows.
        """
        next_rows = self._row_bounds[:-1].copy()
        for position, (fragment, form) in enumerate(
            zip(self._rank_fragments, self._forms, strict=True)
        ):
            # Ranks with the same form differ in the position and the offsets only.
            rows = rows_of[fragment.form_key]
            rows.boxes[:, 0] = position
            rows.boxes[:, 1 : 1 + form.dims] = offsets_of(
                fragment.content.offsets, form, key=fragment.ref.name
            )
            table_rows = next_rows[rows.tensor] + rows.nth
            self._boxes[table_rows], self._chunks[table_rows] = rows.boxes, rows.chunks
            tensors, counts = rows.shard_counts
            next_rows[tensors] += counts

    def merge(self, layout_keys: Sequence[str]) -> Layouts:
        """Return the tensors and layouts of all ranks. Raises the errors of ``merge_layouts``."""
        tensors: list[Tensor] = []
        layout_of: list[int] = []
        copies: list[Copies] = []
        for index, name in enumerate(self._names):
            if name in self._conflicts and (text := forms_text(self._parts(name))):
                raise TensorIncomplete(name, text)
            dtype, shape, order = self._headings[name]
            layout_index, tensor_copies = self._layout(
                name, shape, slice(*self._row_bounds[index : index + 2])
            )
            copies += [tensor_copies] if tensor_copies else []
            tensors.append(Tensor(name, dtype, shape, (), order))
            layout_of.append(layout_index)
        return Layouts(
            layout_keys=layout_keys,
            tensors=tuple(tensors),
            layouts=tuple(self._layouts),
            layout_of=tuple(layout_of),
            copies=tuple(copies),
        )

    def _layout(self, name: str, shape: tuple[int, ...], rows: slice) -> tuple[int, Copies | None]:
        """Return the index of the layout of a tensor, and the chunks of the tensor that several
        ranks have stored (None if there are no such chunks).

        Args:
            name: The name of the tensor.
            shape: The shape of the tensor.
            rows: The rows of the tensor in the table.

        Raises:
            TensorIncomplete: The boxes overlap or leave a hole.
            ReplicasDiverged: Copies of a box differ.
        """
        table = self._boxes[rows]
        if len(table) == 1 and (run := self._single_shard_run(table[0].tolist(), shape)):
            return self._layouts.setdefault((run,), len(self._layouts)), None
        key = shape, checksum(table.tobytes())
        if key in self._layout_cache:
            layout_index, row_pairs = self._layout_cache[key]
            return layout_index, self._copies(name, rows.start + row_pairs)
        positions, offsets, shapes = self._columns(table, len(shape))
        unique_rows, row_pairs = np.arange(len(table)), np.zeros((0, 2), dtype=np.int64)
        is_tiled = _tiles(shape, offsets, shapes)
        if not is_tiled or not shapes.all():
            unique_rows, row_pairs = _split_copies(offsets, shapes)
        copies = self._copies(name, rows.start + row_pairs)
        boxes = offsets[unique_rows], shapes[unique_rows]
        if not is_tiled and not _tiles(shape, *boxes):
            sorted_boxes = sorted(
                Box(tuple(o), tuple(n)) for o, n in zip(*map(np.ndarray.tolist, boxes), strict=True)
            )
            if fault := tiling_fault(shape, sorted_boxes):
                raise TensorIncomplete(name, f"{fault}: {ranks_text(self._parts(name))}")
        layout = compress(self._rank_numbers()[positions[unique_rows]], *boxes)
        layout_index = self._layouts.setdefault(layout, len(self._layouts))
        self._layout_cache[key] = layout_index, row_pairs
        return layout_index, copies

    def _single_shard_run(self, row: list[int], shape: tuple[int, ...]) -> Run | None:
        """Return the run for a tensor with a single shard if this shard is the whole tensor, else
        None.

        This is a shortcut for the usual case in jobs with few ranks.
        """
        dims = len(shape)
        offsets, shard_shape = row[1 : 1 + dims], tuple(row[1 + self._dims : 1 + self._dims + dims])
        if shard_shape != shape or any(offsets):
            return None
        return Run(self._rank_fragments[row[0]].content.rank, tuple(offsets), shard_shape, ())

    def _rank_numbers(self) -> Ints:
        """Return the rank at each position in ``_rank_fragments``."""
        ranks = [fragment.content.rank for fragment in self._rank_fragments]
        return np.array(ranks, dtype=np.int64)

    def _columns(self, table: Ints, dims: int) -> tuple[Ints, Ints, Ints]:
        """Return the positions of the ranks, the offsets and the shapes in some rows of the table.
        The rows belong to a tensor of ``dims`` dimensions.
        """
        return table[:, 0], table[:, 1 : 1 + dims], table[:, 1 + self._dims : 1 + self._dims + dims]

    def _parts(self, name: str) -> list[tuple[int, Tensor]]:
        """Return the ranks that have a tensor, each with the tensor and the shards that it wrote,
        for an error.
        """
        index = self._names.index(name)
        rows = self._boxes[slice(*self._row_bounds[index : index + 2])]
        shards_at: dict[int, list[Shard]] = defaultdict(list)
        for position, offsets, shape in zip(
            *map(np.ndarray.tolist, self._columns(rows, self._dims)), strict=True
        ):
            shards_at[position].append(
                Shard(self._rank_fragments[position].content.rank, 0, tuple(offsets), tuple(shape))
            )
        parts: list[tuple[int, Tensor]] = []
        for position, fragment in enumerate(self._rank_fragments):
            for heading_name, dtype, whole_shape, _ in self._forms[position].headings:
                if heading_name != name:
                    continue
                dims = len(whole_shape)
                shards = [
                    replace(shard, offsets=shard.offsets[:dims], shape=shard.shape[:dims])
                    for shard in shards_at[position]
                ]
                tensor = Tensor(name, dtype, whole_shape, tuple(shards))
                parts.append((fragment.content.rank, tensor))
        return parts

    def _copies(self, name: str, row_pairs: Ints) -> Copies | None:
        """Compare the chunks of the boxes that several ranks have stored.

        Return the compared pairs of chunks, so that the next merge can compare them again. Return
        None if there are no such boxes.

        Args:
            name: The name of the tensor.
            row_pairs: Pairs of rows with the same box. The manifest names the first row of a pair.

        Raises:
            ReplicasDiverged: The chunks of a pair differ.
        """
        if not len(row_pairs):
            return None
        # A box without elements has no chunks.
        rows_a, rows_b = row_pairs[self._chunks[row_pairs[:, 1], 1] > 0].T
        counts = self._chunks[rows_b, 1].astype(np.int64)
        if (mismatches := np.flatnonzero(self._chunks[rows_a, 1] != counts)).size:
            pair_ranks = [
                self._rank_fragments[int(self._boxes[rows[mismatches[0]], 0])].content.rank
                for rows in (rows_a, rows_b)
            ]
            raise ReplicasDiverged(name, pair_ranks, " (they are cut otherwise)")
        # The index of each chunk within its shard: 0 to ``counts - 1`` for each pair of rows.
        chunk_index = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        rank_numbers = self._rank_numbers()

        def chunks_and_ranks(rows: Ints) -> tuple[Ints, Ints]:
            positions = self._boxes[rows, 0]
            begin = self._first_chunks[positions] + self._chunks[rows, 0]
            chunks = np.repeat(begin, counts) + chunk_index
            return chunks, np.repeat(rank_numbers[positions], counts)

        first_chunks, first_rank = chunks_and_ranks(rows_a)
        second_chunks, second_rank = chunks_and_ranks(rows_b)
        copies = Copies(
            name=name,
            first=first_chunks,
            first_rank=first_rank,
            second=second_chunks,
            second_rank=second_rank,
        )
        if self._chunk_checksums is None:
            self._chunk_checksums = _checksums(self._rank_fragments)
        _compare(copies, self._chunk_checksums)
        return copies


def _headings(
    fragments: Fragments, rank_fragments: Sequence[RankFragment]
) -> tuple[dict[str, tuple[str, tuple[int, ...], tuple[int, ...]]], set[str]]:
    """Return the dtype, the shape and the order of each tensor by name, and the names of the
    tensors whose dtype or shape differs between ranks.

    The order is that of the lowest rank whose memory is not row-major. Ranks may have different
    orders, since the part of a rank may have a dimension of one element.
    """
    heading_of: dict[str, tuple[str, tuple[int, ...], tuple[int, ...]]] = {}
    conflicts: set[str] = set()
    finished_headings: set[tuple[Heading, ...]] = set()
    for form_key in dict.fromkeys(fragment.form_key for fragment in rank_fragments):
        headings = fragments.forms[form_key].headings
        if headings in finished_headings:
            continue
        finished_headings.add(headings)
        for name, dtype, shape, order in headings:
            first_dtype, first_shape, first_order = heading_of.setdefault(
                name, (dtype, shape, order)
            )
            if (first_dtype, first_shape) != (dtype, shape):
                conflicts.add(name)
            elif order and not first_order:
                heading_of[name] = dtype, shape, order
    return heading_of, conflicts


def _tiles(shape: tuple[int, ...], offsets: Ints, shapes: Ints) -> bool:
    """Return True if the boxes are certain to cover every element of a tensor of ``shape`` exactly
    once. The boxes must be inside the shape.

    This check is fast, but it may return False although the boxes cover the tensor exactly once. If
    the result is False, ``tiling_fault`` must decide.
    """
    has_elements = shapes.all(axis=1)
    if not has_elements.all():
        offsets, shapes = offsets[has_elements], shapes[has_elements]
    if sum(np.prod(shapes, axis=1, dtype=np.int64).tolist()) != math.prod(shape):
        return False
    cut_dims = [dim for dim in range(len(shape)) if (shapes[:, dim] != shape[dim]).any()]
    if len(cut_dims) == 0:
        return True  # Each box is the whole tensor, and their volume allows only one of them
    edges = [
        np.unique(np.concatenate([offsets[:, d], offsets[:, d] + shapes[:, d]])) for d in cut_dims
    ]
    if len(cut_dims) > _MOST_GRID_DIMS or math.prod(len(edge) for edge in edges) > _MOST_CELLS:
        return False
    # The grid has a cell between any two neighbouring edges. Put +1 and -1 at the corners of each
    # box. After cumulative sums along each dimension, each cell has the number of boxes that cover
    # it.
    grid = np.zeros([len(edge) for edge in edges], dtype=np.int32)
    low = [np.searchsorted(edge, offsets[:, d]) for edge, d in zip(edges, cut_dims, strict=True)]
    high = [
        np.searchsorted(edge, offsets[:, d] + shapes[:, d])
        for edge, d in zip(edges, cut_dims, strict=True)
    ]
    for corner in np.ndindex(*(2,) * len(cut_dims)):
        index = tuple(high[k] if is_high else low[k] for k, is_high in enumerate(corner))
        np.add.at(grid, index, -1 if sum(corner) % 2 else 1)
    for axis in range(len(cut_dims)):
        np.cumsum(grid, axis=axis, out=grid)
    return bool((grid <= 1).all())


def _split_copies(offsets: Ints, shapes: Ints) -> tuple[Ints, Ints]:
    """Return the rows whose box is in no earlier row. For every other row, also return a pair: the
    first row with the same box, and the row itself.
    """
    if not offsets.shape[1]:  # All boxes of 0-d tensors are the same
        rows = np.arange(len(offsets))
        return rows[:1], np.stack([np.zeros_like(rows), rows], axis=1)[1:]
    boxes = np.concatenate([offsets, shapes], axis=1)
    _, first_rows, inverse = np.unique(boxes, axis=0, return_index=True, return_inverse=True)
    first_row_of = first_rows[inverse.reshape(-1)]
    rows = np.arange(len(boxes))
    is_first = first_row_of == rows
    return rows[is_first], np.stack([first_row_of, rows], axis=1)[~is_first]


def _checksums(rank_fragments: Sequence[RankFragment]) -> Ints:
    """Return the checksum of every chunk of every rank, each as a row of 64-bit integers."""
    checksums = np.frombuffer(
        b"".join(fragment.content.checksums for fragment in rank_fragments), dtype="<i8"
    )
    return checksums.reshape(-1, CHECKSUM_BYTES // 8)


def _compare(copies: Copies, checksums: Ints) -> None:
    """Raise ``ReplicasDiverged`` if the chunks of a pair have different checksums."""
    differ = (checksums[copies.first] != checksums[copies.second]).any(axis=1)
    if differ.any():
        index = int(np.argmax(differ))
        raise ReplicasDiverged(
            copies.name, [int(copies.first_rank[index]), int(copies.second_rank[index])]
        )

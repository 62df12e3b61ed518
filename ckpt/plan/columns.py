"""Fragments of a large world -> their manifest, which leaves to the fragments what only some rank needs. By arrays: a shard never becomes an object.

As strict as the merge of small worlds, and the same in what it refuses and in whose name (tests hold the one against the other). What ranks have in common to the byte (the form of a fragment, a tree) is
looked at once, a layout once however many tensors lie so, and what is as it was in the last save not at all. Memory: a few numbers for each shard; of a fragment only its columns are kept.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
from msgspec.structs import replace

from ckpt.errors import ReplicasDiverged, TensorIncomplete
from ckpt.model.box import Box, tiling_fault
from ckpt.model.checksum import checksum
from ckpt.model.manifest import Encoding, File, FragmentRef, Shard, Tensor
from ckpt.model.packed import Columns, Heading, Packed, check_packed, columns_of, offsets_of, replicas_of
from ckpt.model.runs import Ints, Runs, compress
from ckpt.plan.faults import forms_told, ranks_told

_MOST_CELLS = 1 << 26


@dataclass(frozen=True, slots=True, kw_only=True)
class Light:
    """What is kept of a fragment until all are there. What others have too is one object."""

    ref: FragmentRef
    step: int
    attempt: str
    rank: int
    world_size: int
    created_at: float
    chunk_bytes: int
    format: int
    file: File | None
    form: str
    offsets: bytes
    offsets_digest: str
    checksums: bytes
    tied: Mapping[str, str]
    tree: bytes
    replicas: bytes
    metadata: bytes
    encoded: tuple[Encoding, ...]

    @property
    def layout(self) -> str:
        """The same where boxes, places and chunk lengths are the same."""
        return self.form + self.offsets_digest


@dataclass(slots=True)
class Gathered:
    """Fragments as they come, in any order."""

    ranks: list[Light] = field(default_factory=list)
    forms: dict[str, Columns] = field(default_factory=dict)
    _texts: dict[str, bytes] = field(default_factory=dict)

    def add(self, part: Packed, ref: FragmentRef) -> None:
        """Check a fragment and keep what the merge needs of it. Raises ``ManifestCorrupt`` if it is none that we write."""
        form = f"{part.chunk_bytes}/{checksum(part.form)}"
        if form not in self.forms:
            self.forms[form] = columns_of(part.form, part.chunk_bytes, key=ref.name)
        check_packed(part, self.forms[form], key=ref.name)
        self.ranks.append(
            Light(
                ref=ref, step=part.step, attempt=part.attempt, rank=part.rank, world_size=part.world_size,
                created_at=part.created_at, chunk_bytes=part.chunk_bytes, format=part.format, file=part.file, form=form,
                offsets=part.offsets, offsets_digest=checksum(part.offsets), checksums=part.checksums, tied=part.tied,
                tree=self._text(part.tree), replicas=self._text(part.replicas), metadata=self._text(part.metadata),
                encoded=part.encoded,
            )
        )  # fmt: skip

    def _text(self, raw: msgspec.Raw | bytes) -> bytes:
        """A copy: what a decoder gives holds on to all of its fragment."""
        text = bytes(raw)
        return self._texts.setdefault(checksum(text), text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """Boxes of one tensor that more than one rank has stored: pairs of chunks, by their number among the chunks of all ranks, and the ranks they are of."""

    name: str
    kept: Ints
    other: Ints
    kept_rank: Ints
    other_rank: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Layouts:
    """What the merge makes of the boxes of all ranks. ``came_from``: the layout of each rank."""

    came_from: Sequence[str] = ()
    tensors: tuple[Tensor, ...] = ()
    layouts: tuple[Runs, ...] = ()
    layout_of: tuple[int, ...] = ()
    copies: tuple[Copies, ...] = ()


def merge_layouts(gathered: Gathered, ranks: Sequence[Light], known: Layouts | None) -> Layouts:
    """The tensors of ``ranks``, which are in order; those of ``known`` if nothing about them has changed. Copies are compared each time.

    Raises:
        ReplicasDiverged, TensorIncomplete: As ``plan.merge.merge``.
        ManifestCorrupt: The offsets of a fragment are none that we write.
    """
    came_from = [rank.layout for rank in ranks]
    if known is not None and came_from == known.came_from:
        if known.copies:
            sums = _checksums(ranks)
            for copies in known.copies:
                _compare(copies, sums)
        return known
    return _World(gathered, ranks).merge(came_from)


def first_of(ranks: Sequence[Light], what: str) -> list[tuple[int, bytes]]:
    """The different values of a field, each with the lowest rank that has it."""
    found: dict[bytes, int] = {}
    seen: set[int] = set()
    for rank in ranks:
        text: bytes = getattr(rank, what)
        if id(text) not in seen:  # one object for all that are equal
            seen.add(id(text))
            found.setdefault(text, rank.rank)
    return [(rank, text) for text, rank in found.items()]


def marks_of(ranks: Sequence[Light]) -> Iterable[tuple[int, Mapping[str, str]]]:
    """Digests of replicas; those of a rank that says the same as a lower one add nothing."""
    for rank, raw in first_of(ranks, "replicas"):
        yield rank, replicas_of(raw, key="replicas")


def holders_of(gathered: Gathered, ranks: Sequence[Light]) -> Mapping[str, int]:
    """For each tensor the last rank that names it."""
    last = {rank.form: rank.rank for rank in ranks}
    order = sorted(last.items(), key=lambda item: item[1])
    return {name: rank for form, rank in order for name, _, _ in gathered.forms[form].headings}


class _World:
    """All shards as columns, ordered by tensor (their names in order), then rank."""

    def __init__(self, gathered: Gathered, ranks: Sequence[Light]) -> None:
        self._ranks = ranks
        forms = self._forms = [gathered.forms[rank.form] for rank in ranks]
        self._headings, self._disputed = _headings(gathered, ranks)
        self._names = sorted(self._headings)
        number = {name: index for index, name in enumerate(self._names)}
        dims = max((form.dims for form in forms), default=0)
        total = sum(len(form.tensor) for form in forms)
        tensor = np.empty(
            total, dtype=np.uint16 if len(number) <= 1 << 16 else np.int64
        )  # two bytes: sorted by radix
        self._rank, self._start, self._count = (np.empty(total, dtype=np.int32) for _ in range(3))
        self._offsets, self._shape = np.zeros((total, dims), np.int64), np.ones((total, dims), np.int64)
        numbers: dict[str, Ints] = {}
        row = 0
        self._chunk_base = np.zeros(len(ranks) + 1, dtype=np.int64)
        for position, (rank, form) in enumerate(zip(ranks, forms, strict=True)):
            if rank.form not in numbers:
                numbers[rank.form] = np.array([number[name] for name, _, _ in form.headings], dtype=np.int64)
            here = slice(row, row + len(form.tensor))
            tensor[here] = numbers[rank.form][form.tensor]
            self._offsets[here, : form.dims] = offsets_of(rank.offsets, form, key=rank.ref.name)
            self._shape[here, : form.dims] = form.shape
            self._rank[here], self._start[here], self._count[here] = position, form.starts, form.counts
            self._chunk_base[position + 1] = self._chunk_base[position] + len(form.chunks)
            row = here.stop
        self._order = np.argsort(tensor, kind="stable")
        self._edges = np.searchsorted(tensor[self._order], np.arange(len(number) + 1))
        self._seen: dict[str, tuple[int, Ints]] = {}
        self._layouts: dict[Runs, int] = {}
        self._sums: Ints | None = None

    def merge(self, came_from: Sequence[str]) -> Layouts:
        tensors: list[Tensor] = []
        layout_of: list[int] = []
        copies: list[Copies] = []
        for index, name in enumerate(self._names):
            if name in self._disputed and (disputed := forms_told(self._parts(name))):
                raise TensorIncomplete(name, disputed)
            dtype, shape = self._headings[name]
            rows = self._order[self._edges[index] : self._edges[index + 1]]
            layout, found = self._layout(name, shape, rows)
            copies += [found] if found else []
            tensors.append(Tensor(name, dtype, shape, ()))
            layout_of.append(layout)
        return Layouts(
            came_from=came_from,
            tensors=tuple(tensors),
            layouts=tuple(self._layouts),
            layout_of=tuple(layout_of),
            copies=tuple(copies),
        )

    def _layout(self, name: str, shape: tuple[int, ...], rows: Ints) -> tuple[int, Copies | None]:
        """The number of a tensor's layout, and what is stored more than once; both are in order."""
        position = self._rank[rows]
        offsets, shapes = self._offsets[rows, : len(shape)], self._shape[rows, : len(shape)]
        key = checksum(
            b"".join((repr(shape).encode(), position.tobytes(), offsets.tobytes(), shapes.tobytes()))
        )
        if key in self._seen:
            layout, others = self._seen[key]
            return layout, self._copies(name, rows, others)
        kept, others = np.arange(len(rows)), np.zeros((0, 2), dtype=np.int64)
        whole = _tiles(shape, offsets, shapes)
        if not whole or not shapes.all():
            kept, others = _unique(offsets, shapes)
        found = self._copies(name, rows, others)
        boxes = offsets[kept], shapes[kept]
        if not whole and not _tiles(shape, *boxes):
            listed = sorted(
                Box(tuple(o), tuple(n)) for o, n in zip(*map(np.ndarray.tolist, boxes), strict=True)
            )
            if fault := tiling_fault(shape, listed):
                raise TensorIncomplete(name, f"{fault}: {ranks_told(self._parts(name))}")
        ids = np.array([rank.rank for rank in self._ranks], dtype=np.int64)
        layout = self._layouts.setdefault(compress(ids[position[kept]], *boxes), len(self._layouts))
        self._seen[key] = layout, others
        return layout, found

    def _parts(self, name: str) -> list[tuple[int, Tensor]]:
        """What each rank has of a tensor that is refused."""
        index = self._names.index(name)
        rows = self._order[self._edges[index] : self._edges[index + 1]]
        held: dict[int, list[Shard]] = defaultdict(list)
        for position, offsets, shape in zip(
            self._rank[rows].tolist(), self._offsets[rows].tolist(), self._shape[rows].tolist(), strict=True
        ):
            held[position].append(Shard(self._ranks[position].rank, 0, tuple(offsets), tuple(shape)))
        found: list[tuple[int, Tensor]] = []
        for position, rank in enumerate(self._ranks):
            for _, dtype, whole in (each for each in self._forms[position].headings if each[0] == name):
                cut = [
                    replace(s, offsets=s.offsets[: len(whole)], shape=s.shape[: len(whole)])
                    for s in held[position]
                ]
                found.append((rank.rank, Tensor(name, dtype, whole, tuple(cut))))
        return found

    def _copies(self, name: str, rows: Ints, others: Ints) -> Copies | None:
        """Compared, and what to compare next time. ``others``: pairs of rows, the first of which is kept."""
        if not len(others):
            return None
        one, two = rows[others[:, 0]], rows[others[:, 1]]
        solid = self._count[two] > 0
        one, two = one[solid], two[solid]
        counts = self._count[two].astype(np.int64)
        if (unlike := np.flatnonzero(self._count[one] != counts)).size:
            pair = [self._ranks[int(self._rank[side[unlike[0]]])].rank for side in (one, two)]
            raise ReplicasDiverged(name, pair, " (they are cut otherwise)")
        step = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        sides: list[Ints] = []
        ids = np.array([rank.rank for rank in self._ranks], dtype=np.int64)
        for side in (one, two):
            first = self._chunk_base[self._rank[side]] + self._start[side]
            sides += [np.repeat(first, counts) + step, np.repeat(ids[self._rank[side]], counts)]
        copies = Copies(name=name, kept=sides[0], kept_rank=sides[1], other=sides[2], other_rank=sides[3])
        if self._sums is None:
            self._sums = _checksums(self._ranks)
        _compare(copies, self._sums)
        return copies


def _headings(
    gathered: Gathered, ranks: Sequence[Light]
) -> tuple[dict[str, tuple[str, tuple[int, ...]]], set[str]]:
    """Dtype and shape by name; and the names about which ranks disagree."""
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    disputed: set[str] = set()
    done: set[tuple[Heading, ...]] = set()
    for form in dict.fromkeys(rank.form for rank in ranks):
        headings = gathered.forms[form].headings
        if headings in done:
            continue
        done.add(headings)
        for name, dtype, shape in headings:
            first = found.setdefault(name, (dtype, shape))
            if first != (dtype, shape):
                disputed.add(name)
    return found, disputed


def _tiles(shape: tuple[int, ...], offsets: Ints, shapes: Ints) -> bool:
    """Whether boxes, which lie inside ``shape``, cover it exactly once. If not, they may still do: ask ``tiling_fault``."""
    solid = shapes.all(axis=1)
    if not solid.all():
        offsets, shapes = offsets[solid], shapes[solid]
    if sum(np.prod(shapes, axis=1, dtype=np.int64).tolist()) != math.prod(shape):
        return False
    cut = [dim for dim in range(len(shape)) if (shapes[:, dim] != shape[dim]).any()]
    if len(cut) == 0:
        return True  # of that volume: one box, or none
    edges = [np.unique(np.concatenate([offsets[:, d], offsets[:, d] + shapes[:, d]])) for d in cut]
    if len(cut) > 4 or math.prod(len(edge) for edge in edges) > _MOST_CELLS:
        return False
    # +1 and -1 at the corners of each box; summed up along each dimension, each cell has the number of its boxes
    grid = np.zeros([len(edge) for edge in edges], dtype=np.int32)
    low = [np.searchsorted(edge, offsets[:, d]) for edge, d in zip(edges, cut, strict=True)]
    high = [np.searchsorted(edge, offsets[:, d] + shapes[:, d]) for edge, d in zip(edges, cut, strict=True)]
    for corner in np.ndindex(*(2,) * len(cut)):
        at = tuple(high[k] if far else low[k] for k, far in enumerate(corner))
        np.add.at(grid, at, -1 if sum(corner) % 2 else 1)
    for axis in range(len(cut)):
        np.cumsum(grid, axis=axis, out=grid)
    return bool((grid <= 1).all())


def _unique(offsets: Ints, shapes: Ints) -> tuple[Ints, Ints]:
    """Rows whose box no row before them has, and for every other row the pair of the first that has its box, and itself."""
    if not offsets.shape[1]:  # of 0-d tensors all boxes are the same
        rows = np.arange(len(offsets))
        return rows[:1], np.stack([np.zeros_like(rows), rows], axis=1)[1:]
    boxes = np.concatenate([offsets, shapes], axis=1)
    _, first, inverse = np.unique(boxes, axis=0, return_index=True, return_inverse=True)
    owner = first[inverse.reshape(-1)]
    rows = np.arange(len(boxes))
    return rows[owner == rows], np.stack([owner, rows], axis=1)[owner != rows]


def _checksums(ranks: Sequence[Light]) -> Ints:
    """Of all chunks of all ranks, as two numbers each."""
    return np.frombuffer(b"".join(rank.checksums for rank in ranks), dtype="<i8").reshape(-1, 2)


def _compare(copies: Copies, sums: Ints) -> None:
    differ = (sums[copies.kept] != sums[copies.other]).any(axis=1)
    if differ.any():
        at = int(np.argmax(differ))
        raise ReplicasDiverged(copies.name, [int(copies.kept_rank[at]), int(copies.other_rank[at])])

"""Fragments of all ranks -> the manifest, or the reason why there is none.

The same fragments give the same manifest whoever merges them: order is by rank and name, the time is the latest of the fragments'. Equal copies of a
box are kept once (lowest rank); copies that differ, holes and overlaps are refused with the name of the tensor.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from ckpt.errors import CommitError, ReplicasDiverged, TensorIncomplete
from ckpt.model.box import Box, tiling_fault
from ckpt.model.chunks import lengths_like
from ckpt.model.dtype import DTYPES
from ckpt.model.manifest import FORMAT, Fragment, FragmentRef, Manifest, Shard, Tensor, chunk_offsets
from ckpt.model.packed import Packed, Part
from ckpt.model.values import Node, join, parse
from ckpt.plan.columns import Gathered, Layouts, Light, first_of, holders_of, merge_layouts
from ckpt.plan.faults import forms_told, kind_of, mixed, ranks_told
from ckpt.plan.marks import check_frames, check_replicas

_sorted = msgspec.json.Encoder(order="deterministic")


class Known:
    """The tensors of the last merge: what did not change from save to save is not put together again, which would take the interpreter from the training thread.

    Threads: one at a time.
    """

    def __init__(self) -> None:
        self.parts: dict[int, Fragment] = {}
        """rank -> its last fragment; it was in order. Of small worlds only."""
        self.layouts: Layouts | None = None
        """Of large worlds: what the last merge has made of their boxes."""
        self._merged: tuple[Tensor, ...] = ()
        self._merged_from: list[tuple[Tensor, ...]] = []

    def tensors(self, fragments: Sequence[Fragment]) -> tuple[Tensor, ...]:
        """The merged tensors of ``fragments``: those of last time if nothing about them has changed, and no two ranks stored the same."""
        own = [fragment.tensors for fragment in fragments]
        if not self._merged or own != self._merged_from:
            merged = _merge_tensors(fragments)
            shards = sum(len(tensor.shards) for tensors in own for tensor in tensors)
            once = shards == sum(len(tensor.shards) for tensor in merged)
            self._merged, self._merged_from = merged, own if once else []  # copies must be compared each time
        return self._merged


def merge(parts: Iterable[tuple[Part, FragmentRef]], known: Known | None = None) -> Manifest:
    """The manifest of one attempt at one step. ``known`` remembers from call to call.

    Parts may come in any order, and one at a time: of those of a large world only what is needed is kept.

    Raises:
        ReplicasDiverged: Copies, or plain values, that should be equal are not.
        TensorIncomplete: A hole, an overlap, or ranks that disagree about a tensor's shape or dtype.
        ManifestCorrupt: The fragment of a large world is none that we write; those of small ones come checked.
        CommitError: Fragments of different saves.
    """
    small: list[tuple[Fragment, FragmentRef]] = []
    large = Gathered()
    for part, ref in parts:
        if isinstance(part, Packed):
            large.add(part, ref)
        else:
            small.append((part, ref))
    if small and large.ranks:
        one, two = small[0][0].rank, large.ranks[0].rank
        raise CommitError(
            f"ranks {one} and {two} have written fragments of different formats: run the same ckpt on all ranks"
        )
    return _merge_large(large, known or Known()) if large.ranks else _merge_small(small, known or Known())


def _merge_large(gathered: Gathered, known: Known) -> Manifest:
    ranks = sorted(gathered.ranks, key=lambda rank: rank.rank)
    _check_same_save(ranks)
    first = ranks[0]
    check_frames(first_of(ranks, "replicas"))
    _check_kinds(first_of(ranks, "tree"), lambda: holders_of(gathered, ranks))
    found = known.layouts = merge_layouts(gathered, ranks, known.layouts)
    return Manifest(
        format=max(rank.format for rank in ranks),
        step=first.step,
        attempt=first.attempt,
        world_size=first.world_size,
        created_at=max(rank.created_at for rank in ranks),
        chunk_bytes=first.chunk_bytes,
        files=tuple(rank.file for rank in ranks if rank.file),
        fragments=tuple(rank.ref for rank in ranks),
        tensors=found.tensors,
        tied=_merge_tied(ranks, {tensor.name for tensor in found.tensors}),
        tree=_merge_raw("", [(rank, msgspec.Raw(text)) for rank, text in first_of(ranks, "tree")]),
        per_rank={},
        metadata=_merge_raw(
            "metadata", [(rank, msgspec.Raw(text)) for rank, text in first_of(ranks, "metadata")]
        ),
        encoded=tuple(encoding for rank in ranks for encoding in rank.encoded),
        by_reference=True,
        layouts=found.layouts,
        layout_of=found.layout_of,
    )


def _merge_small(parts: Iterable[tuple[Fragment, FragmentRef]], known: Known) -> Manifest:
    ordered = sorted(parts, key=lambda part: part[0].rank)
    fragments = [fragment for fragment, _ in ordered]
    first = fragments[0]
    _check_same_save(fragments)
    check_replicas((fragment.rank, fragment.replicas) for fragment in fragments)
    _check_kinds(
        [(fragment.rank, bytes(fragment.tree)) for fragment in fragments],
        lambda: {tensor.name: fragment.rank for fragment in fragments for tensor in fragment.tensors},
    )
    tensors = known.tensors(fragments)
    known.parts = {fragment.rank: fragment for fragment in fragments}
    return Manifest(
        format=max(FORMAT, *(fragment.format for fragment in fragments)),
        step=first.step,
        attempt=first.attempt,
        world_size=first.world_size,
        created_at=max(fragment.created_at for fragment in fragments),
        chunk_bytes=first.chunk_bytes,
        files=tuple(fragment.file for fragment in fragments if fragment.file),
        fragments=tuple(ref for _, ref in ordered),
        tensors=tensors,
        tied=_merge_tied(fragments, {tensor.name for tensor in tensors}),
        tree=_merge_raw("", [(fragment.rank, fragment.tree) for fragment in fragments]),
        per_rank={str(fragment.rank): fragment.per_rank for fragment in fragments},
        metadata=_merge_raw("metadata", [(fragment.rank, fragment.metadata) for fragment in fragments]),
        encoded=tuple(encoding for fragment in fragments for encoding in fragment.encoded),
    )


def _check_same_save(parts: Sequence[Fragment | Light]) -> None:
    first = parts[0]
    for other in parts:
        if (other.step, other.attempt, other.world_size, other.chunk_bytes) != (
            first.step, first.attempt, first.world_size, first.chunk_bytes,
        ):  # fmt: skip
            raise CommitError(f"fragments of ranks {first.rank} and {other.rank} belong to different saves")


def _check_kinds(trees: Iterable[tuple[int, bytes]], tensors: Callable[[], Mapping[str, int]]) -> None:
    """What a module or optimizer has as a tensor on one rank must not be a plain value of it on another: where trees are equal it is not. ``tensors``: name -> a rank that has it."""
    unique: dict[bytes, int] = {}
    for rank, tree in trees:
        unique.setdefault(tree, rank)
    if len(unique) > 1 and (
        found := mixed([(rank, parse(msgspec.Raw(tree))) for tree, rank in unique.items()], tensors())
    ):
        name, one, two = found
        raise ReplicasDiverged(name, (one, two), f" (tensor on rank {one} and plain value on rank {two})")


def _merge_tensors(fragments: Sequence[Fragment]) -> tuple[Tensor, ...]:
    by_name: dict[str, list[tuple[int, Tensor]]] = defaultdict(list)
    for fragment in fragments:
        for tensor in fragment.tensors:
            by_name[tensor.name].append((fragment.rank, tensor))
    checksums = _Checksums(fragments)
    merged: list[Tensor] = []
    for name in sorted(by_name):
        parts = by_name[name]
        first = parts[0][1]
        form = (first.dtype, first.shape)
        if any((part.dtype, part.shape) != form for _, part in parts) and (told := forms_told(parts)):
            raise TensorIncomplete(name, told)
        shards = _unique(name, [shard for _, part in parts for shard in part.shards], checksums, first.dtype)
        if fault := tiling_fault(first.shape, [shard.box for shard in shards]):
            raise TensorIncomplete(name, f"{fault}: {ranks_told(parts)}")
        merged.append(Tensor(name, first.dtype, first.shape, tuple(shards)))
    return tuple(merged)


def _unique(name: str, shards: Sequence[Shard], checksums: _Checksums, dtype: str) -> list[Shard]:
    kept: dict[Box, Shard] = {}
    for shard in shards:
        other = kept.setdefault(shard.box, shard)
        if other is not shard and checksums.of(other, dtype) != checksums.of(shard, dtype):
            raise ReplicasDiverged(name, [other.rank, shard.rank])
    return [kept[box] for box in sorted(kept)]


class _Checksums:
    """Chunk checksums of a shard, looked up only where two ranks stored the same box."""

    def __init__(self, fragments: Sequence[Fragment]) -> None:
        self._files = {fragment.rank: fragment.file for fragment in fragments}
        self._index: dict[int, dict[int, int]] = {}

    def of(self, shard: Shard, dtype: str) -> list[str]:
        file = self._files[shard.rank]
        if file is None or not shard.box.numel:
            return []
        if shard.rank not in self._index:
            self._index[shard.rank] = {offset: i for i, offset in enumerate(chunk_offsets(file))}
        start = self._index[shard.rank][shard.offset]
        first = file.chunks[start].nbytes // DTYPES[dtype].itemsize
        lengths = lengths_like(shard.shape, first, at_most=len(file.chunks) - start)
        assert lengths is not None  # the fragment was checked
        return [chunk.checksum for chunk in file.chunks[start : start + len(lengths)]]


def _merge_tied(fragments: Sequence[Fragment | Light], stored: set[str]) -> dict[str, str]:
    """A name that some rank stores under its own name needs no tie."""
    tied: dict[str, str] = {}
    holder: dict[str, int] = {}
    for fragment in fragments:
        for name, target in fragment.tied.items():
            rank = holder.setdefault(name, fragment.rank)
            if tied.setdefault(name, target) != target and name not in stored:
                raise ReplicasDiverged(name, [rank, fragment.rank])
    return {name: target for name, target in sorted(tied.items()) if name not in stored}


def _merge_raw(path: str, parts: Sequence[tuple[int, msgspec.Raw]]) -> msgspec.Raw:
    """Ranks nearly always agree to the byte; only where they do not are the trees taken apart."""
    unique: dict[bytes, int] = {}
    for rank, raw in parts:
        unique.setdefault(bytes(raw), rank)
    if len(unique) == 1:
        return msgspec.Raw(next(iter(unique)))
    nodes = [(rank, parse(msgspec.Raw(raw))) for raw, rank in unique.items()]
    merged, holder = nodes[0][1], nodes[0][0]
    for rank, node in nodes[1:]:
        merged = _union(path, merged, node, (holder, rank))
    return msgspec.Raw(msgspec.json.encode(merged))


def _union(path: str, one: Node, two: Node, ranks: tuple[int, int]) -> Node:
    """Names may live on some ranks only (pipeline stages); what lives on two must be equal."""
    if _same(one, two):
        return one
    if (kinds := (kind_of(one), kind_of(two)))[0] != kinds[1]:
        told = " and ".join(f"{kind} on rank {rank}" for kind, rank in zip(kinds, ranks, strict=True))
        raise ReplicasDiverged(path, ranks, f" ({told})")
    if not (isinstance(one, dict) and isinstance(two, dict)):
        raise ReplicasDiverged(path, ranks)
    match one.get("$"):
        case None | "module" | "object":
            return _union_mapping(path, one, two, ranks)
        case "optimizer":
            return _union_optimizer(path, one, two, ranks)
        case _:
            raise ReplicasDiverged(path, ranks)


def _same(one: Node, two: Node) -> bool:
    """Equal, whatever the order of keys; to Python 1, 1.0 and True are equal too, to a restore they are not."""
    return one == two and _sorted.encode(one) == _sorted.encode(two)


def _union_mapping(
    path: str, one: Mapping[str, Node], two: Mapping[str, Node], ranks: tuple[int, int]
) -> Node:
    merged = dict(one)
    for key, node in two.items():
        deeper = path if key in ("v", "values") and "$" in one else join(path, key)
        merged[key] = _union(deeper, merged[key], node, ranks) if key in merged else node
    return merged


def _union_optimizer(
    path: str, one: Mapping[str, Node], two: Mapping[str, Node], ranks: tuple[int, int]
) -> Node:
    if len(one["groups"]) != len(two["groups"]):
        raise ReplicasDiverged(f"{path}/param_groups", ranks)
    groups: list[Node] = []
    for index, (a, b) in enumerate(zip(one["groups"], two["groups"], strict=True)):
        if not _same(a["values"], b["values"]):
            raise ReplicasDiverged(f"{path}/param_groups/{index}", ranks)
        groups.append({"params": list(dict.fromkeys([*a["params"], *b["params"]])), "values": a["values"]})
    return {
        **one,
        "groups": groups,
        "state": _union_mapping(f"{path}/state", one["state"], two["state"], ranks),
    }

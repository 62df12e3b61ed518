"""Fragments of all ranks -> the manifest, or the reason why there is none.

The same fragments give the same manifest on every rank that merges them: order is by rank and name,
and the time is the latest of the fragments'. Equal copies of a box are kept once (lowest rank).
Copies that differ, holes and overlaps are refused with the name of the tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec
import numpy as np
from msgspec.structs import replace

from ckpt.errors import CommitError, ReplicasDiverged
from ckpt.model.manifest import FORMAT, FragmentRef, Manifest, Packed
from ckpt.model.packed import Columns, replicas_of
from ckpt.model.patterns import patterns_of, unfitting
from ckpt.model.runs import Ints
from ckpt.model.values import Node, join, parse
from ckpt.plan.merge_errors import kind_of, mixed
from ckpt.plan.merge_layouts import Gathered, Layouts, Light, first_of, holders_of, merge_layouts

_sorted = msgspec.json.Encoder(order="deterministic")

Marks = Iterable[tuple[int, Mapping[str, str]]]
"""Ranks, ascending, and what each reports: name -> ``boxes=digest``."""


class Known:
    """Results of the last merge, which the next one uses again.

    Thread safety: one merge at a time.

    Attributes:
        forms: The forms of the last fragments, unpacked and checked.
        layouts: The tensors and layouts of the last manifest.
    """

    def __init__(self) -> None:
        self.forms: Mapping[str, Columns] = {}
        self.layouts: Layouts | None = None


def merge(parts: Iterable[tuple[Packed, FragmentRef]], known: Known | None = None) -> Manifest:
    """Return the manifest of one attempt at one step. ``known`` remembers results from call to
    call.

    Parts may come in any order, and one at a time: only what is needed of each is kept.

    Raises:
        ReplicasDiverged: Copies, or plain values, that should be equal are not.
        TensorIncomplete: A hole, an overlap, or ranks that disagree about a tensor's shape or
            dtype.
        ManifestCorrupt: A fragment that no writer writes.
        CommitError: Fragments of different saves.
        ConfigError: A pattern of the save fits no name on any rank.
    """
    known = known or Known()
    gathered = Gathered(known.forms)
    for part, ref in parts:
        gathered.add(part, ref)
    ranks = sorted(gathered.ranks, key=lambda rank: rank.part.rank)
    _check_same_save([rank.part for rank in ranks])
    first = ranks[0].part
    metadata = _merge_raw("metadata", first_of(ranks, "metadata"))
    if unused := patterns_of(metadata)[1]:
        raise unfitting(unused)
    check_frames(first_of(ranks, "replicas"))
    _check_kinds(first_of(ranks, "tree"), lambda: holders_of(gathered, ranks))
    found = known.layouts = merge_layouts(gathered, ranks, known.layouts)
    known.forms = gathered.forms
    return Manifest(
        format=FORMAT,
        step=first.step,
        attempt=first.attempt,
        world_size=first.world_size,
        created_at=max(rank.part.created_at for rank in ranks),
        chunk_bytes=first.chunk_bytes,
        files=tuple(rank.part.file for rank in ranks if rank.part.file),
        fragments=tuple(rank.ref for rank in ranks),
        tensors=found.tensors,
        tied=_merge_tied([rank.part for rank in ranks], {tensor.name for tensor in found.tensors}),
        tree=_merge_raw("", first_of(ranks, "tree")),
        metadata=metadata,
        layouts=found.layouts,
        layout_of=found.layout_of,
        encoded=tuple(encoding for rank in ranks for encoding in rank.part.encoded),
        carried=_carried(ranks),
    )


def _carried(ranks: Sequence[Light]) -> tuple[Packed, ...]:
    """Return the fragments, without what is merged, if a rank asks for it."""
    if not any(rank.part.in_manifest for rank in ranks):
        return ()
    return tuple(replace(rank.part, tied={}) for rank in ranks)


def check_frames(frames: Sequence[tuple[int, bytes]]) -> None:
    """Raise ``ReplicasDiverged`` as ``check_replicas`` does.

    ``frames``: ranks, ascending, and what fragments of large worlds have in ``replicas``; of equal
    ones only the first.
    """
    hashed = [_hashed(replicas_of(raw, key="replicas")) for _, raw in frames]
    what, digest = np.concatenate(hashed, axis=1) if hashed else np.zeros((2, 0), np.int64)
    order = np.argsort(what)
    what, digest = what[order], digest[order]
    if ((what[1:] == what[:-1]) & (digest[1:] != digest[:-1])).any():
        check_replicas((rank, replicas_of(raw, key="replicas")) for rank, raw in frames)


def _hashed(replicas: Mapping[str, str]) -> Ints:
    """Return each digest with the tensor and boxes that it belongs to."""
    parts = [mark.partition("=") for mark in replicas.values()]
    what = zip(replicas, [boxes for boxes, _, _ in parts], strict=True)
    digest = [digest for _, _, digest in parts]
    return np.stack([np.fromiter(map(hash, each), np.int64, len(parts)) for each in (what, digest)])


def check_replicas(marks: Marks) -> None:
    """Check that equal boxes have equal digests. Each rank has digests of what it holds but did not
    write whole. Raises ``ReplicasDiverged``.
    """
    seen: dict[tuple[str, str], tuple[int, str]] = {}
    for mine, replicas in marks:
        for name, mark in replicas.items():
            boxes, _, digest = mark.partition("=")
            rank, known = seen.setdefault((name, boxes), (mine, digest))
            if known != digest:
                raise ReplicasDiverged(name, [rank, mine])


def _check_same_save(parts: Sequence[Packed]) -> None:
    first = parts[0]
    for other in parts:
        if (other.step, other.attempt, other.world_size, other.chunk_bytes) != (
            first.step, first.attempt, first.world_size, first.chunk_bytes,
        ):  # fmt: skip
            raise CommitError(
                f"fragments of ranks {first.rank} and {other.rank} belong to different saves"
            )


def _check_kinds(
    trees: Sequence[tuple[int, bytes]], tensors: Callable[[], Mapping[str, int]]
) -> None:
    """Refuse what a module or optimizer has as a tensor on one rank and as a plain value on
    another.

    Where trees are equal there is none. ``tensors``: name -> a rank that has it.
    """
    if len(trees) < 2:
        return
    if found := mixed([(rank, parse(msgspec.Raw(tree))) for rank, tree in trees], tensors()):
        name, one, two = found
        raise ReplicasDiverged(
            name, (one, two), f" (tensor on rank {one} and plain value on rank {two})"
        )


def _merge_tied(fragments: Sequence[Packed], stored: set[str]) -> dict[str, str]:
    """Merge the tied names. A name that some rank stores under its own name needs no tie."""
    tied: dict[str, str] = {}
    holder: dict[str, int] = {}
    for fragment in fragments:
        for name, target in fragment.tied.items():
            rank = holder.setdefault(name, fragment.rank)
            if tied.setdefault(name, target) != target and name not in stored:
                raise ReplicasDiverged(name, [rank, fragment.rank])
    return {name: target for name, target in sorted(tied.items()) if name not in stored}


def _merge_raw(path: str, unique: Sequence[tuple[int, bytes]]) -> msgspec.Raw:
    """Return the merged tree. Ranks nearly always agree to the byte, and trees are decoded only
    where they do not.

    ``unique``: the different trees, each with the lowest rank that has it.
    """
    if len(unique) == 1:
        return msgspec.Raw(unique[0][1])
    nodes = [(rank, parse(msgspec.Raw(raw))) for rank, raw in unique]
    merged, holder = nodes[0][1], nodes[0][0]
    for rank, node in nodes[1:]:
        merged = _union(path, merged, node, (holder, rank))
    return msgspec.Raw(msgspec.json.encode(merged))


def _union(path: str, one: Node, two: Node, ranks: tuple[int, int]) -> Node:
    """Merge names that only some ranks may have, such as those of pipeline stages. A name that two
    ranks have must be equal on both.
    """
    if _same(one, two):
        return one
    if (kinds := (kind_of(one), kind_of(two)))[0] != kinds[1]:
        text = " and ".join(
            f"{kind} on rank {rank}" for kind, rank in zip(kinds, ranks, strict=True)
        )
        raise ReplicasDiverged(path, ranks, f" ({text})")
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
    """Return True if two nodes are equal, whatever the order of their keys.

    1, 1.0 and True differ here, unlike in Python.
    """
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
        groups.append(
            {"params": list(dict.fromkeys([*a["params"], *b["params"]])), "values": a["values"]}
        )
    return {
        **one,
        "groups": groups,
        "state": _union_mapping(f"{path}/state", one["state"], two["state"], ranks),
    }

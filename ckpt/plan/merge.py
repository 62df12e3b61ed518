"""Merge the fragments of all ranks into the manifest, or raise an error that says why this is
impossible.

The same fragments give the same manifest on every rank that merges them. Files are ordered by rank
and tensors by name, and the manifest has the latest creation time of all fragments. If several
ranks have stored equal copies of a box, the manifest names the copy of the lowest rank. If copies
differ, or the boxes of a tensor overlap or leave a hole, the merge raises an error that names the
tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec
import numpy as np
from msgspec.structs import replace

from ckpt.errors import CommitError, ReplicasDiverged
from ckpt.model.key_order import KeyOrder
from ckpt.model.manifest import FORMAT, FragmentRef, Manifest, Packed, Tensor
from ckpt.model.packed import Columns, replicas_of
from ckpt.model.patterns import patterns_of, unfitting
from ckpt.model.runs import Ints
from ckpt.model.values import Node, join, parse
from ckpt.model.views import View, views_of_all
from ckpt.plan.merge_errors import kind_of, mixed
from ckpt.plan.merge_layouts import Gathered, Layouts, Light, first_of, holders_of, merge_layouts

_sorted = msgspec.json.Encoder(order="deterministic")

Marks = Iterable[tuple[int, Mapping[str, str]]]
"""Pairs of a rank and its ``Fragment.replicas`` (name -> ``boxes=digest``), in ascending order of
ranks.
"""


class Known:
    """Results of one merge that the next merge can use again.

    Thread safety: only one merge at a time may use the object.

    Attributes:
        forms: The forms of the fragments of the last merge, unpacked and checked, by the keys of
            ``Gathered.forms``. See `ckpt.model.packed` about forms.
        layouts: The tensors and layouts of the last manifest; None before the first merge.
    """

    def __init__(self) -> None:
        self.forms: Mapping[str, Columns] = {}
        self.layouts: Layouts | None = None


def merge(parts: Iterable[tuple[Packed, FragmentRef]], known: Known | None = None) -> Manifest:
    """Return the manifest of one attempt at one step.

    Args:
        parts: The fragments of all ranks with their references, in any order. The merge takes one
            fragment at a time, and keeps only the fields that it needs.
        known: The results of the last merge, which this merge uses and replaces.

    Raises:
        ReplicasDiverged: Ranks have different copies of a tensor or of a plain value.
        TensorIncomplete: The boxes of a tensor overlap or leave a hole, or ranks disagree about its
            shape or dtype.
        ManifestCorrupt: A fragment has contents that ckpt never writes.
        CodecMissing: The codec of a data file is not installed here.
        CommitError: The fragments belong to different saves.
        ConfigError: A pattern of the save matches no name on any rank.
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
        views=_merge_views(ranks, found.tensors),
        carried=_carried(ranks),
    )


def _merge_views(ranks: Sequence[Light], tensors: Sequence[Tensor]) -> dict[str, View]:
    parts = [rank.part.views for rank in ranks if rank.part.views]
    kinds = {tensor.name: (tensor.dtype, tensor.shape) for tensor in tensors} if parts else {}
    return views_of_all(parts, kinds)


def _carried(ranks: Sequence[Light]) -> tuple[Packed, ...]:
    """Return the fragments that the manifest must carry, without the fields that the merge unites.

    If one fragment has ``in_manifest`` set, these are the fragments of all ranks. Otherwise the
    result is empty.
    """
    if not any(rank.part.in_manifest for rank in ranks):
        return ()
    return tuple(replace(rank.part, tied={}, views={}) for rank in ranks)


def check_frames(frames: Sequence[tuple[int, bytes]]) -> None:
    """Raise ``ReplicasDiverged`` as ``check_replicas`` does, but faster for many ranks.

    Args:
        frames: The different values of ``Packed.replicas``, each with the lowest rank that has it,
            in ascending order of these ranks.
    """
    hashed = [_hashed(replicas_of(raw, key="replicas")) for _, raw in frames]
    what, digest = np.concatenate(hashed, axis=1) if hashed else np.zeros((2, 0), np.int64)
    order = np.argsort(what)
    what, digest = what[order], digest[order]
    if ((what[1:] == what[:-1]) & (digest[1:] != digest[:-1])).any():
        check_replicas((rank, replicas_of(raw, key="replicas")) for rank, raw in frames)


def _hashed(replicas: Mapping[str, str]) -> Ints:
    """Return two rows of hash values, with a column for each tensor. The first row has the hashes
    of the tensors' names and boxes, and the second row has the hashes of their digests.
    """
    parts = [mark.partition("=") for mark in replicas.values()]
    what = zip(replicas, [boxes for boxes, _, _ in parts], strict=True)
    digest = [digest for _, _, digest in parts]
    return np.stack([np.fromiter(map(hash, each), np.int64, len(parts)) for each in (what, digest)])


def check_replicas(marks: Marks) -> None:
    """Raise ``ReplicasDiverged`` if two ranks report different digests of the same boxes.

    A rank reports the digests of the tensors that it holds as a replica.
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
    """Raise ``ReplicasDiverged`` if a name in a module or optimizer is a tensor on one rank and a
    plain value on another.

    Args:
        trees: The different trees, each with the lowest rank that has it. One tree needs no check.
        tensors: A function that returns the names of all tensors, each with a rank that has it.
    """
    if len(trees) < 2:
        return
    if found := mixed([(rank, parse(msgspec.Raw(tree))) for rank, tree in trees], tensors()):
        name, one, two = found
        raise ReplicasDiverged(
            name, (one, two), f" (tensor on rank {one} and plain value on rank {two})"
        )


def _merge_tied(fragments: Sequence[Packed], stored: set[str]) -> dict[str, str]:
    """Return the merged tied names, which are further names of stored tensors.

    A name is left out if some rank stores a tensor under it.

    Args:
        fragments: The fragments of all ranks, in order.
        stored: The names of all stored tensors.

    Raises:
        ReplicasDiverged: Two ranks tie a name to different names, and no rank stores a tensor under
            it.
    """
    tied: dict[str, str] = {}
    holder: dict[str, int] = {}
    for fragment in fragments:
        for name, target in fragment.tied.items():
            rank = holder.setdefault(name, fragment.rank)
            if tied.setdefault(name, target) != target and name not in stored:
                raise ReplicasDiverged(name, [rank, fragment.rank])
    return {name: target for name, target in sorted(tied.items()) if name not in stored}


def _merge_raw(path: str, unique: Sequence[tuple[int, bytes]]) -> msgspec.Raw:
    """Return the tree that is merged from the trees of all ranks.

    Usually the trees of all ranks are equal byte for byte. In this case no tree is decoded.

    Args:
        path: The name of the tree in errors.
        unique: The different trees, each with the lowest rank that has it.
    """
    if len(unique) == 1:
        return msgspec.Raw(unique[0][1])
    nodes = [(rank, parse(msgspec.Raw(raw))) for rank, raw in unique]
    merged, holder = nodes[0][1], nodes[0][0]
    for rank, node in nodes[1:]:
        merged = _union(path, merged, node, (holder, rank))
    return msgspec.Raw(msgspec.json.encode(merged))


def _union(path: str, one: Node, two: Node, ranks: tuple[int, int]) -> Node:
    """Return the union of two nodes, which two ranks have at the same path of their trees.

    A name may exist on only one of the two ranks, as with pipeline stages. Values that both ranks
    have must be equal.

    Args:
        path: The path of the nodes in the state.
        one: The first node.
        two: The second node.
        ranks: The ranks of the two nodes, for errors.

    Raises:
        ReplicasDiverged: The nodes differ in a value that both have.
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
        case "dict" | "OrderedDict":
            return _union_pairs(path, one, two, ranks)
        case _:
            raise ReplicasDiverged(path, ranks)


def _same(one: Node, two: Node) -> bool:
    """Return True if two nodes are equal. The order of keys does not matter, and 1, 1.0 and True
    are different.
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


def _union_pairs(
    path: str, one: Mapping[str, Node], two: Mapping[str, Node], ranks: tuple[int, int]
) -> Node:
    """Return the union of two dicts that have pairs of nodes: the pairs of the first rank, and then
    the pairs that only the second rank has.

    Raises:
        ReplicasDiverged: The ranks have different values for a key, or the keys that both ranks
            have are in a different order in an ``OrderedDict``.
    """
    merged = {_sorted.encode(key): [key, node] for key, node in one["v"]}
    others = {_sorted.encode(key): (key, node) for key, node in two["v"]}
    if one["$"] == "OrderedDict" and [key for key in merged if key in others] != [
        key for key in others if key in merged
    ]:
        raise ReplicasDiverged(path, ranks, " (in the order of its keys)")
    for text, (key, node) in others.items():
        if text in merged:
            deeper = path if isinstance(key, list | dict) else join(path, key)
            merged[text][1] = _union(deeper, merged[text][1], node, ranks)
        else:
            merged[text] = [key, node]
    found: dict[str, Node] = {**one, "v": list(merged.values())}
    if "m" in one or "m" in two:
        both = [each["m"] for each in (one, two) if "m" in each]
        found["m"] = _union(path, both[0], both[-1], ranks)
    return found


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
    known = {path for group in one["groups"] for path in group["params"]}
    added = [path for group in two["groups"] for path in group["params"] if path not in known]
    keys = KeyOrder.from_node(one).union(KeyOrder.from_node(two), added)
    merged = {
        **two,
        **one,
        **keys.node(),
        "groups": groups,
        "state": _union_mapping(f"{path}/state", one["state"], two["state"], ranks),
    }
    if plain := {*one.get("plain", ()), *two.get("plain", ())}:
        merged["plain"] = sorted(plain)
    if "values" in one and "values" in two:
        merged["values"] = _union(f"{path}/values", one["values"], two["values"], ranks)
    return merged

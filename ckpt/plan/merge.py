"""Merge the fragments of all ranks into the manifest, or raise an error that says why this is
impossible.

The same fragments give the same manifest on every rank that merges them. Files are ordered by rank
and tensors by name, and the manifest has the latest creation time of all fragments. If several
ranks have stored equal copies of a box, the manifest names the copy of the lowest rank. If copies
differ, or the boxes of a tensor overlap or leave a hole, the merge raises an error that names the
tensor.

A fragment describes what one rank has made durable. A *tree* is the state of a rank without its
tensors, as JSON, and a *node* is a value in it. The node of a value that JSON cannot represent,
such as a module, has its kind under the key "$" (see `ckpt.model.values`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec
import numpy as np
from msgspec.structs import replace

from ckpt.errors import CommitError, ReplicasDiverged
from ckpt.model.box_layouts import Ints
from ckpt.model.delta import check_part
from ckpt.model.fragment_columns import Columns, replicas_of
from ckpt.model.key_order import KeyOrder
from ckpt.model.manifest import FORMAT, FragmentRef, Manifest, Packed, Tensor
from ckpt.model.patterns import WHOLE, no_match_error, patterns_of
from ckpt.model.values import Node, join, parse
from ckpt.model.values_by_level import MODULE_VERSIONS
from ckpt.model.views import View, views_of_all
from ckpt.plan.merge_errors import kind_conflict, kind_of
from ckpt.plan.merge_layouts import (
    Fragments,
    Layouts,
    RankFragment,
    distinct_values,
    holders_of,
    merge_layouts,
)

_encoder = msgspec.json.Encoder(order="deterministic")

RankReplicas = Iterable[tuple[int, Mapping[str, str]]]
"""Pairs of a rank and its ``Fragment.replicas`` (name -> ``boxes=digest``), in ascending order of
ranks.
"""


class MergeCache:
    """Results of one merge that the next merge can use again.

    Thread safety: only one merge at a time may use the object.

    Args:
        deltas: The part of the state that has deltas, which the first merge of a whole state checks
            (``SaveConfig.deltas``); None if there is none.

    Attributes:
        deltas: ``deltas`` until that check.
        forms: The forms of the fragments of the last merge, unpacked and checked, by the keys of
            ``Fragments.forms``. See `ckpt.model.fragment_columns` about forms.
        layouts: The tensors and layouts of the last manifest; None before the first merge.
    """

    def __init__(self, deltas: str | None = None) -> None:
        self.deltas = deltas
        self.forms: Mapping[str, Columns] = {}
        self.layouts: Layouts | None = None


def merge(parts: Iterable[tuple[Packed, FragmentRef]], cache: MergeCache | None = None) -> Manifest:
    """Return the manifest of one attempt at one step.

    Args:
        parts: The fragments of all ranks with their references, in any order. The merge takes one
            fragment at a time, and keeps only the fields that it needs.
        cache: The results of the last merge, which this merge uses and replaces. Its ``deltas`` is
            the part of the state that has deltas, until a merge of a whole state has checked that
            a tensor is in it.

    Raises:
        ReplicasDiverged: Ranks have different copies of a tensor or of a plain value.
        TensorIncomplete: The boxes of a tensor overlap or leave a hole, or ranks disagree about its
            shape or dtype.
        ManifestCorrupt: A fragment has contents that ckpt never writes.
        CodecMissing: The codec of a data file is not installed here.
        CommitError: The fragments belong to different saves.
        ConfigError: A pattern of the save matches no name on any rank, or no tensor of any rank is
            in the part that has deltas.
    """
    cache = cache or MergeCache()
    fragments = Fragments(cache.forms)
    for content, ref in parts:
        fragments.add(content, ref)
    rank_fragments = sorted(fragments.rank_fragments, key=lambda fragment: fragment.content.rank)
    _check_same_save([fragment.content for fragment in rank_fragments])
    reference = rank_fragments[0].content
    metadata = _merge_trees("metadata", distinct_values(rank_fragments, "metadata"))
    patterns, unmatched_patterns = patterns_of(metadata)
    if unmatched_patterns:
        raise no_match_error(unmatched_patterns)
    check_replica_frames(distinct_values(rank_fragments, "replicas"))
    _check_kinds(
        distinct_values(rank_fragments, "tree"), lambda: holders_of(fragments, rank_fragments)
    )
    layouts = cache.layouts = merge_layouts(fragments, rank_fragments, cache.layouts)
    cache.forms = fragments.forms
    if cache.deltas is not None and patterns == WHOLE:
        check_part(cache.deltas, (tensor.name for tensor in layouts.tensors))
        cache.deltas = None
    return Manifest(
        format=FORMAT,
        step=reference.step,
        attempt=reference.attempt,
        world_size=reference.world_size,
        created_at=max(fragment.content.created_at for fragment in rank_fragments),
        chunk_bytes=reference.chunk_bytes,
        files=tuple(fragment.content.file for fragment in rank_fragments if fragment.content.file),
        fragments=tuple(fragment.ref for fragment in rank_fragments),
        tensors=layouts.tensors,
        tied=_merge_tied(
            [fragment.content for fragment in rank_fragments],
            {tensor.name for tensor in layouts.tensors},
        ),
        tree=_merge_trees("", distinct_values(rank_fragments, "tree")),
        metadata=metadata,
        layouts=layouts.layouts,
        layout_of=layouts.layout_of,
        encoded=tuple(
            encoding for fragment in rank_fragments for encoding in fragment.content.encoded
        ),
        locations=tuple(
            location for fragment in rank_fragments for location in fragment.content.locations
        ),
        increments=tuple(
            increment for fragment in rank_fragments for increment in fragment.content.increments
        ),
        views=_merge_views(rank_fragments, layouts.tensors),
        carried=_fragment_copies(rank_fragments),
    )


def _merge_views(
    rank_fragments: Sequence[RankFragment], tensors: Sequence[Tensor]
) -> dict[str, View]:
    if not (
        parts := [fragment.content.views for fragment in rank_fragments if fragment.content.views]
    ):
        return {}
    kinds = {tensor.name: (tensor.dtype, tensor.shape) for tensor in tensors}
    return views_of_all(parts, kinds)


def _fragment_copies(rank_fragments: Sequence[RankFragment]) -> tuple[Packed, ...]:
    """Return the fragments that the manifest must carry, without the fields that the merge unites.

    If one fragment has ``in_manifest`` set, these are the fragments of all ranks. Otherwise the
    result is empty.
    """
    if not any(fragment.content.in_manifest for fragment in rank_fragments):
        return ()
    return tuple(replace(fragment.content, tied={}, views={}) for fragment in rank_fragments)


def check_replica_frames(frames: Sequence[tuple[int, bytes]]) -> None:
    """Raise ``ReplicasDiverged`` as ``check_replicas`` does, but faster for many ranks.

    Args:
        frames: The different values of ``Packed.replicas``, which are compressed, each with the
            lowest rank that has it, in ascending order of these ranks.
    """
    columns = [_hashes(replicas_of(frame, key="replicas")) for _, frame in frames]
    boxes, digests = np.concatenate(columns, axis=1) if columns else np.zeros((2, 0), np.int64)
    order = np.argsort(boxes)
    boxes, digests = boxes[order], digests[order]  # Hash values (see ``_hashes``)
    if ((boxes[1:] == boxes[:-1]) & (digests[1:] != digests[:-1])).any():
        check_replicas((rank, replicas_of(frame, key="replicas")) for rank, frame in frames)


def _hashes(replicas: Mapping[str, str]) -> Ints:
    """Return two rows of hash values, with a column for each tensor. The first row has the hashes
    of the tensors' names and boxes, and the second row has the hashes of their digests.

    ``replicas`` has a mark ``boxes=digest`` for the name of each tensor.
    """
    parts = [mark.partition("=") for mark in replicas.values()]
    box_texts = zip(replicas, [boxes for boxes, _, _ in parts], strict=True)
    digests = [digest for _, _, digest in parts]
    return np.stack(
        [np.fromiter(map(hash, texts), np.int64, len(parts)) for texts in (box_texts, digests)]
    )


def check_replicas(replicas_of_ranks: RankReplicas) -> None:
    """Raise ``ReplicasDiverged`` if two ranks report different digests of the same boxes.

    A rank reports the digests of the tensors that it holds as a replica, each in a mark
    ``boxes=digest`` under the name of the tensor. ``replicas_of_ranks`` are pairs of a rank and
    these marks by name.
    """
    digests: dict[tuple[str, str], tuple[int, str]] = {}
    for rank, replicas in replicas_of_ranks:
        for name, mark in replicas.items():
            boxes, _, digest = mark.partition("=")
            earlier_rank, earlier_digest = digests.setdefault((name, boxes), (rank, digest))
            if earlier_digest != digest:
                raise ReplicasDiverged(name, [earlier_rank, rank])


def _check_same_save(parts: Sequence[Packed]) -> None:
    reference = parts[0]
    for part in parts:
        if (part.step, part.attempt, part.world_size, part.chunk_bytes) != (
            reference.step, reference.attempt, reference.world_size, reference.chunk_bytes,
        ):  # fmt: skip
            raise CommitError(
                f"fragments of ranks {reference.rank} and {part.rank} belong to different saves"
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
    if conflict := kind_conflict(
        [(rank, parse(msgspec.Raw(tree))) for rank, tree in trees], tensors()
    ):
        name, tensor_rank, value_rank = conflict
        raise ReplicasDiverged(
            name,
            (tensor_rank, value_rank),
            f" (tensor on rank {tensor_rank} and plain value on rank {value_rank})",
        )


def _merge_tied(fragments: Sequence[Packed], stored_names: set[str]) -> dict[str, str]:
    """Return the merged tied names, which are further names of stored tensors.

    A name is left out if some rank stores a tensor under it.

    Args:
        fragments: The fragments of all ranks, in order.
        stored_names: The names of all stored tensors.

    Raises:
        ReplicasDiverged: Two ranks tie a name to different names, and no rank stores a tensor under
            it.
    """
    ties: dict[str, str] = {}
    first_ranks: dict[str, int] = {}
    for fragment in fragments:
        for name, target in fragment.tied.items():
            first_rank = first_ranks.setdefault(name, fragment.rank)
            if ties.setdefault(name, target) != target and name not in stored_names:
                raise ReplicasDiverged(name, [first_rank, fragment.rank])
    return {name: target for name, target in sorted(ties.items()) if name not in stored_names}


def _merge_trees(path: str, distinct_trees: Sequence[tuple[int, bytes]]) -> msgspec.Raw:
    """Return the tree that is merged from the trees of all ranks.

    Usually the trees of all ranks are equal byte for byte. In this case no tree is decoded.

    Args:
        path: The name of the tree in errors.
        distinct_trees: The different trees, each with the lowest rank that has it.
    """
    if len(distinct_trees) == 1:
        [(_, tree)] = distinct_trees
        return msgspec.Raw(tree)
    (first_rank, union), *nodes = [(rank, parse(msgspec.Raw(raw))) for rank, raw in distinct_trees]
    for rank, node in nodes:
        union = _union(path, union, node, (first_rank, rank))
    return msgspec.Raw(msgspec.json.encode(union))


def _union(path: str, a: Node, b: Node, ranks: tuple[int, int]) -> Node:
    """Return the union of two nodes, which two ranks have at the same path of their trees.

    A name may exist on only one of the two ranks, as with pipeline stages. Values that both ranks
    have must be equal.

    Args:
        path: The path of the nodes in the state.
        a: The first node.
        b: The second node.
        ranks: The ranks of the two nodes, for errors.

    Raises:
        ReplicasDiverged: The nodes differ in a value that both have.
    """
    if _is_equal(a, b):
        return a
    kind_a, kind_b = kind_of(a), kind_of(b)
    if kind_a != kind_b:
        rank_a, rank_b = ranks
        text = f"{kind_a} on rank {rank_a} and {kind_b} on rank {rank_b}"
        raise ReplicasDiverged(path, ranks, f" ({text})")
    if not (isinstance(a, dict) and isinstance(b, dict)):
        raise ReplicasDiverged(path, ranks)
    match a.get("$"):
        case None | "module" | "object":
            return _union_mapping(path, a, b, ranks)
        case "optimizer":
            return _union_optimizer(path, a, b, ranks)
        case "dict" | "OrderedDict":
            return _union_pairs(path, a, b, ranks)
        case _:
            raise ReplicasDiverged(path, ranks)


def _is_equal(a: Node, b: Node) -> bool:
    """Return True if two nodes are equal. The order of keys does not matter, and 1, 1.0 and True
    are different.
    """
    return a == b and _encoder.encode(a) == _encoder.encode(b)


def _union_mapping(
    path: str, a: Mapping[str, Node], b: Mapping[str, Node], ranks: tuple[int, int]
) -> Node:
    """Return the union of two dicts, or of two nodes of a module or object, whose values are under
    "v" or "values". These two keys are no part of a path.
    """
    union = dict(a)
    for key, node in b.items():
        inner_path = path if key in ("v", "values") and "$" in a else join(path, key)
        union[key] = _union(inner_path, union[key], node, ranks) if key in union else node
    return union


def _union_pairs(
    path: str, a: Mapping[str, Node], b: Mapping[str, Node], ranks: tuple[int, int]
) -> Node:
    """Return the union of two dicts that have pairs of nodes: the pairs of the first rank, and then
    the pairs that only the second rank has. A node has its pairs under "v" (see `model.values`).

    Raises:
        ReplicasDiverged: The ranks have different values for a key, or the keys that both ranks
            have are in a different order in an ``OrderedDict``.
    """
    pairs = {_encoder.encode(key): [key, node] for key, node in a["v"]}
    pairs_of_b = {_encoder.encode(key): (key, node) for key, node in b["v"]}
    if a["$"] == "OrderedDict" and [key for key in pairs if key in pairs_of_b] != [
        key for key in pairs_of_b if key in pairs
    ]:
        raise ReplicasDiverged(path, ranks, " (in the order of its keys)")
    for encoded_key, (key, node) in pairs_of_b.items():
        if encoded_key in pairs:
            inner_path = path if isinstance(key, list | dict) else join(path, key)
            pairs[encoded_key][1] = _union(inner_path, pairs[encoded_key][1], node, ranks)
        else:
            pairs[encoded_key] = [key, node]
    union: dict[str, Node] = {**a, "v": list(pairs.values())}
    # The versions of modules, which torch gives to a state_dict
    if version_nodes := [node[MODULE_VERSIONS] for node in (a, b) if MODULE_VERSIONS in node]:
        union[MODULE_VERSIONS] = _union(path, version_nodes[0], version_nodes[-1], ranks)
    return union


def _union_optimizer(
    path: str, a: Mapping[str, Node], b: Mapping[str, Node], ranks: tuple[int, int]
) -> Node:
    """Return the union of two nodes of an optimizer: its groups with the parameters of both ranks,
    and the state of these parameters.

    Raises:
        ReplicasDiverged: The settings of a group differ, or a value that both ranks have.
    """
    if len(a["groups"]) != len(b["groups"]):
        raise ReplicasDiverged(f"{path}/param_groups", ranks)
    groups: list[Node] = []
    for index, (group_a, group_b) in enumerate(zip(a["groups"], b["groups"], strict=True)):
        if not _is_equal(group_a["values"], group_b["values"]):
            raise ReplicasDiverged(f"{path}/param_groups/{index}", ranks)
        groups.append(
            {
                "params": list(dict.fromkeys([*group_a["params"], *group_b["params"]])),
                "values": group_a["values"],
            }
        )
    paths = {path for group in a["groups"] for path in group["params"]}
    new_paths = [path for group in b["groups"] for path in group["params"] if path not in paths]
    key_order = KeyOrder.from_node(a).union(KeyOrder.from_node(b), new_paths)
    union = {
        **b,
        **a,
        **key_order.node(),
        "groups": groups,
        "state": _union_mapping(f"{path}/state", a["state"], b["state"], ranks),
    }
    # The keys whose tensors are plain although their parameters are DTensors
    if plain_keys := {*a.get("plain", ()), *b.get("plain", ())}:
        union["plain"] = sorted(plain_keys)
    if "values" in a and "values" in b:
        union["values"] = _union(f"{path}/values", a["values"], b["values"], ranks)
    return union

from __future__ import annotations

import dataclasses
import random

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from ckpt.errors import CommitError, ManifestCorrupt, ReplicasDiverged, TensorIncomplete
from ckpt.model.box import Box
from ckpt.model.record_encoding import pack
from ckpt.model.views import View
from ckpt.plan import merge_layouts
from ckpt.plan.leaf import Leaf
from ckpt.plan.merge import MergeCache, merge
from tests.kit.examples import examples
from tests.plan.worlds import fragment_of, merged, raw, with_ref

X = {"x": np.arange(48, dtype=np.float32).reshape(12, 4)}
ALL = Box((0, 0), (12, 4))
TOP, BOTTOM = Box((0, 0), (6, 4)), Box((6, 0), (6, 4))


def leaf(
    *boxes: Box, name: str = "x", dtype: str = "float32", shape: tuple[int, ...] = (12, 4)
) -> Leaf:
    return Leaf(name, dtype, shape, boxes)


def fragments(*ranks: list[Leaf], arrays=None, **changes):
    """Make one fragment for each rank. A change that is a list has one value for each rank."""
    found = []
    for rank, leaves in enumerate(ranks):
        mine = {
            key: value[rank] if isinstance(value, list) else value for key, value in changes.items()
        }
        data = arrays[rank] if isinstance(arrays, list) else arrays or X
        found.append(fragment_of(rank, len(ranks), leaves, data, **mine)[1])
    return found


def test_a_merged_manifest_is_valid_and_names_all_parts():
    found = fragments(
        [leaf(TOP)],
        [leaf(BOTTOM)],
        metadata=raw({"run": 1}),
        tree=raw({"x": {"$": "tensor", "n": "x"}}),
    )
    manifest = merged(found)
    assert (
        [file.rank for file in manifest.files] == [ref.rank for ref in manifest.fragments] == [0, 1]
    )
    assert [(t.name, t.shape, [s.box for s in t.shards]) for t in manifest.tensors] == [
        ("x", (12, 4), [TOP, BOTTOM])
    ]
    assert manifest.created_at == 1001.0
    assert msgspec.json.decode(manifest.metadata) == {"run": 1}


@settings(max_examples=examples(50))
@given(st.integers(0, 2**32))
def test_the_order_of_fragments_does_not_change_a_byte(seed):
    rng = random.Random(seed)
    trees = [raw({"a": 1, f"stage{rank}": [rank]}) for rank in range(3)]
    found = fragments(
        [leaf(TOP), leaf(ALL, name="y")], [leaf(BOTTOM)], [leaf(TOP), leaf(ALL, name="y")],
        arrays={**X, "y": X["x"]}, tree=trees, tied=[{"z": "x"}, {}, {"w": "y"}],
    )  # fmt: skip
    assert pack(merge(map(with_ref, rng.sample(found, 3)))) == pack(merge(map(with_ref, found)))


# -- copies ----------------------------------------------------------------------------------------


def test_equal_copies_are_kept_once_from_the_lowest_rank():
    manifest = merged(
        fragments(
            [leaf(TOP)],
            [leaf(TOP), leaf(ALL, name="y")],
            [leaf(BOTTOM), leaf(ALL, name="y")],
            arrays={**X, "y": X["x"]},
        )
    )
    shards = {
        tensor.name: [(shard.rank, shard.box) for shard in tensor.shards]
        for tensor in manifest.tensors
    }
    assert shards == {"x": [(0, TOP), (2, BOTTOM)], "y": [(1, ALL)]}


@pytest.mark.parametrize("element", [(0, 0), (11, 3)])
def test_copies_that_differ_in_one_element_are_refused_with_name_and_ranks(element):
    other = {"x": X["x"].copy()}
    other["x"][element] += 1
    with pytest.raises(ReplicasDiverged, match="'x' differs between ranks 1, 2") as caught:
        merged(fragments([], [leaf(ALL)], [leaf(ALL)], arrays=[X, X, other]))
    assert (caught.value.name, caught.value.ranks) == ("x", (1, 2))


def test_the_order_of_dimensions_is_that_of_the_lowest_rank_that_has_one():
    """A part of one row has no order of its own."""
    parts = [Box((n * 4, 0), (4, 4)) for n in range(3)]
    orders = [(), (1, 0), (0, 1)]
    found = fragments(
        *(
            [dataclasses.replace(leaf(part), order=order)]
            for part, order in zip(parts, orders, strict=True)
        )
    )
    assert merged(found).tensors[0].order == (1, 0)


def test_the_views_of_a_buffer_are_those_of_the_lowest_rank_that_has_it():
    """Views of two ranks would not have their places in one buffer."""
    names = ("a", "b", "c", "d")
    places = [
        {"a": View("a", 0, (4, 1)), "b": View("a", 192, (4, 1))},
        {"a": View("a", 0, (4, 1)), "c": View("a", 192, (4, 1)), "d": View("d", 0, (4, 1))},
    ]
    arrays = dict.fromkeys(names, X["x"])
    leaves = [leaf(ALL, name=name) for name in names]
    found = fragments(leaves, leaves, arrays=arrays)
    parts = [replace(part, views=views) for part, views in zip(found, places, strict=True)]
    assert merged(parts).views == {**places[0], "d": View("d", 0, (4, 1))}


def test_digests_of_shared_leaves_must_agree():
    found = fragments([leaf(TOP)], [leaf(BOTTOM)], replicas=[{"x": "all=1.0"}, {"x": "all=2.0"}])
    with pytest.raises(ReplicasDiverged) as caught:
        merged(found)
    assert (caught.value.name, caught.value.ranks) == ("x", (0, 1))


def test_digests_of_different_boxes_are_not_compared():
    merged(fragments([leaf(TOP)], [leaf(BOTTOM)], replicas=[{"x": "top=1.0"}, {"x": "bottom=2.0"}]))


# -- tensors that are not whole --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "two", "expected"),
    [
        (leaf(TOP), leaf(), "24 of 48 elements are in no box"),
        (leaf(TOP), leaf(Box((7, 0), (5, 4))), "4 of 48 elements are in no box"),
        (leaf(TOP), leaf(Box((5, 0), (7, 4))), "overlap"),
        (leaf(ALL), leaf(TOP), "overlap"),
    ],
)
def test_holes_and_overlaps_are_refused_with_the_name(one, two, expected):
    with pytest.raises(TensorIncomplete, match=expected) as caught:
        merged(fragments([one], [two]))
    assert caught.value.name == "x"
    assert "rank 0 wrote" in str(caught.value)
    assert "rank 1 wrote" in str(caught.value)


@pytest.mark.parametrize(
    ("two", "expected"),
    [
        (
            leaf(Box((0, 0), (4, 12)), shape=(4, 12)),
            r"float32\[12, 4\] on rank 0 and float32\[4, 12\] on rank 1",
        ),
        (leaf(BOTTOM, dtype="int32"), r"float32\[12, 4\] on rank 0 and int32\[12, 4\] on rank 1"),
    ],
)
def test_ranks_that_disagree_about_a_tensor_are_refused(two, expected):
    arrays = {"x": np.zeros(two.shape, dtype=two.dtype)}
    with pytest.raises(TensorIncomplete, match=expected):
        merged(fragments([leaf(TOP)], [two], arrays=[X, arrays]))


def test_a_tensor_without_elements_is_whole():
    nothing = leaf(Box((0, 0), (0, 3)), name="none", shape=(0, 3))
    manifest = merged(
        fragments([nothing], [nothing], arrays={"none": np.zeros((0, 3), np.float32)})
    )
    assert [tensor.name for tensor in manifest.tensors] == ["none"]


@pytest.mark.parametrize("field", ["step", "attempt", "chunk_bytes", "world_size"])
def test_fragments_of_different_saves_are_refused(field):
    one, two = fragments([leaf(TOP)], [leaf(BOTTOM)])
    other = {"step": 6, "attempt": "zzzzzz", "chunk_bytes": 128, "world_size": 3}[field]
    with pytest.raises(CommitError, match="ranks 0 and 1 belong to different saves"):
        merged([one, replace(two, **{field: other})])


# -- ties ------------------------------------------------------------------------------------------


def test_a_tie_is_dropped_where_another_rank_stores_the_name():
    found = fragments(
        [leaf(ALL)],
        [leaf(ALL, name="head")],
        arrays={**X, "head": X["x"]},
        tied=[{"head": "x", "deep": "x"}, {}],
    )
    assert merged(found).tied == {"deep": "x"}


# -- trees -----------------------------------------------------------------------------------------


def tree_of(*trees):
    found = fragments(*[[]] * len(trees), tree=[raw(tree) for tree in trees])
    return msgspec.json.decode(merged(found).tree)


def test_pipeline_stages_are_joined():
    one = {"step": 3, "stage0": {"lr": 1}, "model": {"$": "module", "values": {"a.extra": 1}}}
    two = {
        "step": 3,
        "stage1": [2],
        "model": {"$": "module", "values": {"b.extra": 2}},
        "sched": {"$": "object", "v": {"n": 1}},
    }
    assert tree_of(one, two) == {
        "step": 3,
        "stage0": {"lr": 1},
        "stage1": [2],
        "model": {"$": "module", "values": {"a.extra": 1, "b.extra": 2}},
        "sched": {"$": "object", "v": {"n": 1}},
    }


def optimizer(params, state, **values):
    return {
        "opt": {
            "$": "optimizer",
            "groups": [{"params": params, "values": {"lr": 0.1, **values}}],
            "state": state,
        }
    }


def ordered(**values: object) -> dict[str, object]:
    """Return the node of an `OrderedDict`, as `Module.state_dict()` returns it."""
    versions = {"$": "OrderedDict", "v": [["", {"version": 1}]]}
    return {"$": "OrderedDict", "v": [list(pair) for pair in values.items()], "m": versions}


def test_state_dicts_of_stages_are_joined():
    node = {"$": "tensor", "n": "x"}
    trees = [raw({"m": ordered(a=node, both=1)}), raw({"m": ordered(b=node, both=1)})]
    manifest = merged(fragments([leaf(TOP)], [leaf(BOTTOM)], tree=trees))
    assert msgspec.json.decode(manifest.tree) == {"m": ordered(a=node, both=1, b=node)}


def test_dicts_with_other_keys_than_strings_are_joined():
    trees = [raw({"m": {"$": "dict", "v": [[rank, f"layer {rank}"]]}}) for rank in range(2)]
    manifest = merged(fragments([leaf(TOP)], [leaf(BOTTOM)], tree=trees))
    pairs = [[0, "layer 0"], [1, "layer 1"]]
    assert msgspec.json.decode(manifest.tree) == {"m": {"$": "dict", "v": pairs}}


@pytest.mark.parametrize("other", [ordered(a=1, b=3), ordered(b=2, a=1)])
def test_state_dicts_that_differ_in_a_value_or_in_their_order_are_refused(other):
    trees = [raw({"m": ordered(a=1, b=2)}), raw({"m": other})]
    with pytest.raises(ReplicasDiverged, match="'m"):
        merged(fragments([leaf(TOP)], [leaf(BOTTOM)], tree=trees))


def test_optimizers_of_stages_have_all_parameters_once():
    joined = tree_of(
        optimizer(["a", "shared"], {"opt/a/step": 1}), optimizer(["shared", "b"], {"opt/b/step": 1})
    )
    assert joined == optimizer(["a", "shared", "b"], {"opt/a/step": 1, "opt/b/step": 1})


@pytest.mark.parametrize(
    ("one", "two", "path"),
    [
        ({"step": 3}, {"step": 4}, "step"),
        ({"a": {"b/c": 1}}, {"a": {"b/c": 2}}, "a/b~1c"),
        ({"a": [1, 2]}, {"a": [1, 3]}, "a"),
        ({"a": [1]}, {"a": {"0": 1}}, "a"),
        ({"a": {"$": "tuple", "v": [1]}}, {"a": [1]}, "a"),
        ({"a": {"$": "tuple", "v": [1]}}, {"a": {"$": "tuple", "v": [2]}}, "a"),
        ({"a": {"$": "tensor", "n": "x"}}, {"a": {"$": "tensor", "n": "y"}}, "a"),
        (
            {"m": {"$": "module", "values": {"v": 1}}},
            {"m": {"$": "module", "values": {"v": 2}}},
            "m/v",
        ),
        ({"o": {"$": "object", "v": {"n": 1}}}, {"o": {"$": "object", "v": {"n": 2}}}, "o/n"),
        (optimizer([], {}), optimizer([], {}, lr=0.2), "opt/param_groups/0"),
        (
            optimizer([], {"opt/a/step": 1}),
            optimizer([], {"opt/a/step": 2}),
            "opt/state/opt~1a~1step",
        ),
        (
            {"opt": {"$": "optimizer", "groups": [], "state": {}}},
            optimizer([], {}),
            "opt/param_groups",
        ),
        ({"a": 1}, {"a": True}, "a"),
        ({"a": 1}, {"a": 1.0}, "a"),
        ({"a": 0.0}, {"a": -0.0}, "a"),
        ({"a": [1]}, {"a": [True]}, "a"),
        (optimizer([], {}, on=1), optimizer([], {}, on=True), "opt/param_groups/0"),
    ],
)
def test_values_that_differ_are_refused_with_path_and_ranks(one, two, path):
    with pytest.raises(ReplicasDiverged) as caught:
        tree_of(one, one, two)
    assert (caught.value.name, caught.value.ranks) == (path, (0, 2))


@pytest.mark.parametrize(
    ("one", "two", "expected"),
    [
        (
            {"a": {"$": "tensor", "n": "a"}},
            {"a": 3},
            "'a'.* 0, 1 .tensor on rank 0 and int on rank 1",
        ),
        (
            {"a": {"b": 1}},
            {"a": {"$": "module", "values": {}}},
            "'a'.*dict on rank 0 and module on rank 1",
        ),
        ({"a": "1"}, {"a": 1}, "'a'.*string on rank 0 and int on rank 1"),
    ],
)
def test_what_is_of_another_kind_on_another_rank_is_told(one, two, expected):
    with pytest.raises(ReplicasDiverged, match=expected):
        tree_of(one, two)


@pytest.mark.parametrize(
    ("with_value", "without"),
    [
        ({"m": {"$": "module", "values": {"x": 1}}}, {"m": {"$": "module", "values": {}}}),
        (optimizer([], {"m/x": 1}), optimizer([], {})),
    ],
)
def test_a_tensor_of_a_module_that_is_a_plain_value_elsewhere_is_told(with_value, without):
    found = fragments(
        [leaf(ALL, name="m/x")],
        [leaf(ALL)],
        arrays={"x": X["x"], "m/x": X["x"]},
        tree=[raw(without), raw(with_value)],
    )
    with pytest.raises(
        ReplicasDiverged, match=r"'m/x'.*tensor on rank 0 and plain value on rank 1"
    ):
        merged(found)


def test_a_mesh_that_changed_on_some_ranks_is_told():
    """Rank 0 cuts the tensor in two, and ranks 1 and 2 cut it in three."""
    third = [Box((at, 0), (4, 4)) for at in (0, 4, 8)]
    with pytest.raises(TensorIncomplete) as caught:
        merged(fragments([leaf(TOP)], [leaf(third[1])], [leaf(third[2])]))
    reported = str(caught.value)
    assert "'x': boxes overlap at (4, 0)" in reported, reported
    for part in (
        "rank 0 wrote [6, 4] at [0, 0]",
        "rank 1 wrote [4, 4] at [4, 0]",
        "mesh that changed",
    ):
        assert part in reported, reported


def test_dicts_that_differ_in_order_only_are_equal():
    assert tree_of({"a": 1, "b": {"c": 2, "d": 3}}, {"b": {"d": 3, "c": 2}, "a": 1}) == {
        "a": 1,
        "b": {"c": 2, "d": 3},
    }


def test_metadata_that_differs_is_refused():
    with pytest.raises(ReplicasDiverged) as caught:
        merged(fragments([], [], metadata=[raw({"note": 1}), raw({"note": 2})]))
    assert caught.value.name == "metadata/note"


def test_per_rank_trees_are_kept_apart():
    manifest = merged(fragments([], [], per_rank=[raw({"rng": 1}), raw({"rng": 2})]))
    assert {rank: msgspec.json.decode(tree) for rank, tree in manifest.per_rank.items()} == {
        "0": {"rng": 1},
        "1": {"rng": 2},
    }


def test_a_rank_without_a_file_has_no_part_in_the_files():
    one, two = fragments([leaf(ALL)], [])
    manifest = merged([one, replace(two, file=None)])
    assert [file.rank for file in manifest.files] == [0]


def test_what_is_remembered_from_the_last_merge_changes_no_byte_of_the_next():
    known = MergeCache()
    other = {"x": X["x"] + 1}
    cases = [
        fragments([leaf(TOP)], [leaf(BOTTOM)]),
        fragments([leaf(TOP)], [leaf(BOTTOM)], arrays=other, step=8),
        fragments([leaf(BOTTOM)], [leaf(TOP)]),  # the same boxes, held by others
        fragments([leaf(ALL)], []),
        fragments([leaf(ALL, name="y")], [], arrays={"y": X["x"]}),
        fragments([leaf(TOP)], [leaf(BOTTOM)]),
    ]
    for found in cases:
        assert pack(merge(map(with_ref, found), known)) == pack(merge(map(with_ref, found)))


def test_copies_are_compared_each_time():
    known = MergeCache()
    merge((with_ref(f) for f in fragments([leaf(ALL)], [leaf(ALL)])), known)
    drifted = fragments([leaf(ALL)], [leaf(ALL)], arrays=[X, {"x": X["x"] + 1}])
    with pytest.raises(ReplicasDiverged):
        merge((with_ref(f) for f in drifted), known)


def test_a_hole_is_found_after_a_merge_without_one():
    known = MergeCache()
    merge((with_ref(f) for f in fragments([leaf(TOP)], [leaf(BOTTOM)])), known)
    with pytest.raises(TensorIncomplete):
        merge((with_ref(f) for f in fragments([leaf(TOP)], [])), known)


def test_a_fragment_is_checked_again_where_it_differs_from_the_one_that_was_in_order():
    known = MergeCache()
    (good,) = fragments([leaf(ALL)])
    merged([good], known)
    shard = replace(good.tensors[0].shards[0], offset=1)
    moved = replace(good, tensors=(replace(good.tensors[0], shards=(shard,)),))
    with pytest.raises(ManifestCorrupt, match="chunks"):
        merged([moved], known)
    assert good.file is not None
    first, *rest = good.file.chunks
    half = replace(first, nbytes=first.nbytes // 2)
    cut = replace(good.file, chunks=(half, half, *rest))
    merged([replace(good, file=cut)], known)  # other lengths: checked again, and accepted
    joined = replace(good.file, chunks=(replace(first, nbytes=good.file.size),))
    with pytest.raises(ManifestCorrupt, match="chunks"):
        merged([replace(good, file=joined)], known)


def test_what_did_not_change_since_the_last_merge_is_not_unpacked_again(monkeypatch):
    known = MergeCache()
    merge(map(with_ref, fragments([leaf(TOP)], [leaf(BOTTOM)])), known)
    monkeypatch.setattr(merge_layouts, "columns_of", None)
    monkeypatch.setattr(merge_layouts, "offsets_of", None)
    other = fragments([leaf(TOP)], [leaf(BOTTOM)], arrays={"x": X["x"] + 1}, step=8)
    assert merge(map(with_ref, other), known).step == 8

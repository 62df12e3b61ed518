"""Long plain values get the nodes that a call for each container would make."""

from __future__ import annotations

import gc
import math
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable
from enum import Enum, StrEnum
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpt import CheckpointManager
from ckpt.errors import ManifestCorrupt, UnsupportedValue
from ckpt.model import values, values_by_level
from ckpt.model.values import decode, dumps, encode, plain_node, to_json
from ckpt.model.values_by_level import is_plain
from ckpt.state.walk.collect import collect
from ckpt.state.walk.state_objects import walk_objects, walk_tensors
from tests.kit.marks import torture


def refuse(value: object, path: str) -> Any:
    raise UnsupportedValue(path, type(value).__name__)


def history(length: int) -> list[Any]:
    return [
        {
            "step": step,
            "pair": (step, 0.5 * step),
            "parts": [[step], (), {"a": (1, None)}, [], {}],
            "loss": math.nan if step % 7 == 0 else 1.0,
        }
        for step in range(length)
    ]


MIXED = [*history(9), 2**70, "é", b"x", np.float32(2), {3}, OrderedDict(a=(1,)), True, (-0.0,)]


REORDER: OrderedDict[str, Any] = OrderedDict(a=1, b=(2,), c=3)
REORDER.move_to_end("a")


@pytest.mark.parametrize(
    "value",
    [
        history(40),
        MIXED,
        tuple(MIXED),
        {"a": MIXED, "b": tuple(history(2))},
        [{1: 2}, (3,)],
        [{"$": 1}, (3,)],
        [{"é": 1}, (3,)],
        [[0] * 3] * 70,
        [(1, 2)] * 70,
        [[]] * 70,
        [{1: (2,)}, {"a": 1}, {"$": 3}, {(1, 2): {True: []}}, {}] * 20,
        [OrderedDict(b=1, a=[(2,)]), Counter("abca"), OrderedDict(), (3,)] * 20,
        [REORDER, {1: REORDER}, [REORDER]],
        ["é", math.inf, math.nan, -math.nan, 2**64, "a"] * 20,
    ],
    ids=lambda _: "",
)
def test_a_value_has_the_same_node_as_one_call_for_each_container_makes(
    value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = dumps(encode(value, "v", refuse), "v")
    monkeypatch.setattr(values, "CONTAINERS", frozenset())
    assert together == dumps(encode(value, "v", refuse), "v")


def test_what_is_not_plain_is_named_with_its_path() -> None:
    value = [*history(80), {"deep": [(1, object())]}]
    with pytest.raises(UnsupportedValue) as refused:
        encode(value, "v", refuse)
    assert refused.value.name == "v/80/deep/0/1"


class Name(StrEnum):
    A = "a"


@pytest.mark.parametrize("key", [Name.A, "\ud800", np.str_("a")])
def test_a_key_that_is_no_text_is_named_beside_an_equal_one(key: str) -> None:
    with pytest.raises(UnsupportedValue, match=r"v/1/"):
        encode([{"a": 1}, {key: 2}], "v", refuse)


def test_dicts_whose_keys_have_one_hash_are_refused_inside_of_a_list() -> None:
    collision = {number * sys.hash_info.modulus: 0 for number in range(1, 30)}
    with pytest.raises(UnsupportedValue, match="one hash"):
        encode([{}, collision], "v", refuse)


def test_the_names_of_a_plain_value_are_as_many_as_its_node_has() -> None:
    """A tree that ``dumps`` lets pass is one that ``parse`` lets pass."""
    value = [{"a key of 24 characters..": (step, [step, {}])} for step in range(50)]
    part = plain_node(value, "history")
    assert part is not None
    tree = {"history": part.node}
    assert part.name_chars >= values.most_name_chars(tree) - 1
    depth: Any = list(range(5000))
    for _ in range(5):
        depth = {"z" * 100_000: depth}
    deep = plain_node(depth, "n")
    assert deep is not None
    for name_chars in ({"n": deep.name_chars}, {}):
        with pytest.raises(UnsupportedValue, match="as many characters"):
            dumps({"n": deep.node}, "state", name_chars)


@pytest.mark.parametrize(
    "settings",
    [
        {"lr": 1e-3, "betas": (0.9, math.inf), "foreach": None, "names": ["a", "\u00e9"]},
        {"$": "tag", "lr": 1},
        {1: 2, "x": (), (1, 2): []},
        {},
    ],
)
def test_a_small_dict_gets_the_node_that_the_levels_would_make(settings: dict[Any, Any]) -> None:
    assert values._is_small(settings)
    node = values_by_level.node_of(settings, 0, values._MAX_DEPTH, values._encode_leaf)
    assert encode(settings, "v", refuse) == node


@pytest.mark.parametrize("inner", [{"a": 1}, [[1]], [0] * 40, OrderedDict()])
def test_a_dict_is_not_small_with_dicts_nested_lists_or_many_values(inner: Any) -> None:
    assert not values._is_small({"x": inner})


def test_a_small_tree_may_have_names_that_are_too_long_or_be_too_deep() -> None:
    long = {"k" * 4_000: [0] * 2_000}
    deep: Any = []
    for _ in range(values._MAX_JSON_DEPTH - 1):
        deep = [deep]
    assert len(dumps(deep[0], "state")) == 2 * (values._MAX_JSON_DEPTH - 1)
    for tree, words in ((long, "as many characters"), (deep, "nested too deeply")):
        assert len(msgspec.json.encode(tree)) < values._LARGE_JSON
        with pytest.raises(UnsupportedValue, match=words):
            dumps(tree, "state")


def containers_of(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text("k~/", max_size=5), inner)
    )


trees: st.SearchStrategy[Any] = st.recursive(st.integers(0, 9), containers_of, max_leaves=30)
with_tuples: st.SearchStrategy[Any] = st.recursive(
    st.integers(0, 9),
    lambda inner: st.one_of(
        containers_of(inner), st.tuples(inner, inner), st.lists(inner, max_size=3).map(tuple)
    ),
    max_leaves=30,
)


@given(trees)
def test_the_json_of_a_tree_bounds_the_characters_of_its_names(tree: Any) -> None:
    def name_chars(node: Any, chars: int = 0) -> int:
        items = list(node.items()) if isinstance(node, dict) else list(enumerate(node))
        total = chars * len(items)
        for key, item in items:
            if isinstance(item, dict | list):
                part_chars = len(key) + 1 if isinstance(key, str) else values_by_level.INDEX_CHARS
                total += name_chars(item, chars + part_chars)
        return total

    most = values._most_name_chars_of_json(msgspec.json.encode([tree]))
    assert name_chars([tree]) <= most


@given(with_tuples)
def test_compact_nodes_of_tuples_have_the_same_json(value: Any) -> None:
    nodes = [
        values_by_level.node_of(
            [value],
            0,
            values._MAX_DEPTH,
            values._encode_leaf,
            values_by_level.WalkSize(is_compact=is_compact),
        )
        for is_compact in (True, False)
    ]
    compact, plain = map(msgspec.json.encode, nodes)
    assert compact == plain == dumps(encode([value], "v", refuse), "v")


def test_wide_containers_in_themselves_end_the_walk() -> None:
    inner: list[Any] = []
    inner += [inner] * 1000
    assert not is_plain(inner, frozenset({int}), 100)
    with pytest.raises(UnsupportedValue, match=r"'v'.*others, or itself, again and again"):
        encode(inner, "v", refuse)


class Colour(Enum):
    RED = 1


INMOST = pytest.mark.parametrize(
    "inmost", [0.5, torch.ones(1), Colour.RED], ids=["float", "tensor", "enum"]
)


def held_twice(kind: type, inmost: object) -> Any:
    """Return ``inmost`` in containers that hold another one twice, forty times."""
    shared = inmost
    for _ in range(40):
        pair = {"a": shared, "b": shared}
        shared = kind(pair if issubclass(kind, dict) else pair.values())
    return shared


@pytest.mark.parametrize(
    ("kind", "inmost"),
    [
        (list, 0.5),
        (OrderedDict, torch.ones(1)),
        *torture((tuple, torch.ones(1)), (dict, Colour.RED), (OrderedDict, Colour.RED)),
    ],
)
def test_containers_that_hold_others_twice_many_times_are_refused_by_name(
    kind: type, inmost: object
) -> None:
    shared = held_twice(kind, inmost)
    with pytest.raises(UnsupportedValue, match=r"x.*again and again"):
        collect({"x": shared}, rank=0)
    with pytest.raises(UnsupportedValue, match=r"x.*again and again"):
        to_json("x", shared)


@INMOST
def test_a_restore_into_containers_that_hold_others_twice_many_times_ends(
    inmost: object, tmp_path: Path
) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save({"x": 1}, 1)
        state = {"x": held_twice(list, inmost)}
        if inmost == 0.5:  # It is replaced as a whole
            manager.restore(state)
            assert state == {"x": 1}
        else:
            with pytest.raises(UnsupportedValue, match=r"x.*again and again"):
                manager.restore(state)


def test_a_value_that_is_shared_many_times_is_encoded_as_often() -> None:
    default = {"lr": 0.1, "betas": (0.9, 0.99)}
    node = encode([default] * 100_000, "v", refuse)
    assert node == [{"lr": 0.1, "betas": {"$": "tuple", "v": [0.9, 0.99]}}] * 100_000


@pytest.mark.parametrize("row", [0.5, torch.ones(1)], ids=["plain", "tensor"])
def test_a_table_of_one_row_again_and_again_is_saved(row: object, tmp_path: Path) -> None:
    default = {f"column {number}": number for number in range(200)}
    with CheckpointManager(tmp_path) as manager:
        manager.save({"x": [default] * 1000 + [row]}, 1)
        state: dict[str, Any] = {"x": [dict.fromkeys(default) for _ in range(1000)] + [row]}
        manager.restore(state)
    assert state["x"][999] == default


@pytest.mark.parametrize(
    "work",
    [
        lambda value: dumps(encode(value, "v", refuse), "v"),
        lambda value: list(walk_objects({"v": value})),
        lambda value: list(walk_tensors({"v": value})),
    ],
    ids=["node", "objects", "tensors"],
)
@pytest.mark.parametrize(
    "make",
    [
        lambda length: [(number, 0.5, "x") for number in range(length)],
        lambda length: [{"n": number, "l": [[number], {"a": (0.5,)}]} for number in range(length)],
        lambda length: [number * 0.5 for number in range(length)],
    ],
    ids=["tuples", "nested", "floats"],
)
def test_no_function_is_called_for_each_of_many_containers(
    make: Callable[[int], Any], work: Callable[[Any], object]
) -> None:
    def calls(length: int) -> int:
        value, count = make(length), 0

        def counted(frame: object, event: str, argument: object) -> None:
            del frame, argument
            nonlocal count
            count += event == "call"

        sys.setprofile(counted)
        try:
            work(value)
        finally:
            sys.setprofile(None)
        return count

    assert calls(2000) < calls(200) + 100  # One call for each container would be 1800 more


def test_the_keys_of_many_tensors_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """A save looks whether each value of the state is plain, and a large dict of tensors is not."""
    looked_at: list[int] = []
    pair_flags = values_by_level._pair_flags

    def counted(kind: type, members: Any, keys: Any) -> Any:
        looked_at.append(len(keys))
        return pair_flags(kind, members, keys)

    monkeypatch.setattr(values_by_level, "_pair_flags", counted)
    tensors = {f"t{i}": torch.zeros(1) for i in range(2000)}
    assert plain_node(tensors, "t") is None
    assert plain_node({"inner": tensors}, "t") is None
    assert looked_at == [1]


@pytest.mark.parametrize("runs", [True, False])
def test_the_garbage_collector_is_as_it_was(runs: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if runs else gc.disable)()
        encode(history(50), "v", refuse)
        with pytest.raises(UnsupportedValue):
            encode([(1, object())], "v", refuse)
        assert gc.isenabled() == runs
    finally:
        (gc.enable if before else gc.disable)()


def each_alone(value: Any) -> Any:
    """Return the value of a node by a call for each container."""
    return values._decode(value, refuse_tag)


def refuse_tag(tag: str, node: object) -> Any:
    raise ValueError(tag)


@pytest.mark.parametrize(
    "value",
    [
        *(history(3), MIXED, tuple(MIXED), {"a": MIXED}, [{1: 2}, (3,)], [{"$": 1}], (), [(), {}]),
        *(
            {},
            [{1: (2,)}, {"a": 1}, {(1, 2): {3: []}}, Counter("aab"), REORDER],
            [REORDER, 1, [], ()],
        ),
    ],
    ids=lambda _: "",
)
def test_a_node_has_the_value_that_one_call_for_each_container_makes(value: Any) -> None:
    node = encode(value, "v", refuse)
    assert repr(decode(node, refuse_tag)) == repr(each_alone(node)) == repr(value)


def test_a_value_shares_no_list_with_its_node() -> None:
    node = [[1, [2]], {"a": [3]}]
    value = decode(node, refuse_tag)
    value[0][1].append(4)
    value[1]["a"].append(5)
    assert node == [[1, [2]], {"a": [3]}]


@pytest.mark.parametrize(
    "node",
    [
        [{"$": "tuple"}],
        [{"$": "tuple", "v": 3}],
        [{"$": "what"}],
        [{"$": ["tuple"], "v": []}],
        [{"$": "bytes", "v": "?"}],
        {"$": "tuple", "v": [[{"$": "int", "v": "z"}]]},
    ],
)
def test_a_node_that_is_no_value_is_named_by_its_tag(node: Any) -> None:
    with pytest.raises(ManifestCorrupt) as refused:
        decode(node, refuse_tag)
    with pytest.raises(ManifestCorrupt) as alone:
        each_alone(node)
    assert str(refused.value) == str(alone.value)


def test_a_tag_of_null_is_a_key() -> None:
    assert decode([{"$": None}, {"$": "tuple", "v": [1]}], refuse_tag) == [{"$": None}, (1,)]

from __future__ import annotations

import contextlib
import datetime as dt
import enum
import math
import os
import struct
import subprocess
import sys
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ckpt.errors import ManifestCorrupt, UnsupportedValue
from ckpt.model.values import decode, dumps, encode, join, to_json, unescape
from tests.kit.examples import examples

ROOT = Path(__file__).resolve().parents[2]


def refuse(value, path):
    raise UnsupportedValue(path, type(value).__name__)


def unknown(tag, node):
    raise ManifestCorrupt("tree", f"tag {tag!r}")


def round_trip(value):
    return decode(msgspec.json.decode(dumps(encode(value, "v", refuse), "v")), unknown)


def same(one, two) -> bool:
    """Return whether both are equal in type, order and every bit, sets and floats included."""
    if type(one) is not type(two):
        return False
    if isinstance(one, float) and not isinstance(one, np.generic):
        return struct.pack("d", one) == struct.pack("d", two) or (
            math.isnan(one) and math.isnan(two)
        )
    if isinstance(one, complex) and not isinstance(one, np.generic):
        return same(one.real, two.real) and same(one.imag, two.imag)
    if isinstance(one, np.generic):
        return one.dtype == two.dtype and one.tobytes() == two.tobytes()
    if isinstance(one, dict):
        return len(one) == len(two) and all(
            same(a, b) and same(one[a], two[b]) for a, b in zip(one, two, strict=True)
        )
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(same, one, two))
    if isinstance(one, set | frozenset):
        return len(one) == len(two) and all(any(same(a, b) for b in two) for a in one)
    return one == two


text = st.text(st.characters(exclude_categories=["Cs"]))
integers = (
    st.integers()
    | st.integers(-(2**70), 2**70)
    | st.sampled_from([2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 10**500])
)
numpy_scalars = st.one_of(
    st.floats(width=32).map(np.float32),
    st.floats(width=16).map(np.float16),
    st.floats().map(np.float64),
    st.integers(-128, 127).map(np.int8),
    st.integers(0, 2**64 - 1).map(np.uint64),
    st.booleans().map(np.bool_),
    st.complex_numbers(allow_nan=False).map(np.complex128),
)  # fmt: skip
hashable_leaves = st.one_of(
    st.none(),
    st.booleans(),
    integers,
    text,
    st.floats(allow_nan=False),
    st.binary(),
    st.complex_numbers(allow_nan=False),
)
leaves = st.one_of(hashable_leaves, st.floats(), st.binary().map(bytearray), numpy_scalars)
hashables = st.recursive(
    hashable_leaves,
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.sets(hashables, max_size=4),
        st.frozensets(hashables, max_size=4),
        st.dictionaries(text | text.map("${}".format), inner, max_size=4),
        st.dictionaries(hashables, inner, max_size=4),
        st.dictionaries(text, inner, max_size=4).map(OrderedDict),
        st.dictionaries(hashables, st.integers(), max_size=4).map(Counter),
    ),
    max_leaves=20,
)


@settings(max_examples=examples(300))
@given(values)
@example([-0.0, 0.0, math.inf, -math.inf, math.nan, 5e-324, 1e308, 1.0, 1])
@example({"$": 1, "$$": {"$": "tuple", "v": [1]}})
@example({1: "int", "1": "str", (1, 2): "pair", None: "none", b"": "bytes", -0.0: "zero"})
@example({"": {"/": {"~": 1}}})
@example(complex(-0.0, math.nan))
@example([np.longdouble(1) / 3, np.uint8(255), np.float64(math.nan)])
@example(OrderedDict([("b", 1), ("a", 2)]))
@example(Counter({"a": -3}))
@example({frozenset({1, (2, 3)}): bytearray(b"\x00\xff")})
def test_plain_values_come_back_as_they_were(value):
    assert same(round_trip(value), value)


@pytest.mark.parametrize("bits", ["7ff8000000000123", "fff8000000000000", "7ff0000000000001"])
def test_the_bits_of_a_nan_are_kept(bits):
    def bits_of(value):
        return struct.pack(">d", value).hex()

    (value,) = struct.unpack(">d", bytes.fromhex(bits))
    plain, both = round_trip([value, complex(value, -0.0)])
    assert [bits_of(plain), bits_of(both.real), bits_of(both.imag)] == [bits, bits, "8" + "0" * 15]


def test_a_key_with_a_frozenset_has_one_name_whatever_the_order_of_its_members():
    def names(members):
        key = frozenset(members)
        return [join("a", each) for each in (key, (key,), (1, (key, "x")), frozenset([key, 2**64]))]

    assert list(frozenset([0.5, 8])) != list(frozenset([8, 0.5]))
    assert names([0.5, 8]) == names([8, 0.5])
    plain: tuple[object, ...] = (
        (),
        (1,),
        (1, "x"),
        ((1,), (2, 3)),
        frozenset(),
        frozenset({1}),
        (frozenset({"x"}),),
    )
    assert [join("", key) for key in plain] == [f"~2{key!r}" for key in plain]


def test_the_versions_of_a_state_dict_are_kept():
    value = OrderedDict(a=1)
    versions = vars(value)["_metadata"] = OrderedDict(
        [("", {"version": 2}), ("norm", {"version": (1, None)})]
    )
    found = round_trip({"x": [value]})["x"][0]
    assert same(found, value)
    assert same(vars(found)["_metadata"], versions)


def test_two_long_containers_in_a_list_are_no_key_and_value():
    """The pairs of a tagged dict have the same JSON, and the name of a value has its key in it."""
    numbers = list(range(5000))
    for two in ([numbers, numbers], [{"a": numbers}, {"a": numbers}], [(1, numbers), numbers]):
        assert same(round_trip(two), two)
        assert same(round_trip({3: two}), {3: two})


@pytest.mark.parametrize("make", [set, frozenset, dict.fromkeys, Counter, OrderedDict.fromkeys])
def test_what_a_reader_would_refuse_for_its_hashes_is_refused_when_it_is_saved(make):
    """Numbers that are a multiple of 2**61 - 1 apart have one hash."""
    value = make([number * (2**61 - 1) for number in range(1, 17)])
    assert same(round_trip(value), value)
    value = make([number * (2**61 - 1) for number in range(1, 18)])
    with pytest.raises(UnsupportedValue, match="of one hash") as caught:
        encode({"a": value}, "state", refuse)
    assert caught.value.name == "state/a"


def test_ordinary_values_are_themselves_in_json():
    assert to_json("v", {"lr": 0.1, "betas": [0.9, 1], "name": "x", "on": True, "no": None}) == (
        b'{"lr":0.1,"betas":[0.9,1],"name":"x","on":true,"no":null}'
    )


# -- refusals --------------------------------------------------------------------------------------


class Color(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 1


class Text(str):
    __slots__ = ()


Pair = namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    "value",
    [
        Color.RED, Level.LOW, Text("x"), Pair(1, 2), dt.datetime(2020, 1, 1), dt.timedelta(1), object(), print,  # noqa: E501
        lambda: None, int, defaultdict(list), deque(), range(3), memoryview(b""), np.datetime64("2020-01-01"), np.str_("x"),  # noqa: E501
        np.zeros(2), iter([]), ..., slice(1),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_what_would_need_pickle_is_refused_with_its_path(value):
    with pytest.raises(UnsupportedValue) as caught:
        encode({"a": [0, {"b/c": (value,)}]}, "state", refuse)
    assert caught.value.name == "state/a/1/b~1c/0"
    assert caught.value.kind == type(value).__name__


def test_to_json_refuses_with_the_path_and_the_kind():
    with pytest.raises(UnsupportedValue, match="'metadata/run/0' is a Color") as caught:
        to_json("metadata", {"run": [Color.RED]})
    assert caught.value.name == "metadata/run/0"


def test_a_list_in_itself_is_refused():
    loop: list = []
    loop.append(loop)
    with pytest.raises(UnsupportedValue, match="nested too deeply, or in itself"):
        encode(loop, "loop", refuse)


@pytest.mark.parametrize(
    "wrap",
    [lambda v: [v], lambda v: (v,), lambda v: {"k": v}, lambda v: {1: v}, lambda v: frozenset({v})],
)
def test_a_hundred_levels_are_kept_and_many_more_are_refused(wrap):
    value = None
    for _ in range(100):
        value = wrap(value)
    assert same(round_trip(value), value)
    for _ in range(100):
        value = wrap(value)
    with pytest.raises(UnsupportedValue, match="too deeply"):
        encode(value, "deep", refuse)


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ("\ud800", ""),
        ({"\udfff": 1}, "/\udfff"),
        ({"a/b": {"c": [0, "\ud800"]}}, "/a~1b/c/1"),
        (["x", {1: "a\ud800"}], "/1/~21"),
        ({("\ud800", 1): 2}, "/key/0"),
        ({"s": {"\ud800"}}, "/s/0"),
    ],
)
def test_a_lone_surrogate_is_refused_with_the_name(value, name):
    with pytest.raises(UnsupportedValue, match="that is not text") as caught:
        to_json("metadata", value)
    assert caught.value.name == f"metadata{name}"


def test_ints_of_thousands_of_digits_come_back_from_a_set_and_as_keys():
    """Python prints no int of more than 4,300 digits. The members of a set are sorted by text."""
    large = 10**5000
    value = [{large, -large, 1}, frozenset({(large, 2), (1, large)}), {large: large}, (large,)]
    assert same(round_trip(value), value)


@pytest.mark.parametrize(
    "literal",
    [
        "{1, 'a', None, 'b', 'c'}",
        "{frozenset({'a', 'b', 'c'}), frozenset({'a', 'd'}), ('x', frozenset({'y', 'z'}))}",
    ],
)
def test_a_set_has_the_same_bytes_on_ranks_that_hash_differently(literal):
    code = f"from ckpt.model.values import to_json; print(to_json('v', {literal}))"
    ranks = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            cwd=ROOT,
        )
        for seed in "1234"
    ]
    assert len({done.stdout for done in ranks}) == 1


# -- paths -----------------------------------------------------------------------------------------


@given(st.lists(text | st.integers(), max_size=3), st.lists(text | st.integers(), max_size=3))
def test_two_places_never_share_a_path(one, two):
    def path(parts):
        found = "root"
        for part in parts:
            found = join(found, part)
        return found

    assert (path(one) == path(two)) == (one == two)


def test_parts_of_a_path_are_escaped():
    assert join("", "a") == "a"
    assert join("a", "b/c~d") == "a/b~1c~0d"
    assert join("a", 3) == "a/~23"


@given(text | st.integers(-(2**63), 2**63 - 1))
@example("~2")
@example("~23")
def test_a_part_of_a_path_says_which_key_it_was(key):
    assert same(unescape(join("", key)), key)


# -- decoding what we did not write ----------------------------------------------------------------

TAGS = [
    "tuple",
    "set",
    "frozenset",
    "dict",
    "OrderedDict",
    "Counter",
    "bytes",
    "bytearray",
    "int",
    "float",
    "complex",
    "numpy",
    "x",
]
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    text,
    st.sampled_from(
        [
            "AAAA",
            "AAAAAAAAAAA=",
            "<f8",
            "|b1",
            "O",
            "V8",
            "M8[s]",
            "f4,f4",
            "(2,)f4",
            "nan",
            "0x1f",
            "<U4",
            "|S1",
        ]
    ),
)
nodes = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(text, inner, max_size=3),
        st.fixed_dictionaries(
            {"$": st.sampled_from(TAGS) | inner},
            optional={"v": inner | st.lists(st.lists(inner, max_size=3), max_size=2), "d": inner},
        ),
    ),
    max_leaves=12,
)


@settings(max_examples=examples(1000))
@given(nodes)
@example({"$": "complex", "v": ["1"]})
@example({"$": "float", "v": "nan:"})
@example({"$": "float", "v": "nan:" + "f" * 17})
@example({"$": "float", "v": "nan:-1"})
@example({"$": "complex", "v": []})
@example({"$": "numpy", "d": "<f8", "v": ""})
@example({"$": "numpy", "d": "O", "v": "AAAAAAAAAAA="})
@example({"$": "numpy", "d": {"names": ["a"], "formats": ["O"]}, "v": "AAAAAAAAAAA="})
@example({"$": "numpy", "d": [["a", "f4"]], "v": "AAAA"})
@example({"$": "numpy", "d": "(,", "v": "AAAA"})
@example({"$": "numpy", "d": "f4,", "v": "AAAAAA=="})
@example({"$": "set", "v": [[1]]})
@example({"$": "dict", "v": [[{"$": "dict", "v": []}, 1]]})
@example({"$": "dict", "v": [[1]]})
@example({"$": "int", "v": "__import__('os')"})
@example({"$": "float", "v": "9" * 400 + "e999999999"})
@example({"$": "int", "v": "0x" + "f" * 20000})
@example({"$": ["tuple"], "v": []})
@example({"$": "bytes", "v": "é"})
def test_nonsense_is_refused_with_our_errors_only(node):
    with contextlib.suppress(ManifestCorrupt):
        decode(node, unknown)


def test_a_tree_nested_past_all_measure_is_refused():
    node: object = None
    for _ in range(100_000):
        node = [node]
    with pytest.raises(ManifestCorrupt):
        decode(node, unknown)


def test_other_tags_go_to_the_hook():
    seen = []
    node = {"a": [{"$": "tensor", "n": "x"}]}
    assert decode(node, lambda tag, inner: seen.append((tag, inner)) or "here") == {"a": ["here"]}
    assert seen == [("tensor", {"$": "tensor", "n": "x"})]


def test_an_object_dtype_is_never_made():
    with pytest.raises(ManifestCorrupt, match="dtype"):
        decode({"$": "numpy", "d": "|O", "v": "AAAAAAAAAAA="}, unknown)

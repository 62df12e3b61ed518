"""Long plain values get the nodes that a call for each container would make."""

from __future__ import annotations

import gc
import math
import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ckpt.adapters.walk.objects import walk_objects, walk_tensors
from ckpt.errors import UnsupportedValue
from ckpt.model import values
from ckpt.model.levels import is_plain
from ckpt.model.values import dumps, encode


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


def test_wide_containers_in_themselves_end_the_walk() -> None:
    inner: list[Any] = []
    inner += [inner] * 1000
    assert not is_plain(inner, frozenset({int}), 100)
    with pytest.raises(UnsupportedValue, match="nested too deeply, or in itself"):
        encode(inner, "v", refuse)


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

"""Plain values are made again of their nodes, once for each restore."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from ckpt.model.values import dumps, parse, plain_node
from ckpt.state.match.plain_values import Remaker


def refuse(name: str, memory: object) -> None:
    del memory
    raise AssertionError(name)


def remaker() -> Remaker:
    return Remaker({}, {}, refuse)


def node_of(value: Any) -> Any:
    part = plain_node(value, "v")
    assert part is not None
    return part.node


def test_each_call_makes_another_value_of_a_node() -> None:
    value = [{"a": [1], "b": (2, {3: [4]})}, []]
    make_value = remaker().prepare(node_of(value))
    values = [make_value() for _ in range(3)]
    values[0][0]["a"].append(5)
    assert values[1:] == [value, value]
    assert values[1] is not values[2]
    assert values[1][0] is not values[2][0]


def seconds(work: Callable[[], object]) -> float:
    """Return the least time of the processor that one of three calls takes in this thread."""

    def measure() -> float:
        began = time.thread_time()
        work()
        return time.thread_time() - began

    return min(measure() for _ in range(3))


@pytest.mark.parametrize(
    "history",
    [
        [number * 0.1 for number in range(60_000)],
        [{"step": n, "loss": n * 0.1, "lr": 1e-3, "epoch": n / 7} for n in range(20_000)],
        [{} for _ in range(60_000)],
    ],
    ids=["floats", "log history", "empty dicts"],
)
def test_a_long_history_is_made_again_in_at_most_ten_times_what_json_takes(history: Any) -> None:
    raw, text = msgspec.Raw(dumps(node_of(history), "v")), json.dumps(history)
    assert remaker().prepare(parse(raw))() == history
    duration = seconds(lambda: remaker().prepare(parse(raw))())
    assert duration < 10 * seconds(lambda: json.loads(text))

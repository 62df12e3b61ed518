"""A target that does not fit is refused before anything in it changes.

The error names what does not fit.
"""

from __future__ import annotations

import copy
import re
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ckpt import CheckpointManager, PerRank, Tier
from ckpt.errors import (
    ConfigError,
    DtypeMismatch,
    EntryMissing,
    EntryUnexpected,
    KindMismatch,
    RestoreError,
    ShapeMismatch,
)
from tests.state.saving import assert_same


def whole() -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return {
        "a": torch.ones(4),
        "array": np.ones(3),
        "deep": {"list": [torch.ones(2), {"t": torch.ones(1)}], "n": 1},
        "holder": {"m": nn.Linear(1, 1)},
        "list": [1, 2],
        "model": model,
        "n": 5,
        "optimizer": optimizer,
        "per_rank": PerRank(3),
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3),
        "tuple": (torch.ones(1), 2),
    }


@pytest.fixture(scope="module")
def root() -> str:
    place = f"memory://{uuid.uuid4().hex}"
    with CheckpointManager(place) as manager:
        manager.save(whole(), 1)
    return place


def blank() -> dict[str, Any]:
    state = whole()
    with torch.no_grad():
        for parameter in state["model"].parameters():
            parameter.fill_(-1)
    state |= {
        "a": torch.full((4,), -1.0),
        "array": np.full(3, -1.0),
        "n": -1,
        "per_rank": PerRank(-1),
        "list": [-1],
    }
    return state


def content(state: dict[str, Any]) -> Any:
    def plain(value: Any) -> Any:
        if isinstance(
            value, nn.Module | torch.optim.Optimizer | torch.optim.lr_scheduler.LRScheduler
        ):
            return copy.deepcopy(dict(value.state_dict()))
        if isinstance(value, PerRank):
            return plain(value.value)
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(plain(item) for item in value)
        return copy.deepcopy(value)

    return plain(state)


CASES: list[tuple[str, Any, type[RestoreError], str]] = [
    ("extra", torch.zeros(1), EntryMissing, "'extra'"),
    ("a", ..., EntryUnexpected, "'a'"),
    ("n", ..., EntryUnexpected, "'n'"),
    ("scheduler", ..., EntryUnexpected, "'scheduler'"),
    ("a", torch.zeros(5), ShapeMismatch, "'a'"),
    ("a", torch.zeros(2, 2), ShapeMismatch, "'a'"),
    ("a", torch.zeros(4, dtype=torch.float64), DtypeMismatch, "'a'"),
    ("a", 3, KindMismatch, "'a'"),
    ("a", nn.Linear(1, 1), KindMismatch, "'a'"),
    ("a", [torch.zeros(1)], KindMismatch, "'a'"),
    ("a", {"x": torch.zeros(1)}, KindMismatch, "'a'"),
    ("array", np.zeros(4), ShapeMismatch, "'array'"),
    ("array", np.zeros(3, "f4"), DtypeMismatch, "'array'"),
    ("n", torch.zeros(1), KindMismatch, "'n'"),
    ("n", nn.Linear(1, 1), KindMismatch, "'n'"),
    ("n", {"x": torch.zeros(1)}, KindMismatch, "'n'"),
    ("n", [torch.zeros(1)], KindMismatch, "'n'"),
    ("n", PerRank(1), KindMismatch, r"a PerRank in the target: .* \(exclude='n'\)"),
    ("list", {"x": torch.zeros(1)}, KindMismatch, "'list'"),
    ("model", 3, KindMismatch, "'model'"),
    ("model", torch.zeros(1), KindMismatch, "'model'"),
    ("model", nn.Linear(2, 3), ShapeMismatch, "'model/"),
    ("model", nn.Linear(3, 2).half(), DtypeMismatch, "'model/"),
    ("model", nn.Linear(3, 2, bias=False), EntryUnexpected, "'model/bias'"),
    ("model", nn.Sequential(nn.Linear(3, 2)), EntryMissing, r"'model/0\.weight'"),
    ("optimizer", 3, KindMismatch, "'optimizer'"),
    ("optimizer", nn.Linear(3, 2), KindMismatch, "'optimizer'"),
    ("optimizer", torch.optim.SGD([torch.zeros(1)], 0.1), EntryMissing, "optimizer/~param/0/0"),
    ("scheduler", 3, KindMismatch, "'scheduler'"),
    ("per_rank", 3, KindMismatch, "'per_rank'"),
    (
        "deep",
        {"list": [torch.zeros(2), {"t": torch.zeros(1)}], "n": 1, "more": 2},
        EntryMissing,
        "'deep/more'",
    ),
    ("deep", {"list": [torch.zeros(2), {"t": torch.zeros(1)}]}, EntryUnexpected, "'deep/n'"),
    ("deep", {"list": [torch.zeros(2)], "n": 1}, KindMismatch, "'deep/list'"),
    (
        "deep",
        {"list": [torch.zeros(2), {"t": torch.zeros(2)}], "n": 1},
        ShapeMismatch,
        "'deep/list/1/t'",
    ),
    ("holder", {}, KindMismatch, "'holder'"),
    ("holder", None, KindMismatch, "'holder'"),
    ("tuple", (torch.zeros(1), 2, 3), KindMismatch, "'tuple'"),
]


@pytest.mark.parametrize(("key", "value", "error", "named"), CASES)
def test_what_does_not_fit_is_named_and_nothing_changes(
    root: str, key: str, value: Any, error: type[RestoreError], named: str
) -> None:
    target = blank()
    if value is ...:
        del target[key]
    else:
        target[key] = value
    if key == "model" and isinstance(value, nn.Module):
        target["optimizer"] = torch.optim.SGD(value.parameters(), 0.1, momentum=0.9)
    before = content(target)
    with CheckpointManager(root) as manager:
        with pytest.raises(error, match=named):
            manager.restore(target)
        assert_same(content(target), before)
        good = blank()
        assert manager.restore(good) is not None  # the manager still works
    assert good["n"] == 5


def test_what_fits_is_restored(root: str) -> None:
    target = blank()
    with CheckpointManager(root) as manager:
        manager.restore(target)
    expected = whole()
    expected["holder"] = target["holder"]
    assert_same(content(target), content(expected))


@pytest.mark.parametrize("target", [[], None, 3, "x"])
def test_a_target_that_is_no_dict_is_refused(root: str, target: Any) -> None:
    with CheckpointManager(root) as manager, pytest.raises(RestoreError):
        manager.restore(target)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"kye": "k"}, "options.kye is not a setting: did you mean key?"),
        ({"endpoint": "http://x"}, "did you mean endpoint_url?"),
        ({"endpoint_url": 5}, "endpoint_url is not text"),
    ],
)
def test_an_option_that_s3_does_not_know_is_told_when_the_tier_is_built(
    options: dict[str, object], expected: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(expected)):
        CheckpointManager(Tier("s3://bucket/run", options=options))


def test_what_restore_and_a_handle_are_told_is_looked_at(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        saved = manager.save({"x": torch.zeros(2)}, 1)
        with pytest.raises(RestoreError, match=r"restore\(Linear\): a state is a dict"):
            manager.restore(torch.nn.Linear(2, 2))  # type: ignore[arg-type]
        calls: list[tuple[str, Callable[[], object]]] = [
            ("only=3: give names", lambda: manager.restore({}, only=3)),  # type: ignore[arg-type]
            ("step='newest': a step is", lambda: manager.restore({}, step="newest")),
            ("step=-1: a step is", lambda: manager.restore({}, step=-1)),
            ("timeout='x': give seconds", lambda: saved.result("x")),  # type: ignore[arg-type]
        ]
        for reported, call in calls:
            with pytest.raises(ConfigError, match=re.escape(reported)):
                call()

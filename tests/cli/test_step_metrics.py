from __future__ import annotations

import math
from pathlib import Path

import pytest

from ckpt import CheckpointManager
from ckpt.cli.step_metrics import metric_differences, metrics_after
from ckpt.errors import CkptError, OutOfSpace
from ckpt.storage.testing import Raise, Rule
from tests.kit.stores import faulty


@pytest.mark.parametrize(
    ("value", "replay_value", "differ"),
    [
        (1.0, 1.0, False),
        (1.0, 2.0, True),
        (math.nan, math.nan, False),
        (math.nan, math.inf, False),
        (-math.inf, math.nan, False),
        (math.nan, 1.0, True),
        (math.inf, -math.inf, True),
        (math.inf, 1.0, True),
    ],
)
def test_nan_stands_for_all_values_that_a_journal_cannot_hold(
    value: float, replay_value: float, differ: bool
) -> None:
    differences = metric_differences({5: {"loss": value}}, {5: {"loss": replay_value}})
    assert [difference.name for difference in differences] == ["loss"] * differ


def test_a_step_that_no_tier_has_committed_has_its_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "run"
    rule = Rule(verb="upload", key="step-000000002", fault=Raise(OutOfSpace("k", "disk full")))
    with monkeypatch.context() as patch:
        faulty(patch, root, [rule])
        with CheckpointManager(root, on_error="warn") as manager:
            for step in (1, 2, 3):
                try:
                    manager.save({"x": step}, step, metrics={"loss": float(step)})
                except CkptError:
                    assert step == 2
    assert metrics_after(0, [str(root)]) == {step: {"loss": float(step)} for step in (1, 2, 3)}

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

import ckpt
from ckpt import CheckpointManager

STATE = {"x": torch.ones(2)}


def go_on(root: Path, step: int | None, *numbers: int, loss: float = 0.0) -> None:
    """Save the steps ``numbers`` as a new job does, after it has gone back to ``step``."""
    with CheckpointManager(root) as manager:
        if step is not None:
            manager.restore(STATE, step=step)
        for number in numbers:
            manager.save(STATE, number, metrics={"loss": loss})


def rows_of(root: Path) -> list[dict[str, Any]]:
    with ckpt.open(root) as opened:
        return opened.history()


def test_the_rows_are_those_of_the_current_branch(tmp_path: Path) -> None:
    """The attempt that was saved last may be one that a rollback has abandoned."""
    root = tmp_path / "run"
    go_on(root, None, 1, 2, 3, loss=1.0)
    go_on(root, 1, 2, loss=2.0)
    assert [(row["step"], row["loss"], row["abandoned"]) for row in rows_of(root)] == [
        (1, 1.0, False), (2, 2.0, False), (3, 1.0, True),
    ]  # fmt: skip
    go_on(root, 3)
    rows = rows_of(root)
    assert [(row["step"], row["loss"], row["abandoned"]) for row in rows] == [
        (1, 1.0, False), (2, 1.0, False), (3, 1.0, False),
    ]  # fmt: skip
    assert rows[1]["stall_seconds"] is None, "the journal has the other attempt at step 2"
    assert rows[2]["stall_seconds"] > 0


def test_the_remains_of_an_earlier_save_hide_no_figures(tmp_path: Path) -> None:
    root = tmp_path / "run"
    remains = root / "step-000000002.aaaaaaaaaaaa" / "rank-00000.safetensors"
    remains.parent.mkdir(parents=True)
    remains.write_bytes(b"cut")
    os.utime(remains, (1.0, 1.0))
    go_on(root, None, 2)
    (row,) = rows_of(root)
    assert row["state"] == "committed"
    assert row["stall_seconds"] > 0

"""``python -m ckpt.demo``, and the page for users of ``torch.save``."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import ckpt
from ckpt import CheckpointManager
from ckpt.cli.main import app
from tests.kit.pages import block, blocks
from tests.kit.worlds import ROOT, run_script

PAGE = "docs/from-torch-save.md"


@pytest.mark.slow
def test_the_demo_is_killed_in_a_save_and_goes_on_bit_for_bit(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    reported = run_script(ROOT / "ckpt" / "demo.py", "--folder", str(folder), "--width", "256")
    assert "24 of 24 losses are equal to those without the kill, bit for bit" in reported
    match = re.search(
        r"during (?:the save of step (\d+)|a save), and went on from step (\d+)", reported
    )
    assert match
    assert 12 <= int(match[2]) < int(match[1] or 25)
    assert f"ckpt ls {folder}/killed" in reported
    assert (folder / "killed.journal").is_dir()


def train(code: str, steps: int) -> list[float]:
    """Run the loop of the page up to ``steps``, and return its losses."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    losses: list[float] = []

    def train_step() -> None:
        loss = (model(torch.ones(1, 4)) - 1).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    names = {"model": model, "optimizer": optimizer, "steps": steps, "train_step": train_step}
    exec(code, names | {"CheckpointManager": CheckpointManager})
    return losses


def test_the_loop_of_the_page_resumes_and_its_diff_is_the_same_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = block(PAGE, "train_step()")
    (diff,) = [text for page, _, text in blocks("diff") if page == ROOT / PAGE]
    after = [line[1:] for line in diff.splitlines() if line[0] in "+ "]
    assert after == code.splitlines()
    monkeypatch.chdir(tmp_path)
    losses = train(code, 3) + train(code, 6)
    (tmp_path / "again").mkdir()
    monkeypatch.chdir(tmp_path / "again")
    assert losses == train(code, 6)


def test_files_of_torch_save_come_and_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    weights = {"weight": torch.arange(6.0), "bias": torch.ones(2)}
    torch.save({"model": weights, "step": 7}, "checkpoint.pt")
    (text,) = [text for page, _, text in blocks("") if page == ROOT / PAGE]
    for line in text.splitlines():
        outcome = CliRunner().invoke(app, shlex.split(line)[1:])
        assert outcome.exit_code == 0, outcome.output
    again = torch.load("again.pt", weights_only=True)
    loaded = ckpt.load("runs/gpt")
    assert again["step"] == loaded["step"] == 7
    for name, tensor in weights.items():
        assert torch.equal(again["model"][name], tensor)
        assert torch.equal(loaded["model"][name], tensor)

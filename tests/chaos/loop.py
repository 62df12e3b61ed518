"""A training loop: that of docs/quickstart.md, or with the saves of PyTorch."""

from __future__ import annotations

import os
from typing import Any, Final

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from tests.chaos.record import Record
from tests.kit.pages import block

STEPS: Final = 300
EVERY: Final = 100  # As in the quickstart


class Training:
    def __init__(self) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(1)
        self.model = nn.Sequential(
            nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.Linear(64, 1)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 50)

    def step(self) -> None:
        rows = torch.randn(16, 32)
        self.optimizer.zero_grad()
        (self.model(rows) - rows.sum(1, keepdim=True)).square().mean().backward()
        self.optimizer.step()
        self.scheduler.step()


def with_ckpt(training: Training, root: str, record: Record) -> None:
    """Run the loop of the page as it stands there, on another root."""
    text = block("docs/quickstart.md", "report = manager.restore(state)")
    place = 'CheckpointManager("runs/gpt")'
    assert place in text
    names: dict[str, Any] = {
        "model": training.model, "optimizer": training.optimizer, "scheduler": training.scheduler,
        "train_step": training.step, "steps": STEPS, "root": root, "observe": record.observe,
    }  # fmt: skip
    exec(text.replace(place, "CheckpointManager(root, observers=[observe])"), names)
    report = names["report"]
    record.resumed(report.step if report else 0)


def with_torch(training: Training, root: str, record: Record, *, replace: bool) -> None:
    """Save to one file: over the old one, or to another one that then takes its name."""
    path = os.path.join(root, "checkpoint.pt")
    first = 0
    if os.path.exists(path):
        state = torch.load(path)
        training.model.load_state_dict(state["model"])
        training.optimizer.load_state_dict(state["optimizer"])
        training.scheduler.load_state_dict(state["scheduler"])
        torch.set_rng_state(state["rng"])
        first = state["step"] + 1
    record.resumed(max(first - 1, 0))
    for step in range(first, STEPS):
        training.step()
        if step % EVERY == 0 or step == STEPS - 1:
            state = {
                "model": training.model.state_dict(), "optimizer": training.optimizer.state_dict(),
                "scheduler": training.scheduler.state_dict(), "rng": torch.get_rng_state(),
                "step": step,
            }  # fmt: skip
            if replace:
                torch.save(state, f"{path}.new")
                os.replace(f"{path}.new", path)
            else:
                torch.save(state, path)
            record.saved(step)


def with_dcp(training: Training, root: str, record: Record) -> None:
    """Save each step to a folder of its own, and resume from the one with the highest number."""
    names = sorted(os.listdir(root), key=lambda name: int(name.rpartition("-")[2]))
    first = 0
    if names:
        state = _dcp_state(training, 0)
        dcp.load(state, checkpoint_id=os.path.join(root, names[-1]))
        set_state_dict(
            training.model, training.optimizer, model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )  # fmt: skip
        training.scheduler.load_state_dict(state["scheduler"])
        torch.set_rng_state(state["rng"])
        first = state["step"] + 1
    record.resumed(max(first - 1, 0))
    for step in range(first, STEPS):
        training.step()
        if step % EVERY == 0 or step == STEPS - 1:
            dcp.save(_dcp_state(training, step), checkpoint_id=os.path.join(root, f"step-{step}"))
            record.saved(step)


def _dcp_state(training: Training, step: int) -> dict[str, Any]:
    model, optimizer = get_state_dict(training.model, training.optimizer)
    return {
        "model": model, "optimizer": optimizer, "scheduler": training.scheduler.state_dict(),
        "rng": torch.get_rng_state(), "step": step,
    }  # fmt: skip


def main(way: str, root: str) -> None:
    """Train, or go on with the training."""
    record, training = Record(root), Training()
    os.makedirs(root, exist_ok=True)
    match way:
        case "ckpt":
            with_ckpt(training, root, record)
        case "dcp":
            with_dcp(training, root, record)
        case _:
            with_torch(training, root, record, replace=way == "replace")
    record.ended(training.model.state_dict())

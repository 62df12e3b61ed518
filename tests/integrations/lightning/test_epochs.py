"""Steps that are saved where an epoch or a validation ends, and what a resume does with them."""

from __future__ import annotations

import logging
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt import CheckpointManager
from ckpt.integrations.lightning import CkptCheckpoint
from tests.integrations.conftest import after
from tests.kit.marks import torture

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:lightning.*"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:lightning.*"),
    pytest.mark.filterwarnings("ignore::FutureWarning:lightning.*"),
]

EPOCHS, STEPS = {"epochs": 3}, {"epochs": -1, "max_steps": 12}  # of 4 batches each


def train(nets: Any, root: Path, trigger: dict[str, Any], **how: Any) -> dict[int, float]:
    """Train, from the newest step if there is one, and return the losses by step."""

    class Draws(nets.Net):  # type: ignore[misc, name-defined]
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            super().validation_step(batch, batch_idx)
            torch.rand(1)

    nets.seed_everything(3, verbose=False)
    net, loader, validates = Draws(), how.pop("loader"), how.pop("validates", True)
    trainer = nets.trainer(CkptCheckpoint(root, save_top_k=-1, **trigger), **how)
    trainer.fit(net, loader(), nets.validation() if validates else None, ckpt_path="last")
    losses: dict[int, float] = net.losses
    return losses


def saved_and_resumed(
    nets: Any, tmp_path: Path, trigger: dict[str, Any], **how: Any
) -> dict[int, bool]:
    """Return for each saved step but the last whether a resume from it has the same losses."""
    whole = train(nets, tmp_path / "whole", trigger, **how)
    with CheckpointManager(tmp_path / "whole") as manager:
        steps = [step for step in manager.steps() if step < max(whole)]
    return {
        step: train(
            nets,
            nets.only_step(tmp_path / "whole", step, tmp_path / f"from-{step}"),
            trigger,
            **how,
        )
        == after(whole, step)
        for step in steps
    }


POLICIES: dict[str, dict[str, Any]] = {
    "none": {"validates": False},
    "epoch": {},
    "half": {"val_check_interval": 0.5},
    "second": {"check_val_every_n_epoch": 2},
    "steps": {"check_val_every_n_epoch": None, "val_check_interval": 4},
}
TRIGGERS = ("every_n_train_steps", "every_n_epochs")
LIMITS = {"max_epochs": EPOCHS, "max_steps": STEPS}
COMBINATIONS = [
    pytest.param(
        POLICIES[policy],
        trigger,
        LIMITS[limit],
        id=f"{policy}-{trigger}-{limit}",
        marks=() if i % 2 == j == k else pytest.mark.torture,  # CI takes each of them once
    )
    for (i, policy), (j, trigger), (k, limit) in product(
        enumerate(POLICIES), enumerate(TRIGGERS), enumerate(LIMITS)
    )
]


@pytest.mark.parametrize(("policy", "trigger", "limit"), COMBINATIONS)
def test_the_last_batch_of_an_epoch_resumes_with_a_plain_loader(
    nets: Any, tmp_path: Path, policy: dict[str, Any], trigger: str, limit: dict[str, int]
) -> None:
    every = {"every_n_train_steps": 4} if trigger == "every_n_train_steps" else {trigger: 1}
    found = saved_and_resumed(nets, tmp_path, every, loader=nets.shuffled, **policy, **limit)
    found = {step: same for step, same in found.items() if step % 4 == 0}
    saved = [8] if trigger == "every_n_epochs" and "check_val_every_n_epoch" in policy else [4, 8]
    if policy.get("val_check_interval") == 4:
        saved = [4, 8]
    assert found == dict.fromkeys(saved, True)


@pytest.mark.parametrize("limit", [EPOCHS, *torture(STEPS)], ids=["max_epochs", "max_steps"])
def test_a_batch_before_a_validation_resumes(
    nets: Any, tmp_path: Path, limit: dict[str, int]
) -> None:
    """The validation draws random numbers, and a resume does not run it again."""
    found = saved_and_resumed(
        nets,
        tmp_path,
        {"every_n_train_steps": 2},
        loader=nets.Loader,
        val_check_interval=2,
        **limit,
    )
    assert found == dict.fromkeys([2, 4, 6, 8, 10], True)


@pytest.mark.parametrize("trigger", [{"every_n_epochs": 1}, {"every_n_train_steps": 2}])
def test_max_steps_within_an_epoch_resumes(
    nets: Any, tmp_path: Path, trigger: dict[str, Any]
) -> None:
    """Lightning ends the epoch in the middle then, and a larger limit continues it."""
    how = {"loader": nets.Loader, "epochs": -1, "validates": False}
    whole = train(nets, tmp_path / "whole", trigger, max_steps=12, **how)
    train(nets, tmp_path / "parts", trigger, max_steps=6, **how)
    assert train(nets, tmp_path / "parts", trigger, max_steps=12, **how) == after(whole, 6)


@pytest.mark.parametrize("reduces", [True, False])
def test_a_plateau_that_misses_an_epoch_is_named(
    nets: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, reduces: bool
) -> None:
    class Plateau(nets.Net):  # type: ignore[misc, name-defined]
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), 1e-2)
            if not reduces:
                return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"},
            }

    for epochs in (1, 2):
        trainer = nets.trainer(CkptCheckpoint(tmp_path), epochs=epochs)
        with caplog.at_level(logging.WARNING, "ckpt"):
            trainer.fit(Plateau(), nets.shuffled(), nets.validation(), ckpt_path="last")
    assert caplog.text.count("ReduceLROnPlateau misses the epoch that ends at step 4") == reduces

"""Optimizers inside wrappers of other libraries.

The step that does the work has the hook, whether the wrapper or the inner optimizer is in the
state.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt import CheckpointManager
from tests.overlap.jobs import WIDTH, trained
from tests.overlap.window import Window, assert_restores, content
from tests.state.saving import assert_same


def batch(number: int) -> torch.Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(number))


# -- Accelerate ------------------------------------------------------------------------------------


@pytest.fixture
def accelerator() -> Any:
    accelerate = pytest.importorskip("accelerate", reason="Accelerate is not installed")
    made = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    yield made
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def accelerated(accelerator: Any, state: dict[str, Any]) -> dict[str, Any]:
    scheduler = torch.optim.lr_scheduler.StepLR(state["optimizer"], 1, gamma=0.5)
    model, optimizer, scheduler = accelerator.prepare(state["model"], state["optimizer"], scheduler)
    return state | {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def accelerated_step(accelerator: Any, state: dict[str, Any], number: int) -> None:
    """Train on two batches. The wrapper lets the optimizer step only with the second one."""
    for half in range(2):
        with accelerator.accumulate(state["model"]):
            loss = state["model"](batch(2 * number + half))
            accelerator.backward(loss)
            state["optimizer"].step()
            state["scheduler"].step()
            state["optimizer"].zero_grad()


@pytest.mark.parametrize(
    "inner", [False, True], ids=["wrapper in the state", "inner one in the state"]
)
def test_accelerate(root: str, window: Window, accelerator: Any, inner: bool) -> None:
    state, twin, target = (accelerated(accelerator, trained(seed=seed)) for seed in (0, 0, 5))
    seen = dict(state)
    if inner:
        seen["optimizer"] = state["optimizer"].optimizer
        target["optimizer"] = target["optimizer"].optimizer
    assert (type(seen["optimizer"]).__name__ == "AcceleratedOptimizer") is not inner
    accelerated_step(accelerator, state, 0)
    with CheckpointManager(root) as manager:
        window.save(manager, seen)
        window.must_wait(lambda: accelerated_step(accelerator, state, 1))
    for number in range(2):
        accelerated_step(accelerator, twin, number)
    assert_same(content(state), content(twin))
    assert_restores(root, window.reference, target)


# -- Lightning -------------------------------------------------------------------------------------


@pytest.fixture
def fabric() -> Any:
    lightning = pytest.importorskip("lightning.fabric", reason="Lightning is not installed")
    made = lightning.Fabric(accelerator="cpu", devices=1)
    made.launch()
    return made


def fabric_step(fabric: Any, state: dict[str, Any], number: int) -> None:
    state["optimizer"].zero_grad()
    fabric.backward(state["model"](batch(number)))
    state["optimizer"].step()


def set_up(fabric: Any, seed: int) -> dict[str, Any]:
    state = trained(seed=seed)
    state["model"], state["optimizer"] = fabric.setup(state["model"], state["optimizer"])
    return state


@pytest.mark.parametrize(
    "inner", [False, True], ids=["wrapper in the state", "inner one in the state"]
)
def test_lightning_fabric(root: str, window: Window, fabric: Any, inner: bool) -> None:
    state, twin, target = (set_up(fabric, seed) for seed in (0, 0, 5))
    seen = dict(state)
    if inner:
        seen |= {"model": state["model"].module, "optimizer": state["optimizer"].optimizer}
        target |= {"model": target["model"].module, "optimizer": target["optimizer"].optimizer}
    with CheckpointManager(root) as manager:
        window.save(manager, seen)
        window.must_wait(lambda: fabric_step(fabric, state, 1))
    fabric_step(fabric, twin, 1)
    assert_same(content(state), content(twin))
    assert_restores(root, window.reference, target)


@pytest.mark.filterwarnings(
    "ignore"
)  # Lightning's own warnings, about pytrees and about a loader with few workers
@pytest.mark.parametrize(
    "inner", [False, True], ids=["wrapper in the state", "inner one in the state"]
)
def test_lightning_trainer(
    root: str, window: Window, inner: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lightning = pytest.importorskip("lightning.pytorch", reason="Lightning is not installed")
    monkeypatch.chdir(tmp_path)

    class Task(lightning.LightningModule):  # type: ignore[misc, name-defined]
        """A task that takes its three steps itself, and is saved before the second one."""

        def __init__(self, seed: int, manager: CheckpointManager | None) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.net, self.manager = trained(seed=seed)["model"], manager

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.net.parameters(), lr=0.01)

        def training_step(self, rows: torch.Tensor, number: int) -> None:
            wrapper = self.optimizers()
            wrapper.zero_grad()
            self.manual_backward(self.net(rows))
            if number == 1 and self.manager is not None:
                assert type(wrapper).__name__ == "LightningAdamW"
                window.save(
                    self.manager,
                    {"model": self.net, "optimizer": wrapper.optimizer if inner else wrapper},
                )
                window.must_wait(wrapper.step)
            else:
                wrapper.step()

    def fit(task: Task) -> dict[str, Any]:
        trainer = lightning.Trainer(
            accelerator="cpu",
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        rows: Any = [batch(n) for n in range(3)]
        trainer.fit(task, torch.utils.data.DataLoader(rows, batch_size=None))
        return {"model": task.net, "optimizer": trainer.optimizers[0]}

    with CheckpointManager(root) as manager:
        saved = fit(Task(0, manager))
    assert_same(content(saved), content(fit(Task(0, None))))
    assert_restores(root, window.reference, fit(Task(5, None)))

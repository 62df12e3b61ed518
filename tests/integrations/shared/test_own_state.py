"""Optimizers with a state dict of their own behind the doors: saved by it, or refused early."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW

from bench.rank_exit import exit_rank
from ckpt.errors import UnsupportedValue
from ckpt.integrations.lightning import CkptCheckpoint
from ckpt.integrations.shared.own_state import OwnState, saved_as
from tests.integrations.conftest import after
from tests.kit.worlds import world

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:lightning.*"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:lightning.*"),
    pytest.mark.filterwarnings("ignore::FutureWarning:lightning.*"),
]


class Own(AdamW):
    """An optimizer that keeps a number outside of its state, and saves it by itself."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, lr)
        self.steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        for group in self.param_groups:
            group["lr"] = 1e-2 / self.steps
        return super().step(closure)

    def state_dict(self) -> Any:
        return {**super().state_dict(), "steps": self.steps}

    def load_state_dict(self, state_dict: Any) -> None:
        state = dict(state_dict)
        self.steps = state.pop("steps")
        super().load_state_dict(state)


def kinds() -> list[Any]:
    """Return the class of this module, and one of bitsandbytes if it is installed."""
    try:
        return [Own, importlib.import_module("bitsandbytes").optim.AdamW8bit]
    except ImportError:
        return [Own]


@pytest.mark.parametrize("kind", kinds())
def test_lightning_resumes_with_the_same_losses(nets: Any, tmp_path: Path, kind: Any) -> None:
    class Net(nets.Net):  # type: ignore[misc, name-defined]
        def configure_optimizers(self) -> Any:
            return kind(self.parameters(), lr=1e-2)

    root = tmp_path / "whole"
    every: dict[str, Any] = {"save_top_k": -1, "every_n_train_steps": 1}
    losses = nets.fit(Net(width=512), CkptCheckpoint(root, **every))
    place = nets.only_step(root, 3, tmp_path / "from-3")
    assert nets.fit(Net(width=512), CkptCheckpoint(place, **every), "last") == after(losses, 3)


@pytest.mark.parametrize("kind", kinds())
def test_accelerate_resumes_with_the_same_losses(tmp_path: Path, kind: Any) -> None:
    accelerate = pytest.importorskip("accelerate")
    door = importlib.import_module("ckpt.integrations.accelerate")

    def trained(steps: range, *, save: bool) -> list[float]:
        torch.manual_seed(steps.start)
        net = nn.Linear(64, 64)
        accelerator = accelerate.Accelerator(cpu=True)
        net, optimizer = accelerator.prepare(net, kind(net.parameters(), lr=1e-2))
        found = []
        with door.AcceleratorCheckpoints(accelerator, tmp_path) as checkpoints:
            checkpoints.load_state()
            for step in steps:
                loss = net(torch.linspace(0, step + 1, 64)).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                found.append(loss.item())
                if save and step == 3:
                    checkpoints.save_state().result()
        return found

    assert trained(range(8), save=True)[4:] == trained(range(4, 8), save=False)


def test_a_transformers_trainer_resumes_with_the_same_losses(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[hf]'")
    trainers = importlib.import_module("tests.integrations.trainers")
    for kind in kinds():

        def trainer(folder: Path, kind: Any = kind, **how: Any) -> Any:
            made = trainers.trainer(folder, lr_scheduler_type="constant", width=64, **how)
            made.create_optimizer = lambda *_: _made(made, kind)
            return made

        whole = trainer(tmp_path / f"{kind.__name__}-whole")
        whole.train()
        cut = tmp_path / f"{kind.__name__}-cut"
        with pytest.raises(trainers.Stopped):
            trainer(cut, callbacks=[trainers.At(8, trainers.stop)]).train()
        resumed = trainer(cut)
        resumed.train(resume_from_checkpoint=True)
        assert trainers.losses(resumed) == trainers.losses(whole)
        assert trainers.same(trainers.weights(resumed), trainers.weights(whole))


def _made(trainer: Any, kind: Any) -> Any:
    if trainer.optimizer is None:
        trainer.optimizer = kind(trainer.model.parameters(), lr=1e-2)
    return trainer.optimizer


@pytest.mark.distributed
def test_sharded_parameters_are_refused_by_name() -> None:
    world(1, Path(__file__))


def main() -> None:
    torch.distributed.init_process_group("gloo")
    net = nn.Linear(4, 4)
    fully_shard(net, mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(UnsupportedValue, match="Own, an optimizer with a state_dict"):
        saved_as([Own(net.parameters())], "optimizers")
    plain = AdamW(net.parameters())
    assert saved_as([plain], "optimizers") == [plain]
    (own,) = saved_as([Own(nn.Linear(2, 2).parameters())], "optimizers")
    assert isinstance(own, OwnState)
    if importlib.util.find_spec("accelerate"):
        refused_at_the_start(Own(net.parameters()))
    exit_rank()


def refused_at_the_start(optimizer: Own) -> None:
    accelerator = importlib.import_module("accelerate").Accelerator(cpu=True)
    accelerator.prepare(optimizer)
    checkpoints = importlib.import_module("ckpt.integrations.accelerate").AcceleratorCheckpoints
    with pytest.raises(UnsupportedValue, match="Own, an optimizer with a state_dict"):
        checkpoints(accelerator, "never-made")
    assert not Path("never-made").exists()


if __name__ == "__main__":
    main()

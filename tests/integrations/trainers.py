"""Trainers of transformers for the tests: tiny models made from scratch, and data from a seed."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        Trainer,
        TrainerCallback,
        TrainingArguments,
        set_seed,
    )

    from ckpt.integrations.transformers import make_ckpt_trainer

CkptTrainer = make_ckpt_trainer(Trainer)
Losses = list[tuple[int, float]]


class Words(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.words = torch.randint(0, 64, (count, 12), generator=generator)

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.words[index], "labels": self.words[index]}


def model(width: int = 16) -> Any:
    """Return a model with dropout, so that a resumed run needs the random generators."""
    set_seed(3)
    config = GPT2Config(
        vocab_size=64, n_positions=12, n_embd=width, n_layer=2, n_head=2,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def arguments(folder: Path | str, **options: Any) -> TrainingArguments:
    chosen: dict[str, Any] = {
        "max_steps": 10, "save_steps": 3, "logging_steps": 1, "per_device_train_batch_size": 4,
        "learning_rate": 0.01, "report_to": [], "use_cpu": True, "disable_tqdm": True, "seed": 3,
    }  # fmt: skip
    return TrainingArguments(str(folder), **chosen | options)


class At(TrainerCallback):  # type: ignore[misc]
    """A callback that calls a function at the end of a step."""

    def __init__(self, step: int, do: Callable[[], object]) -> None:
        self.step, self.do = step, do

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            self.do()


class Stopped(Exception):
    """The training ends here, as after a crash that the process survives."""


def stop() -> None:
    raise Stopped


def trainer(folder: Path | str, kind: Any = CkptTrainer, **options: Any) -> Any:
    """Make a trainer with ``options`` of the constructor, of ``model`` and ``Words``, and of
    training.
    """
    names = ("callbacks", "ckpt_tiers", "ckpt_config")
    own = {name: options.pop(name) for name in names if name in options}
    net, count = model(options.pop("width", 16)), options.pop("count", 32)
    args = arguments(folder, **options)
    return kind(model=net, args=args, train_dataset=Words(count), eval_dataset=Words(8), **own)


def flip(folder: Path, step: int) -> None:
    """Change one byte in the middle of the data of a step."""
    (found,) = (folder / "ckpt").glob(f"step-{step:09d}.*")
    path = max(
        (each for each in found.rglob("*") if each.is_file()), key=lambda e: e.stat().st_size
    )
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def losses(trained: Any) -> Losses:
    return [(each["step"], each["loss"]) for each in trained.state.log_history if "loss" in each]


def weights(trained: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trained.model.state_dict().items()}


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)

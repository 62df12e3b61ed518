"""A training by the Trainer of transformers, with the saves of ckpt or its own."""

from __future__ import annotations

import os
from typing import Any, Final

import torch
from transformers import (  # type: ignore[import-not-found, unused-ignore]
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import (  # type: ignore[import-not-found, unused-ignore]
    get_last_checkpoint,
)

from ckpt.integrations.transformers import make_ckpt_trainer
from tests.chaos.record import Record

STEPS: Final = 15
EVERY: Final = 5


class Teller(TrainerCallback):
    def __init__(self, record: Record, *, tells_saves: bool) -> None:
        self._record, self._tells_saves = record, tells_saves

    def on_train_begin(self, args: Any, state: Any, control: Any, **words: Any) -> None:
        self._record.resumed(state.global_step)

    def on_save(self, args: Any, state: Any, control: Any, **words: Any) -> None:
        if self._tells_saves:  # The folder is whole now
            self._record.saved(state.global_step)


def main(way: str, out: str) -> None:
    """Train, or go on with the training."""
    record = Record(out)
    torch.set_num_threads(1)
    set_seed(1)
    data = [{"input_ids": row, "labels": row} for row in torch.randint(64, (64, 16))]
    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=1, n_head=2)
    args = TrainingArguments(
        out, max_steps=STEPS, save_steps=EVERY, per_device_train_batch_size=4, use_cpu=True,
        report_to=[], disable_tqdm=True, logging_steps=1000,
    )  # fmt: skip
    words: dict[str, Any] = {"model": GPT2LMHeadModel(config), "args": args, "train_dataset": data}
    words["callbacks"] = [Teller(record, tells_saves=way != "ckpt")]
    if way == "ckpt":
        trainer = make_ckpt_trainer(Trainer)(**words, ckpt_observers=[record.observe])
        trainer.train(resume_from_checkpoint="auto")
    else:
        trainer = Trainer(**words)
        newest = get_last_checkpoint(out) if os.path.isdir(out) else None
        trainer.train(resume_from_checkpoint=newest)
    record.ended(trainer.model.state_dict())

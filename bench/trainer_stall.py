"""What a save costs the Trainer of transformers: its own save, and that of ckpt, in turns.

python -m bench.trainer_stall FOLDER     (needs the extra hf)
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import time
from typing import Any

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from ckpt.config import SaveConfig
from ckpt.integrations.transformers import make_ckpt_trainer

SAVES, EVERY, ROUNDS = 4, 3, 2


class Clock(TrainerCallback):  # type: ignore[misc]
    """The seconds from the end of each step to the end of the next, with a save in between or
    not.
    """

    def __init__(self) -> None:
        self.with_save: list[float] = []
        self.without: list[float] = []
        self.calls: list[float] = []
        self._at, self._saved = 0.0, False

    def on_step_end(self, *given: Any, **_: Any) -> None:
        """Count a step; the save follows this call."""
        now = time.perf_counter()
        if given[1].global_step > EVERY + 1:  # the first save makes what the later ones use again
            (self.with_save if self._saved else self.without).append(now - self._at)
        self._at, self._saved = time.perf_counter(), False

    def on_save(self, *given: Any, **_: Any) -> None:
        """Count a call: between the end of the step and this there is nothing else."""
        if given[1].global_step > EVERY:
            self.calls.append(time.perf_counter() - self._at)
        self._saved = True


def run(kind: type[Any], folder: str, clock: Clock, **own: Any) -> int:
    """Train, and return the bytes of the state."""
    set_seed(1)
    config = GPT2Config(vocab_size=8192, n_positions=64, n_embd=256, n_layer=6, n_head=8)
    model = GPT2LMHeadModel(config)
    rows = torch.randint(0, 8192, (256, 64))
    args = TrainingArguments(
        folder,
        max_steps=(SAVES + 1) * EVERY + 1,
        save_steps=EVERY,
        save_total_limit=2,
        logging_strategy="no",
        per_device_train_batch_size=4,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    data = [{"input_ids": row, "labels": row} for row in rows]
    trainer = kind(model=model, args=args, train_dataset=data, callbacks=[clock], **own)
    trainer.train()
    return sum(3 * int(value.nbytes) for value in model.parameters())


def main() -> None:
    """Take turns, and print medians."""
    folder = sys.argv[1]
    torch.set_num_threads(1)
    kinds: dict[str, type[Any]] = {"Trainer": Trainer, "ckpt": make_ckpt_trainer(Trainer)}
    clocks = {name: Clock() for name in kinds}
    nbytes = 0
    for _ in range(ROUNDS):
        for name, kind in kinds.items():
            own = {"ckpt_config": SaveConfig()} if name == "ckpt" else {}
            nbytes = run(kind, os.path.join(folder, name), clocks[name], **own)
            shutil.rmtree(os.path.join(folder, name))
    for name, clock in clocks.items():
        step = statistics.median(clock.without)
        found = {
            "state_mb": nbytes // 10**6,
            "saves": len(clock.with_save),
            "call_ms": 1000 * statistics.median(clock.calls),
            "calls_ms": [round(1000 * each, 1) for each in clock.calls],
            "step_ms": 1000 * step,
            "step_with_a_save_ms": 1000 * statistics.median(clock.with_save),
            "costs_ms": 1000 * (statistics.median(clock.with_save) - step),
        }
        print(name, json.dumps(found))
    print("load average", os.getloadavg())


if __name__ == "__main__":
    main()

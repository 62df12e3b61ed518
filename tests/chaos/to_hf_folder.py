"""A folder of Hugging Face, made by ckpt, or by the model over the folder of an older one.

Only the folders are watched. Before each run, what transformers loads of them is written down: the
run before was killed, unless this one is the first.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from transformers import (  # type: ignore[import-not-found, unused-ignore]
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.utils import logging  # type: ignore[import-not-found, unused-ignore]

from ckpt import CheckpointManager, HfFolders
from ckpt.cli.main import main as run_ckpt
from tests.chaos.record import DIGEST, SEEN, STATES, Record
from tests.exchange.exports.export_run import export_here
from tests.kit.waiting import until

NOTHING, OLDER, NEW, HALF = STATES
PART: Final = "20KB"
STEPS: Final = ((1, 0), (2, 0), (3, 0), (3, 1))
"""The number and the branch of each save of the training, which goes back from step 3 to step 2."""
TOKENIZER: Final = "tokenizer.json"
CONFIG: Final = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32,
    architectures=["LlamaForCausalLM"],
)  # fmt: skip


def model_of(step: int, branch: int = 0) -> Any:
    torch.manual_seed(10 * step + branch)
    return LlamaForCausalLM(CONFIG)


def prepare(way: str, out: str) -> None:
    """Make what is there before the first run, and write down what can be loaded now."""
    torch.set_num_threads(1)
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    folder = Path(out).parent
    if not (folder / SEEN).exists():
        Path(out).mkdir()
        CONFIG.save_pretrained(folder / "config")
        (folder / "config" / TOKENIZER).write_text("{}")
        if way != "beside":
            with CheckpointManager(folder / "run") as manager:
                for step in (1, 2):
                    manager.save({"model": model_of(step)}, step)
        if way == "moved":
            export(out, 1)
        elif way == "own":
            model_of(1).save_pretrained(f"{out}/model", max_shard_size=PART)
            shutil.copy(folder / "config" / TOKENIZER, f"{out}/model")
    with (folder / SEEN).open("a") as file:
        file.write(f"{state_of(way, Path(out))}\n")


def state_of(way: str, out: Path) -> str:
    """Return what there is to load: the new folder, an older one, nothing, or a half."""
    if way != "beside":
        model = loaded(out / "model", [(1, 0), (2, 0)])
        return model if isinstance(model, str) else {1: OLDER, 2: NEW}[model[0]]
    places = {int(place.name.removeprefix("step-")): place for place in out.glob("step-*")}
    states = [loaded(place, [(step, 0), (step, 1)]) for step, place in places.items()]
    models = [state for state in states if not isinstance(state, str)]
    if len(models) < len(states):
        return HALF
    return NOTHING if not models else NEW if max(models) >= STEPS[-1] else OLDER


def loaded(place: Path, models: Sequence[tuple[int, int]]) -> tuple[int, int] | str:
    """Return the model that transformers loads, ``NOTHING``, or ``HALF``."""
    try:
        weights = LlamaForCausalLM.from_pretrained(place).state_dict()
    except Exception:
        return NOTHING
    for model in models:
        expected = model_of(*model).state_dict()
        if all(torch.equal(weights[name], value) for name, value in expected.items()):
            return model if (place / TOKENIZER).exists() else HALF
    return HALF


def export(out: str, step: int) -> None:
    folder = os.path.dirname(out)
    sys.argv = ["ckpt", "export", f"{folder}/run", f"{out}/model", "--format", "hf"]
    sys.argv += ["--config", f"{folder}/config", "--step", str(step), "--max-shard-size", PART]
    if status := run_ckpt():
        raise RuntimeError(f"ckpt export has ended with {status}")


def train(out: str) -> None:
    """Save the steps, and go back once. Wait for each folder, so that none is passed over."""
    folder = os.path.dirname(out)
    with pytest.MonkeyPatch.context() as patch:
        export_here(patch)  # The process that exports dies too, as it does with its node
        folders = HfFolders(out, f"{folder}/config", keep_last=2)
        model = model_of(1)
        with CheckpointManager(f"{folder}/run", observers=[folders]) as manager, folders:
            state = {"model": model, "count": torch.tensor(0)}
            manager.restore(state)
            count = int(state["count"])
            for step, branch in STEPS[count:] or [(STEPS[-1][0] + 1, 1)]:
                if branch == 1 and step == STEPS[-1][0]:
                    manager.restore(state, step=step - 1)
                model.load_state_dict(model_of(step, branch).state_dict())
                count += 1
                state["count"] = torch.tensor(count)
                manager.save(state, step)
                assert until(partial(is_there, Path(out), (step, branch)))


def is_there(out: Path, model: tuple[int, int]) -> bool:
    return loaded(out / f"step-{model[0]:09d}", [model]) == model


def main(way: str, out: str) -> None:
    """Make the folder, or go on with what a run before has left."""
    Record(out).resumed(0)
    place, older = f"{out}/model", f"{out}/older"
    if way == "own":
        model_of(2).save_pretrained(place, max_shard_size=PART)
    elif way == "beside":
        train(out)
    else:
        if way == "moved" and not os.path.exists(older):
            os.rename(place, older)
        if not os.path.exists(place):  # A folder that is there is complete
            export(out, 2)
    (Path(out).parent / DIGEST).write_text(state_of(way, Path(out)))

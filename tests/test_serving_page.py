"""What ``docs/serving.md`` shows does what it says."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import ckpt
from ckpt import CheckpointManager, HfFolders
from ckpt.errors import EntryUnexpected
from tests.exchange.exports.export_run import export_here
from tests.kit.pages import blocks

BLOCKS = [block.text for block in blocks("python") if block.page.name == "serving.md"]


def job(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    return {"model": nn.Linear(4, 4), "step": seed}


class Engine(nn.Linear):
    """A model that asks the loop to end once it has weights."""

    def __init__(self, stop: threading.Event) -> None:
        super().__init__(4, 4)
        self.stop = stop

    def load_state_dict(self, *arguments: Any, **options: Any) -> Any:
        self.stop.set()
        return super().load_state_dict(*arguments, **options)


@pytest.mark.parametrize(
    "words", ["for version in versions", "produced ="], ids=["serve", "roll out"]
)
def test_another_process_has_the_weights(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with CheckpointManager("runs/gpt") as manager:
        manager.save(job(200))
    (text,) = [text for text in BLOCKS if words in text]
    stop = threading.Event()
    names: dict[str, Any] = {
        "ckpt": SimpleNamespace(follow=partial(ckpt.follow, stop=stop)),
        "model": Engine(stop),
    }
    exec(text, names)
    assert torch.equal(names["model"].weight, job(200)["model"].weight)
    assert names["version"].step == 200


@pytest.mark.parametrize("part", ["model", "served"])
def test_a_job_writes_deltas(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (text,) = [text for text in BLOCKS if f'deltas="{part}"' in text]
    state = job(201)
    names = {"CheckpointManager": CheckpointManager, "state": state, "model": state["model"]}
    exec(text, names)
    assert ckpt.load("runs/gpt", "step") == 201
    assert torch.equal(
        ckpt.load("runs/gpt", part)["weight"].float(),
        state["model"].weight.to(torch.bfloat16 if part == "served" else torch.float32).float(),
    )


def test_a_restart_gives_the_copy_of_the_weights_a_place_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    state = job(201)
    served = {name: value.bfloat16() for name, value in state["model"].state_dict().items()}
    with CheckpointManager("runs/gpt", deltas="served") as manager:
        manager.save({**state, "served": served}, step=201)
    state, copy = job(5), {name: torch.zeros_like(value) for name, value in served.items()}
    with CheckpointManager("runs/gpt", deltas="served") as manager:
        with pytest.raises(EntryUnexpected):
            manager.restore(state)
        manager.restore({**state, "served": copy})
        manager.save({**state, "served": copy}, step=202)
    assert all(torch.equal(copy[name], served[name]) for name in served)


def test_the_weights_have_the_names_of_an_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with CheckpointManager("runs/gpt") as manager:
        manager.save({"model": {"embed.weight": torch.ones(2), "steps": torch.zeros(1)}}, step=1)
    (text,) = [text for text in BLOCKS if "names=" in text]
    names: dict[str, Any] = {"ckpt": ckpt}
    exec(text, names)
    assert list(names["weights"]) == ["model.embed_tokens.weight"]


def test_a_job_makes_folders_of_hugging_face(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    export_here(monkeypatch)
    config = tmp_path / "gpt2" / "config.json"
    config.parent.mkdir()
    config.write_text("{}")
    (text,) = [text for text in BLOCKS if "HfFolders" in text]
    state = job(1000)
    exec(text, {"CheckpointManager": CheckpointManager, "HfFolders": HfFolders, "state": state})
    weights = load_file("hf/gpt/step-000001000/model.safetensors")
    assert torch.equal(weights["weight"], state["model"].weight.to(torch.bfloat16))

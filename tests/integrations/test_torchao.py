"""The optimizers and weights of the package torchao are resumed in a fresh process."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from ckpt import CheckpointManager
from ckpt.errors import KindMismatch
from tests.kit.worlds import world
from tests.processes import run
from tests.state.saving import bits

pytest.importorskip("torchao", reason="torchao is not installed", exc_type=ImportError)
HERE = Path(__file__).resolve()
WORKER = HERE.parent / "workers" / "quantised.py"


def worker(kind: str, phase: str, root: Path, *, ranks: int = 1) -> list[str]:
    """Return the losses of every rank after the save, or after the restore."""
    command = [sys.executable, str(WORKER), kind, phase, str(root)]
    if ranks > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command[1:1] = launcher
    path = os.pathsep.join([str(HERE.parents[2]), str(HERE.parents[2] / "backends")])
    done = run(command, env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, timeout=500)
    assert done.returncode == 0, done.stdout[-4000:]
    return sorted(line for line in done.stdout.splitlines() if line.startswith("losses"))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_a_fresh_process_trains_on_to_the_bit(kind: str, tmp_path: Path) -> None:
    losses = worker(kind, "save", tmp_path)
    assert len(losses) == 1
    assert worker(kind, "restore", tmp_path) == losses


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(1200)
def test_two_ranks_of_fsdp2_train_on_to_the_bit(tmp_path: Path) -> None:
    losses = worker("AdamW8bit", "save", tmp_path, ranks=2)
    assert len(losses) == 2
    assert worker("AdamW8bit", "restore", tmp_path, ranks=2) == losses


def tensors_in(root: Path) -> dict[str, bytes]:
    with ckpt.open(root) as opened:
        return {name: bits(opened.tensor(name)[...]) for name in opened.names()}


@pytest.mark.integration
@pytest.mark.distributed
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("kind", "worlds"),
    [
        ("AdamW8bit", [4, 2, 1, 2]),
        ("AdamWFp8", [4, 2, 1, 2]),
        ("AdamW4bit", [3, 4, 1, 3]),  # blocks of 128 divide the parts of three ranks
    ],
)
def test_moments_are_resharded_from_rank_to_rank(
    kind: str, worlds: list[int], tmp_path: Path
) -> None:
    """Every rank of another world restores and saves the moments again, and they are equal to the
    bit.
    """
    world(worlds[0], WORKER, kind, "save", tmp_path / "0", timeout=500)  # it compiles
    saved = tensors_in(tmp_path / "0")
    assert sum(name.endswith("/codes") for name in saved) == 4
    for number, ranks in enumerate(worlds[1:], 1):
        came_from, to = tmp_path / str(number - 1), tmp_path / str(number)
        said = world(ranks, WORKER, kind, "move", came_from, to, timeout=500)
        assert said.count("losses") == ranks
        assert tensors_in(to) == saved, (ranks, number)


@pytest.mark.integration
@pytest.mark.distributed
@pytest.mark.timeout(600)
def test_moments_of_another_kind_on_another_number_of_ranks(tmp_path: Path) -> None:
    """torchao keeps less than 4,096 elements of a rank in 32 bits: here those of two ranks.

    Quantised moments are then refused by name. Moments in 32 bits are restored as they are.
    """
    one, two, again = tmp_path / "1", tmp_path / "2", tmp_path / "3"
    world(1, WORKER, "AdamW8bit", "save", one, "", "64", timeout=500)
    with pytest.raises(AssertionError, match=r"KindMismatch: 'optimizer/model/0\.weight/exp_avg'"):
        world(2, WORKER, "AdamW8bit", "restore", one, "", "64", timeout=500)
    world(2, WORKER, "AdamW8bit", "save", two, "", "64", timeout=500)
    assert "losses" in world(1, WORKER, "AdamW8bit", "move", two, again, "64", timeout=500)
    assert tensors_in(again) == tensors_in(two)


def quantised(config: str, seed: int) -> Any:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(128, 128))
    api = importlib.import_module("torchao.quantization")
    api.quantize_(model, getattr(api, config)())
    return model


def inside(tensor: Any) -> dict[str, bytes]:
    return {name: bits(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0]}


@pytest.mark.parametrize("config", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig"])
def test_quantised_weights_are_filled_in_place(config: str, tmp_path: Path) -> None:
    model, target = quantised(config, 0), quantised(config, 1)
    assert inside(model[0].weight) != inside(target[0].weight)
    with CheckpointManager(tmp_path) as manager:
        manager.save({"model": model}, 1)
        manager.restore({"model": target})
        assert inside(target[0].weight) == inside(model[0].weight)
        sample = torch.randn(4, 128)
        assert torch.equal(target(sample), model(sample))
        with pytest.raises(KindMismatch, match=r"'model/0\.weight'"):
            manager.restore({"model": nn.Sequential(nn.Linear(128, 128))})


def test_nf4_weights_are_filled_in_place(tmp_path: Path) -> None:
    api = importlib.import_module("torchao.quantization.quantize_.workflows.nf4.nf4_tensor")

    def state(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        return {"w": api.to_nf4(torch.randn(512, 512), 64, 256)}

    one, two = state(0), state(1)
    with CheckpointManager(tmp_path) as manager:
        manager.save(one, 1)
        manager.restore(two)
    assert inside(two["w"]) == inside(one["w"])
    assert torch.equal(two["w"].get_original_weight(), one["w"].get_original_weight())

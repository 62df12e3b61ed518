"""Real engines of DeepSpeed.

What one stage and number of ranks saves, any other one restores, and so does plain PyTorch. The
reverse holds too.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt import CheckpointManager
from tests.distributed.launch import torchrun
from tests.integrations.deepspeed.on_deepspeed import MARKS

WORKER = Path(__file__).parents[1] / "workers" / "zero.py"
STAGES, DTYPES = ("1", "2", "3"), ("fp32", "bf16")
VARIANTS = ("2-bf16-robin", "1-bf16-sums", "3-fp32-groups", "2-bf16-offload", "3-bf16-offload")

pytestmark = MARKS


@pytest.fixture(scope="module", autouse=True)
def nets() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS_ACCELERATOR", "cpu")
        from tests.integrations.workers import zero_nets

        yield zero_nets


def train(nets: Any, net: Any, optimizer: Any, first: int, steps: int) -> list[float]:
    """Train as the engines do, with clipping and a rate that grows as theirs."""
    losses: list[float] = []
    for step in range(first, first + steps):
        words = nets.batch(step, 0, 1)
        loss = nets.loss_of(net(words), words)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def contents(net: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """Return the contents under the worker's names."""
    found = {f"model/{name}": value.detach().clone() for name, value in net.named_parameters()}
    found |= {f"model/{name}": value.clone() for name, value in net.named_buffers()}
    for name, parameter in net.named_parameters():
        for key in ("exp_avg", "exp_avg_sq") if parameter.requires_grad else ():
            found[f"{key}/{name}"] = optimizer.state[parameter][key].clone()
    return found


@pytest.fixture(scope="module")
def folder(nets: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of what plain PyTorch has saved, and two ranks.

    The two ranks have saved it and restored it at once under other stages.
    """
    made = tmp_path_factory.mktemp("zero")
    net, optimizer = nets.build(1)
    losses = train(nets, net, optimizer, 0, 3)
    with CheckpointManager(made / "plain-fp32") as manager:
        manager.save({"model": net, "optimizer": optimizer, "step": 3})
    kept = contents(net, optimizer)
    seen = {name: value.detach().clone() for name, value in net.named_parameters()}
    losses = train(nets, net, optimizer, 3, 1)  # the engine's schedule sets the rate after that
    torch.save({"kept": kept, "seen": seen, "losses": losses, "world": 1}, made / "plain-fp32.pt")
    said = torchrun(
        2,
        WORKER,
        made,
        "save:1-fp32",
        "save:2-bf16",
        "save:3-fp32",
        "save:3-bf16",
        "load:1-fp32:1-fp32",
        "load:1-fp32:3-fp32",
        "load:2-bf16:2-bf16",
        "load:3-bf16:3-bf16",
        "load:3-bf16:1-bf16",
        "load:plain-fp32:2-fp32",
        "load:plain-fp32:3-fp32",
        "load:plain-fp32:2-bf16",
        "load:3-bf16:1-fp32",
        timeout=600,
    )
    assert "ALL WELL" in said
    return made


@pytest.mark.parametrize("ranks", [1, 3])
def test_other_numbers_of_ranks(folder: Path, ranks: int) -> None:
    orders = [
        "load:1-fp32:3-fp32",
        "load:3-fp32:2-fp32",
        "load:2-bf16:3-bf16",
        "load:3-bf16:1-bf16",
    ]
    converted = ["load:2-bf16:3-fp32", "load:1-fp32:2-bf16"]
    said = torchrun(
        ranks, WORKER, folder, *orders, *converted, "load:plain-fp32:3-fp32", timeout=600
    )
    assert "ALL WELL" in said


def test_an_engine_goes_on_from_an_adopted_universal_checkpoint(tmp_path: Path) -> None:
    """The schedule and the counters come with the optimizer."""
    said = torchrun(2, WORKER, tmp_path, "convert:1-fp32:2-fp32", "convert:2-fp32:3-fp32")
    assert "ALL WELL" in said


def test_a_checkpoint_sets_no_attribute_of_an_engine_but_the_counters(tmp_path: Path) -> None:
    assert "ALL WELL" in torchrun(1, WORKER, tmp_path, "counters:1-fp32")


@pytest.mark.parametrize("kind", ["1-fp32", "3-fp32", "2-bf16", "3-bf16"])
def test_plain_pytorch_goes_on_where_an_engine_was(nets: Any, folder: Path, kind: str) -> None:
    reported = torch.load(folder / f"{kind}.pt")
    net, optimizer = nets.build(2)
    state = {"model": net, "optimizer": optimizer, "step": 0}
    with CheckpointManager(folder / kind) as manager:
        # parameters that are not trained have the engine's dtype
        assert manager.restore(state, cast=kind.endswith("bf16")) is not None
    assert state["step"] == 3
    found = contents(net, optimizer)
    assert found.keys() == reported["kept"].keys()
    for name, value in reported["kept"].items():
        assert torch.equal(found[name].float(), value.float()), name
    assert net.head.weight is net.embed.weight
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.01, 0.0]
    losses = train(nets, net, optimizer, 3, 2)
    near = 2e-7 if kind.endswith("fp32") else 2e-2  # the model computed in bf16
    assert losses[0] == pytest.approx(reported["losses"][0], abs=near)
    assert losses[1] == pytest.approx(reported["losses"][1], abs=near)


@pytest.mark.torture
@pytest.mark.parametrize("saving", [1, 2, 3])
def test_every_stage_to_every_other_on_one_two_and_three_ranks(tmp_path: Path, saving: int) -> None:
    kinds = ["-".join(pair) for pair in itertools.product(STAGES, DTYPES)]
    assert "ALL WELL" in torchrun(
        saving, WORKER, tmp_path, *(f"save:{kind}" for kind in kinds), timeout=600
    )
    everywhere = [
        f"load:{stage}-{dtype}:{other}-{dtype}"
        for stage, other, dtype in itertools.product(STAGES, STAGES, DTYPES)
    ]
    for ranks in (1, 2, 3):
        assert "ALL WELL" in torchrun(ranks, WORKER, tmp_path, *everywhere, timeout=600)


@pytest.mark.torture
def test_other_optimizers_of_deepspeed_and_other_orders_of_parameters(tmp_path: Path) -> None:
    orders = [f"{verb}:{kind}" for kind in VARIANTS for verb in ("save", f"load:{kind}")]
    crossed = [
        "load:2-bf16-robin:3-bf16",
        "load:3-fp32-groups:1-fp32",
        "load:1-bf16-sums:3-bf16-groups",
        "load:3-bf16-offload:2-bf16",
    ]
    assert "ALL WELL" in torchrun(2, WORKER, tmp_path, *orders, *crossed, timeout=900)
    assert "ALL WELL" in torchrun(3, WORKER, tmp_path, *crossed, timeout=900)

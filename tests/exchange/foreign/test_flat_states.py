"""Flat states, as torchtitan saves them, become a model and an optimizer again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from ckpt import CheckpointManager
from tests.cli.conftest import Cli
from tests.exchange.folders.compare import is_same
from tests.exchange.folders.net import Net, batch, build

# DCP says so whenever there is no process group
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def in_groups(seed: int) -> tuple[Net, torch.optim.Optimizer]:
    """Return a trained network with two groups of parameters."""
    net, _ = build(seed)
    groups = [
        {"params": [value for value in net.parameters() if value.ndim == 1], "weight_decay": 0.0},
        {"params": [value for value in net.parameters() if value.ndim > 1], "lr": 0.5},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    net(batch(1)).square().sum().backward()
    optimizer.step()
    return net, optimizer


def test_the_state_of_torchtitan_restores_into_model_and_optimizer(cli: Cli) -> None:
    net, optimizer = in_groups(0)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    counts = {"step": torch.tensor(2, dtype=torch.int32), "ntokens_seen": torch.tensor(9)}
    flat: Any = get_optimizer_state_dict(net, optimizer, options=options)
    state = {**net.state_dict(), "optimizer": flat, "train_state": counts}
    dcp.save(state, checkpoint_id="step-2")
    ran = cli("import", "step-2", "runs", "--step", 2)
    assert ran.code == 0, ran.err
    assert "the 11 tensors beside 'optimizer' are 'model' now" in ran.err
    other, another = in_groups(1)
    target: dict[str, Any] = {"model": other, "optimizer": another, "train_state": None}
    with CheckpointManager("runs") as manager:
        report = manager.restore(target)
    assert report is not None
    assert (report.missing, report.unexpected) == ((), ())
    assert is_same(other.state_dict(), net.state_dict())
    assert is_same(another.state_dict()["state"], optimizer.state_dict()["state"])
    assert [group["lr"] for group in another.param_groups] == [0.1, 0.5]
    assert target["train_state"] == counts


class Pair(nn.Module):
    """Two modules of the same names."""

    def __init__(self) -> None:
        super().__init__()
        self.maker, self.critic = nn.Linear(3, 3), nn.Linear(3, 3)


@pytest.mark.parametrize("named", [True, False])
def test_an_optimizer_over_two_modules_restores_with_both(cli: Cli, named: bool) -> None:
    """Without names, its state is restored by position."""
    pair, optimizer = over_two(0)
    names = [f"{one}/{name}" for one in ("critic", "maker") for name in ("weight", "bias")]
    Path("names.txt").write_text("\n".join(names))
    state = {"maker": pair.maker.state_dict(), "critic": pair.critic.state_dict()}
    torch.save({**state, "optimizer": optimizer.state_dict()}, "c.pt")
    given = ("--param-names", "names.txt") if named else ()
    ran = cli("import", "c.pt", "runs", "--step", 1, *given, "--json")
    assert ran.code == 0, ran.err
    how = "of 'critic' and 'maker', by name" if named else "by place"
    assert how in ran.json["names"]["optimizer"]
    other, another = over_two(1)
    with CheckpointManager("runs") as manager:
        target = {"maker": other.maker, "critic": other.critic, "optimizer": another}
        report = manager.restore(target)
    assert report is not None
    assert (report.missing, report.unexpected) == ((), ())
    assert is_same(another.state_dict(), optimizer.state_dict())
    assert is_same(other.state_dict(), pair.state_dict())


def over_two(seed: int) -> tuple[Pair, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    pair = Pair()
    optimizer = torch.optim.AdamW([*pair.critic.parameters(), *pair.maker.parameters()])
    pair.maker(pair.critic(torch.ones(3))).sum().backward()
    optimizer.step()
    return pair, optimizer

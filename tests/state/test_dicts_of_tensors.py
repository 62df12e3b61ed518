"""Parameters in plain dicts: of an optimizer, on several ranks, and instead of a saved module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ckpt.errors import EntryMissing, EntryUnexpected, KindMismatch
from tests.state.ranks import rank_of
from tests.state.saving import manifest_of, restored, saved
from tests.state.worlds import restore, save_ranks


def stage(rank: int, virtual: int, value: float) -> nn.Linear:
    """Return one of four stages of a pipeline.

    Every rank has two, as an interleaved schedule distributes them.
    """
    net = nn.Linear(3, 3)
    with torch.no_grad():
        net.weight.fill_(value + 10 * (2 * virtual + rank))
    return net


def merged(
    rank: int, value: float, *, detached: bool
) -> tuple[dict[str, Any], torch.optim.Optimizer, list[nn.Linear]]:
    """Return the state of one rank: the parameters of its stages in one dict, by name."""
    stages = {f"layers.{2 * virtual + rank}": stage(rank, virtual, value) for virtual in range(2)}
    weights = {
        f"{name}.{key}": tensor
        for name, net in stages.items()
        for key, tensor in (net.state_dict() if detached else dict(net.named_parameters())).items()
    }
    optimizer = torch.optim.AdamW([p for net in stages.values() for p in net.parameters()])
    return {"model": weights, "optimizer": optimizer}, optimizer, list(stages.values())


@pytest.mark.parametrize("detached", [False, True])
def test_virtual_stages_that_are_merged_by_name_keep_their_optimizer_apart(detached: bool) -> None:
    def of_rank(rank: int) -> dict[str, Any]:
        state, optimizer, stages = merged(rank, 1.0, detached=detached)
        for net in stages:
            for parameter in net.parameters():
                moments = {key: parameter.detach() * 2 for key in ("exp_avg", "exp_avg_sq")}
                optimizer.state[parameter] = {"step": torch.tensor(4.0), **moments}
        return state

    images, manifest = save_ranks(2, of_rank)
    names = {tensor.name for tensor in manifest.tensors}
    assert {f"optimizer/model/layers.{i}.weight/exp_avg" for i in range(4)} <= names
    for rank in range(2):
        with rank_of(rank, 2):
            state, optimizer, stages = merged(rank, 500.0, detached=detached)
            restore(state, images, manifest, rank, 2)
            for virtual, net in enumerate(stages):
                want = 1.0 + 10 * (2 * virtual + rank)
                assert (net.weight == want).all()
                assert (optimizer.state[net.weight]["exp_avg"] == 2 * want).all()
                assert optimizer.state[net.weight]["step"] == 4


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(2)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    return net, optimizer


def test_a_dict_of_parameters_and_a_module_restore_each_other_with_their_optimizers() -> None:
    net, optimizer = trained()
    as_module = {"model": net, "optimizer": optimizer}
    as_dict = {"model": net.state_dict(), "optimizer": optimizer}
    for state, other_is_module in ((as_dict, True), (as_module, False), (as_dict, False)):
        other = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        fresh = torch.optim.AdamW(other.parameters())
        target = {"model": other if other_is_module else other.state_dict(), "optimizer": fresh}
        restored(saved(state), target)
        for key, tensor in net.state_dict().items():
            assert torch.equal(other.state_dict()[key], tensor), key
        for mine, theirs in zip(net.parameters(), other.parameters(), strict=True):
            assert torch.equal(optimizer.state[mine]["exp_avg"], fresh.state[theirs]["exp_avg"])


def test_a_dict_in_the_place_of_a_module_must_have_its_names() -> None:
    net, _ = trained()
    root = saved({"model": net})
    with pytest.raises(EntryUnexpected, match=r"model/1\.running_mean"):
        restored(root, {"model": {"0.weight": torch.zeros(4, 3)}})
    with pytest.raises(EntryMissing, match=r"model/0\.other"):
        restored(root, {"model": {**net.state_dict(), "0.other": torch.zeros(4)}})
    with pytest.raises(KindMismatch, match="a dict that has a tensor under each of its names"):
        restored(root, {"model": {}})


def test_tied_names_of_a_module_come_back_into_a_dict() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    net[1].weight = net[0].weight
    target = {"model": {key: torch.zeros_like(tensor) for key, tensor in net.state_dict().items()}}
    restored(saved({"model": net}), target)
    assert torch.equal(target["model"]["1.weight"], net.get_parameter("0.weight"))


def test_what_was_known_by_its_place_in_the_optimizer_alone_is_found() -> None:
    """An older ckpt saved it like this, and so does this one where the dict holds copies."""
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.5, momentum=0.9)
    optimizer.state[weight]["momentum_buffer"] = torch.full((3,), 7.0)
    root = saved({"weights": {"w": weight.detach().clone()}, "optimizer": optimizer})
    assert "optimizer/~param/0/0/momentum_buffer" in {
        tensor.name for tensor in manifest_of(root).tensors
    }
    fresh = nn.Parameter(torch.zeros(3))
    target = torch.optim.SGD([fresh], lr=0.1, momentum=0.9)
    restored(root, {"weights": {"w": fresh}, "optimizer": target})
    assert torch.equal(fresh, torch.ones(3))
    assert torch.equal(target.state[fresh]["momentum_buffer"], torch.full((3,), 7.0))
    assert target.param_groups[0]["lr"] == 0.5

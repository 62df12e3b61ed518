"""Objects whose ``state_dict()`` holds their own tensors.

``torch.distributed.checkpoint`` requires such objects. For two ranks, see
tests/distributed/workers/in_layouts.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ckpt import CheckpointManager, LocalShards, PerRank
from ckpt.errors import EntryMissing, EntryUnexpected, ShapeMismatch, UnsupportedValue
from tests.kit.marks import each_once
from tests.kit.models import sharded
from tests.state.ranks import mesh_of, rank_of
from tests.state.saving import manifest_of, new_root, restored, saved
from tests.state.stateful import KINDS, AppState, Net, state_with, train
from tests.state.worlds import restore, save_ranks


@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_on_as_if_it_had_not_stopped(kind: str) -> None:
    torch.manual_seed(1)
    net = Net()
    state, optimizer = state_with(kind, net, lr=0.1)
    train(net, optimizer, 2)
    root = saved(state)
    other = Net()
    fresh, stepper = state_with(kind, other, lr=0.7)
    restored(root, fresh)
    assert torch.equal(train(other, stepper, 2), train(net, optimizer, 2))
    assert other.tied.weight is other.net2.weight


@pytest.mark.parametrize(("kind", "worlds"), each_once(KINDS, [(2, 3), (4, 2), (1, 2)]))
def test_it_moves_to_another_number_of_ranks(kind: str, worlds: tuple[int, int]) -> None:
    ranks, others = worlds
    """The test acts as every rank of either world in turn, and gathers nothing."""

    def built(world_size: int, value: float) -> dict[str, Any]:
        net = Net()
        if world_size > 1:
            fully_shard(net, mesh=mesh_of((world_size,)))
        state, optimizer = state_with(kind, net, lr=value)
        for inner in getattr(optimizer, "optimizers", [optimizer]):
            for number, parameter in enumerate(net.parameters()):
                local(parameter).copy_(pattern(parameter, value + number))
                moments = {
                    key: torch.zeros_like(parameter).detach() for key in ("exp_avg", "exp_avg_sq")
                }
                for each in moments.values():
                    local(each).copy_(pattern(parameter, value + number + 0.5))
                inner.state[parameter] = {"step": torch.tensor(value), **moments}
        return state

    with torch.no_grad():
        images, manifest = save_ranks(ranks, lambda rank: built(ranks, 4.0))
        for rank in range(others):
            with rank_of(rank, others):
                want = built(others, 4.0)
                state = built(others, 9.0)
                restore(state, images, manifest, rank, others)
                assert_alike(state, want)


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.data


def pattern(like: torch.Tensor, value: float) -> torch.Tensor:
    """Return what a rank has of a tensor whose elements are ``value``, ``value + 1``, and so on."""
    whole = torch.arange(float(like.numel())).view(like.shape) + value
    if not isinstance(like, DTensor):
        return whole
    rows = whole.chunk(like.device_mesh.size(), 0)
    here = like.device_mesh.get_local_rank()
    return rows[here] if here < len(rows) else whole[:0]


def assert_alike(have: Any, want: Any, path: str = "") -> None:
    """Check that the objects of two states give the same ``state_dict()``."""
    if hasattr(have, "state_dict"):
        have, want = have.state_dict(), want.state_dict()
    if isinstance(have, dict):
        assert have.keys() == want.keys(), path
        for key in have:
            assert_alike(have[key], want[key], f"{path}/{key}")
    elif isinstance(have, torch.Tensor):
        assert torch.equal(local(have), local(want)), path
    else:
        assert have == want, path


class Queue(Stateful):
    """Tensors whose sizes change, and plain values."""

    def __init__(self, waiting: int, seen: int) -> None:
        self.kept: dict[str, Any] = {
            "waiting": torch.arange(waiting),
            "weights": torch.full((2,), float(seen)),
            "seen": seen,
        }

    def state_dict(self) -> dict[str, Any]:
        return self.kept

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kept = state


def test_its_tensors_are_filled_in_place_and_those_of_another_size_made_anew() -> None:
    root = saved({"queue": Queue(5, 3)})
    target = Queue(2, 0)
    weights = target.kept["weights"]
    restored(root, {"queue": target})
    assert target.kept["weights"] is weights
    assert torch.equal(weights, torch.full((2,), 3.0))
    assert torch.equal(target.kept["waiting"], torch.arange(5))
    assert target.kept["seen"] == 3


def test_what_one_side_lacks_is_named() -> None:
    class More(Queue):
        def __init__(self) -> None:
            super().__init__(5, 3)
            self.kept["more"] = torch.ones(2)

    with pytest.raises(EntryMissing, match="queue/more"):
        restored(saved({"queue": Queue(5, 3)}), {"queue": More()})
    with pytest.raises(EntryUnexpected, match="queue/more"):
        restored(saved({"queue": More()}), {"queue": Queue(5, 3)})


def test_a_sharded_tensor_of_another_size_is_refused() -> None:
    class Wide(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.inner = nn.Linear(width, width)

    with rank_of(0, 1):
        root = new_root()
        for width in (4, 5):
            net = sharded(Wide(width), mesh=mesh_of((1,)))
            state = {"app": AppState(net, torch.optim.SGD(net.parameters(), momentum=0.9))}
            if width == 4:
                saved(state, root)
            else:
                with pytest.raises(ShapeMismatch, match=r"app/model/inner\.weight"):
                    restored(root, state)


def test_a_model_that_stands_in_the_state_as_well_is_stored_once() -> None:
    with rank_of(0, 1):
        net = sharded(Net(), mesh=mesh_of((1,)))
        optimizer = torch.optim.SGD(net.parameters(), momentum=0.9)
        root = saved({"app": AppState(net, optimizer), "model": net})
        names = [tensor.name for tensor in manifest_of(root).tensors]
        assert "app/model/net1.weight" in names
        assert "model/net1.weight" not in names
        other = sharded(Net(), mesh=mesh_of((1,)))
        restored(
            root,
            {
                "app": AppState(other, torch.optim.SGD(other.parameters(), momentum=0.9)),
                "model": other,
            },
        )
        assert torch.equal(local(other.net1.weight), local(net.net1.weight))


def test_its_tensors_are_copied_before_save_async_returns() -> None:
    """The manager does not know what changes them, so they cannot wait for a step."""
    torch.manual_seed(1)
    net = Net()
    state, optimizer = state_with("tutorial", net, lr=0.1)
    train(net, optimizer, 1)
    before = net.net1.weight.detach().clone()
    root = new_root()
    with CheckpointManager(root) as manager:
        pending = manager.save_async(state, 0)
        with torch.no_grad():
            net.net1.weight.zero_()
        pending.result()
    other = Net()
    restored(root, state_with("tutorial", other, lr=0.1)[0])
    assert torch.equal(other.net1.weight, before)


def test_parts_of_its_own_are_filled_in_place() -> None:
    class Parts(Stateful):
        def __init__(self, value: float) -> None:
            self.memory = torch.full((4,), value)
            self.parts = LocalShards((4,), [((0,), self.memory[:2]), ((2,), self.memory[2:])])

        def state_dict(self) -> dict[str, Any]:
            return {"parts": self.parts}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            assert state["parts"] is self.parts

    target = Parts(0.0)
    restored(saved({"parts": Parts(2.0)}), {"parts": target})
    assert torch.equal(target.memory, torch.full((4,), 2.0))


def test_sharded_tensors_of_one_rank_alone_are_refused() -> None:
    with rank_of(0, 1):
        net = sharded(Net(), mesh=mesh_of((1,)))
        state = {"app": PerRank(AppState(net, torch.optim.SGD(net.parameters())))}
        with pytest.raises(UnsupportedValue, match=r"DTensor in a PerRank"):
            saved(state)

"""An engine's flat memory in a state, under the names of plain PyTorch."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn

from ckpt import CheckpointManager
from ckpt.errors import ConfigError, RestoreError
from ckpt.integrations.deepspeed import zero_state
from ckpt.state.walk.collect import collect
from ckpt.state.walk.last_walk import LastWalk
from tests.integrations.deepspeed.flat_engine import Engine
from tests.overlap.conftest import window  # noqa: F401
from tests.overlap.window import Window
from tests.state.saving import manifest_of, new_root, restored, saved

KEYS = ("exp_avg", "exp_avg_sq")


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Net(nn.Module):
    seen: torch.Tensor

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up, self.fixed, self.down = (
            nn.Linear(6, 5),
            nn.Linear(5, 5),
            nn.Linear(5, 6, bias=False),
        )
        self.fixed.requires_grad_(False)
        self.again = self.up
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.down(self.fixed(self.up(values)))


def plain(seed: int) -> tuple[Net, torch.optim.AdamW]:
    net = Net(seed)
    weights: dict[str, Any] = {"params": [net.up.weight, net.down.weight]}
    rest = {"params": [net.up.bias], "weight_decay": 0.0}
    return net, torch.optim.AdamW([weights, rest], lr=0.1)


def engine(seed: int, **options: Any) -> Engine:
    return Engine(*plain(seed), **options)


def masters(trained: Engine) -> list[torch.Tensor]:
    inner = trained.optimizer.optimizer
    flats = trained.optimizer.single_partition_of_fp32_groups
    return [
        value.detach().clone()
        for flat in flats
        for value in (flat, *(inner.state[flat][key] for key in KEYS))
    ]


def test_an_engine_goes_on_as_if_it_had_never_been_away() -> None:
    source, target = engine(1), engine(2)
    source.train(3)
    root = saved(zero_state(source))
    restored(root, zero_state(target))
    assert all(map(torch.equal, masters(source), masters(target)))
    assert target.global_steps == 3
    assert target.lr_scheduler.last_epoch == 3
    assert target.optimizer.optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
    assert source.train(3) == target.train(3)


def test_it_goes_on_in_place_where_it_has_stepped_before() -> None:
    source = engine(1)
    source.train(2)
    kept, state = masters(source), zero_state(source)
    root = saved(state)
    flats = source.optimizer.single_partition_of_fp32_groups
    memory = [source.optimizer.optimizer.state[flat]["exp_avg"].data_ptr() for flat in flats]
    expected = source.train(2)
    restored(root, state)
    assert all(map(torch.equal, kept, masters(source)))
    assert memory == [
        source.optimizer.optimizer.state[flat]["exp_avg"].data_ptr() for flat in flats
    ]
    assert source.train(2) == expected


def test_a_plain_model_and_optimizer_take_it_as_their_own() -> None:
    source = engine(1)
    source.train(3)
    net, optimizer = plain(2)
    net.fixed.bfloat16()  # what is not trained has the engine's dtype
    root = saved(zero_state(source))
    restored(root, {"model": net, "optimizer": optimizer})
    weights, biases = source.optimizer.single_partition_of_fp32_groups
    assert torch.equal(
        torch.cat([net.up.weight.reshape(-1), net.down.weight.reshape(-1)]), weights[:-3]
    )
    assert torch.equal(net.up.bias, biases[:-3])
    assert torch.equal(net.fixed.weight, source.module.fixed.weight)
    assert net.seen.tolist() == [3, 3]
    for key in KEYS:
        flat = source.optimizer.optimizer.state[weights][key]
        assert torch.equal(optimizer.state[net.up.weight][key].reshape(-1), flat[:30])
    assert float(optimizer.state[net.up.bias]["step"]) == 3
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
    assert optimizer.param_groups[1]["weight_decay"] == 0
    assert manifest_of(root).tied["model/again.weight"] == "model/up.weight"


def step_plainly(net: Net, optimizer: torch.optim.AdamW) -> None:
    net(torch.randn(4, 6)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_it_takes_what_a_plain_model_and_optimizer_have_saved() -> None:
    net, optimizer = plain(1)
    net.fixed.to(torch.bfloat16).float()  # bits that bfloat16 holds
    step_plainly(net, optimizer)
    net.fixed.bfloat16()
    root = saved({"model": net, "optimizer": optimizer})
    target = engine(2)
    restored(root, zero_state(target))
    weights, _ = target.optimizer.single_partition_of_fp32_groups
    assert torch.equal(weights[:30].view(5, 6), net.up.weight)
    assert torch.equal(target.module.up.weight, net.up.weight.bfloat16())
    state = target.optimizer.optimizer.state[weights]
    assert torch.equal(
        state["exp_avg"][30:-3].view(6, 5), optimizer.state[net.down.weight]["exp_avg"]
    )
    assert state["exp_avg"][-3:].tolist() == [0, 0, 0]  # padding
    assert float(state["step"]) == 1
    assert target.global_steps == 0


def test_parameters_that_had_not_stepped_start_from_zero_beside_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    net, optimizer = plain(1)
    net.fixed.bfloat16()
    net.up.weight.grad = torch.ones(5, 6)
    optimizer.step()
    root = saved({"model": net, "optimizer": optimizer})
    target = engine(2)
    target.train(2)
    with caplog.at_level(logging.WARNING, "ckpt"):
        restored(root, zero_state(target))
    weights, biases = target.optimizer.single_partition_of_fp32_groups
    state = target.optimizer.optimizer.state
    assert state[weights]["exp_avg"][:30].eq(0.1).all()
    assert state[weights]["exp_avg"][30:].eq(0).all()
    assert float(state[weights]["step"]) == 1
    assert biases not in state
    assert not caplog.records


def test_counts_that_differ_within_what_steps_together_are_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    net, optimizer = plain(1)
    net.fixed.bfloat16()
    for parameters in ([net.up.weight], [net.up.weight, net.down.weight]):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
    target = engine(2)
    with caplog.at_level(logging.WARNING, "ckpt"):
        restored(saved({"model": net, "optimizer": optimizer}), zero_state(target))
    weights, _ = target.optimizer.single_partition_of_fp32_groups
    assert float(target.optimizer.optimizer.state[weights]["step"]) == 2
    assert "after 1 to 2 steps" in caplog.text


def test_the_step_waits_until_master_weights_and_state_are_copied(window: Window) -> None:  # noqa: F811
    source = engine(1)
    source.train(2)
    kept, state, root = masters(source), zero_state(source), new_root()
    with CheckpointManager(root) as manager:
        flats = source.optimizer.single_partition_of_fp32_groups
        pending = window.save(manager, state, of=[flat.detach() for flat in flats])
        window.must_wait(lambda: source.train(1))
        pending.result(30)
    assert not torch.equal(kept[0], masters(source)[0])
    restored(root, state)
    assert all(map(torch.equal, kept, masters(source)))


def test_a_save_finds_nothing_new_where_only_values_have_changed() -> None:
    source = engine(1)
    source.train(1)
    state, last_walk = zero_state(source), LastWalk()
    first = collect(state, rank=0, last_walk=last_walk)
    source.train(1)
    second = collect(state, rank=0, last_walk=last_walk)
    assert [id(part) for part in first.parts] == [id(part) for part in second.parts]
    steps = {
        held.name: float(held.tensor)  # type: ignore[arg-type]
        for held in second.named_tensors
        if held.name.endswith("/step")
    }
    assert set(steps.values()) == {2.0}
    assert len(steps) == 3


def test_a_checkpoint_from_before_the_first_step_lets_the_optimizer_begin_anew() -> None:
    root = saved(zero_state(engine(1)))
    target = engine(2)
    target.train(2)
    restored(root, zero_state(target))
    assert target.train(2) == engine(1).train(2)


def test_the_model_alone(tmp_path: Any) -> None:
    source, target = engine(1), engine(2)
    source.train(2)
    root = saved(zero_state(source))
    with CheckpointManager(root) as manager:
        manager.restore(zero_state(target), only="model/*")
    assert torch.equal(target.module.up.weight, source.module.up.weight)
    assert target.global_steps == 0
    assert not target.optimizer.optimizer.state


def test_another_kind_of_schedule_starts_anew(caplog: pytest.LogCaptureFixture) -> None:
    source, target = engine(1), engine(2, scheduled=False)
    source.train(1)
    target.lr_scheduler = torch.optim.lr_scheduler.ConstantLR(target.optimizer.optimizer)
    with caplog.at_level(logging.WARNING, "ckpt"):
        restored(saved(zero_state(source)), zero_state(target))
    assert "a StepLR, the engine a ConstantLR" in caplog.text
    assert target.lr_scheduler.last_epoch == 0


def test_a_dynamic_loss_scale_comes_back_and_a_fixed_one_stays() -> None:
    def scaler(scale: float, *, dynamic: bool) -> SimpleNamespace:
        return SimpleNamespace(
            cur_scale=scale, cur_iter=int(scale), last_overflow_iter=-1, dynamic=dynamic
        )

    source, moving, fixed = engine(1), engine(2), engine(3)
    source.optimizer.loss_scaler = scaler(512, dynamic=True)
    moving.optimizer.loss_scaler, fixed.optimizer.loss_scaler = (
        scaler(2, dynamic=True),
        scaler(2, dynamic=False),
    )
    root = saved(zero_state(source))
    restored(root, zero_state(moving))
    restored(root, zero_state(fixed))
    assert vars(moving.optimizer.loss_scaler) == vars(source.optimizer.loss_scaler)
    assert fixed.optimizer.loss_scaler.cur_scale == 2


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda e: setattr(e.optimizer, "swap_optimizer", True), "NVMe"),
        (lambda e: setattr(e, "has_moe_layers", True), "experts"),
        (lambda e: setattr(e.optimizer, "zenflow", True), "ZenFlow"),
        (lambda e: setattr(e, "optimizer", e.optimizer.optimizer), "AdamW"),
        (lambda e: e.optimizer.bit16_groups_flat.reverse(), "reload_states"),
    ],
)
def test_what_cannot_be_saved_is_refused_at_once(change: Any, expected: str) -> None:
    wrong = engine(1)
    change(wrong)
    with pytest.raises(ConfigError, match=expected):
        zero_state(wrong)


def test_ranks_that_hold_other_parameters_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = engine(1)
    # its data parallel group has one of them
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    with pytest.raises(ConfigError, match="another kind than that of data"):
        zero_state(wrong)


def test_state_of_another_shape_than_its_parameter_is_refused_with_nothing_changed() -> None:
    net, optimizer = plain(1)
    step_plainly(net, optimizer)
    net.fixed.bfloat16()
    optimizer.state[net.up.weight]["rows"] = torch.zeros(4)
    root, target = saved({"model": net, "optimizer": optimizer}), engine(2)
    target.train(1)
    before = masters(target)
    with pytest.raises(RestoreError, match="'rows' of shape"):
        restored(root, zero_state(target))
    assert all(map(torch.equal, before, masters(target)))


def test_optimizer_state_that_belongs_to_no_parameter_is_refused() -> None:
    odd = engine(1)
    odd.train(1)
    weights, _ = odd.optimizer.single_partition_of_fp32_groups
    odd.optimizer.optimizer.state[weights]["rows"] = torch.zeros(4)
    with pytest.raises(ConfigError, match="'rows'"):
        saved(zero_state(odd))

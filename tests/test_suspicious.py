"""Saves whose trained tensors show that training does not work: ``on_suspicious``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ckpt
from ckpt import CheckpointManager, Tier
from ckpt.errors import ConfigError, SuspiciousState
from ckpt.events import Event, SaveSuspicious
from ckpt.save.training_alarm import _EXPONENTS, all_finite
from tests.coordination.world import World
from tests.distributed.launch import WORKERS
from tests.kit.stores import whole
from tests.kit.worlds import world


class Job:
    """A model, its optimizer, and a manager that notes what is suspicious."""

    def __init__(self, root: Path, model: Any = None, **settings: Any) -> None:
        torch.manual_seed(1)
        self.model: Any = model or nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
        self.optimizer = torch.optim.AdamW(
            [each for each in self.model.parameters() if each.requires_grad], lr=0.01
        )
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        self.seen: list[SaveSuspicious] = []
        settings = {"on_suspicious": "warn", **settings}
        self.manager = CheckpointManager(root, observers=[self._note], **settings)

    def _note(self, event: Event) -> None:
        if isinstance(event, SaveSuspicious):
            self.seen.append(event)

    @property
    def steps(self) -> list[int]:
        return [event.step for event in self.seen]

    def train(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(3, 8)).square().sum().backward()
        self.optimizer.step()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.manager.close()


@pytest.mark.parametrize(
    "tiers", ["one", "memory", "encoded", pytest.param("waves", marks=pytest.mark.slow)]
)
def test_a_step_without_a_change_is_named(
    tmp_path: Path, tiers: str, caplog: pytest.LogCaptureFixture
) -> None:
    places: Any = {
        "memory": ["memory", tmp_path / "near", tmp_path / "far"],
        "encoded": [Tier(str(tmp_path), codec="zstd")],
    }.get(tiers, tmp_path)
    model = nn.Linear(8, 2 << 20) if tiers == "waves" else None
    settings = {"host_memory": 180 << 20, "check_finite": True} if tiers == "waves" else {}
    with Job(places, model, **settings) as job:
        for step in (1, 2, 3, 4):
            if step != 3:
                job.train()
            job.manager.save(job.state, step)
    assert job.steps == [3]
    error = job.seen[0].error
    assert isinstance(error, SuspiciousState)
    assert error.since == 2
    assert len(error.names) == (2 if tiers == "waves" else 4)
    assert whole(tmp_path / "near" if tiers == "memory" else tmp_path) == [1, 2, 3, 4]
    warned = [record.getMessage() for record in caplog.records if "trained" in record.getMessage()]
    assert len(warned) == 1
    assert "step 3: no trained tensor has changed since step 2" in warned[0]


def test_raise_comes_from_the_next_call_and_the_step_is_committed(tmp_path: Path) -> None:
    with Job(tmp_path, on_suspicious="raise", on_error="warn") as job:
        job.train()
        job.manager.save(job.state, 1)
        with pytest.raises(SuspiciousState, match="step 2: no trained tensor has changed since"):
            job.manager.save(job.state, 2)
        job.train()
        job.manager.save(job.state, 3)
        job.manager.save_async(job.state, 4).result()
        with pytest.raises(SuspiciousState, match="step 4"):
            job.manager.fence()
        assert job.manager.failed == 0
        job.manager.save_async(job.state, 5)
        with pytest.raises(SuspiciousState, match="step 5"):
            job.manager.close()
    assert whole(tmp_path) == [1, 2, 3, 4, 5]


def test_ignore_looks_at_nothing(tmp_path: Path) -> None:
    with Job(tmp_path, on_suspicious="ignore", check_finite=True) as job:
        with torch.no_grad():
            job.model[0].bias[0] = float("nan")
        for step in (1, 2):
            job.manager.save(job.state, step)
    assert job.steps == []


def _nothing(job: Job) -> None:
    job.train()


def _rate_of_zero(job: Job) -> None:
    for group in job.optimizer.param_groups:
        group["lr"] = torch.tensor(0.0) if job.steps else 0.0


def _warm_up(job: Job) -> None:
    """The rate was zero when the optimizer stepped, and is not when the step is saved."""
    _rate_of_zero(job)
    job.manager.save(job.state, 9)
    job.optimizer.param_groups[0]["lr"] = 0.1


def _frozen(job: Job) -> None:
    job.model.requires_grad_(False)


def _restored(job: Job) -> None:
    assert job.manager.restore(job.state)


def _one_more_parameter(job: Job) -> None:
    """It is trained and not saved, so it may have changed."""
    job.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    job.manager.save(job.state, 9, exclude="optimizer")


@pytest.mark.parametrize(
    "before", [_nothing, _rate_of_zero, _warm_up, _frozen, _restored, _one_more_parameter]
)
def test_no_alarm_where_nothing_had_to_change(
    tmp_path: Path, before: Callable[[Job], None]
) -> None:
    with Job(tmp_path) as job:
        job.train()
        job.manager.save(job.state, 8)
        before(job)
        job.manager.save(job.state, 10, exclude="optimizer")
        assert job.steps == []


@pytest.mark.parametrize("only", ["optimizer", "model/0.bias"])
def test_a_part_of_what_is_trained_raises_no_alarm(tmp_path: Path, only: str) -> None:
    with Job(tmp_path) as job:
        for step in (1, 2, 3):
            job.manager.save(job.state, step, only=only)
        assert job.steps == []
        job.manager.save(job.state, 4)
        job.manager.save(job.state, 5)
        assert job.steps == [5]


def test_all_that_is_trained_is_compared_without_the_frozen_base(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 4))
    with Job(tmp_path, model) as job:
        state = {"model": ckpt.trainable(model), "optimizer": job.optimizer}
        for step in (1, 2, 3):
            job.manager.save(state, step)
            if step == 1:
                job.train()
        assert job.steps == [3]
        assert job.seen[0].error.names == ("model/1.bias", "model/1.weight")  # type: ignore[attr-defined]


def test_one_of_two_optimizers_is_enough(tmp_path: Path) -> None:
    with Job(tmp_path) as one, Job(tmp_path / "other") as other:
        state = {"generator": one.state, "critic": other.state}
        for step in range(4):
            (one if step % 2 else other).train()
            one.manager.save(state, step)
        assert one.steps == []
        one.manager.save(state, 9)
        assert one.steps == [9]


def test_what_is_frozen_at_the_save_may_have_been_trained_before(tmp_path: Path) -> None:
    """The critic is trained each time, and frozen while the generator learns from it."""
    with Job(tmp_path) as generator, Job(tmp_path / "other") as critic:
        state = {"generator": generator.state, "critic": critic.state}
        for step in range(6):
            critic.train()
            critic.model.requires_grad_(False)
            if step % 3 == 0:
                generator.train()
            generator.manager.save(state, step)
            critic.model.requires_grad_(True)
        assert generator.steps == []
        critic.model.requires_grad_(False)
        generator.manager.save(state, 9)
        assert generator.steps == [9]


def test_a_rate_that_is_no_number_is_no_error(tmp_path: Path) -> None:
    with Job(tmp_path) as job:
        job.optimizer.param_groups[0]["lr"] = (1e-3, 1e-4)
        job.manager.save(job.state, 1)
        assert job.steps == []


def test_an_older_step_is_compared_with_none(tmp_path: Path) -> None:
    with Job(tmp_path) as job:
        job.manager.save(job.state, 5)
        job.manager.save(job.state, 3)
        assert job.steps == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_the_tensor_with_a_bad_number_is_named(
    tmp_path: Path, dtype: torch.dtype, bad: float
) -> None:
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)).to(dtype)
    with Job(tmp_path, model, check_finite=True) as job:
        job.manager.save(job.state, 1)
        with torch.no_grad():
            model[1].weight[3, 7] = bad
        job.manager.save(job.state, 2)
        assert job.steps == [2]
        error = job.seen[0].error
        assert isinstance(error, SuspiciousState)
        assert (error.names, error.since) == (("model/1.weight",), None)


def test_a_bad_number_is_no_alarm_unless_it_is_looked_for(tmp_path: Path) -> None:
    with Job(tmp_path) as job:
        job.manager.save(job.state, 1)
        with torch.no_grad():
            job.model[1].weight[3, 7] = float("nan")
        job.manager.save(job.state, 2)
        assert job.steps == []


@pytest.mark.parametrize("name", sorted(_EXPONENTS))
def test_the_largest_numbers_are_finite(name: str) -> None:
    dtype = getattr(torch, name)
    numbers = torch.zeros(300_000, dtype=dtype)
    numbers[-1] = torch.finfo(dtype).max
    numbers[-2] = torch.finfo(dtype).min
    raw: Any = numbers.view(torch.uint8).numpy()
    assert all_finite(memoryview(raw), _EXPONENTS[name])
    for bad in (np.nan, np.inf, -np.inf):
        numbers[-3] = bad
        assert not all_finite(memoryview(raw), _EXPONENTS[name])


@pytest.mark.parametrize("moving", [(), (0,), (1,), (0, 1)])
@pytest.mark.parametrize("scans", [False, True])
def test_a_change_on_one_rank_is_enough(
    tmp_path: Path, moving: tuple[int, ...], scans: bool
) -> None:
    """Each rank has a stage of its own, and both raise the same error."""

    def train(coordinator: Any) -> list[SuspiciousState]:
        settings = {"coordinator": coordinator, "on_suspicious": "raise", "check_finite": scans}
        try:
            with Job(tmp_path, **settings) as job:
                stage = f"stage{coordinator.rank}"
                state = {stage: job.model, f"optimizer{coordinator.rank}": job.optimizer}
                job.manager.save(state, 1)
                if coordinator.rank in moving:
                    job.train()
                job.manager.save(state, 2)
        except SuspiciousState as error:  # from the save or from the end
            return [error]
        return []

    ended = World(2, patience=30).run(train)
    names = tuple(
        f"stage{rank}/{layer}.{part}"
        for rank in (0, 1)
        for layer in (0, 1)
        for part in ("bias", "weight")
    )
    for rank in (0, 1):
        assert isinstance(ended[rank], list), ended
        assert [error.names for error in ended[rank]] == ([] if moving else [names])


def test_a_bad_number_on_one_rank_is_named_on_all(tmp_path: Path) -> None:
    def train(coordinator: Any) -> list[tuple[str, ...]]:
        with Job(tmp_path, coordinator=coordinator, check_finite=True) as job:
            if coordinator.rank == 1:
                with torch.no_grad():
                    job.model[0].bias[2] = float("nan")
            state = {f"m{coordinator.rank}": job.model, f"o{coordinator.rank}": job.optimizer}
            job.manager.save(state, 1)
        return [event.error.names for event in job.seen]  # type: ignore[attr-defined]

    assert World(2, patience=30).run(train) == {0: [("m1/0.bias",)], 1: [("m1/0.bias",)]}


@pytest.mark.distributed
def test_replicated_and_sharded_models_are_compared(tmp_path: Path) -> None:
    assert "ALL WELL" in world(2, WORKERS / "suspicious.py", tmp_path)


@pytest.mark.parametrize("wrong", [{"on_suspicious": "warm"}, {"check_finite": 3}])
def test_a_wrong_setting_is_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        CheckpointManager(tmp_path, **wrong)
    assert not list(tmp_path.iterdir())

"""The engines that verl's registry makes bring each update of an actor to the rollouts."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import warnings
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("verl", reason="verl is not installed")
pytest.importorskip("tensordict", reason="tensordict, which verl needs, is not installed")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Those of Ray, and of the packages of verl
    from verl.checkpoint_engine import CheckpointEngineRegistry
    from verl.utils.import_utils import import_external_libs

import ckpt
from ckpt import CheckpointManager
from ckpt.errors import NoCheckpoint
from tests import processes

ROOT = Path(__file__).resolve().parents[2]
BOUND = 400

pytestmark = pytest.mark.integration

Weights = dict[str, torch.Tensor]


def weights_of(seed: int) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    names = ("embed.weight", "layers.0.weight", "layers.10.weight")
    return {name: torch.randn(64, 32, generator=generator).bfloat16() for name in names}


class Job:
    """The engines of a job of verl with two workers for the actor and two for the rollouts."""

    def __init__(self, root: Path, **options: Any) -> None:
        options = {"bucket_size": 1 << 20, "root": str(root), **options}
        self.actor = [
            CheckpointEngineRegistry.new("ckpt", is_master=rank == 0, **options) for rank in (0, 1)
        ]
        self.rollouts = [CheckpointEngineRegistry.new("ckpt", **options) for _ in range(2)]
        self.others: list[Callable[[], Awaitable[None]]] = []  # What a worker does besides

    def update(self, weights: Weights, global_steps: int | None) -> list[Weights]:
        """Make an update in the order of verl's manager. Return what the rollouts get."""
        engines = self.actor + self.rollouts
        metadata = [engine.prepare() for engine in engines]
        build = CheckpointEngineRegistry.get("ckpt").build_topology
        groups = build(len(self.actor), len(self.rollouts), metadata)
        for workers, arguments in zip((self.actor, self.rollouts), groups, strict=True):
            for rank, engine in enumerate(workers):
                engine.init_process_group(
                    **{name: values[rank] for name, values in arguments.items()}
                )
        results = asyncio.run(self._run(weights, global_steps))
        for engine in engines:
            engine.finalize()
        return results

    async def _run(self, weights: Weights, global_steps: int | None) -> list[Weights]:
        async def receive(engine: Any) -> Weights:
            items = engine.receive_weights(global_steps=global_steps)
            return {name: tensor.clone() async for name, tensor in items}

        async def send(engine: Any) -> None:
            await engine.send_weights((item for item in weights.items()), global_steps=global_steps)

        rollouts = [asyncio.ensure_future(receive(engine)) for engine in self.rollouts]
        await asyncio.gather(*map(send, self.actor), *(other() for other in self.others))
        return [await rollout for rollout in rollouts]


@pytest.fixture(autouse=True)
def door() -> None:
    """Import the module as ``custom_backend_module`` does."""
    import_external_libs("ckpt.integrations.verl")


def same(weights: Weights, other: Weights) -> bool:
    return weights.keys() == other.keys() and all(
        torch.equal(value, other[name]) for name, value in weights.items()
    )


def test_each_rollout_gets_each_update(tmp_path: Path) -> None:
    job = Job(tmp_path)
    for seed in (1, 2, 3):
        weights = weights_of(seed)
        assert all(same(got, weights) for got in job.update(weights, 10 + seed))
    with ckpt.open(tmp_path) as opened:
        assert [row["global_steps"] for row in opened.history()] == [11, 12, 13]
        assert opened.steps() == [2, 1]
        assert opened.names() == sorted(f"model/{name}" for name in weights)


def test_the_event_loop_goes_on_while_an_update_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered, save = threading.Event(), CheckpointManager.save

    def save_late(*arguments: Any, **words: Any) -> Any:
        asked.set()
        assert answered.wait(20)
        return save(*arguments, **words)

    async def answer() -> None:
        while not asked.is_set():
            await asyncio.sleep(0.01)
        answered.set()

    asked = threading.Event()
    monkeypatch.setattr(CheckpointManager, "save", save_late)
    job, weights = Job(tmp_path), weights_of(1)
    job.others.append(answer)
    assert all(same(got, weights) for got in job.update(weights, 1))


def test_a_trainer_that_goes_back_publishes_a_newer_step(tmp_path: Path) -> None:
    """verl resumes from a checkpoint of its own, and counts on from there."""
    job = Job(tmp_path)
    for seed in (1, 2, 3):
        job.update(weights_of(seed), seed)
    again = Job(tmp_path)
    weights = weights_of(4)
    assert all(same(got, weights) for got in again.update(weights, 2))
    with ckpt.open(tmp_path) as opened:
        assert opened.step == 3


def test_an_update_may_have_no_number(tmp_path: Path) -> None:
    weights = weights_of(1)
    assert all(same(got, weights) for got in Job(tmp_path).update(weights, None))


def test_a_rollout_does_not_wait_for_ever(tmp_path: Path) -> None:
    engine = Job(tmp_path, timeout_seconds=0.2).rollouts[0]
    engine.init_process_group(step=7)

    async def receive() -> None:
        async for _ in engine.receive_weights(global_steps=7):
            pass

    with pytest.raises(NoCheckpoint, match="no version of step 7 within"):
        asyncio.run(receive())


def facts_of(script: str, *arguments: object, **environment: str) -> Any:
    """Run a script of ``workers``, and return the JSON that it prints."""
    ended = processes.run(
        [sys.executable, Path(__file__).parent / "workers" / script, *arguments],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "backends")]),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",
            **environment,
        },
        timeout=BOUND,
    )
    assert ended.returncode == 0, ended.stdout[-6000:]
    (line,) = [line for line in ended.stdout.splitlines() if line.startswith("FACTS ")]
    return json.loads(line.removeprefix("FACTS "))


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(BOUND + 40)
def test_the_manager_of_verl_updates_rollouts_on_ray(tmp_path: Path) -> None:
    assert facts_of("verl_update.py", tmp_path) == [[True, True]] * 3


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(BOUND + 40)
def test_the_actor_of_verl_trains_and_updates_rollouts(tmp_path: Path) -> None:
    """verl registers its FSDP engine for CUDA. Nothing in it needs the device."""
    facts = facts_of(
        "verl_train.py",
        tmp_path / "root",
        tmp_path / "model",
        VERL_PLATFORM="cpu",
        VERL_USE_EXTERNAL_MODULES="tests.integrations.workers.verl_cpu",
        VERL_ENGINE_DEVICE="cuda",
    )
    first, *trained, again, loaded = facts
    assert first == again == [True, True]
    assert trained == [[True, True, True]] * 2
    assert loaded == [True]
    with ckpt.open(tmp_path / "root") as opened:
        assert [row["global_steps"] for row in opened.history()] == [0, 1, 2, 1]

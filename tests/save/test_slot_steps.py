"""Which slots hold what is nowhere else."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt.storage.tiers
from ckpt import CheckpointManager, Tier
from ckpt.model.keys import StepRef
from ckpt.save.job_steps import JobSteps
from ckpt.save.slot_steps import SlotSteps
from ckpt.storage.registry import open_backend
from ckpt.storage.tiers import OpenTier

ONE, TWO = (StepRef(step, "a" * 12) for step in (1, 2))


def test_the_newest_step_in_memory_is_needed_until_a_newer_one_or_a_durable_tier_has_it(
    tmp_path: Path,
) -> None:
    job = JobSteps([])
    tier, slots = OpenTier(0, Tier(str(tmp_path)), open_backend(str(tmp_path))), SlotSteps(0, job)
    slots.keep("/one", tier, ONE)
    assert not slots.is_needed("/one")  # It is not committed yet
    slots.set_committed(ONE)
    slots.keep("/two", tier, TWO)
    assert (slots.is_needed("/one"), slots.is_needed("/two")) == (True, False)
    slots.set_committed(TWO)
    assert (slots.is_needed("/one"), slots.is_needed("/two")) == (False, True)
    job.set_durable(TWO)
    assert not slots.is_needed("/two")


class Watched:
    """A tier in memory that waits before it puts the manifest of the second step."""

    def __init__(self, url: str, options: Mapping[str, object]) -> None:
        self.inner = open_backend(url, options)
        self.calls: list[str] = []
        self.go = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def put(self, key: str, data: Any, **how: Any) -> Any:
        if key.startswith("step-000000002") and key.endswith("manifest.json"):
            assert self.go.wait(60)
            self.calls.append("put 2")
        return self.inner.put(key, data, **how)

    def delete(self, key: str) -> None:
        if key.startswith("step-000000001") and key.endswith("manifest.json"):
            self.calls.append("delete 1")
            self.go.set()
        self.inner.delete(key)


def test_the_only_step_in_memory_stays_until_the_next_one_is_committed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened: list[Watched] = []

    def open_watched(url: str, options: Mapping[str, object]) -> Watched:
        opened.append(Watched(url, options))
        return opened[-1]

    is_needed = SlotSteps.is_needed

    def asked(steps: SlotSteps, path: str) -> bool:
        if found := is_needed(steps, path):
            opened[0].go.set()  # The third save waits
        return found

    monkeypatch.setattr(ckpt.storage.tiers, "open_backend", open_watched)
    monkeypatch.setattr(SlotSteps, "is_needed", asked)
    state = {"x": torch.zeros(1000)}
    name = f"test-stays-{os.getpid()}"
    with CheckpointManager(f"shm://{name}") as manager:
        manager.save(state, 1)
        second = manager.save_async(state, 2)
        manager.save_async(state, 3).result()
        second.result()
        assert manager.latest_step() == 3
    assert opened[0].calls == ["put 2", "delete 1"]
    shutil.rmtree(f"/dev/shm/ckpt-memory-{os.getuid()}-{name}")


def test_the_only_step_in_memory_stays_until_a_larger_one_is_committed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened: list[Watched] = []

    def open_watched(url: str, options: Mapping[str, object]) -> Watched:
        opened.append(Watched(url, options))
        return opened[-1]

    monkeypatch.setattr(ckpt.storage.tiers, "open_backend", open_watched)
    with CheckpointManager(f"shm://test-grows-{os.getpid()}") as manager:
        manager.save({"x": torch.zeros(1000)}, 1)
        second = manager.save_async({"x": torch.zeros(3_000_000)}, 2)
        assert (manager.latest_step(), opened[0].calls) == (1, [])
        opened[0].go.set()
        second.result()
        manager.save({"x": torch.zeros(3_000_000)}, 3)
        assert manager.latest_step() == 3
    assert opened[0].calls == ["put 2", "delete 1"]

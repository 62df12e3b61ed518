"""There is no memory for a slot.

The error comes when the slot is requested, and has the numbers. Training goes on, and the next save
works when there is room again.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckpt import CheckpointManager
from ckpt.errors import HostMemoryExhausted
from ckpt.staging import slot_pool
from ckpt.staging.memory_budget import measure
from tests.kit.worlds import ENVIRONMENT, ROOT
from tests.overlap.jobs import train, trained
from tests.overlap.window import Window, assert_restores

MIB = 1 << 20


def test_a_machine_that_is_full_is_told_of_at_prepare_and_at_every_save_until_it_is_not(
    root: str, window: Window, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(shm: str, **how: Any) -> Any:
        return replace(measure(shm, **how), memory=10_000, shared_bytes=10_000)

    state = trained()
    with CheckpointManager(root) as manager:
        monkeypatch.setattr(slot_pool, "measure", full)
        with pytest.raises(HostMemoryExhausted, match="0 MiB may be used by each of the 1 rank"):
            manager.prepare(state)
        for number in range(3):
            with pytest.raises(HostMemoryExhausted):
                manager.save_async(state, number)
            train(state, number)
        monkeypatch.setattr(slot_pool, "measure", measure)
        pending = window.save(manager, state, 2)  # the step that could not be saved
        window.must_wait(lambda: train(state, 4))
        pending.result(60)
        assert manager.steps() == [2]
    assert_restores(root, window.reference, trained(seed=5))


def test_a_budget_that_is_too_small_by_setting_says_so(root: str) -> None:
    state = trained()
    state["large"] = state["model"].one.weight.detach().repeat(1000, 1)  # 9 MiB
    with CheckpointManager(root, host_memory=2 * MIB) as manager:
        with pytest.raises(HostMemoryExhausted, match="host_memory"):
            manager.prepare(state)
        with pytest.raises(HostMemoryExhausted, match="host_memory"):
            manager.save(state, 1)
        train(state, 3)
        del state["large"]
        manager.save(state, 1)
        assert manager.steps() == [1]


@pytest.mark.torture
def test_a_process_that_is_refused_memory_trains_on_and_saves_later(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.overlap.no_memory", str(tmp_path / "run")],
        cwd=ROOT,
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, (done.returncode, done.stdout, done.stderr[-3000:])
    assert "ALL WELL" in done.stdout

"""Saves that fail while training goes on: ``on_error="warn"``."""

from __future__ import annotations

import gc
import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt import CheckpointManager, Tier
from ckpt.config import OnError
from ckpt.errors import (
    AccessDenied,
    CkptError,
    ConfigError,
    HostMemoryExhausted,
    OutOfSpace,
    PeerFailed,
    StepExists,
    StepsMissing,
    UnsupportedValue,
)
from ckpt.events import Event, SaveFailed
from ckpt.storage.testing import Delay, Raise, Rule
from tests.coordination.world import World
from tests.kit.stores import faulty, whole


def state(step: int) -> dict[str, Any]:
    return {"x": torch.full((1000,), step)}


def full_disk(*, nth: int | None = None) -> Rule:
    return Rule(verb="upload", key="safetensors", nth=nth, fault=Raise(OutOfSpace))


def test_training_goes_on_and_the_next_save_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    faulty(monkeypatch, tmp_path, [full_disk(nth=2), full_disk(nth=3)])
    seen: list[Event] = []
    with CheckpointManager(tmp_path, on_error="warn", observers=[seen.append]) as manager:
        for step in range(6):
            pending = manager.save_async(state(step), step)
            manager.fence()
            assert isinstance(pending.exception(), OutOfSpace) == (step in (1, 2))
        assert manager.failed == 2
    failed = [event for event in seen if isinstance(event, SaveFailed)]
    assert [event.step for event in failed] == [1, 2]
    assert all(isinstance(event.error, OutOfSpace) for event in failed)
    assert whole(tmp_path) == [0, 3, 4, 5]
    lines = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [record.levelname for record in lines] == ["WARNING"] * 3
    assert "training goes on" in lines[0].getMessage()
    assert "2 saves failed: steps 1, 2" in lines[2].getMessage()


def test_the_default_raises_from_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty(monkeypatch, tmp_path, [full_disk(nth=1)])
    with CheckpointManager(tmp_path) as manager:
        manager.save_async(state(1), 1)
        with pytest.raises(OutOfSpace):
            manager.fence() or manager.save(state(2), 2)
        assert manager.failed == 1
        manager.save(state(3), 3)


def test_the_blocking_save_does_not_raise_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty(monkeypatch, tmp_path, [full_disk(nth=1)])
    with CheckpointManager(tmp_path, on_error="warn") as manager:
        pending = manager.save(state(1), 1)
        assert isinstance(pending.exception(), OutOfSpace)
        with pytest.raises(OutOfSpace):
            pending.result()  # the error is raised where it is requested
        assert manager.save(state(1), 1).exception() is None
    assert whole(tmp_path) == [1]


def test_a_save_that_cannot_begin_is_a_save_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with CheckpointManager(tmp_path, on_error="warn", host_memory=1 << 20) as manager:
        monkeypatch.setattr("ckpt.staging.slot_pool.measure", _no_memory)
        pending = manager.save_async(state(1), 1)
        assert isinstance(pending.exception(), HostMemoryExhausted)
        assert manager.failed == 1
        monkeypatch.undo()
        manager.save(state(1), 1)
    assert whole(tmp_path) == [1]


def _no_memory(*_: object, **__: object) -> Any:
    raise HostMemoryExhausted(4000, "0 MiB are free")


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda manager: manager.save_async({"x": object()}, 5), UnsupportedValue),
        (lambda manager: manager.save_async(state(5), -5), ConfigError),
        (lambda manager: manager.save_async(state(5), 5, only="y"), ConfigError),
        (lambda manager: manager.save_async(state(1), 1), StepExists),
    ],
)
def test_mistakes_of_the_call_are_raised_all_the_same(
    tmp_path: Path, call: Any, error: type[CkptError]
) -> None:
    with CheckpointManager(tmp_path, on_error="warn") as manager:
        manager.save(state(1), 1)
        with pytest.raises(error):
            call(manager)
        assert manager.failed == 0
    with pytest.raises(ConfigError, match="on_error='warm': choose 'raise' or 'warn'"):
        CheckpointManager(tmp_path, on_error="warm")  # type: ignore[arg-type]


def test_a_farther_tier_that_fails_counts_and_costs_no_step_of_the_nearer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    faulty(
        monkeypatch,
        far,
        [Rule(verb="upload", key="safetensors", fault=Raise(AccessDenied("k", "no")))],
    )
    with CheckpointManager([Tier(str(near)), Tier(str(far))], on_error="warn") as manager:
        for step in range(3):
            manager.save(state(step), step)
    assert manager.failed == 3
    assert whole(near) == [0, 1, 2]
    assert "3 saves failed: steps 0, 1, 2" in caplog.text


@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_what_close_gives_up_is_raised_or_said(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    on_error: OnError,
) -> None:
    faulty(monkeypatch, tmp_path, [Rule(verb="upload", key="safetensors", fault=Delay(1.0))])
    before = set(threading.enumerate())

    def give_up() -> None:
        manager = CheckpointManager(tmp_path, on_error=on_error)
        manager.save_async(state(1), 1)
        manager.close(timeout=0.1)

    if on_error == "raise":
        with pytest.raises(StepsMissing):
            give_up()
    else:
        give_up()
        assert "lacks step 1" in caplog.text
        assert "1 save failed: step 1" in caplog.text
    # the save goes on in the background, and must not affect the next test
    for _ in range(600):
        gc.collect()  # the error holds the manager, whose threads end with it
        if not (left := set(threading.enumerate()) - before):
            return
        for thread in left:
            if thread.ident is not None:  # a thread that begins cannot be joined yet
                thread.join(0.1)
    raise AssertionError(f"threads that do not end: {set(threading.enumerate()) - before}")


@pytest.mark.parametrize("failing", [0, 1])
def test_all_ranks_go_on_where_one_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    """One rank's disk is full, and later one rank has no memory. No rank has the step."""
    rule = Rule(verb="upload", key=f"rank-{failing:05d}", nth=2, fault=Raise(OutOfSpace))
    faulty(monkeypatch, tmp_path, [rule])

    def train(coordinator: Any) -> list[type | None]:
        ends: list[type | None] = []
        with CheckpointManager(
            tmp_path, coordinator=coordinator, on_error="warn", commit_timeout_seconds=20
        ) as manager:
            for step in range(5):
                mine = {f"x{coordinator.rank}": torch.full((1000,), step)}
                if step == 3 and coordinator.rank == failing:
                    manager._saver.slots.acquire = _no_memory  # type: ignore[method-assign]
                error = manager.save(mine, step, timeout=60).exception()
                manager._saver.slots.__dict__.pop("acquire", None)
                ends.append(type(error) if error else None)
            assert manager.failed == 2
        return ends

    ended = World(2, patience=30).run(train)
    assert ended[failing] == [None, OutOfSpace, None, HostMemoryExhausted, None], ended
    assert ended[1 - failing] == [None, PeerFailed, None, PeerFailed, None], ended
    assert whole(tmp_path) == [0, 2, 4]

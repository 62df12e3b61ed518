"""A program requests a stop, on one rank or on all, in any thread."""

from __future__ import annotations

import itertools
import threading
import time
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt import CheckpointManager
from ckpt.elastic.planned_stop import as_deadline
from ckpt.errors import ConfigError, ManagerClosed, ThreadLimit
from tests.coordination.world import World
from tests.kit.stores import whole


@pytest.mark.parametrize("asking", [(0,), (2,), (0, 1, 2)])
def test_all_ranks_stop_after_the_same_step_and_save_it(
    tmp_path: Path, asking: tuple[int, ...]
) -> None:
    def train(coordinator: Any) -> int:
        rank = coordinator.rank
        with CheckpointManager(tmp_path, coordinator=coordinator) as manager:
            stop = manager.on_stop_request()
            for step in range(100_000):
                state = {f"x{rank}": torch.full((8,), step)}
                if step == 5 + rank and rank in asking:
                    threading.Thread(target=manager.request_stop, args=(60,)).start()
                if stop.requested(step):
                    manager.save(state, step)
                    return step
                time.sleep(0.001 * rank)  # the ranks are at different steps
        raise AssertionError("it did not stop")

    stopped = World(3, patience=30).run(train)
    assert len(set(stopped.values())) == 1, stopped
    assert whole(tmp_path) == [stopped[0]]


def test_a_request_without_a_deadline_and_then_none_is_waited_for(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        stop = manager.on_stop_request()
        assert not stop.requested(1)
        manager.request_stop()
        manager.request_stop(datetime.now(UTC) + timedelta(hours=1))
        assert any(stop.requested(step) or time.sleep(0.001) for step in range(2, 100_000))
        assert stop.signal is None
    assert manager_is_quiet()


def manager_is_quiet() -> bool:
    """Return whether no thread of a planned stop is left."""
    return not [each for each in threading.enumerate() if each.name.startswith("ckpt-stop")]


def few_threads(patch: pytest.MonkeyPatch, count: int) -> None:
    """Let the system start ``count`` more threads."""
    left, start = [None] * count, threading.Thread.start

    def start_one(self: threading.Thread) -> None:
        if not left:
            raise RuntimeError("can't start new thread")
        left.pop()
        start(self)

    patch.setattr(threading.Thread, "start", start_one)


def test_a_stop_needs_no_new_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with CheckpointManager(tmp_path) as manager:
        stop = manager.on_stop_request()
        with monkeypatch.context() as patch:
            few_threads(patch, 0)
            manager.request_stop()
            assert any(stop.requested(step) for step in itertools.count())


@pytest.mark.parametrize("count", [0, 1, 2])
def test_ranks_without_a_thread_for_a_stop_are_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    with CheckpointManager(tmp_path, coordinator=World(2).coordinator(0)) as manager:
        with monkeypatch.context() as patch:
            few_threads(patch, count)
            with pytest.raises(ThreadLimit):
                manager.on_stop_request()
        manager.on_stop_request()


def test_wrong_calls_change_nothing(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    with pytest.raises(ConfigError, match="the ranks do not listen"):
        manager.request_stop()
    stop = manager.on_stop_request()
    assert manager.on_stop_request() is stop
    with pytest.raises(ConfigError, match="already listens"):
        manager.on_signals()
    past = datetime.now(UTC) - timedelta(seconds=1)
    for wrong in (0, -3, float("nan"), True, "soon", past, datetime.now()):
        with pytest.raises(ConfigError, match="deadline="):
            manager.request_stop(wrong)  # type: ignore[arg-type]
    time.sleep(0.05)
    assert not stop.requested(1)
    manager.close()
    with pytest.raises(ManagerClosed):
        manager.request_stop()


def test_a_deadline_is_a_time() -> None:
    noon = datetime(2100, 1, 1, 12, tzinfo=timezone(timedelta(hours=2)))
    assert as_deadline(noon) == noon.timestamp()
    assert as_deadline(90) == pytest.approx(time.time() + 90, abs=5)
    assert as_deadline(None) == as_deadline(float("inf")) == float("inf")
    assert as_deadline(1e12) > 1e12

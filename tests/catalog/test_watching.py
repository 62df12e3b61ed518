"""Each committed step comes once, and stays while it is handled."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt import CheckpointManager, Tier
from ckpt.catalog import watching
from ckpt.catalog.step_listing import RootContents, committed, list_root
from ckpt.catalog.watching import Watcher, each_step
from ckpt.errors import AccessDenied, ConfigError, ThreadLimit, TransientStorageError
from ckpt.pipeline import retry
from ckpt.pipeline.retry import RetryPolicy
from ckpt.root import pins
from ckpt.root.pins import all_pins
from ckpt.storage.registry import open_backend
from ckpt.storage.testing import FaultyBackend, Raise, Rule


def save(root: Path, *steps: int, **tier: Any) -> None:
    with CheckpointManager(Tier(str(root), **tier)) as manager:
        for step in steps:
            manager.save({"x": torch.full((9,), step)}, step)


def seen(root: Path, **options: Any) -> list[int]:
    watcher = Watcher(open_backend(str(root)), options.pop("name", "default"), **options)
    return [step.step for step in each_step(watcher, None)]


def test_each_step_comes_once_also_to_the_next_watcher_of_the_name(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 5)
    assert seen(tmp_path) == [1, 2, 5]
    save(tmp_path, 6)
    assert seen(tmp_path) == [6]
    assert seen(tmp_path) == []
    assert seen(tmp_path, name="publish") == [1, 2, 5, 6]


def test_new_steps_come_while_the_watcher_waits(tmp_path: Path) -> None:
    save(tmp_path, 1)
    stop, found = threading.Event(), []
    for step in ckpt.watch(str(tmp_path), poll_seconds=0.01, stop=stop):
        found.append(step.step)
        assert Path(step.path, "manifest.json").exists()
        if step.step < 3:
            save(tmp_path, step.step + 1)
        else:
            stop.set()
    assert found == [1, 2, 3]


def test_a_step_stays_while_it_is_handled_and_goes_afterwards(tmp_path: Path) -> None:
    save(tmp_path, 1)
    backend = open_backend(str(tmp_path))
    for step in each_step(Watcher(backend, "eval"), None):
        save(tmp_path, 2, 3, keep_last=1)
        assert {ref.step for ref in committed(backend)} == {1, 3}
        assert all_pins(backend)[0].ref == step.ref
    assert all_pins(backend) == []
    save(tmp_path, 4, keep_last=1)
    assert {ref.step for ref in committed(backend)} == {4}


def test_a_step_whose_loop_was_left_comes_again(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    steps = ckpt.watch(str(tmp_path))
    assert next(steps).step == 1
    steps.close()
    assert seen(tmp_path) == [1, 2]
    assert all_pins(open_backend(str(tmp_path))) == []


def test_a_step_whose_handling_raised_comes_again(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)

    def evaluate() -> None:
        for step in ckpt.watch(str(tmp_path)):
            raise KeyError(step.step)

    with pytest.raises(KeyError, match="1"):
        evaluate()
    gc.collect()  # the error holds the iterator
    assert seen(tmp_path) == [1, 2]
    assert all_pins(open_backend(str(tmp_path))) == []


def test_a_step_is_not_kept_if_no_thread_can_renew_its_pin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    save(tmp_path, 1)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(ThreadLimit):
            seen(tmp_path)
    assert all_pins(open_backend(str(tmp_path))) == []
    assert seen(tmp_path) == [1]


def test_only_the_newest_comes_if_it_is_asked_for(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3)
    assert seen(tmp_path, newest=True) == [3]
    assert seen(tmp_path, newest=True) == []
    save(tmp_path, 4, 5)
    assert seen(tmp_path, newest=True) == [5]


def test_a_step_that_is_left_comes_with_the_next_watcher_only(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    watcher = Watcher(open_backend(str(tmp_path)), "eval")
    for step in each_step(watcher, None):
        if step.step == 1:
            watcher.skip(step)
    assert watcher.look() == []
    assert seen(tmp_path, name="eval") == [1]


def test_records_of_steps_that_are_gone_are_removed(tmp_path: Path) -> None:
    save(tmp_path, 1)
    seen(tmp_path)
    save(tmp_path, 2, 3, keep_last=1)
    assert seen(tmp_path) == [3]
    assert len(list((tmp_path / "watchers" / "default").iterdir())) == 1


def test_a_step_that_is_removed_before_its_turn_is_passed_over(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3)
    found = []
    for step in each_step(Watcher(open_backend(str(tmp_path)), "eval"), None):
        found.append(step.step)
        save(tmp_path, 3 + len(found), keep_last=2)
    assert found == [1, 3]


def test_a_store_that_is_away_for_a_while_is_asked_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)
    watcher = Watcher(open_backend(str(tmp_path)), "eval")
    looks = iter([TransientStorageError("", "no answer"), None])

    def look(*_: object) -> RootContents:
        if error := next(looks):
            raise error
        return list_root(open_backend(str(tmp_path)))

    monkeypatch.setattr(watching, "list_root", look)
    with caplog.at_level("WARNING", "ckpt"):
        assert next(iter(each_step(watcher, 0.01))).step == 1
    assert "new steps could not be listed" in caplog.text


@pytest.mark.parametrize("folder", ["pins", "watchers"])
def test_a_step_comes_again_if_the_store_does_not_answer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    save(tmp_path, 1, 2)
    backend, away = open_backend(str(tmp_path)), [True]
    put = backend.put

    def odd(key: str, *args: Any, **how: Any) -> Any:
        if key.startswith(folder) and away:
            away.clear()
            raise TransientStorageError(key, "no answer")
        return put(key, *args, **how)

    monkeypatch.setattr(backend, "put", odd)
    monkeypatch.setattr(retry, "_RETRY", RetryPolicy(attempts=1))
    monkeypatch.setattr(pins, "_RETRY", RetryPolicy(attempts=1))
    found, stop = [], threading.Event()
    for step in each_step(Watcher(backend, "eval"), 0.01, stop):
        found.append(step.step)
        if step.step == 2:
            stop.set()
    assert found == ([1, 2] if folder == "pins" else [1, 1, 2])
    assert "step 1 is handled again at the next look" in caplog.text


def test_a_store_that_only_lets_one_read_is_an_error(tmp_path: Path) -> None:
    save(tmp_path, 1)
    refusing = FaultyBackend(
        open_backend(str(tmp_path)), [Rule(verb="put", fault=Raise(AccessDenied))]
    )
    with pytest.raises(AccessDenied):
        next(iter(each_step(Watcher(refusing, "eval"), None)))


@pytest.mark.parametrize("name", ["", "a/b", "..", "x" * 65, "-a", "a b"])
def test_a_name_that_is_no_key_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="letters, digits"):
        ckpt.watch(str(tmp_path), name=name)


@pytest.mark.parametrize("seconds", [0, -1, float("inf"), float("nan")])
def test_a_poll_time_that_is_none_is_refused(tmp_path: Path, seconds: float) -> None:
    with pytest.raises(ConfigError, match="positive"):
        ckpt.watch(str(tmp_path), poll_seconds=seconds)

"""A mount that does not answer delays no view of another run."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt.observe.run_looks
import ckpt.observe.run_view
from ckpt import CheckpointManager
from ckpt.config import Tier
from ckpt.observe.run_looks import RunLooks
from ckpt.observe.run_view import RunWatch, watch_runs
from ckpt.storage.registry import open_backend


@pytest.fixture
def silence(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Reads below folders that begin with ``dead`` wait until this event is set. It is set at
    the start.
    """
    answers = threading.Event()
    answers.set()

    def late(call: Any) -> Any:
        def wrapped(path: Any, *args: Any, **options: Any) -> Any:
            if "/dead" in str(path):
                answers.wait()
            return call(path, *args, **options)

        return wrapped

    for name in ("listdir", "stat", "scandir"):
        monkeypatch.setattr(os, name, late(getattr(os, name)))
    monkeypatch.setattr(ckpt.observe.run_view, "open_backend", late(open_backend))
    monkeypatch.setattr(ckpt.observe.run_view, "_OPEN_SECONDS", 0.1)
    monkeypatch.setattr(ckpt.observe.run_looks, "_MARGIN_SECONDS", 0.1)
    yield answers
    answers.set()


def save(root: Path, step: int) -> None:
    with CheckpointManager(str(root)) as manager:
        manager.save({"x": torch.ones(2)}, step)


@pytest.mark.parametrize("dead_at_the_start", [False, True])
def test_a_dead_mount_freezes_only_its_own_run(
    tmp_path: Path, silence: threading.Event, dead_at_the_start: bool
) -> None:
    dead, alive = tmp_path / "dead", tmp_path / "alive"
    save(dead, 1), save(alive, 1)
    if dead_at_the_start:
        silence.clear()
    looks = RunLooks(watch_runs([Tier(str(dead)), Tier(str(alive))], {}))
    known = looks.look(10.0)
    assert [step.step for step in known[1].steps] == [1]
    silence.clear()
    save(alive, 2)
    for _ in range(2):  # The first look waits for the mount, and the second does not
        late, prompt = looks.look(0.5)
    assert [step.step for step in prompt.steps] == [2, 1]
    assert late.steps == known[0].steps
    assert late.tiers[0].error.startswith("no answer for ")
    silence.set()
    while looks.look(5.0)[0].tiers[0].error:
        pass
    assert [step.step for step in looks.look(5.0)[0].steps] == [1]


def test_a_run_behind_a_link_is_shown_once(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "link").symlink_to("data")
    with CheckpointManager(tmp_path / "data" / "gpt") as manager:
        manager.save({"x": torch.ones(3)}, 1)
    url = str(tmp_path / "link" / "gpt")
    view = RunWatch(url, [Tier(url)]).look(20)
    assert [tier.url for tier in view.tiers] == [url]
    assert view.steps[0].cells[0].seconds > 0

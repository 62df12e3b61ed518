"""A save that is interrupted as it begins blocks nothing: not the optimizer, ``close`` or the next
save.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt import CheckpointManager, Tier
from ckpt.errors import CkptError, StagingError, ThreadLimit
from ckpt.pipeline.workers import Workers
from ckpt.save.active_save import HandOver
from ckpt.staging.fence import Fence
from ckpt.staging.slot_pool import SlotPool
from ckpt.staging.snapshot import Snapshot
from tests.kit.interrupting import interrupted_call
from tests.overlap.jobs import train, trained

original = Workers.submit


def interrupted(self: HandOver) -> None:
    raise KeyboardInterrupt


def fail_before(self: Workers, work: Any, *args: Any) -> Any:
    raise KeyboardInterrupt


def fail_after(self: Workers, work: Any, *args: Any) -> Any:
    original(self, work, *args)
    raise KeyboardInterrupt


CUTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {}


def cut(work: Callable[[pytest.MonkeyPatch], None]) -> None:
    CUTS[work.__name__] = work


def on_group(name: str, act: Callable[..., Any]) -> Callable[..., Any]:
    """Disturb only the group of threads ``name``, and only in saves."""

    def submit(self: Workers, work: Any, *args: Any) -> Any:
        return (act if self.name == name else original)(self, work, *args)

    return submit


@cut
def watching(patch: pytest.MonkeyPatch) -> None:
    watch = Fence.watch

    def watched(self: Fence, snapshot: Snapshot) -> None:
        watch(self, snapshot)
        raise KeyboardInterrupt

    patch.setattr(Fence, "watch", watched)


@cut
def before_it_is_handed_over(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HandOver, "begin", interrupted)


@cut
def before_the_stream_is_queued(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Workers, "submit", on_group("save", fail_before))


@cut
def after_the_stream_is_queued(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Workers, "submit", on_group("save", fail_after))


@cut
def before_the_copying_is_queued(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Workers, "submit", on_group("copy", fail_before))


@cut
def after_the_copying_is_queued(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Workers, "submit", on_group("copy", fail_after))


@cut
def as_slots_are_made_ahead(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SlotPool, "has_all", lambda *_: False)
    patch.setattr(Workers, "submit", on_group("slots", fail_before))


def finishes(work: Callable[[], object]) -> None:
    """Run on another thread, so that an endless wait fails the test and does not stop the tests."""
    done: list[object] = []
    thread = threading.Thread(target=lambda: done.append(work()), daemon=True)
    thread.start()
    thread.join(60)
    assert done, "it waits for ever"


@pytest.mark.parametrize("name", CUTS)
def test_an_interrupted_beginning_holds_nobody_up(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = trained()
    manager = CheckpointManager(str(tmp_path), slots=2 if name == "as_slots_are_made_ahead" else 1)
    manager.save(state, 1)
    with monkeypatch.context() as patch:
        CUTS[name](patch)
        with pytest.raises(KeyboardInterrupt):
            manager.save_async(state, 2)
    finishes(lambda: train(state, 2) or True)
    errors: list[CkptError] = []

    def go_on() -> bool:
        # The error of step 2 is raised before step 3 begins, or after it is saved if it is late.
        while 3 not in manager.steps():
            try:
                manager.save(state, 3)
            except CkptError as error:
                errors.append(error)
                if len(errors) > 1:
                    break
        manager.close()
        return True

    finishes(go_on)
    assert len(errors) < 2
    assert all(isinstance(error, StagingError) and "interrupted" in str(error) for error in errors)
    assert 3 in CheckpointManager(str(tmp_path)).steps()


def test_ctrl_c_in_a_call_that_copies_the_state_itself_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it does if the state passes through memory in waves. No other thread copies it then."""
    copy_eager = Snapshot.copy_eager

    def in_the_foreground(self: Snapshot) -> None:
        copy_eager(self)
        self.foreground = True

    monkeypatch.setattr(Snapshot, "copy_eager", in_the_foreground)
    state = trained()
    turns: list[int] = []

    def interrupt_each_call() -> bool:
        with CheckpointManager(str(tmp_path), slots=1) as manager:
            while True:
                turns.append(len(turns) + 1)
                try:
                    with interrupted_call(("active_save.py", "snapshot.py"), turns[-1]):
                        manager.save_async(state, 2 * turns[-1])
                except KeyboardInterrupt:
                    train(state, 2)
                else:
                    return True
                with suppress(StagingError):  # The error of the interrupted save
                    manager.save(state, 2 * turns[-1] + 1)

    finishes(interrupt_each_call)
    assert len(turns) > 20


def test_without_a_thread_the_manager_says_so_when_it_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", full)
        with pytest.raises(ThreadLimit, match="ulimit -u"):
            CheckpointManager(str(tmp_path))


def test_a_save_needs_no_new_thread_to_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save fails like any other if it cannot start what it needs to write. The next
    save works.
    """

    def full(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    state = trained()
    with CheckpointManager(str(tmp_path)) as manager:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", full)
            pending = manager.save_async(state, 1)
            assert isinstance(pending.exception(60), ThreadLimit)
        finishes(lambda: train(state, 1) or True)
        manager.save(state, 2)
        assert manager.steps() == [2]


@pytest.mark.parametrize("name", ["prune", "backfill", "queue"])
def test_a_commit_needs_no_new_thread(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without one, the slot would stay taken, and the save would end on no tier."""

    def refused(self: threading.Thread) -> None:
        if self.name.startswith(f"ckpt-{name}"):
            raise RuntimeError("can't start new thread")
        start(self)

    start = threading.Thread.start
    tiers = [Tier(str(tmp_path / "near"), keep_last=1), Tier(str(tmp_path / "far"))]
    state = trained()
    with CheckpointManager(tiers) as manager:
        manager.save(state, 1)
    with CheckpointManager(tiers, slots=1) as manager:
        assert manager.restore(state)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refused)
            pending = manager.save_async(state, 2)
            assert pending.exception(60) is None
        finishes(lambda: manager.save(state, 3))
    assert CheckpointManager(tiers[:1]).steps() == [3]


def test_tensors_are_let_go_with_a_save_that_was_called_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with CheckpointManager(str(tmp_path), slots=1) as manager:
        with monkeypatch.context() as patch:
            patch.setattr(HandOver, "begin", interrupted)
            for step in range(3):
                with pytest.raises(KeyboardInterrupt):
                    manager.save_async({"x": torch.ones(3)}, step)
        manager.save({"x": torch.ones(3)}, 0)
        assert manager.steps() == [0]

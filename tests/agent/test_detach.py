"""``close(detach=True)`` returns when the nearest durable tier has the last step."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import ckpt.storage.tiers
from ckpt import CheckpointManager, Tier
from ckpt.agent.folder import AgentFolder
from ckpt.agent.registration import Registration
from ckpt.catalog.verify import verify_step
from ckpt.errors import AccessDenied, CommitError, LeftToAgent, TransientStorageError
from ckpt.events import Event, SaveCommitted
from ckpt.model.keys import OWNER, is_fragment
from ckpt.pipeline.workers import Workers
from ckpt.root.attempts import step_refs
from ckpt.root.owner import read_owner
from ckpt.save import detach
from ckpt.save.detach import await_detaches
from ckpt.storage.registry import open_backend
from tests.agent.conftest import await_state, memory_folder
from tests.coordination.world import World
from tests.kit.states import state
from tests.kit.stores import Gated, whole
from tests.kit.waiting import until

DETACH_SECONDS = 5.0
"""A second, on a machine that has other work too."""
BACKLOG_BYTES, STEPS = 2 << 30, 4


class Hanging(Gated):
    """A far store that takes nothing from the trainer until its gate opens.

    ``changed`` has the keys that the trainer puts or deletes from then on.
    """

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.changed: list[str] = []

    def put(self, key, *args, **how):
        if self.open.is_set():
            self.changed.append(key)
        return self.inner.put(key, *args, **how)

    def delete(self, key):
        if self.open.is_set():
            self.changed.append(key)
        return self.inner.delete(key)

    def upload(self, key, size):
        self.began.append(key)
        assert self.open.wait(200)
        return self.inner.upload(key, size)


@pytest.fixture
def hanging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hanging]:
    far = Hanging(str(tmp_path / "far"))

    def opened(url, options):
        return far if url == str(tmp_path / "far") else open_backend(url, options)

    monkeypatch.setattr(ckpt.storage.tiers, "open_backend", opened)
    monkeypatch.setattr(
        Registration, "copier", lambda link, target: None
    )  # a worker would not hang
    yield far
    far.open.set()


@pytest.fixture
def ended_threads() -> Callable[..., bool]:
    """Return whether no thread with this name is left, apart from those that were there before."""
    before = set(threading.enumerate())

    def ended(*names: str) -> bool:
        later = set(threading.enumerate()) - before
        return not any(thread.name.startswith(names) for thread in later)

    return ended


def test_it_does_not_wait_for_a_far_tier_that_hangs(
    place: AgentFolder, tmp_path: Path, hanging: Hanging, ended_threads: Callable[..., bool]
) -> None:
    """What the trainer had begun there ends later, and does not affect what the agent has done."""
    manager = CheckpointManager([tmp_path / "near", tmp_path / "far"], agent="required")
    saves = [manager.save_async(state(step), step) for step in (1, 2, 3)]
    for save in saves:
        save.result(60, tier=str(tmp_path / "near"))
    assert until(lambda: hanging.began)
    began = time.perf_counter()
    manager.close(detach=True)
    assert time.perf_counter() - began < DETACH_SECONDS
    assert whole(tmp_path / "near") == [1, 2, 3]
    await_state(place, "done")
    assert whole(tmp_path / "far") == [1, 2, 3]
    hanging.open.set()
    assert [type(save.exception(60)) for save in saves] == [type(None)] * 3
    far_url = str(tmp_path / "far")
    assert all(isinstance(save.exception(tier=far_url), LeftToAgent) for save in saves)
    assert until(lambda: ended_threads("ckpt-queue", "ckpt-save", "ckpt-end"))
    assert not hanging.changed  # the agent may use the same files
    assert whole(tmp_path / "far") == [1, 2, 3]
    with Workers("test", 2) as workers:
        far = open_backend(str(tmp_path / "far"))
        for ref in step_refs(far):
            assert verify_step(far, ref, workers=workers).intact


def test_what_the_far_tier_still_needs_stays_on_the_near_one(
    place: AgentFolder, tmp_path: Path, hanging: Hanging
) -> None:
    near = Tier(str(tmp_path / "near"), keep_last=1)
    manager = CheckpointManager([near, tmp_path / "far"], agent="required")
    for step in (1, 2, 3):
        manager.save_async(state(step), step).result(60, tier=near.url)
    manager.close(detach=True)
    hanging.open.set()
    await_state(place, "done")
    assert whole(tmp_path / "far") == [1, 2, 3]
    assert whole(tmp_path / "near") == [3]


class Refusing(Gated):
    """A far store that refuses fragments, and whose deletions hang until its gate opens."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.upload = self.inner.upload  # type: ignore[method-assign]

    def put(self, key, *args, **how):
        if is_fragment(key.rpartition("/")[2]) and not self.open.is_set():
            raise AccessDenied(key, "refused")
        return self.inner.put(key, *args, **how)

    def delete(self, key):
        self.began.append(key)
        assert self.open.wait(200)
        return self.inner.delete(key)


def test_it_waits_for_the_removal_of_a_save_that_was_aborted(
    place: AgentFolder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    ended_threads: Callable[..., bool],
) -> None:
    """Otherwise the agent could copy the step while the files of the aborted save are removed."""
    far, detached = Refusing(str(tmp_path / "far")), threading.Event()

    def opened(url, options):
        return far if url == str(tmp_path / "far") else open_backend(url, options)

    def note_detach(registered: Registration, reason: str) -> None:
        detached.set()
        real_detach(registered, reason)

    request.addfinalizer(far.open.set)
    real_detach = Registration.detach
    monkeypatch.setattr(ckpt.storage.tiers, "open_backend", opened)
    monkeypatch.setattr(
        Registration, "copier", lambda link, target: None
    )  # a worker would not refuse
    monkeypatch.setattr(Registration, "detach", note_detach)
    monkeypatch.setattr(detach, "_STORE_SECONDS", 100.0)
    manager = CheckpointManager([tmp_path / "near", tmp_path / "far"], agent="required")
    save = manager.save_async(state(1), 1)
    save.result(60, tier=str(tmp_path / "near"))
    assert until(lambda: far.began)
    with Workers("test", 1) as workers:
        closing = workers.submit(manager.close, detach=True)
        assert until(lambda: ended_threads("ckpt-save"))  # it has reached the detach
        assert not detached.wait(0.2)
        far.open.set()
        closing.result(60)
    assert detached.is_set()


def test_the_leader_waits_for_the_other_ranks() -> None:
    ranks, ended = World(2), threading.Event()
    with Workers("test", 1) as workers:
        waiting = workers.submit(await_detaches, ranks.coordinator(0))
        waiting.add_done_callback(lambda _: ended.set())
        assert not ended.wait(0.2)
        await_detaches(ranks.coordinator(1))  # it does not wait itself
        assert ended.wait(60)


def test_the_leader_leaves_the_job_without_a_rank_that_does_not_come(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(detach, "_RANKS_SECONDS", 0.1)
    with caplog.at_level("INFO", "ckpt"):
        await_detaches(World(2).coordinator(0))
    assert "without some ranks" in caplog.text


def test_a_rank_leaves_the_job_though_the_leader_has_ended_and_its_store_with_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> None:
        raise CommitError("the job's store is gone")

    late = World(2).coordinator(1)
    monkeypatch.setattr(late, "post", fails)
    with caplog.at_level("INFO", "ckpt"):
        await_detaches(late)
    assert "the job's store is gone" in caplog.text


class Down(Gated):
    """A far store whose record of the job cannot be read: it answers with an error, or
    not at all.
    """

    def __init__(self, url: str, hangs: bool) -> None:
        super().__init__(url)
        self.hangs, self.is_down = hangs, False
        self.open.set()

    def head(self, key):
        if self.is_down and key == OWNER:
            if self.hangs:
                assert self.open.wait(200)
            raise TransientStorageError(key, "down")
        return self.inner.head(key)


@pytest.mark.parametrize("hangs", [False, True])
def test_it_does_not_wait_for_the_record_of_a_store_that_is_down(
    place: AgentFolder, tmp_path: Path, monkeypatch, hangs
) -> None:
    far = Down(str(tmp_path / "far"), hangs)
    monkeypatch.setattr(
        ckpt.storage.tiers,
        "open_backend",
        lambda url, options: far if url == far.url else open_backend(url, options),
    )
    manager = CheckpointManager([tmp_path / "near", tmp_path / "far"], agent="required")
    manager.save(state(1), 1)
    far.is_down = True
    far.open.clear()
    began = time.perf_counter()
    manager.close(detach=True)
    assert time.perf_counter() - began < DETACH_SECONDS
    await_state(place, "done")
    far.open.set()
    assert whole(tmp_path / "far") == [1]
    assert until(lambda: read_owner(open_backend(str(tmp_path / "far"))) is None)


@pytest.fixture
def in_memory(tmp_path: Path) -> Iterator[list[Tier]]:
    tiers = [Tier("memory"), Tier(str(tmp_path / "disk"), every=100)]
    yield tiers
    shutil.rmtree(memory_folder(*tiers), ignore_errors=True)


@pytest.mark.parametrize("how", ["with", "close"])
def test_an_exception_leaves_the_job_to_the_agent(
    in_memory: list[Tier], place: AgentFolder, tmp_path: Path, how
) -> None:
    """A step that only memory has becomes durable."""
    with pytest.raises(ValueError, match="oh"):  # noqa: PT012
        manager = CheckpointManager(in_memory, agent="required")
        if how == "with":
            with manager:
                manager.save(state(1), 1)
                raise ValueError("oh")
        try:
            manager.save(state(1), 1)
            raise ValueError("oh")
        finally:
            manager.close()
    await_state(place, "done")
    assert whole(tmp_path / "disk") == [1]
    assert not memory_folder(*in_memory).exists()


def test_a_second_manager_of_the_process_is_finished_too(
    place: AgentFolder, tmp_path: Path
) -> None:
    tiers = [tmp_path / "near", tmp_path / "far"]
    for step in (1, 2, 3):
        manager = CheckpointManager(tiers, agent="required")
        manager.save_async(state(step), step)
        manager.close(detach=True)
    await_state(place, "done")
    assert 3 in whole(tmp_path / "far")


def test_a_step_that_only_the_far_tier_takes_is_waited_for(
    place: AgentFolder, tmp_path: Path
) -> None:
    tiers = [Tier(str(tmp_path / "near"), every=2), Tier(str(tmp_path / "far"))]
    manager = CheckpointManager(tiers, agent="required")
    manager.save_async({"x": torch.ones(3)}, 3)
    manager.close(detach=True)
    assert whole(tmp_path / "far") == [3]


@pytest.mark.torture
@pytest.mark.timeout(1800)
def test_a_backlog_of_2_gib_does_not_hold_up_the_end(
    place: AgentFolder, tmp_path: Path, hanging: Hanging
) -> None:
    """The far tier takes nothing from the trainer, and the last step is on its way to the near
    tier.

    The test prints the time from its commit there to the return.
    """
    committed_at: dict[int, float] = {}

    def note(event: Event) -> None:
        if isinstance(event, SaveCommitted) and event.tier == str(tmp_path / "near"):
            committed_at[event.step] = time.perf_counter()

    tiers = [tmp_path / "near", tmp_path / "far"]
    manager = CheckpointManager(tiers, agent="required", observers=[note], scrub_mb_per_s=0)
    large = {"w": torch.zeros(BACKLOG_BYTES // STEPS, dtype=torch.uint8)}
    for step in range(1, STEPS + 1):
        large["w"].fill_(step)
        save = manager.save_async(large, step)
        if step < STEPS:
            save.result(600, tier=str(tmp_path / "near"))
    called = time.perf_counter()
    manager.close(detach=True)
    returned = time.perf_counter()
    copied_steps = whole(tmp_path / "far") if (tmp_path / "far").exists() else []
    assert whole(tmp_path / "near") == list(range(1, STEPS + 1))
    assert not copied_steps
    after = returned - max(called, committed_at[STEPS])
    print(
        f"\nclose(detach=True) with {BACKLOG_BYTES >> 20} MiB that the far tier lacks returned "
        f"{after:.3f} s after the last commit on the near tier, {returned - called:.3f} s after "
        f"the call ({os.getloadavg()[0]:.1f} processes ran on {os.cpu_count()} cores)"
    )
    assert after < 1.0
    await_state(place, "done")
    assert whole(tmp_path / "far") == list(range(1, STEPS + 1))

"""The agent gives way to the next job, and a failing tier does not affect the others."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import ckpt.agent.job_tiers
from ckpt import CheckpointManager, Tier
from ckpt.agent.__main__ import _finish
from ckpt.agent.finish_worker import Finish
from ckpt.agent.messages import Job, fields_of
from ckpt.agent.worker_messages import Copied, Ended, Order
from ckpt.catalog.step_listing import committed
from ckpt.errors import OutOfSpace
from ckpt.model.keys import OWNER
from ckpt.pipeline.workers import Workers
from ckpt.root.owner import NO_PROCESS, Owner, read_owner
from ckpt.storage.registry import open_backend
from ckpt.storage.tiers import urls_of
from tests.agent.conftest import memory_folder
from tests.kit.stores import Wrapped
from tests.kit.worlds import run_code

TRAINER = """
import os, sys, msgspec, torch
from ckpt import CheckpointManager
from ckpt.root.owner import Owner
manager = CheckpointManager(sys.argv[1:])
for step in (1, 2, 3):
    manager.save({"x": torch.full((1000,), step)}, step)
print(msgspec.json.encode(Owner.of_this_process(manager._coordinator.attempt)).decode(), flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Owner]:
    """Return what a job has left that has died with steps 1 to 3 on one tier."""
    near = tmp_path_factory.mktemp("dead") / "near"
    reported = run_code(TRAINER, near, status=-signal.SIGKILL)
    return near, msgspec.json.decode(reported, type=Owner)


@pytest.fixture
def dead(tmp_path: Path, left: tuple[Path, Owner]) -> Job:
    """The job was to have its steps on "far" and "farther" too."""
    shutil.copytree(left[0], tmp_path / "near")
    tiers = [Tier(str(tmp_path / name)) for name in ("near", "far", "farther")]
    for name in ("far", "farther"):
        (tmp_path / name).mkdir()  # The trainer makes the roots when it registers
    return Job(
        owner=left[1],
        processes=(),
        tiers=tuple(fields_of(tier, tier.url) for tier in tiers),
        ranks=0,
        backlog=4,
        environment={},
    )


def finish(job: Job) -> tuple[Ended, list[tuple[int, str]]]:
    copied: list[tuple[int, str]] = []

    def report(reported: msgspec.Struct) -> None:
        if isinstance(reported, Copied):
            copied.append((reported.step, Path(reported.to).name))

    with Workers("test", 2) as workers, Finish(job, workers, report) as finishing:
        return finishing.run(), copied


def steps(root: Path) -> list[int]:
    return sorted(ref.step for ref in committed(open_backend(str(root))))


class Watched(Wrapped):
    """A store that calls ``on_put`` before each put."""

    def __init__(self, inner: Any, on_put: Callable[[str], None]) -> None:
        super().__init__(inner)
        self._on_put = on_put

    def put(self, key: str, *args: Any, **how: Any) -> Any:
        self._on_put(key)
        return self.inner.put(key, *args, **how)


def watch(monkeypatch: pytest.MonkeyPatch, root: Path, on_put: Callable[[str], None]) -> None:
    def opened(url: str, options: Any) -> Any:
        found = open_backend(url, options)
        return Watched(found, on_put) if url == str(root) else found

    monkeypatch.setattr(ckpt.agent.job_tiers, "open_backend", opened)


def test_one_worker_finishes_a_job_and_frees_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is so if the memory need not stay. If it cannot be freed, the next worker does it."""
    tiers = [Tier("memory"), Tier(str(tmp_path / "near"))]
    memory = memory_folder(*tiers)
    try:
        said = run_code(TRAINER, *(tier.url for tier in tiers), status=-signal.SIGKILL)
        job = Job(
            owner=msgspec.json.decode(said, type=Owner),
            processes=(),
            tiers=tuple(map(fields_of, tiers, urls_of(tiers))),
            ranks=0,
            backlog=4,
            environment={},
        )
        with Workers("test", 2) as workers:

            def outcome(*, frees: bool) -> Ended:
                return _finish(Order(job, "finish", frees=frees), workers, lambda _: None)

            assert outcome(frees=False) == Ended("done")
            assert memory.exists()
            with monkeypatch.context() as patch:
                patch.setattr(Finish, "free_memory", lambda _: Ended("failed", "no"))
                assert outcome(frees=True) == Ended("done")
            assert outcome(frees=True) == Ended("freed")
            assert not memory.exists()
        assert steps(tmp_path / "near") == [1, 2, 3]
    finally:
        shutil.rmtree(memory, ignore_errors=True)


def test_all_of_it_is_taken_farther_newest_first_and_twice_does_nothing_more(
    tmp_path: Path, dead: Job
) -> None:
    ended, copied = finish(dead)
    assert ended == Ended("done")
    assert copied == [(step, far) for far in ("far", "farther") for step in (3, 2, 1)]
    assert steps(tmp_path / "farther") == [1, 2, 3]
    assert finish(dead) == (Ended("done"), [])
    assert read_owner(open_backend(str(tmp_path / "far"))) is None  # it took no root


@pytest.mark.parametrize("taken", ["near", "far"])
def test_no_manifest_is_put_once_another_job_has_taken_a_root(
    tmp_path: Path, dead: Job, monkeypatch, taken
) -> None:
    """The other job begins while the files of the first copy are on their way."""
    other = msgspec.structs.replace(
        Owner.of_this_process("feedbeefzzzz"), pid=1, machine="elsewhere"
    )

    def take(key: str) -> None:
        if key.startswith("step-000000002") and key.endswith("rank-00000.json"):
            (tmp_path / taken / OWNER).write_bytes(msgspec.json.encode(other))

    watch(monkeypatch, tmp_path / "far", take)
    ended, copied = finish(dead)
    assert ended == Ended("superseded")
    assert copied == [(3, "far")]
    assert steps(tmp_path / "far") == [3]
    assert not list((tmp_path / "farther").iterdir())
    assert finish(dead)[0] == Ended("superseded")


def test_the_next_job_goes_on_where_the_agent_was_cut_off(
    tmp_path: Path, dead: Job, monkeypatch
) -> None:
    class Cut(BaseException):
        pass

    def die(key: str) -> None:
        if key.startswith("step-000000002") and key.endswith("manifest.json"):
            raise Cut

    watch(monkeypatch, tmp_path / "far", die)
    with pytest.raises(Cut):
        finish(dead)
    assert steps(tmp_path / "far") == [3]
    with CheckpointManager([tmp_path / name for name in ("near", "far")]) as manager:
        state = {"x": torch.zeros(1000, dtype=torch.int64)}
        report = manager.restore(state)
        assert report is not None
        assert report.step == 3
        manager.save(state, 4)
    assert steps(tmp_path / "far") == [1, 2, 3, 4]


def test_a_job_after_it_on_the_same_roots_ends_its_turn(tmp_path: Path, dead: Job) -> None:
    with CheckpointManager(tmp_path / "near") as manager:
        assert manager.restore({"x": torch.zeros(1000, dtype=torch.int64)}) is not None
        manager.save({"x": torch.ones(1000, dtype=torch.int64)}, 4)
        assert finish(dead) == (Ended("superseded"), [])
    assert finish(dead) == (Ended("superseded"), [])  # it has closed, and the root names no job
    assert not list((tmp_path / "far").iterdir())


def test_a_job_after_another_of_the_same_process_is_finished(tmp_path: Path, dead: Job) -> None:
    """The far tier still names the previous job, which has detached. The near one knows that it has
    ended.
    """
    first = msgspec.structs.replace(dead.owner, attempt="feedbeefzzzz", pid=NO_PROCESS)
    near = read_owner(open_backend(str(tmp_path / "near")))
    assert near is not None
    (tmp_path / "far" / OWNER).write_bytes(msgspec.json.encode(first))
    assert finish(dead)[0] == Ended("superseded")
    second = msgspec.structs.replace(near, ended=(first.attempt,))
    (tmp_path / "near" / OWNER).write_bytes(msgspec.json.encode(second))
    assert finish(dead)[0] == Ended("done")
    assert steps(tmp_path / "far") == [1, 2, 3]


def test_a_job_that_lives_keeps_the_root_that_it_had_before(tmp_path: Path, dead: Job) -> None:
    alive = Owner.of_this_process("feedbeefzzzz")
    (tmp_path / "far" / OWNER).write_bytes(msgspec.json.encode(alive))
    after_it = msgspec.structs.replace(dead, before=(alive.attempt,))
    assert finish(after_it)[0] == Ended("superseded")
    assert steps(tmp_path / "far") == []


def test_a_tier_that_fails_costs_no_other_and_is_tried_again(
    tmp_path: Path, dead: Job, monkeypatch
) -> None:
    def full(key: str) -> None:
        raise OutOfSpace(key, "no space is left")

    with monkeypatch.context() as broken:
        watch(broken, tmp_path / "far", full)
        ended, copied = finish(dead)
    assert ended.outcome == "failed"
    assert "no space is left" in ended.error
    assert {far for _, far in copied} == {"farther"}
    assert steps(tmp_path / "farther") == [1, 2, 3]
    assert steps(tmp_path / "far") == []
    assert finish(dead)[0] == Ended("done")
    assert steps(tmp_path / "far") == [1, 2, 3]


def test_a_tier_that_cannot_be_opened_costs_no_other(tmp_path: Path, dead: Job) -> None:
    odd = msgspec.structs.replace(
        dead, tiers=(dead.tiers[0], {"url": "nosuch://place"}, dead.tiers[2])
    )
    ended, copied = finish(odd)
    assert ended.outcome == "failed"
    assert "nosuch" in ended.error
    assert {far for _, far in copied} == {"farther"}


@pytest.fixture
def full(tmp_path: Path, dead: Job) -> Iterator[Job]:
    """The job has step 3 in memory only. "near" has steps 1 and 2, and room for no more."""
    near, memory = Tier(str(tmp_path / "near")), Tier(f"shm://test-{os.getpid()}")
    folder = memory_folder(memory)
    [newest] = (tmp_path / "near").glob("step-000000003.*")
    size = sum(file.stat().st_size for file in newest.iterdir())
    shutil.copytree(tmp_path / "near", folder)
    shutil.rmtree(newest)
    for one in (1, 2):
        shutil.rmtree(next(folder.glob(f"step-00000000{one}.*")))
    near = dataclasses.replace(near, capacity=2 * size + size // 2)
    first = tuple(fields_of(tier, tier.url) for tier in (memory, near))
    yield msgspec.structs.replace(dead, tiers=(*first, dead.tiers[1]))
    shutil.rmtree(folder)


def test_a_full_near_tier_keeps_what_the_far_one_lacks(tmp_path: Path, full: Job) -> None:
    ended, _ = finish(full)
    assert "farther tiers wait for these steps: 1, 2" in ended.error
    assert steps(tmp_path / "near") == [1, 2]
    assert steps(tmp_path / "far") == [1, 2, 3]
    assert finish(full)[0] == Ended("done")
    assert steps(tmp_path / "near") == [2, 3]


def test_a_copy_in_memory_does_not_make_a_step_durable(tmp_path: Path, full: Job) -> None:
    """There is room for one step, and memory has a copy of the only one on the disk."""
    shutil.rmtree(next((tmp_path / "near").glob("step-000000001.*")))
    [second] = (tmp_path / "near").glob("step-000000002.*")
    shutil.copytree(second, memory_folder(Tier(full.tiers[0]["url"])) / second.name)
    capacity = full.tiers[1]["capacity"] // 2
    one = msgspec.structs.replace(
        full, tiers=(full.tiers[0], {**full.tiers[1], "capacity": capacity})
    )
    ended, _ = finish(one)
    assert "the newest has no other copy" in ended.error
    assert steps(tmp_path / "near") == [2]


@pytest.mark.parametrize("lives", [False, True])
def test_what_the_job_was_writing_makes_room_for_the_copies(
    tmp_path: Path, full: Job, monkeypatch, lives
) -> None:
    """The exception is a process of the job that may still be writing it, here or on
    another node.
    """
    near = open_backend(str(tmp_path / "near"))
    [newest] = memory_folder(Tier(full.tiers[0]["url"])).glob("step-000000003.*")
    begun = near.upload(f"{newest.name}/rank-00000.safetensors", 100)
    begun.write(0, memoryview(bytes(100)))
    seen: list[int] = []
    unfinished = partial(near.unfinished_writes, "")  # type: ignore[attr-defined]
    watch(monkeypatch, tmp_path / "near", lambda _: seen.append(len(list(unfinished()))))
    wide = {**full.tiers[1], "capacity": None}
    job = msgspec.structs.replace(full, tiers=(full.tiers[0], wide), ranks=int(lives))
    assert finish(job)[0] == Ended("done")
    assert steps(tmp_path / "near") == [1, 2, 3]
    assert set(seen) == {int(lives)}
    begun.abort()


def test_a_save_that_lacks_only_its_manifest_is_finished(tmp_path: Path, dead: Job) -> None:
    [manifest] = (tmp_path / "near").glob("step-000000003.*/manifest.json")
    whole = manifest.read_bytes()
    manifest.unlink()
    assert steps(tmp_path / "near") == [1, 2]
    assert finish(dead)[0] == Ended("done")
    assert manifest.read_bytes() == whole
    assert steps(tmp_path / "far") == [1, 2, 3]


def test_a_root_that_its_own_trainer_still_holds_is_tried_again(tmp_path: Path, dead: Job) -> None:
    """The trainer detaches, and the far store is slow to take its record."""
    [newest] = (tmp_path / "near").glob("step-000000003.*")
    shutil.copytree(newest, tmp_path / "far" / newest.name)
    (tmp_path / "far" / newest.name / "manifest.json").unlink()
    record = tmp_path / "far" / OWNER
    trainer = Owner.of_this_process(dead.owner.attempt)
    record.write_bytes(msgspec.json.encode(trainer))
    ended, _ = finish(dead)
    assert ended.outcome == "failed"
    assert "waits for the trainer" in ended.error
    record.write_bytes(msgspec.json.encode(msgspec.structs.replace(trainer, pid=NO_PROCESS)))
    assert finish(dead)[0] == Ended("done")
    assert steps(tmp_path / "far") == [1, 2, 3]
    assert steps(tmp_path / "farther") == [1, 2, 3]


@pytest.mark.parametrize("part", ["rank-00000.json", "rank-00000.safetensors"])
def test_a_save_that_lacks_a_part_is_never_committed(tmp_path: Path, dead: Job, part) -> None:
    [folder] = (tmp_path / "near").glob("step-000000003.*")
    (folder / "manifest.json").unlink()
    (folder / part).unlink()
    assert finish(dead)[0] == Ended("done")
    assert steps(tmp_path / "near") == [1, 2]
    assert steps(tmp_path / "far") == [1, 2]

"""Jobs that share a root: a job takes nothing from another job that may be alive."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from msgspec.structs import replace

import ckpt.coordination.committer
import ckpt.retention.pruner
import ckpt.storage.tiers
from ckpt import CheckpointManager, Tier
from ckpt.catalog.inventory import Inventory
from ckpt.catalog.step_listing import committed, own_objects
from ckpt.coordination.step_files import put_manifest
from ckpt.errors import CkptError, CommitError, RootInUse, TransientStorageError
from ckpt.model.keys import OWNER
from ckpt.retention.pruner import prune
from ckpt.retention.removal import remove
from ckpt.root.attempts import step_refs
from ckpt.root.owner import Owner, claim, read_owner
from ckpt.storage.registry import open_backend
from ckpt.storage.tiers import open_tiers
from tests.kit.states import IMAGE, state
from tests.kit.stores import Gated, Wrapped, whole, wrap_stores
from tests.kit.worlds import paused


def seems(root: Path, **fields: Any) -> None:
    """Let the owner of ``root`` look to others as ``fields`` say. To itself it is unchanged."""
    backend = open_backend(str(root))
    owner = read_owner(backend)
    assert owner is not None
    backend.put(OWNER, [msgspec.json.encode(replace(owner, **fields))])


ELSEWHERE = {"machine": "another machine"}
LEADER_DEAD = {"started": 1}


def restored_from(*tiers: Tier | Path, step: int | None = None) -> Any:
    target = state(0)
    with CheckpointManager(
        [tier if isinstance(tier, Tier) else str(tier) for tier in tiers]
    ) as manager:
        report = manager.restore(target, step)
    assert report is not None
    assert target["x"].unique().tolist() == [report.step]
    return report


_STARTS = """
import sys, torch
from ckpt import CheckpointManager
with CheckpointManager(sys.argv[1]) as manager:
    manager.restore({"x": torch.zeros(3)}, rollback=sys.argv[2] == "goes on")
    pause(*sys.argv[-2:])
"""


@pytest.mark.parametrize(
    ("first", "second", "warnings"),
    [("goes on", "goes on", 1), ("evaluates", "goes on", 0), ("goes on", "evaluates", 0)],
)
def test_a_second_job_learns_at_its_start_of_one_that_has_not_saved_yet(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, first: str, second: str, warnings: int
) -> None:
    root = tmp_path / "run"
    with CheckpointManager(root) as manager:
        manager.save({"x": torch.ones(3)}, 1)
    with paused(_STARTS, root, first, folder=tmp_path), CheckpointManager(root) as manager:
        for _ in range(2):
            manager.restore({"x": torch.zeros(3)}, rollback=second == "goes on")
        manager.close()
    texts = [record.getMessage() for record in caplog.records]
    assert sum("another job lives, and has not saved yet" in text for text in texts) == warnings


def test_an_evaluation_is_not_told_that_its_saves_would_fail(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    code = """
import sys, torch
from ckpt import CheckpointManager
with CheckpointManager(sys.argv[1]) as manager:
    manager.save({"x": torch.ones(3)}, 1)
    pause(*sys.argv[-2:])
"""
    with paused(code, tmp_path / "run", folder=tmp_path):
        with CheckpointManager(tmp_path / "run") as manager:
            manager.restore({"x": torch.zeros(3)}, rollback=False)
        assert "belongs to a job that is alive" not in caplog.text
        with CheckpointManager(tmp_path / "run") as manager:
            manager.restore({"x": torch.zeros(3)})
        assert "belongs to a job that is alive" in caplog.text


def test_a_job_that_only_restores_evicts_nothing_of_a_job_on_another_machine(
    near: Path,
    far: Path,
    gated: Gated,
) -> None:
    """Steps 11 and 12 wait for the far tier, and are nowhere else."""
    gated.open.set()
    with CheckpointManager(far) as manager:
        manager.save(state(9), 9)
    gated.open.clear()
    with CheckpointManager([near, far], backlog=9) as living:
        for step in (11, 12):
            living.save_async(state(step), step).result(20, tier=str(near))
        seems(near, **ELSEWHERE)
        report = restored_from(Tier(str(near), capacity=2 * IMAGE + 100_000), far, step=9)
        assert (report.tier, report.cached_bytes) == (str(far), 0)
        assert whole(near) == [11, 12]
        gated.open.set()
    assert whole(far) == [9, 11, 12]


@pytest.mark.parametrize("owner", [ELSEWHERE, LEADER_DEAD], ids=["unknown", "its leader has died"])
def test_a_job_that_only_restores_leaves_what_another_has_begun(
    near: Path, far: Path, owner: dict[str, Any]
) -> None:
    """The other ranks may be committing it just now."""
    for root, step in ((far, 9), (near, 10)):
        with CheckpointManager(root) as manager:
            manager.save(state(step), step)
    (folder,) = near.glob("step-*")
    (folder / "manifest.json").unlink()
    (ref,) = step_refs(open_backend(str(near)))
    claim(open_backend(str(near)), replace(Owner.of_this_process(ref.attempt), **owner))
    restored_from(Tier(str(near), capacity=IMAGE + 100_000), far, step=9)
    assert {path.name for path in folder.iterdir()} == {"rank-00000.json", "rank-00000.safetensors"}


@pytest.fixture
def in_memory(tmp_path: Path) -> Iterator[list[Tier]]:
    """Return tiers of which the first is in memory, which is freed at the end."""
    tiers = [Tier("memory"), Tier(str(tmp_path / "disk"))]
    yield tiers
    memory = open_tiers(tiers)[0].backend
    for ref in step_refs(memory):
        for info in own_objects(memory, ref):
            memory.delete(info.key)
    memory.delete(OWNER)
    memory.close()


def kept(tiers: list[Tier]) -> list[int]:
    return sorted(ref.step for ref in committed(open_tiers(tiers)[0].backend))


def test_a_job_that_only_restores_leaves_a_living_one_what_it_has_in_memory(
    in_memory: list[Tier],
) -> None:
    with CheckpointManager(in_memory) as living:
        for step in (1, 2):
            living.save(state(step), step)
        assert kept(in_memory) == [1, 2]
        restored_from(*in_memory)
        assert kept(in_memory) == [1, 2]


def test_a_restore_between_the_last_fragment_and_the_manifest_costs_no_step_in_memory(
    in_memory: list[Tier], monkeypatch: pytest.MonkeyPatch
) -> None:
    restores: list[int] = []

    def meanwhile(backend: Any, key: str, data: bytes) -> None:
        if backend.url.startswith("shm://") and key.startswith("step-000000002"):
            restores.append(restored_from(*in_memory).step)
        put_manifest(backend, key, data)

    with CheckpointManager(in_memory) as living:
        living.save(state(1), 1)
        monkeypatch.setattr(ckpt.coordination.committer, "put_manifest", meanwhile)
        living.save(state(2), 2)
        memory = open_tiers(in_memory)[0].backend
        assert whole(memory.url) == [1, 2]
    assert restores == [1]


class Partitioned(Wrapped):
    """A store that takes the first manifest and does not answer.

    Then another job takes the root and evicts that step.
    """

    def __init__(self, root: Path, meanwhile: Callable[[], None]) -> None:
        super().__init__(open_backend(str(root)))
        self.meanwhile, self.puts = meanwhile, 0

    def put(self, key: str, parts: Any, *, if_absent: bool = False) -> Any:
        info = self.inner.put(key, parts, if_absent=if_absent)
        if key.endswith("manifest.json"):
            self.puts += 1
            if self.puts == 1:
                self.meanwhile()
                raise TransientStorageError(key, "no answer")
        return info


def test_a_manifest_is_not_put_again_once_another_job_has_the_root(
    near: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def taken_over() -> None:
        seems(near, **ELSEWHERE)
        claim(backend.inner, Owner.of_this_process("anotherabcde"))
        for held in Inventory(backend.inner).look():
            assert held.state == "committed"
            remove(backend.inner, held)

    backend = Partitioned(near, taken_over)
    wrap_stores(monkeypatch, lambda url, store: backend if backend.puts == 0 else store)
    manager = CheckpointManager(near)
    with pytest.raises(CommitError, match=r"whether it was committed .* cannot be seen"):
        manager.save(state(5), 5)
    manager.close()
    assert backend.puts == 1
    assert whole(near) == []


@pytest.mark.parametrize("closed", [False, True], ids=["lives", "has closed"])
def test_a_pruner_that_comes_late_removes_nothing_of_the_next_job(
    near: Path, closed: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The first job stops before it prunes. Meanwhile another machine goes on from its step 2."""
    go = threading.Event()

    def late(*args: Any, **how: Any) -> Any:
        assert go.wait(30)
        return prune(*args, **how)

    monkeypatch.setattr(ckpt.retention.pruner, "prune", late)
    first = CheckpointManager(Tier(str(near), keep_last=1))
    for step in (1, 2):
        first.save(state(step), step)
    seems(near, **ELSEWHERE)
    monkeypatch.setattr(ckpt.retention.pruner, "prune", prune)
    second = CheckpointManager(near)
    second.restore(state(0))
    for step in (3, 4):
        second.save(state(step), step)
    if closed:
        second.close()
    go.set()
    first.close()
    assert whole(near) == ([2, 3, 4] if closed else [1, 2, 3, 4])
    assert ("were not removed" in caplog.text) == (not closed)
    second.close()


def test_a_root_whose_next_owner_has_closed_is_taken_again(near: Path) -> None:
    """Otherwise the job would write there without a name, and a third one could take the root for
    free.
    """
    with CheckpointManager(near) as first:
        first.save(state(1), 1)
        seems(near, **ELSEWHERE)
        with CheckpointManager(near) as second:
            second.restore(state(0))
            second.save(state(2), 2)
            with pytest.raises(RootInUse):
                first.save(state(3), 3)
        first.save(state(3), 3)
        owner = read_owner(open_backend(str(near)))
        assert owner is not None
        assert owner.pid == os.getpid()
        with pytest.raises(CkptError, match="step 2 is already saved"):
            first.save(state(2), 2)
    assert whole(near) == [1, 2, 3]

"""The agent of one node, and the shared tier on which it meets the agents of the others."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ckpt import Tier
from ckpt.agent.finish_worker import Finish
from ckpt.agent.messages import Job, fields_of
from ckpt.agent.node_part_copier import NodeParts
from ckpt.agent.worker_messages import Ended
from ckpt.catalog.rollbacks import newest_rollback, put_rollback
from ckpt.errors import (
    AccessDenied,
    ChecksumMismatch,
    CkptError,
    CommitError,
    LinkRefused,
    ObjectNotFound,
    OutOfSpace,
    RootInUse,
    RootLost,
    StorageError,
    TransientStorageError,
)
from ckpt.model.keys import StepRef
from ckpt.model.rollback import roll_back
from ckpt.pipeline.workers import Workers
from ckpt.storage.registry import open_backend
from tests.checkpoints import DEAD, own, write_checkpoint

OF_THE_STORE = [
    RootInUse("/far", "another job"),
    RootLost(""),
    AccessDenied("step", "no credentials"),
    OutOfSpace("step"),
    TransientStorageError("step", "no answer"),
]
OF_ONE_STEP = [
    CommitError("a part lacks"),
    ChecksumMismatch("step", 0, 1),
    StorageError("step", "it is being discarded"),
    ObjectNotFound("step"),
    LinkRefused("step"),
]


@pytest.mark.parametrize("error", [*OF_THE_STORE, *OF_ONE_STEP])
def test_an_error_of_one_step_keeps_no_further_step_from_being_tried(
    monkeypatch: pytest.MonkeyPatch, error: CkptError
) -> None:
    """An error of the whole store, or of a root that another job has taken, ends the work."""
    parts: Any = [
        SimpleNamespace(step=SimpleNamespace(ref=StepRef(step, "a" * 12))) for step in (3, 2)
    ]
    tried: list[int] = []

    def bring(_: NodeParts, part: Any) -> None:
        tried.append(part.step.ref.step)
        raise error

    monkeypatch.setattr(NodeParts, "_bring", bring)
    own = object.__new__(NodeParts)
    if error in OF_THE_STORE:
        with pytest.raises(type(error)):
            own._bring_all(parts)
        assert tried == [3]
    else:
        assert own._bring_all(parts) == {part.step.ref: error for part in parts}


@pytest.fixture
def node(tmp_path: Path) -> Job:
    """The job of two nodes has committed step 1 on the shared tier, and was killed at step 2. The
    node of rank 1 has its part of step 2 without the manifest.
    """
    tiers = [Tier(str(tmp_path / "node"), local=True), Tier(str(tmp_path / "shared"))]
    stores = [open_backend(tier.url) for tier in tiers]
    for store in stores:
        own(store, DEAD)
    arrays = {"x": np.ones((8, 16))}
    write_checkpoint(stores[1], 1, arrays, world_size=2)
    ref = write_checkpoint(stores[0], 2, arrays, world_size=2, commit=False).ref
    for file in (tmp_path / "node" / ref.folder).glob("rank-00000.*"):
        file.unlink()
    return Job(
        owner=DEAD,
        processes=(),
        ranks=2,
        tiers=tuple(fields_of(tier, tier.url) for tier in tiers),
        backlog=4,
        environment={},
        node_ranks=(1,),
    )


def finish(job: Job) -> Ended:
    with Workers("test", 2) as workers, Finish(job, workers, lambda _: None) as finishing:
        return finishing.run()


def test_a_part_without_a_manifest_waits_until_no_other_node_can_have_the_manifest(
    tmp_path: Path, node: Job
) -> None:
    """The other node may have committed the step, and its ranks end later."""
    ended = finish(node)
    assert ended.outcome == "failed"
    assert "step 2 may be a checkpoint on another node" in ended.error
    assert "rank(s) 0" in ended.error
    shared = open_backend(str(tmp_path / "shared"))
    shared.put(StepRef(1, DEAD.attempt).end_note(0), [b""])  # and for no later step
    assert finish(node) == Ended("done")


def test_an_abandoned_part_counts_neither_as_the_newest_nor_as_one_that_waits(
    tmp_path: Path, node: Job
) -> None:
    """The job went back from step 2 to step 1. Only the shared tier has the rollback."""
    shared = open_backend(str(tmp_path / "shared"))
    target = StepRef(1, DEAD.attempt)
    rollback = roll_back([], target, [StepRef(2, DEAD.attempt)], trials={DEAD.attempt: 1})
    assert rollback is not None
    put_rollback(shared, rollback)
    assert finish(node) == Ended("done")
    assert newest_rollback(open_backend(str(tmp_path / "node"))) == rollback


def test_a_part_without_a_manifest_does_not_wait_forever_for_a_lost_node(
    tmp_path: Path, node: Job
) -> None:
    before = time.time() - 2 * 3600
    for file in (tmp_path / "node").glob("step-000000002.*/*"):
        os.utime(file, (before, before))
    assert finish(node) == Ended("done")

"""What a job may remove from a root that it took from a job that may be alive."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from ckpt import CheckpointManager
from ckpt.catalog.inventory import Inventory
from ckpt.coordination.single import SingleCoordinator
from ckpt.model.keys import OWNER
from ckpt.root.claim import Claim, TakeoverPost
from ckpt.root.owner import Owner, read_owner
from ckpt.storage.registry import open_backend
from ckpt.storage.testing import FaultyBackend

OWN = "ownownownown"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A root with one step, whose job is on another machine and may be alive."""
    with CheckpointManager(tmp_path) as manager:
        manager.save({"x": 1}, 1)
        owner = read_owner(open_backend(str(tmp_path)))
    assert owner is not None
    monkeypatch.setattr("ckpt.root.owner._ended_attempts", set[str]())  # The job is not known here
    (tmp_path / OWNER).write_bytes(msgspec.json.encode(replace(owner, machine="another")))
    return tmp_path


def may_remove(claim: Claim, root: Path) -> bool:
    [step] = Inventory(open_backend(str(root))).look()
    return claim.may_remove(step)


def dated(root: Path, seconds: float) -> None:
    """Set the date of the manifest to so many seconds after that of ``writer.json``."""
    date = (root / OWNER).stat().st_mtime + seconds
    [manifest] = root.glob("step-*/manifest.json")
    os.utime(manifest, (date, date))


@pytest.mark.parametrize(("seconds", "is_older"), [(-1, True), (0, False), (1, False)])
@pytest.mark.parametrize("leads", [True, False])
def test_a_step_of_the_same_second_may_have_been_committed_since(
    root: Path, seconds: int, is_older: bool, leads: bool
) -> None:
    """S3 dates its objects to whole seconds."""
    posted = TakeoverPost(SingleCoordinator(), 0)
    claim = leader = Claim(open_backend(str(root)), Owner.of_this_process(OWN))
    leader.take()
    if not leads:
        assert leader.takeover is not None
        posted.post(leader.takeover)
        claim = Claim(open_backend(str(root)), Owner.of_this_process(OWN), takeover_post=posted)
        claim.use()
    dated(root, seconds)
    assert may_remove(claim, root) == is_older


def test_a_step_that_was_committed_between_two_takeovers_was_not_there(root: Path) -> None:
    claim = Claim(open_backend(str(root)), Owner.of_this_process(OWN))
    claim.take()
    dated(root, 1)
    claim.take()
    os.utime(root / OWNER, (2**32, 2**32))
    assert not may_remove(claim, root)


def test_the_date_costs_a_request_only_where_a_job_may_be_alive(root: Path) -> None:
    counts: list[int] = []
    for _ in range(2):
        backend = FaultyBackend(open_backend(str(root)), [])
        claim = Claim(backend, Owner.of_this_process(OWN))
        claim.take()
        counts.append(sum((call.verb, call.key) == ("head", OWNER) for call in backend.calls))
        claim.release()
    assert counts[0] == counts[1] + 1

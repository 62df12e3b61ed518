"""What may be removed, and what only looks as if it might."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ckpt.catalog.evictor import Evictor
from ckpt.catalog.holdings import Holdings
from ckpt.catalog.prune import prune
from ckpt.catalog.room import Room
from ckpt.config import Tier
from ckpt.coordination.mark import mark_finished
from ckpt.coordination.single import SingleCoordinator
from ckpt.errors import AccessDenied, OutOfSpace, TransientStorageError
from ckpt.model.checksum import checksum
from ckpt.model.layout import StepRef
from ckpt.plan.retention import Retention
from ckpt.storage.testing import FaultyBackend, Raise, Rule
from ckpt.storage.tiers import OpenTier, open_tiers

ONE, TWO = "aaaaaaaaaaaa", "bbbbbbbbbbbb"


def attempt(root: Path, step: int, of: str, *, version: int | None = 1, days: float = 0.0) -> Path:
    """A folder with a data file of 1,000 bytes, and a manifest of that format unless it is None."""
    folder = root / StepRef(step, of).folder
    folder.mkdir(parents=True)
    (folder / "rank-00000.safetensors").write_bytes(bytes(1000))
    if version is not None:
        body = (
            f'{{"format":{version},"step":{step},"attempt":"{of}",'
            '"files":[["rank-00000.safetensors",0,1000,[]]],"metadata":{}}'
        ).encode()
        (folder / "manifest.json").write_bytes(
            b'{"checksum":"' + checksum(body).encode() + b'","body":' + body + b"}"
        )
    for path in folder.iterdir():
        os.utime(path, (time.time() - days * 86400,) * 2)
    return folder


def tier(root: Path, **fields: object) -> OpenTier:
    (opened,) = open_tiers((Tier(str(root), **fields),))
    return opened


def room(root: Path, capacity: int) -> Room:
    return Room(
        tier(root, capacity=capacity),
        SingleCoordinator(),
        timeout=5,
        waiting=frozenset,
        elsewhere=lambda _: False,
    )


def test_a_checkpoint_of_a_later_format_is_nobodys_to_remove(tmp_path: Path) -> None:
    later = attempt(tmp_path, 10, ONE, version=9, days=30)
    attempt(tmp_path, 20, TWO)
    assert prune(tier(tmp_path).backend, Retention(keep_last=1), own=TWO) == []
    assert later.exists()


def test_nor_does_it_go_for_room(tmp_path: Path) -> None:
    later = attempt(tmp_path, 10, ONE, version=9, days=30)
    with pytest.raises(OutOfSpace):
        room(tmp_path, 1500).agree(StepRef(20, TWO), 0, 1000, restored=None)
    assert later.exists()


def test_what_a_dead_job_left_goes_for_room_however_young(tmp_path: Path) -> None:
    whole, remains = attempt(tmp_path, 10, ONE), attempt(tmp_path, 20, ONE, version=None)
    room(tmp_path, 2500).agree(StepRef(20, TWO), 0, 1000, restored=10)
    assert whole.exists()
    assert not remains.exists()


def test_a_partial_cache_of_the_running_job_goes_when_it_is_old(tmp_path: Path) -> None:
    attempt(tmp_path, 10, ONE)
    old = attempt(tmp_path, 5, ONE, version=None, days=2)
    young = attempt(tmp_path, 6, ONE, version=None)
    prune(tier(tmp_path).backend, Retention(keep_last=1), own=ONE)
    assert not old.exists()
    assert young.exists()


def test_a_manifest_that_cannot_be_read_stops_no_pruning(tmp_path: Path) -> None:
    (attempt(tmp_path, 5, ONE) / "manifest.json").write_bytes(b"nonsense")
    gone, kept = attempt(tmp_path, 10, ONE), attempt(tmp_path, 20, ONE)
    prune(tier(tmp_path).backend, Retention(keep_last=1), own=ONE)
    assert not gone.exists()
    assert kept.exists()


def test_ranks_that_make_room_at_once_take_off_nothing_that_must_stay(tmp_path: Path) -> None:
    """A full disk is met by several ranks in the same moment: each looks and takes off for itself."""
    for step in range(1, 9):
        attempt(tmp_path, step, ONE)
    waited_for = frozenset({StepRef(3, ONE)})
    gate = threading.Barrier(6)

    def rank(_: int) -> bool:
        evictor = Evictor(
            tier(tmp_path, capacity="1GB"), ONE, waiting=lambda: waited_for, elsewhere=lambda _: False
        )
        gate.wait()
        return evictor.free(StepRef(9, ONE), 2500, restored=None)

    with ThreadPoolExecutor(6) as ranks:
        outcomes = list(ranks.map(rank, range(6)))
    assert any(outcomes)
    left = {held.ref.step: held.state for held in Holdings(tier(tmp_path).backend).look()}
    assert left[3] == left[8] == "whole"
    assert set(left.values()) == {"whole"}  # nothing is left half removed
    assert 1 not in left


def test_what_a_finisher_left_that_never_came_back_goes_in_the_end(tmp_path: Path) -> None:
    """Its disk was full, say: there was room for the mark, and not for the manifest."""
    backend, ref = tier(tmp_path).backend, StepRef(5, ONE)
    attempt(tmp_path, 10, TWO)
    left = attempt(tmp_path, 5, ONE, version=None, days=30)
    assert mark_finished(backend, ref)

    def days_later(days: float) -> list[int]:
        """How many files are left, and the size of the mark."""
        if (mark := left / "verdict").exists():
            os.utime(mark, (time.time() - days * 86400,) * 2)
        prune(backend, Retention(keep_last=1), own=TWO)
        return [len(list(left.iterdir())), mark.stat().st_size] if left.exists() else []

    count, size = days_later(0.5)
    assert (count, size > 0) == (2, True)  # it may be at work
    assert days_later(2) == [2, 0]  # the pruner's mark instead
    assert not mark_finished(backend, ref)
    assert days_later(0.5) == [2, 0]
    assert days_later(2) == []


def test_a_folder_that_cannot_be_removed_keeps_no_other_from_being_removed(tmp_path: Path) -> None:
    stuck, gone, kept = (attempt(tmp_path, step, ONE) for step in (1, 2, 3))
    backend = FaultyBackend(
        tier(tmp_path).backend, [Rule(verb="delete", key=stuck.name, fault=Raise(AccessDenied))]
    )
    with pytest.raises(AccessDenied):
        prune(backend, Retention(keep_last=1), own=ONE)
    assert (stuck.exists(), gone.exists(), kept.exists()) == (True, False, True)


def test_a_store_that_does_not_answer_is_not_asked_for_every_folder(tmp_path: Path) -> None:
    for step in range(1, 6):
        attempt(tmp_path, step, ONE)
    backend = FaultyBackend(tier(tmp_path).backend, [Rule(verb="delete", fault=Raise(TransientStorageError))])
    with pytest.raises(TransientStorageError):
        prune(backend, Retention(keep_last=1), own=ONE)
    assert [call.verb for call in backend.calls].count("delete") == 1

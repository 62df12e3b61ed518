from __future__ import annotations

import contextlib
import uuid

import pytest

from ckpt.catalog.finalize import RunFacts, finalize
from ckpt.catalog.inventory import Inventory
from ckpt.catalog.step_listing import is_committed
from ckpt.catalog.transfer import fetch_step
from ckpt.catalog.verify import StepFolder, verify_step
from ckpt.errors import (
    CkptError,
    CommitError,
    ObjectExists,
    OutOfSpace,
    StorageError,
    TransientStorageError,
)
from ckpt.model.keys import StepRef, data_name, fragment_name
from ckpt.pipeline.workers import Workers
from ckpt.retention.policy import PruneContext, Retention
from ckpt.retention.pruner import prune
from ckpt.retention.removal import remove
from ckpt.root.claim_marker import (
    claim_for_finish,
    claim_for_removal,
    claim_rank_to_bring,
    claim_rank_to_remove,
    discard_part,
    release_marker,
)
from ckpt.root.owner import Owner, claim
from ckpt.storage.api import read_object
from ckpt.storage.testing import Crash, FaultyBackend, Raise, Rule, SimulatedCrash
from ckpt_backends.memory import forget_memory, open_memory
from tests.checkpoints import write_checkpoint
from tests.cli.conftest import ARRAYS
from tests.kit.stores import Wrapped

REF = StepRef(7, "abcxyz")
DEAD = Owner(attempt="abcxyz", host="far", machine="elsewhere", pid=1, started=1)


@pytest.fixture
def store():
    name = uuid.uuid4().hex
    yield open_memory(f"memory://{name}", {"shared": True})
    forget_memory(name)


@pytest.fixture
def left(store):
    """A store with all parts of two ranks, and no manifest."""
    claim(store, DEAD)
    write_checkpoint(store, REF.step, ARRAYS, world_size=2, commit=False)
    return store


def names(store) -> set[str]:
    return {info.name for info in store.list(f"{REF.folder}/")}


def clear(store, rank: int, *, marked: bool = False) -> bool:
    names = REF.key(fragment_name(rank)), REF.key(data_name(rank))
    return discard_part(store, REF, *names, rank=rank if marked else None)


def test_ranks_that_discard_their_parts_at_once_leave_no_files(left):
    """One of them deletes the marker that they share just after another one has found it."""
    found = Rule(verb="put", key=f"{REF.claim_marker}$", nth=1, fault=Raise(ObjectExists))
    assert clear(FaultyBackend(left, [found]), 1, marked=True)
    assert clear(left, 0, marked=True)
    assert names(left) == set()


def finish(store) -> None:
    with Workers("test", 2) as workers:
        finalize(store, REF, workers=workers, facts=RunFacts(job_is_dead=True))


def test_a_rank_clears_its_own_away_and_leaves_no_mark(left):
    assert clear(left, 1)
    assert names(left) == {"rank-00000.json", "rank-00000.safetensors"}
    assert clear(left, 0)
    assert names(left) == set()


def test_nothing_is_cleared_away_while_somebody_finishes_it(left):
    before = names(left)
    assert claim_for_finish(left, REF)
    assert not clear(left, 0)
    assert names(left) == before | {"claim"}
    finish(left)
    assert not clear(left, 0)
    assert names(left) == before | {"manifest.json"}


def test_a_rank_on_a_tier_that_nodes_share_leaves_no_marker_either(left):
    assert clear(left, 1, marked=True)
    assert names(left) == {"rank-00000.json", "rank-00000.safetensors"}


def test_a_rank_removes_nothing_that_an_agent_brings(left):
    before = names(left)
    assert claim_rank_to_bring(left, REF, 1)
    assert claim_rank_to_bring(left, REF, 1)  # Two buddies may have copies
    assert not clear(left, 1, marked=True)
    assert names(left) == before | {"rank-00001.claim"}
    assert clear(left, 0, marked=True)


def test_an_agent_brings_nothing_of_a_rank_that_clears_away(left):
    assert claim_rank_to_remove(left, REF, 1)
    assert not claim_rank_to_bring(left, REF, 1)
    assert claim_rank_to_bring(left, REF, 0)
    assert clear(left, 1, marked=True)
    assert claim_rank_to_bring(left, REF, 1)


def test_the_marker_of_a_rank_stays_while_another_rank_deletes_that_of_the_step(left):
    """So an agent learns that a rank has not ended, although the marker of the step is gone."""
    assert claim_rank_to_remove(left, REF, 1)
    assert claim_for_removal(left, REF)
    assert clear(left, 0, marked=True)  # It deletes the marker that both have put
    assert names(left) == {"rank-00001.json", "rank-00001.safetensors", "rank-00001.claim"}
    assert not claim_rank_to_bring(left, REF, 1)


def test_a_rank_that_finds_a_checkpoint_leaves_no_marker(left):
    before = names(left)
    finish(left)
    assert not clear(left, 1, marked=True)
    assert names(left) == before | {"manifest.json"}


def test_markers_of_ranks_are_removed_with_the_step(left):
    assert claim_rank_to_bring(left, REF, 1)
    [held] = Inventory(left).look()
    assert remove(left, held)
    assert names(left) == set()


def test_nothing_is_finished_while_a_rank_clears_away(left):
    assert claim_for_removal(left, REF)
    with pytest.raises(CommitError, match="being discarded"):
        finish(left)
    assert "manifest.json" not in names(left)


def test_who_comes_second_finds_it_finished(left):
    """Two jobs look for the newest step at once, and to both it had no manifest."""
    finish(left)
    manifest = read_object(left, REF.manifest, limit=1 << 20)
    finish(left)
    assert read_object(left, REF.manifest, limit=1 << 20) == manifest
    assert "claim" not in names(left)


@pytest.mark.parametrize("verb", ["folders", "list", "head", "read_into", "put"])
def test_a_store_that_stutters_is_asked_again(left, verb):
    finish(FaultyBackend(left, [Rule(verb=verb, nth=1, fault=Raise(TransientStorageError))]))
    assert "manifest.json" in names(left)


def test_the_first_mark_stands_and_the_same_again_is_no_error(left):
    assert claim_for_removal(left, REF)
    assert claim_for_removal(left, REF)
    assert not claim_for_finish(left, REF)
    release_marker(left, REF)
    assert claim_for_finish(left, REF)
    assert claim_for_finish(left, REF)
    assert not claim_for_removal(left, REF)


def test_a_pruner_leaves_what_is_being_finished(left):
    claim_for_finish(left, REF)
    before = names(left)
    prune(left, Retention(keep_last=1), PruneContext(grace_seconds=-1, includes_undated=True))
    assert names(left) == before
    release_marker(left, REF)
    prune(left, Retention(keep_last=1), PruneContext(grace_seconds=-1, includes_undated=True))
    assert names(left) == set()


def test_on_a_full_disk_only_what_no_fragment_tells_of_goes(left):
    full = FaultyBackend(left, [Rule(verb="put", key="claim", fault=Raise(OutOfSpace))])
    before = names(left)
    with pytest.raises(OutOfSpace):
        clear(full, 0)
    assert names(left) == before
    left.delete(REF.key(fragment_name(0)))
    assert clear(full, 0)
    assert names(left) == {"rank-00001.json", "rank-00001.safetensors"}


def removed(store, backend=None) -> bool:
    (held,) = Inventory(store).look()
    return remove(backend or store, held)


@pytest.mark.parametrize("verb", ["put", "delete"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("nth", range(1, 7))
def test_a_removal_that_is_cut_anywhere_is_no_checkpoint_again_and_the_next_retention_ends_it(
    left, verb, nth, when
):
    finish(left)
    cut = FaultyBackend(left, [Rule(verb=verb, nth=nth, fault=Crash(when))])
    with contextlib.suppress(SimulatedCrash):
        removed(left, cut)
    if names(left) and not is_committed(left, REF):
        with pytest.raises(CkptError):
            finish(left)
        assert not is_committed(left, REF)
        # the job runs, and the step is young: only the marker shows that it is to be removed
        prune(left, Retention(keep_last=1), PruneContext(own=REF.attempt))
        assert names(left) == set()
    elif names(left):
        finish_is_whole(left)
        assert removed(left)
        assert names(left) == set()


def finish_is_whole(store) -> None:
    with Workers("test", 2) as workers:
        assert not verify_step(store, REF, workers=workers).faults


def test_what_is_being_removed_is_neither_finished_nor_copied_there(left):
    """The remover is stopped behind its first deletion, that of the manifest."""
    finish(left)
    source = open_memory(f"memory://{uuid.uuid4().hex}", {})
    with Workers("test", 2) as workers:
        fetch_step([left], StepFolder(source, REF, workers))

        class HeldUp(Wrapped):
            held = False

            def delete(self, key):
                left.delete(key)
                if key == REF.manifest and not self.held:
                    self.held = True
                    with pytest.raises(CommitError, match="being discarded"):
                        finish(left)
                    with pytest.raises(StorageError, match="being removed"):
                        fetch_step([source], StepFolder(left, REF, workers))

        assert removed(left, HeldUp(left))
    assert names(left) == set()


def test_a_step_that_is_being_finished_once_more_is_not_removed(left):
    finish(left)
    assert claim_for_finish(left, REF)
    before = names(left)
    assert not removed(left)
    assert names(left) == before
    release_marker(left, REF)
    assert removed(left)


def test_a_full_disk_without_room_for_a_mark_keeps_no_step_from_going(left):
    finish(left)
    full = FaultyBackend(left, [Rule(verb="put", key="claim", fault=Raise(OutOfSpace))])
    assert removed(left, full)
    assert names(left) == set()

from __future__ import annotations

import time
import uuid

import pytest

from ckpt.coordination.abort_reason import Abort, abort_reason, rebuild
from ckpt.coordination.commit_state_machine import Bounds, Committed, Failure, Unknown
from ckpt.coordination.committer import Committer, SharedStore
from ckpt.coordination.single import SingleCoordinator
from ckpt.errors import (
    CkptError,
    CommitError,
    CommitTimeout,
    ManifestCorrupt,
    OutOfSpace,
    PeerFailed,
    ReplicasDiverged,
    RootInUse,
    StepExists,
    TensorIncomplete,
    TierNotShared,
    TransientStorageError,
    with_root,
)
from ckpt.model.box import Box
from ckpt.model.checksum import checksum
from ckpt.model.keys import fragment_name
from ckpt.model.manifest import Manifest
from ckpt.model.record_encoding import unpack
from ckpt.model.validate import check_manifest
from ckpt.storage.api import read_object
from ckpt.storage.testing import flip_byte
from ckpt_backends.memory import forget_memory, open_memory
from tests.coordination.durable import ARRAY, REF, make_durable
from tests.coordination.world import World
from tests.kit.stores import Wrapped

TIMEOUT = 0.3
"""Of ranks that wait for one that does not come. Ranks that all come have ``LONG``, however slow
the machine is.
"""
LONG = 60.0


def checksum_of(verdict):
    """Return the manifest's checksum, or raise the error that a refusal carries.

    A saver does the same with a verdict.
    """
    if isinstance(verdict, Abort):
        raise rebuild(verdict, REF.step)
    assert isinstance(verdict, Committed), verdict
    return verdict.checksum


@pytest.fixture
def store():
    name = uuid.uuid4().hex
    yield open_memory(f"memory://{name}", {"shared": True})
    forget_memory(name)


def committer(coordinator, store, timeout: float = TIMEOUT, takeover: float = 0.1) -> Committer:
    return Committer(
        coordinator, SharedStore(store), name="tier0", bounds=Bounds(timeout, takeover)
    )


def commit_all(
    world: World, store, votes, *, ranks=None, abort: CkptError | None = None, timeout=TIMEOUT
):
    bound = LONG if ranks is None else timeout

    def work(coordinator):
        mine = abort if coordinator.rank == 0 else None
        return checksum_of(
            committer(coordinator, store, bound).commit(REF, votes[coordinator.rank], abort=mine)
        )

    return world.run(work, ranks)


def is_committed(store) -> bool:
    return any(info.key == REF.manifest for info in store.list(""))


@pytest.mark.parametrize("size", [1, 2, 5])
def test_when_all_are_durable_all_hear_the_checksum_of_the_manifest(store, size):
    votes = {rank: make_durable(store, rank, size) for rank in range(size)}
    heard = commit_all(World(size), store, votes)
    data = read_object(store, REF.manifest, limit=1 << 20)
    assert heard == dict.fromkeys(range(size), checksum(data))
    manifest = check_manifest(unpack(data, Manifest, key=REF.manifest), key=REF.manifest)
    assert [fragment.rank for fragment in manifest.fragments] == list(range(size))


def test_a_world_of_one_commits_alone(store):
    vote = make_durable(store, 0, 1)
    found = checksum_of(committer(SingleCoordinator(), store).commit(REF, vote))
    assert found == checksum(read_object(store, REF.manifest, limit=1 << 20))


@pytest.mark.parametrize("failed", [0, 1, 2])
def test_when_one_has_failed_all_hear_which_and_why(store, failed):
    votes = {rank: make_durable(store, rank, 3) for rank in range(3)} | {
        failed: Failure("disk full")
    }
    heard = commit_all(World(3), store, votes)
    for error in heard.values():
        assert isinstance(error, PeerFailed)
        assert (error.step, error.failures) == (5, {failed: "disk full"})
    assert not is_committed(store)


def test_a_reason_with_a_name_that_is_not_utf_8_reaches_all(store):
    """Such as the name of a file. The other ranks would wait for the vote otherwise."""
    votes = {0: make_durable(store, 0, 2), 1: Failure("no such file: step\udce9")}
    for error in commit_all(World(2), store, votes).values():
        assert isinstance(error, PeerFailed)
        assert error.failures == {1: r"no such file: step\udce9"}
    abort = RootInUse("/runs/step\udce9", "another job")
    votes = {rank: make_durable(store, rank, 2) for rank in range(2)}
    for error in commit_all(World(2), store, votes, abort=abort).values():
        assert isinstance(error, RootInUse)
        assert error.root == r"/runs/step\udce9"


@pytest.mark.parametrize("silent", [1, 2])
def test_when_one_is_silent_the_others_hear_its_name_within_the_bound(store, silent):
    others = {0, 1, 2} - {silent}
    votes = {rank: make_durable(store, rank, 3) for rank in others}
    timeout = 2.0  # the other rank that votes may be slow to start
    began = time.monotonic()
    heard = commit_all(World(3), store, votes, ranks=others, timeout=timeout)
    assert time.monotonic() - began < LONG
    assert set(heard) == others
    for error in heard.values():
        assert isinstance(error, CommitTimeout)
        assert (error.missing, error.seconds) == ((silent,), timeout)
    assert not is_committed(store)


def test_a_silent_leader_is_named(store):
    heard = commit_all(World(2, patience=0.02), store, {1: make_durable(store, 1, 2)}, ranks=[1])
    assert isinstance(heard[1], CommitTimeout)
    assert heard[1].missing == (0,)


def test_a_word_that_comes_late_does_not_change_the_verdict(store):
    world = World(2)
    votes = {rank: make_durable(store, rank, 2) for rank in range(2)}
    early = commit_all(world, store, votes, ranks=[0])
    late = commit_all(world, store, votes, ranks=[1])
    assert isinstance(early[0], CommitTimeout)
    assert isinstance(late[1], CommitTimeout)
    assert late[1].missing == (1,)
    assert not is_committed(store)


def test_a_verdict_given_by_another_survivor_stands(store):
    world = World(1)
    vote = make_durable(store, 0, 1)
    first = commit_all(world, store, {0: Failure("told before")})
    second = commit_all(world, store, {0: vote})
    assert isinstance(first[0], PeerFailed)
    assert isinstance(second[0], PeerFailed)


@pytest.mark.parametrize(
    "abort",
    [StepExists(5, "memory://x"), RootInUse("memory://x", "somebody"), OutOfSpace("k", "full")],
)
def test_a_abort_of_the_leader_reaches_all_and_nothing_is_put(store, abort):
    votes = {rank: make_durable(store, rank, 2) for rank in range(2)}
    heard = commit_all(World(2), store, votes, abort=abort)
    for error in heard.values():
        assert type(error) is type(abort)
        assert str(error) == str(abort)
    assert not is_committed(store)


def test_replicas_that_differ_are_refused_everywhere_by_name(store):
    boxes = (Box.whole(ARRAY.shape),)
    votes = {
        rank: make_durable(store, rank, 3, boxes=boxes, array=ARRAY + (rank == 2))
        for rank in range(3)
    }
    for error in commit_all(World(3), store, votes).values():
        assert isinstance(error, ReplicasDiverged)
        assert (error.name, error.ranks) == ("x", (0, 2))
    assert not is_committed(store)


def test_a_hole_is_refused_everywhere_by_name(store):
    votes = {
        rank: make_durable(store, rank, 2, boxes=(Box((6 * rank, 0), (5, 2)),)) for rank in range(2)
    }
    for error in commit_all(World(2), store, votes).values():
        assert isinstance(error, TensorIncomplete)
        assert error.name == "x"
        assert "4 of 24" in str(error)


def test_a_fragment_that_was_damaged_on_its_way_is_refused_everywhere(store):
    votes = {rank: make_durable(store, rank, 2) for rank in range(2)}
    flip_byte(store, REF.key(fragment_name(1)), 100)
    for error in commit_all(World(2), store, votes).values():
        assert isinstance(error, CommitError)
        assert "rank-00001.json" in str(error)
    assert not is_committed(store)


def test_a_fragment_that_is_gone_is_refused_everywhere(store):
    votes = {rank: make_durable(store, rank, 2) for rank in range(2)}
    store.delete(REF.key(fragment_name(1)))
    heard = commit_all(World(2), store, votes)
    assert all(isinstance(error, TierNotShared) and error.ranks == (1,) for error in heard.values())


def test_a_word_that_is_nonsense_is_a_verdict_too(store):
    world = World(2)
    make_durable(store, 1, 2)
    world.coordinator(1).post(f"tier0/{REF.folder}", b"garbage")
    heard = commit_all(world, store, {0: make_durable(store, 0, 2)}, ranks=[0])
    assert isinstance(heard[0], CommitError)
    assert "rank 1: its vote cannot be read" in str(heard[0])


# -- errors on the wire ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        PeerFailed(5, {1: "full", 3: "gone"}),
        CommitTimeout(5, [1, 2], 12.5, "the part"),
        ReplicasDiverged("x", [0, 3]),
        ReplicasDiverged("x", [0, 3], " (they are cut otherwise)"),
        TensorIncomplete("x", "a hole"),
        StepExists(5, "s3://b"),
        StepExists(5, "s3://b", earlier=True),
        RootInUse("s3://b", "attempt x"),
        OutOfSpace("k", "full"),
        with_root(TransientStorageError("k", "reset"), "s3://b"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_refusal_carries_its_error_to_the_other_ranks(error):
    again = rebuild(abort_reason(error), 5)
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert {"root": ""} | vars(again) == {"root": ""} | vars(error)


def test_any_other_error_becomes_a_commit_error_with_its_name():
    again = rebuild(abort_reason(ManifestCorrupt("k", "full of holes")), 5)
    assert type(again) is CommitError
    assert "ManifestCorrupt" in str(again)
    assert "full of holes" in str(again)


class Partitioned(Wrapped):
    """A store that does not answer for the first manifest, and whose next answer is ``then``.

    Requests are tried twice.
    """

    def __init__(self, store, then: Exception, *, arrives: bool) -> None:
        super().__init__(store)
        self.then, self.arrives, self.puts = then, arrives, 0

    def put(self, key, parts, *, if_absent=False):
        if key != REF.manifest:
            return self.inner.put(key, parts, if_absent=if_absent)
        self.puts += 1
        if self.puts > 1:
            raise self.then
        if self.arrives:
            self.inner.put(key, parts, if_absent=if_absent)
            self.inner.delete(key)  # evicted by another job
        raise TransientStorageError(key, "no answer")


def twice(work):
    try:
        return work()
    except TransientStorageError:
        return work()


def test_a_try_without_an_answer_is_not_forgotten_when_the_next_is_refused(store):
    """The first one may still arrive, so no rank may remove the files."""
    vote = make_durable(store, 0, 1)
    place = SharedStore(Partitioned(store, OutOfSpace(REF.manifest), arrives=False), twice)
    verdict = Committer(SingleCoordinator(), place, name="tier0", bounds=Bounds(5)).commit(
        REF, vote
    )
    assert isinstance(verdict, Unknown)
    assert "no answer; then no space left" in verdict.reason


def test_a_manifest_that_was_never_sent_aborts_the_save_though_the_store_is_silent(store):
    """The store cannot say whether the manifest exists, and no answer is needed."""
    vote = make_durable(store, 0, 1)
    partitioned = Partitioned(store, AssertionError("it is not put"), arrives=True)
    asked: list[None] = []

    def confirm() -> None:
        asked.append(None)
        if len(asked) > 1:  # the first time is before the merge
            raise TransientStorageError("writer.json", "no answer")

    place = SharedStore(partitioned, twice, confirm=confirm)
    verdict = Committer(SingleCoordinator(), place, name="tier0", bounds=Bounds(5)).commit(
        REF, vote
    )
    assert isinstance(verdict, Abort)
    assert isinstance(rebuild(verdict, REF.step), TransientStorageError)
    assert (partitioned.puts, len(asked)) == (0, 3)


def test_whose_the_root_is_is_asked_with_each_try_to_put_the_manifest(store):
    vote = make_durable(store, 0, 1)
    partitioned = Partitioned(store, AssertionError("it is put once"), arrives=True)

    def confirm() -> None:
        if partitioned.puts:
            raise RootInUse(store.url, "another job")

    place = SharedStore(partitioned, twice, confirm=confirm)
    verdict = Committer(SingleCoordinator(), place, name="tier0", bounds=Bounds(5)).commit(
        REF, vote
    )
    assert isinstance(verdict, Unknown)
    assert "another job" in verdict.reason
    assert (partitioned.puts, is_committed(store)) == (1, False)

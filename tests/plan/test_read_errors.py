from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.errors import (
    AccessDenied,
    ChecksumMismatch,
    CodecMissing,
    FormatTooNew,
    IntegrityError,
    ManifestCorrupt,
    ObjectNotFound,
    OutOfSpace,
    RestoreError,
    StorageError,
    TransientStorageError,
)
from ckpt.model.box import Box
from ckpt.plan.read_errors import Reach, combined_error, is_damage, plan_without, reach_of
from ckpt.plan.restore import ChunkRead, RestorePlan

CHUNK = ChecksumMismatch("a/rank-00000.safetensors", 4096, 100)


@pytest.mark.parametrize(
    ("error", "reach", "damage"),
    [
        (CHUNK, Reach.CHUNK, True),
        (ManifestCorrupt("k", "torn"), Reach.CHUNK, True),
        (StorageError("k", "ends at byte 7"), Reach.CHUNK, True),
        (ObjectNotFound("k"), Reach.FILE, True),
        (AccessDenied("k"), Reach.FILE, False),
        (TransientStorageError("k"), Reach.STORE, False),
        (OutOfSpace("k"), Reach.CHUNK, False),
        (CodecMissing("k", "rle"), Reach.FILE, False),
        (FormatTooNew("k", 9, 1), None, False),
        (RestoreError("does not fit"), None, False),
        (KeyError("ours"), None, False),
    ],
)
def test_how_far_a_failure_reaches_and_whether_it_speaks_of_the_data(
    error: Exception, reach: Reach | None, damage: bool
) -> None:
    assert reach_of(error) is reach
    assert is_damage(error) is damage


def test_a_store_that_does_not_answer_is_never_taken_for_damage() -> None:
    silent = TransientStorageError("k", "timed out")
    assert combined_error([("near", CHUNK), ("far", silent)], "k") is silent
    denied = AccessDenied("k")
    assert combined_error([("near", ObjectNotFound("k")), ("far", denied)], "k") is denied


def test_the_reason_of_one_store_is_told_as_it_is() -> None:
    assert combined_error([("only", CHUNK)], "k") is CHUNK
    assert combined_error([("near", ObjectNotFound("k")), ("far", CHUNK)], "k") is CHUNK


def test_the_reasons_of_several_stores_are_all_told() -> None:
    error = combined_error([("near", CHUNK), ("far", StorageError("k", "short"))], "the/file")
    assert type(error) is IntegrityError
    for part in ("'the/file'", "near: checksum mismatch", "far: storage failed", "short"):
        assert part in str(error)
    nowhere = combined_error(
        [("near", ObjectNotFound("k")), ("far", ObjectNotFound("k"))], "the/file"
    )
    assert "near: no such object" in str(nowhere)


def chunk(rank: int, offset: int) -> ChunkRead:
    return ChunkRead(
        rank=rank,
        index=offset,
        offset=offset,
        nbytes=8,
        checksum="",
        dtype="int8",
        box=Box((0,), (8,)),
        targets=(),
    )


@given(
    places=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 50)), unique=True, max_size=30),
    chosen=st.sets(st.integers(0, 29)),
)
def test_what_is_left_of_a_plan_keeps_file_order(
    places: list[tuple[int, int]], chosen: set[int]
) -> None:
    plan = RestorePlan(reads=tuple(chunk(*place) for place in sorted(places)), wanted_bytes=5)
    done = [read for index, read in enumerate(plan.reads) if index in chosen]
    left = plan_without(plan, list(reversed(done)))
    assert [read for read in plan.reads if read in done or read in left.reads] == list(plan.reads)
    assert list(left.reads) == [
        read for index, read in enumerate(plan.reads) if index not in chosen
    ]
    assert left.wanted_bytes == 5
    assert plan_without(plan, left.reads).reads == tuple(done)

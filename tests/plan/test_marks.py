"""Digests of replicas are compared as numbers, with the same refusal as in a comparison
one by one.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from ckpt.errors import ManifestCorrupt, ReplicasDiverged
from ckpt.plan.merge import check_replica_frames, check_replicas

NAMES, BOXES, DIGESTS = (
    st.sampled_from("ab="),
    st.sampled_from(["", "(0,)(2,)", "(2,)(2,)"]),
    st.sampled_from("00001="),
)
MARKS = st.dictionaries(NAMES, st.one_of(st.builds("{}={}".format, BOXES, DIGESTS), BOXES))


def outcome(work: Callable[[], None]) -> str | None:
    try:
        work()
    except ReplicasDiverged as error:
        return f"{error} {error.ranks}"
    return None


@given(st.dictionaries(st.integers(0, 9), MARKS, max_size=5))
def test_numbers_tell_what_words_tell(reported: dict[int, dict[str, str]]) -> None:
    ranks = sorted(reported.items())
    frames = [
        (rank, zstandard.compress(msgspec.json.encode(marks)) if marks else b"")
        for rank, marks in ranks
    ]
    assert outcome(lambda: check_replica_frames(frames)) == outcome(lambda: check_replicas(ranks))


def test_the_first_two_that_differ_are_named() -> None:
    marks = [
        {"w": "(0,)(2,)=1"},
        {"w": "(2,)(2,)=2"},
        {"w": "(0,)(2,)=1", "v": "=3"},
        {"w": "(0,)(2,)=4"},
    ]
    frames = [
        (rank, zstandard.compress(msgspec.json.encode(each))) for rank, each in enumerate(marks)
    ]
    check_replica_frames(frames[:3])
    with pytest.raises(ReplicasDiverged, match=r"'w'.*ranks 0, 3"):
        check_replica_frames(frames)


def test_what_is_no_json_object_is_refused() -> None:
    with pytest.raises(ManifestCorrupt):
        check_replica_frames([(0, zstandard.compress(b"[1]"))])

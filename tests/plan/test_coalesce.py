from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from ckpt.model.box import Box
from ckpt.plan.coalesce import coalesce
from ckpt.plan.restore import ChunkRead


def read(rank: int, offset: int, nbytes: int) -> ChunkRead:
    return ChunkRead(
        rank=rank,
        index=0,
        offset=offset,
        nbytes=nbytes,
        checksum="",
        dtype="uint8",
        box=Box((0,), (nbytes,)),
        targets=(),
    )


def runs_of(reads, most, gap):
    return [
        (run.rank, run.offset, run.nbytes, len(run.reads))
        for run in coalesce(reads, most_bytes=most, gap_bytes=gap)
    ]


@st.composite
def files(draw: st.DrawFn) -> list[ChunkRead]:
    found = []
    for rank in range(draw(st.integers(0, 3))):
        offset = 0
        for _ in range(draw(st.integers(0, 6))):
            offset += draw(st.integers(0, 20))
            nbytes = draw(st.integers(1, 30))
            found.append(read(rank, offset, nbytes))
            offset += nbytes
    return found


@given(files(), st.integers(1, 80), st.integers(0, 15))
def test_runs_hold_all_reads_in_order_within_their_bounds(reads, most, gap):
    runs = coalesce(reads, most_bytes=most, gap_bytes=gap)
    assert [one for run in runs for one in run.reads] == reads
    for run in runs:
        assert {one.rank for one in run.reads} == {run.rank}
        assert run.offset == run.reads[0].offset
        assert run.offset + run.nbytes == run.reads[-1].offset + run.reads[-1].nbytes
        assert run.nbytes <= most or len(run.reads) == 1
        assert run.nbytes - sum(one.nbytes for one in run.reads) <= gap * (len(run.reads) - 1)


@given(files(), st.integers(1, 80), st.integers(0, 15))
def test_two_runs_that_could_be_one_are_one(reads, most, gap):
    runs = coalesce(reads, most_bytes=most, gap_bytes=gap)
    for one, two in itertools.pairwise(runs):
        first = two.reads[0]
        near = one.rank == two.rank and first.offset - (one.offset + one.nbytes) <= gap
        assert not near or first.offset + first.nbytes - one.offset > most


def test_neighbours_are_joined_until_the_run_is_full():
    reads = [read(0, 0, 10), read(0, 10, 10), read(0, 25, 5), read(0, 31, 10), read(1, 41, 10)]
    assert runs_of(reads, 100, 5) == [(0, 0, 41, 4), (1, 41, 10, 1)]
    assert runs_of(reads, 100, 4) == [(0, 0, 20, 2), (0, 25, 16, 2), (1, 41, 10, 1)]
    assert runs_of(reads, 20, 5) == [(0, 0, 20, 2), (0, 25, 16, 2), (1, 41, 10, 1)]
    assert runs_of(reads, 1, 5) == [
        (0, 0, 10, 1),
        (0, 10, 10, 1),
        (0, 25, 5, 1),
        (0, 31, 10, 1),
        (1, 41, 10, 1),
    ]
    assert runs_of([], 1, 5) == []

"""Several ranks want the same chunks: which rank reads which chunk for all of them.

The decisions are pure, and the same on every rank that they concern. A chunk is identified by its
key, the number of its file and its place in it, which is the same on every tier. Chunks that the
same ranks want form a group. They are cut, in the order of the files, into as many runs of about
equal size as there are ranks, and each run into parcels that travel as one message.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray

from ckpt.plan.restore import ChunkRead

Keys = NDArray[np.int64]
_PLACES = 32


@dataclass(frozen=True, slots=True)
class Parcel:
    """Chunks that ``reader`` reads for its group, by key."""

    reader: int
    keys: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks in ascending order, and what they send each other.

    In a round each of them reads at most one parcel.
    """

    ranks: tuple[int, ...]
    rounds: tuple[tuple[Parcel, ...], ...]


@dataclass(frozen=True, slots=True)
class Shares:
    """What a rank reads for itself alone, and its groups.

    All ranks see their common groups in the same order.
    """

    alone: frozenset[int]
    groups: tuple[Group, ...]

    @property
    def rounds(self) -> int:
        return max((len(group.rounds) for group in self.groups), default=0)


def keyed(reads: Sequence[ChunkRead]) -> dict[int, ChunkRead]:
    """Return the reads by key, ascending."""
    return dict(sorted(((read.rank << _PLACES) + read.index, read) for read in reads))


def share(
    sizes: Mapping[int, int], wanted: Sequence[Keys], *, worth_bytes: int, parcel_bytes: int
) -> Shares:
    """Return the shares of the rank that wants ``sizes`` (key -> bytes in memory).

    Args:
        wanted: The keys that each rank wants, this one included.
        worth_bytes: A group with less to share is not worth its collectives: each reads.
        parcel_bytes: The size of a parcel. A single larger chunk is a parcel, too.
    """
    keys = np.array(sorted(sizes), dtype=np.int64)
    if not len(keys):
        return Shares(frozenset(), ())
    holds = np.stack([np.isin(keys, each) for each in wanted], axis=1)
    patterns, which = np.unique(holds, axis=0, return_inverse=True)
    alone: list[int] = []
    groups: list[Group] = []
    for number, pattern in enumerate(patterns):
        ranks = tuple(int(rank) for rank in np.flatnonzero(pattern))
        chosen = [int(key) for key in keys[which.reshape(-1) == number]]
        if len(ranks) < 2 or sum(sizes[key] for key in chosen) < worth_bytes:
            alone += chosen
        else:
            groups.append(Group(ranks, tuple(_rounds(ranks, chosen, sizes, parcel_bytes))))
    return Shares(frozenset(alone), tuple(sorted(groups, key=lambda group: group.ranks)))


def _rounds(
    ranks: Sequence[int], keys: Sequence[int], sizes: Mapping[int, int], parcel_bytes: int
) -> Iterator[tuple[Parcel, ...]]:
    total, before = max(1, sum(sizes[key] for key in keys)), 0
    runs: list[list[int]] = [[] for _ in ranks]
    for key in keys:
        middle = before + sizes[key] // 2
        runs[min(middle * len(ranks) // total, len(ranks) - 1)].append(key)
        before += sizes[key]
    parcels = [
        list(_parcels(rank, run, sizes, parcel_bytes))
        for rank, run in zip(ranks, runs, strict=True)
    ]
    for round_ in zip_longest(*parcels):
        yield tuple(parcel for parcel in round_ if parcel is not None)


def _parcels(
    reader: int, keys: Sequence[int], sizes: Mapping[int, int], parcel_bytes: int
) -> Iterator[Parcel]:
    held: list[int] = []
    for key in keys:
        if held and sum(sizes[each] for each in held) + sizes[key] > parcel_bytes:
            yield Parcel(reader, tuple(held))
            held = []
        held.append(key)
    if held:
        yield Parcel(reader, tuple(held))

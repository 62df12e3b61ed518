"""If several ranks want the same chunks, decide which rank reads which chunk for all of them.

The functions are pure, and all ranks that share chunks compute the same division. The key of a
chunk combines the rank of its file and its index in the file, and is the same on all tiers. Ranks
that want the same chunks form a group. In the order of the files, the chunks of a group are divided
into one run for each rank of the group. All runs have about the same size. A run is divided into
parcels, and its rank sends each parcel to the group as one message.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray

from ckpt.plan.restore import ChunkRead

Keys = NDArray[np.int64]
_INDEX_BITS = 32
"""The bits of a key that hold the index of the chunk. The rank of its file is in the bits above."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """The keys of the chunks that the rank ``reader`` reads and then sends to its group in one
    message.
    """

    reader: int
    keys: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that share the reads of chunks which all of them want.

    Attributes:
        ranks: The ranks, in ascending order.
        rounds: The parcels of each round. In one round, each rank reads at most one parcel.
    """

    ranks: tuple[int, ...]
    rounds: tuple[tuple[Parcel, ...], ...]


@dataclass(frozen=True, slots=True)
class Shares:
    """The division of the chunks that one rank wants.

    Attributes:
        own_keys: The keys of the chunks that the rank reads for itself only.
        groups: The groups that the rank belongs to. Any two ranks have their common groups in the
            same order.
    """

    own_keys: frozenset[int]
    groups: tuple[Group, ...]

    @property
    def rounds(self) -> int:
        return max((len(group.rounds) for group in self.groups), default=0)


def by_key(reads: Sequence[ChunkRead]) -> dict[int, ChunkRead]:
    """Return the reads by the keys of their chunks, in ascending order of keys."""
    return dict(sorted(((read.rank << _INDEX_BITS) + read.index, read) for read in reads))


def share(
    sizes: Mapping[int, int], keys_by_rank: Sequence[Keys], *, worth_bytes: int, parcel_bytes: int
) -> Shares:
    """Divide the chunks that one rank wants into those that it reads alone and those that it shares
    with other ranks.

    Args:
        sizes: The size in memory of each chunk that this rank wants, by the key of the chunk.
        keys_by_rank: The keys that each rank wants, by rank. The keys of this rank are included.
        worth_bytes: The smallest number of bytes that a group shares. For fewer bytes, the
            collectives would cost more than they save, so each rank reads these chunks alone.
        parcel_bytes: The largest size of a parcel. A single larger chunk is a parcel of its own.
    """
    keys = np.array(sorted(sizes), dtype=np.int64)
    if not len(keys):
        return Shares(frozenset(), ())
    is_wanted = np.stack([np.isin(keys, rank_keys) for rank_keys in keys_by_rank], axis=1)
    # A pattern says for each rank whether it wants a chunk.
    patterns, pattern_of = np.unique(is_wanted, axis=0, return_inverse=True)
    own_keys: list[int] = []
    groups: list[Group] = []
    for number, pattern in enumerate(patterns):
        ranks = tuple(int(rank) for rank in np.flatnonzero(pattern))
        group_keys = [int(key) for key in keys[pattern_of.reshape(-1) == number]]
        if len(ranks) < 2 or sum(sizes[key] for key in group_keys) < worth_bytes:
            own_keys += group_keys
        else:
            groups.append(Group(ranks, tuple(_rounds(ranks, group_keys, sizes, parcel_bytes))))
    return Shares(frozenset(own_keys), tuple(sorted(groups, key=lambda group: group.ranks)))


def _rounds(
    ranks: Sequence[int], keys: Sequence[int], sizes: Mapping[int, int], parcel_bytes: int
) -> Iterator[tuple[Parcel, ...]]:
    """Yield the parcels of each round of a group of ``ranks`` that shares ``keys``."""
    total, position = max(1, sum(sizes[key] for key in keys)), 0
    runs: list[list[int]] = [[] for _ in ranks]
    for key in keys:
        middle = position + sizes[key] // 2  # A chunk belongs to the run that has its middle
        runs[min(middle * len(ranks) // total, len(ranks) - 1)].append(key)
        position += sizes[key]
    parcels = [
        list(_parcels(rank, run, sizes, parcel_bytes))
        for rank, run in zip(ranks, runs, strict=True)
    ]
    for round_ in zip_longest(*parcels):
        yield tuple(parcel for parcel in round_ if parcel is not None)


def _parcels(
    reader: int, keys: Sequence[int], sizes: Mapping[int, int], parcel_bytes: int
) -> Iterator[Parcel]:
    """Yield the parcels of one run of chunks."""
    parcel: list[int] = []
    for key in keys:
        if parcel and sum(sizes[parcel_key] for parcel_key in parcel) + sizes[key] > parcel_bytes:
            yield Parcel(reader, tuple(parcel))
            parcel = []
        parcel.append(key)
    if parcel:
        yield Parcel(reader, tuple(parcel))

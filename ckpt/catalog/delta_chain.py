"""Read the deltas that lead from one step to a later one.

A delta is a small file of a rank beside its data file. It holds the differences between the
chunks of this step and those of an earlier step, its base. Deltas are a shorter way to the bytes of
a step, and never the only one: one that is missing, damaged or too long means that chunks are read.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from ckpt.codec.word_difference import apply_difference
from ckpt.errors import IntegrityError, ObjectNotFound, StorageError
from ckpt.model.delta import Delta, unpack_delta
from ckpt.model.keys import StepRef
from ckpt.pipeline.retry import RetryPolicy
from ckpt.pipeline.workers import Workers
from ckpt.plan.restore import ChunkId
from ckpt.storage.api import StorageBackend, read_object

MOST_LINKS: Final = 16
"""The most deltas of one rank that are applied one after another. The checkpoint itself is the
anchor behind them.
"""
_RETRY: Final = RetryPolicy()
_log = logging.getLogger("ckpt")


@dataclass(frozen=True, slots=True)
class DeltaChains:
    """The deltas that lead to a step, for each rank in the order in which they are applied."""

    by_rank: Mapping[int, Sequence[Delta]]

    @property
    def nbytes(self) -> int:
        """The bytes of all deltas."""
        return sum(delta.nbytes for chain in self.by_rank.values() for delta in chain)

    def has(self, chunk: ChunkId) -> bool:
        """Return True if there is a chain of differences that leads to a chunk."""
        rank, index = chunk
        chain = self.by_rank.get(rank, ())
        return bool(chain) and all(index in delta.codes for delta in chain)

    def apply(self, chunk: ChunkId, data: memoryview) -> bool:
        """Change ``data``, the bytes of a chunk of the first base, to those of the step.

        Return False if a difference is damaged. The caller compares the result with the checksum of
        the chunk.
        """
        rank, index = chunk
        try:
            for delta in self.by_rank[rank]:
                apply_difference(delta.codes[index], data)
        except ValueError:
            return False
        return True


def read_chains(
    stores: Sequence[StorageBackend],
    ref: StepRef,
    base: StepRef,
    sizes: Mapping[int, int],
    workers: Workers,
) -> DeltaChains:
    """Return the deltas that lead from the step ``base`` to the step ``ref``.

    Args:
        stores: The stores, nearest first.
        sizes: For each rank whose chunks are wanted, the bytes of these chunks. A chain of more
            bytes is of no use.
        workers: The threads that read.
    """
    chains = workers.run_all(
        partial(_read_chain, stores, ref, base, rank, nbytes) for rank, nbytes in sizes.items()
    )
    return DeltaChains({rank: chain for rank, chain in zip(sizes, chains, strict=True) if chain})


def _read_chain(
    stores: Sequence[StorageBackend], ref: StepRef, base: StepRef, rank: int, most_bytes: int
) -> list[Delta]:
    chain: list[Delta] = []
    while ref != base and len(chain) < MOST_LINKS and most_bytes > 0:
        delta = _read_delta(stores, ref, rank, most_bytes)
        if delta is None:
            return []
        chain.insert(0, delta)
        ref, most_bytes = delta.base, most_bytes - delta.nbytes
    return chain if ref == base else []


def _read_delta(
    stores: Iterable[StorageBackend], ref: StepRef, rank: int, most_bytes: int
) -> Delta | None:
    key = ref.delta(rank)
    for store in stores:
        try:
            data = _RETRY.call(partial(read_object, store, key, limit=most_bytes))
            return unpack_delta(data, ref, rank)
        except ObjectNotFound:
            continue
        except (IntegrityError, StorageError) as error:
            _log.info("ckpt: the delta %s on %s is of no use: %s", key, store.url, error)
    return None

"""Read the deltas that lead from one step to a later one.

A delta is a small file of a rank beside its data file. It holds the differences between the chunks
of this step and those of an earlier step, its base. If the run went on again from an earlier step,
the steps after it are an abandoned branch. A difference leads back as well, so the deltas of such a
branch lead to the step at which the current branch begins. A *chain* is the deltas of one rank that
are applied one after another.

Deltas are a shorter way to the bytes of a step, and never the only one: one that is missing,
damaged or too long means that chunks are read.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
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
class Link:
    """A delta of a chain. With ``is_reverse``, it leads from its step to its base."""

    delta: Delta
    is_reverse: bool = False


@dataclass(frozen=True, slots=True)
class DeltaChains:
    """The deltas that lead to a step, for each rank in the order in which they are applied."""

    by_rank: Mapping[int, Sequence[Link]]

    def has(self, chunk: ChunkId) -> bool:
        """Return True if there is a chain of differences that leads to a chunk."""
        rank, index = chunk
        chain = self.by_rank.get(rank, ())
        return bool(chain) and all(index in link.delta.codes for link in chain)

    def apply(self, chunk: ChunkId, data: memoryview) -> bool:
        """Change ``data``, the bytes of a chunk of the first base, to those of the step.

        Return False if a difference is damaged. The caller compares the result with the checksum of
        the chunk.
        """
        rank, index = chunk
        try:
            for link in self.by_rank[rank]:  # ``codes`` has a difference for each chunk
                apply_difference(link.delta.codes[index], data, is_reverse=link.is_reverse)
        except ValueError:
            return False
        return True


class DeltaReader:
    """Reads deltas, and remembers those of the last steps, since an abandoned step may be removed
    before a reader goes back from it.

    ``_deltas`` has the remembered deltas by their step and rank. ``read_bytes`` is the number of
    bytes that the last call of ``chains`` has read.

    Thread safety: the owner's thread calls ``chains`` and ``forget``.
    """

    def __init__(self) -> None:
        self._deltas: dict[tuple[StepRef, int], Delta] = {}
        self._lock, self.read_bytes = threading.Lock(), 0

    def chains(
        self,
        stores: Sequence[StorageBackend],
        ref: StepRef,
        base: StepRef,
        sizes: Mapping[int, int],
        workers: Workers,
    ) -> DeltaChains:
        """Return the deltas that lead from the step ``base`` to the step ``ref``. ``read_bytes`` is
        then how many bytes were read for this.

        Args:
            stores: The stores, nearest first.
            sizes: For each rank whose chunks are wanted, the bytes of these chunks. A chain of more
                bytes is of no use.
            workers: The threads that read.
        """
        self.read_bytes = 0
        chains = workers.run_all(
            partial(_read_chain, partial(self._read, stores), ref, base, rank, nbytes)
            for rank, nbytes in sizes.items()
        )
        return DeltaChains(
            {rank: chain for rank, chain in zip(sizes, chains, strict=True) if chain}
        )

    def forget(self, most_bytes: int) -> None:
        """Forget the deltas that were read first, until the others have at most ``most_bytes``."""
        total = sum(delta.nbytes for delta in self._deltas.values())
        while total > most_bytes:
            total -= self._deltas.pop(next(iter(self._deltas))).nbytes

    def _read(
        self, stores: Iterable[StorageBackend], ref: StepRef, rank: int, most_bytes: int
    ) -> Delta | None:
        """Return a delta that is remembered or on one of ``stores``; None if there is none."""
        delta = self._deltas.get((ref, rank))
        if delta is None and (delta := _read_delta(stores, ref, rank, most_bytes)) is not None:
            with self._lock:
                self._deltas[ref, rank] = delta
                self.read_bytes += delta.nbytes
        return delta


def _read_chain(
    read: Callable[[StepRef, int, int], Delta | None],
    ref: StepRef,
    base: StepRef,
    rank: int,
    most_bytes: int,
) -> list[Link]:
    """Return the links from ``base`` to ``ref``: straight, or back to a step that both come from.

    Return none if there is no such chain, or if it has too many links or bytes.
    """
    links_to_ref: dict[StepRef, list[Link]] = {ref: []}  # The links from each step to ``ref``
    reverse_links: list[Link] = []
    step_ref = ref
    while step_ref != base and len(links_to_ref[step_ref]) < MOST_LINKS:
        delta = read(step_ref, rank, most_bytes)
        if delta is None or delta.base in links_to_ref:
            break
        links_to_ref[delta.base] = [Link(delta), *links_to_ref[step_ref]]
        step_ref, most_bytes = delta.base, most_bytes - delta.nbytes
    step_ref = base
    while step_ref not in links_to_ref:
        delta = read(step_ref, rank, most_bytes) if len(reverse_links) < MOST_LINKS else None
        if delta is None:
            return []
        reverse_links.append(Link(delta, is_reverse=True))
        step_ref, most_bytes = delta.base, most_bytes - delta.nbytes
    return [*reverse_links, *links_to_ref[step_ref]]


def _read_delta(
    stores: Iterable[StorageBackend], ref: StepRef, rank: int, most_bytes: int
) -> Delta | None:
    """Return a delta from the first store that has it intact; None if none has."""
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

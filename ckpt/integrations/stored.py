"""What integrations share that save files of a framework and read them one by one."""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from ckpt.adapters.match.overlaps import read_apart
from ckpt.adapters.match.sink import TensorSink
from ckpt.adapters.tensors.local_shards import Source
from ckpt.catalog.candidates import Candidate, candidates
from ckpt.catalog.tiered_reader import Found, Repair, TieredReader
from ckpt.config import Tier
from ckpt.pipeline.retry import RetryPolicy
from ckpt.pipeline.workers import Workers
from ckpt.plan.leaf import Leaf
from ckpt.plan.restore import plan_restore
from ckpt.storage.api import StorageBackend
from ckpt.storage.tiers import open_tiers

_THREADS: Final = 4
_log = logging.getLogger("ckpt")


class Failed:
    """Raises in place of a state, so that the manager lets the other ranks know."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def state_dict(self) -> dict[str, Any]:
        raise self._error

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing. It is never called, and makes this an object with a state."""


@contextmanager
def opened(
    tiers: Sequence[Tier], step: int | None = None
) -> Generator[tuple[list[StorageBackend], Iterator[Candidate]]]:
    """Open all tiers, and give their stores and the committed attempts at ``step`` (None: any),
    newest first.
    """
    stores = open_tiers(tiers)
    try:
        backends = [tier.backend for tier in stores]
        with Workers("list", len(stores)) as listers:
            yield backends, candidates(backends, step, workers=listers)
    finally:
        for tier in stores:
            tier.backend.close()


def reader_of(backends: Sequence[StorageBackend], found: Candidate) -> TieredReader:
    """Return what reads an attempt, each byte from the nearest store that has it intact."""
    sources = [backends[position] for position in found.answering]
    return TieredReader(sources, found.ref, retry=RetryPolicy(), on_repair=_warn)


def fill(
    reader: TieredReader, outline: Found, leaves: Sequence[Leaf], targets: Sequence[Source]
) -> None:
    """Read the boxes of ``leaves`` into ``targets``, inside of ``TieredReader.whole``.

    Raises ``RestoreError`` if targets share memory that cannot hold what was saved.
    """
    manifest = reader.filled(outline, leaves).manifest
    memory = list(targets)
    put = read_apart([leaf.name for leaf in leaves], memory)
    with Workers("read", _THREADS) as workers:
        reader.read(plan_restore(manifest, leaves), TensorSink(leaves, memory), workers=workers)
    if put is not None:
        put()


def _warn(repair: Repair) -> None:
    _log.warning(
        "ckpt: %s does not have it intact, the next tier is asked: %s", repair.tier, repair.reason
    )

"""The chunks of a plan that one source could not give, on the way to the next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ckpt.plan.coalesce import Run, coalesce
from ckpt.plan.restore import ChunkRead
from ckpt.plan.sources import Reach, reach_of, verdict

if TYPE_CHECKING:
    from ckpt.catalog.tiered_reader import TieredReader

Told = dict[tuple[int, int], list[tuple[str, Exception]]]
"""By file and offset of a chunk: what each source said that was asked for it."""


class Missed:
    """The chunks that one source could not give. Threads: ``guard`` from any."""

    def __init__(
        self, origin: TieredReader, position: int, pairs: Sequence[tuple[ChunkRead, ChunkRead]], told: Told
    ) -> None:
        self._origin, self._position, self._told = origin, position, told
        self._meant = {(moved.rank, moved.offset): read for read, moved in pairs}
        self._last = position + 1 == len(origin.sources)
        self.reads: list[ChunkRead] = []

    def guard(self, run: Run, read: Callable[[Run], None]) -> None:
        """Of a run that fails each chunk is read by itself: the others may be intact."""
        key, _ = self._origin.file_at(self._position, run.rank)
        error = self._origin.gone(self._position, key)
        if error is None:
            try:
                return read(run)
            except Exception as raised:  # noqa: BLE001 - judged there
                if len(run.reads) > 1 and reach_of(raised) is Reach.CHUNK:
                    for one in coalesce(run.reads, most_bytes=0, gap_bytes=0):
                        self.guard(one, read)
                    return None
                error = raised
        self._origin.failed(self._position, key, error, sum(chunk.stored_nbytes for chunk in run.reads))
        for chunk in run.reads:
            meant = self._meant[chunk.rank, chunk.offset]
            told = self._told.setdefault((meant.rank, meant.offset), [])
            told.append((self._origin.sources[self._position].url, error))
            if self._last:
                raise verdict(told, key) from error
            self.reads.append(meant)
        return None

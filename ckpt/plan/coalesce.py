"""Plan few large requests that serve the reads of many neighbouring chunks.

The functions are pure: they send no requests.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ckpt.plan.restore import ChunkRead


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One request to a store: read ``nbytes`` bytes of the file of ``rank``, from ``offset`` on.

    ``reads`` are the chunk reads that the request serves, in file order. ``in_base`` is that of all
    of them.
    """

    rank: int
    offset: int
    nbytes: int
    reads: tuple[ChunkRead, ...]
    in_base: bool = False


def coalesce(reads: Iterable[ChunkRead], *, most_bytes: int, gap_bytes: int) -> list[Run]:
    """Return runs that together serve all of ``reads``, in file order.

    Args:
        reads: The reads in file order.
        most_bytes: The largest size of a run in bytes. A single larger read is a run of its own.
        gap_bytes: The largest gap in bytes between two reads of a run in their file. The run
            includes the bytes of the gap.
    """
    runs: list[Run] = []
    pending: list[ChunkRead] = []
    for read in reads:
        if pending:
            last = pending[-1]
            near = (
                read.rank == last.rank
                and read.in_base == last.in_base
                and 0 <= read.offset - (last.offset + last.stored_nbytes) <= gap_bytes
            )
            if not near or read.offset + read.stored_nbytes - pending[0].offset > most_bytes:
                runs.append(_run(pending))
                pending = []
        pending.append(read)
    if pending:
        runs.append(_run(pending))
    return runs


def _run(reads: list[ChunkRead]) -> Run:
    head, last = reads[0], reads[-1]
    return Run(
        rank=head.rank,
        offset=head.offset,
        nbytes=last.offset + last.stored_nbytes - head.offset,
        reads=tuple(reads),
        in_base=head.in_base,
    )

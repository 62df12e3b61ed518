"""A whole world in this process.

It merges what each rank would write, and reads what each rank would read of that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from ckpt.model.manifest import Manifest
from ckpt.plan.restore import coalesce, plan_restore
from ckpt.staging.slot import Slot
from ckpt.state.match.match_state import match
from ckpt.state.match.selection import Selection
from ckpt.state.match.sink import TensorSink
from ckpt.state.walk.collect import collect
from ckpt.state.walk.plan_cache import PlanCache
from tests.plan.worlds import fragment_over, merged
from tests.state.ranks import rank_of


def save_ranks(
    world_size: int, state_of: Callable[[int], dict[str, Any]], chunk_bytes: int = 64
) -> tuple[dict[int, bytes], Manifest]:
    """Act as each rank in turn, with the state that it has."""

    def each() -> Iterator[tuple[int, int, dict[str, Any]]]:
        for rank in range(world_size):
            with rank_of(rank, world_size):
                yield rank, world_size, state_of(rank)

    return save_each(each(), chunk_bytes)


def save_each(
    states: Iterable[tuple[int, int, dict[str, Any]]], chunk_bytes: int
) -> tuple[dict[int, bytes], Manifest]:
    """Map (rank, world size, state) of each rank to the files, and the manifest of all."""
    images: dict[int, bytes] = {}
    parts = []
    for rank, world_size, state in states:
        found = collect(state, rank=rank)
        prepared = PlanCache(rank, chunk_bytes).prepare(found)
        slot = Slot(prepared.plan.size, None)
        snapshot = prepared.snapshot(slot, found.parts, 5, overlap=False)
        snapshot.copy_eager()
        snapshot.copy_late()
        images[rank] = bytes(slot.view[: prepared.plan.size])
        fragment = fragment_over(
            rank, world_size, prepared.plan, images[rank], chunk_bytes=chunk_bytes, tied=found.ties,
            tree=msgspec.Raw(msgspec.json.encode(found.tree)), replicas=snapshot.replicas(),
        )  # fmt: skip
        parts.append(fragment)
    return images, merged(parts)


def restore(
    state: dict[str, Any],
    images: dict[int, bytes],
    manifest: Manifest,
    rank: int,
    world_size: int,
    *,
    strict: bool = True,
) -> None:
    """Read what the plan says, as the plan says, and nothing else."""
    matched = match(
        state, manifest, rank=rank, world_size=world_size, selection=Selection(strict=strict)
    )
    plan = plan_restore(manifest, matched.leaves)
    sink = TensorSink(matched.leaves, matched.targets)
    places = [(read.rank, read.offset) for read in plan.reads]
    assert places == sorted(set(places)), "a chunk is read twice"
    for run in coalesce(plan.reads, most_bytes=1 << 20, gap_bytes=8):
        data = memoryview(bytearray(images[run.rank][run.offset : run.offset + run.nbytes]))
        for read in run.reads:
            part = data[read.offset - run.offset :][: read.nbytes]
            if (memory := sink.direct(read)) is not None:
                memory[:] = part
            else:
                sink.place(read, part)
    matched.apply()

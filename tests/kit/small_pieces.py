"""Let images of a few kilobytes pass through memory in waves.

``pytest --small-pieces`` calls ``shrink``, so that all tests of small states run with rings.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any, Final

from ckpt.adapters.walk import prepare
from ckpt.pipeline import image_writer
from ckpt.plan.leaf import Leaf
from ckpt.plan.save import SavePlan, plan_save
from ckpt.save import host_memory
from ckpt.staging import budget, copies, frames, image, slot
from ckpt.staging.slots import SlotPool
from ckpt_backends import memory, posix

PIECE_BYTES: Final = 4096


def shrink() -> None:
    """Make pieces, parts, chunks and rings small, until the end of the process."""
    sizes: dict[ModuleType, dict[str, object]] = {
        copies: {"PIECE_BYTES": PIECE_BYTES},
        frames: {"PIECE_BYTES": PIECE_BYTES},
        image: {"PIECE_BYTES": PIECE_BYTES},
        slot: {"_ROUND": PIECE_BYTES},
        image_writer: {"_COPY_BYTES": PIECE_BYTES},
        memory: {"_PART_BYTES": PIECE_BYTES},
        posix: {"_PART_BYTES": PIECE_BYTES},
        budget: {
            "_RING_STEP": PIECE_BYTES,
            "_LEAST_RING": 4 * PIECE_BYTES,
            "_RING_BYTES": 4 * PIECE_BYTES,
        },
        prepare: {"plan_save": small_chunks},
        host_memory: {"SlotPool": small_pool},
    }
    for module, values in sizes.items():
        for name, value in values.items():
            assert hasattr(module, name)
            setattr(module, name, value)


def small_chunks(leaves: Sequence[Leaf], *, rank: int, chunk_bytes: int) -> SavePlan:
    return plan_save(leaves, rank=rank, chunk_bytes=min(chunk_bytes, 2 * PIECE_BYTES))


def small_pool(count: int, *, part_bytes: int, **settings: Any) -> SlotPool:
    """Return a pool whose rings have room for the chunks of ``small_chunks``, and no more."""
    return SlotPool(count, part_bytes=min(part_bytes, 2 * PIECE_BYTES), **settings)

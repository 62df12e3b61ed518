"""Let small images pass through memory in waves.

``pytest --small-pieces`` calls ``shrink``, so that all tests of small states run with rings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ckpt.plan.leaf import Leaf
from ckpt.plan.save import SavePlan, plan_save
from ckpt.save import slot_pool_settings
from ckpt.staging import image, memory_budget, slot, slot_pool, window
from ckpt.staging.slot_pool import SlotPool
from ckpt.state.walk import plan_cache
from ckpt_backends import memory
from ckpt_backends.folder import posix


@dataclass(frozen=True, slots=True)
class Sizes:
    """The bytes of the pieces of a large and of a small image, and of what is in them, and the
    usual number of frames of a ring.
    """

    piece: int
    least_piece: int
    part: int
    chunk: int
    page: int
    frames: int = 6


SMALLEST: Final = Sizes(
    piece=4096, least_piece=4096, part=4096, chunk=2 * 4096, page=4096, frames=4
)


def scaled(mib: int) -> Sizes:
    """Return the sizes of ckpt itself, with ``mib`` bytes for each MiB."""
    return Sizes(piece=32 * mib, least_piece=8 * mib, part=8 * mib, chunk=16 * mib, page=2 * mib)


def shrink(
    sizes: Sizes = SMALLEST, set_value: Callable[[object, str, object], None] = setattr
) -> None:
    """Make pieces, parts, chunks and rings small, until the end of the process or as long as
    ``set_value`` does.
    """

    def small_chunks(leaves: Sequence[Leaf], *, rank: int, chunk_bytes: int) -> SavePlan:
        return plan_save(leaves, rank=rank, chunk_bytes=min(chunk_bytes, sizes.chunk))

    def small_pool(count: int, *, part_bytes: int, **settings: Any) -> SlotPool:
        """Return a pool whose rings have room for the chunks of ``small_chunks``, and no more."""
        return SlotPool(count, part_bytes=min(part_bytes, sizes.chunk), **settings)

    values: dict[object, dict[str, object]] = {
        image: {"PIECE_BYTES": sizes.piece},
        slot_pool: {"PIECE_BYTES": sizes.piece},
        window.Window: {"piece_bytes": sizes.piece},
        slot: {"_HUGE_PAGE_BYTES": sizes.page},
        memory: {"_PART_BYTES": sizes.part},
        posix: {"_PART_BYTES": sizes.part},
        memory_budget: {
            "PIECE_BYTES": sizes.piece,
            "_LEAST_PIECE_BYTES": sizes.least_piece,
            "_USUAL_FRAMES": sizes.frames,
            "_LEAST_RINGS": 1,
        },
        plan_cache: {"plan_save": small_chunks},
        slot_pool_settings: {"SlotPool": small_pool},
    }
    for owner, named in values.items():
        for name, value in named.items():
            assert hasattr(owner, name)
            set_value(owner, name, value)

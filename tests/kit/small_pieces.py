"""Let small images pass through memory in waves.

``pytest --small-pieces`` calls ``shrink``, so that all tests of small states run with rings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

from ckpt.pipeline import image_writer
from ckpt.plan.leaf import Leaf
from ckpt.plan.save import SavePlan, plan_save
from ckpt.save import host_memory
from ckpt.staging import budget, copies, frames, image, slot
from ckpt.staging.slots import SlotPool
from ckpt.state.walk import prepare
from ckpt_backends import memory
from ckpt_backends.folder import posix


@dataclass(frozen=True, slots=True)
class Sizes:
    """The bytes of pieces, which rings grow by, and of what is in them."""

    piece: int
    part: int
    chunk: int
    ring: int
    page: int


SMALLEST: Final = Sizes(piece=4096, part=4096, chunk=2 * 4096, ring=4 * 4096, page=4096)


def scaled(mib: int) -> Sizes:
    """Return the sizes of ckpt itself, with ``mib`` bytes for each MiB."""
    return Sizes(piece=32 * mib, part=8 * mib, chunk=16 * mib, ring=192 * mib, page=2 * mib)


def shrink(
    sizes: Sizes = SMALLEST, set_value: Callable[[ModuleType, str, object], None] = setattr
) -> None:
    """Make pieces, parts, chunks and rings small, until the end of the process or as long as
    ``set_value`` does.
    """

    def small_chunks(leaves: Sequence[Leaf], *, rank: int, chunk_bytes: int) -> SavePlan:
        return plan_save(leaves, rank=rank, chunk_bytes=min(chunk_bytes, sizes.chunk))

    def small_pool(count: int, *, part_bytes: int, **settings: Any) -> SlotPool:
        """Return a pool whose rings have room for the chunks of ``small_chunks``, and no more."""
        return SlotPool(count, part_bytes=min(part_bytes, sizes.chunk), **settings)

    values: dict[ModuleType, dict[str, object]] = {
        copies: {"PIECE_BYTES": sizes.piece},
        frames: {"PIECE_BYTES": sizes.piece},
        image: {"PIECE_BYTES": sizes.piece},
        slot: {"_ROUND": sizes.page},
        image_writer: {"_COPY_BYTES": sizes.piece},
        memory: {"_PART_BYTES": sizes.part},
        posix: {"_PART_BYTES": sizes.part},
        budget: {
            "_RING_STEP": sizes.piece,
            "_LEAST_RING": 4 * sizes.piece,
            "_RING_BYTES": sizes.ring,
        },
        prepare: {"plan_save": small_chunks},
        host_memory: {"SlotPool": small_pool},
    }
    for module, named in values.items():
        for name, value in named.items():
            assert hasattr(module, name)
            set_value(module, name, value)

"""Choose the host memory of a job's images: whole slots, or rings that images pass through.

A ring is smaller than an image, which passes through it in waves: its parts follow one another.
"""

from __future__ import annotations

from collections.abc import Sequence

from ckpt.config import SaveConfig, ranks_on_this_node
from ckpt.errors import ConfigError
from ckpt.staging.slot_pool import NoContents, SlotContents, SlotPool
from ckpt.storage.tiers import OpenTier


def slot_pool(tiers: Sequence[OpenTier], config: SaveConfig, contents: SlotContents) -> SlotPool:
    """Return the pool of the slots of this rank, without any slot yet.

    Args:
        tiers: All tiers, nearest first.
        config: The settings of saves.
        contents: The steps that slots hold between two saves, if a tier is in memory.

    Raises:
        ConfigError: There is less host memory for a tier in memory than an image.
    """
    share, keeps_images = config.memory_share, any(tier.in_memory for tier in tiers)
    if share is not None and share < 1 and keeps_images:
        raise ConfigError(
            f"host_memory={config.host_memory!r}: the tier 'memory' keeps whole images: give it 1x "
            "or more, or leave the tier out"
        )
    parts = (tier.backend.capabilities.part_bytes for tier in tiers)
    return SlotPool(
        config.slots,
        ranks=ranks_on_this_node(),
        limit=config.memory_limit,
        elastic=_may_pass_in_waves(tiers, config),
        part_bytes=max(config.chunk_bytes, *parts),
        contents=contents if keeps_images else NoContents(contents.reservation),
    )


def _may_pass_in_waves(tiers: Sequence[OpenTier], config: SaveConfig) -> bool:
    """Return True if no save needs its whole image in memory at once: no tier is in memory, takes
    only whole files, or may pass the image on to the next tier when it fails.
    """
    return (
        config.overlap == "auto"
        and not any(tier.in_memory for tier in tiers)
        and all(tier.backend.capabilities.takes_parts for tier in tiers)
        and all(tier.required for tier in tiers[:-1])
    )

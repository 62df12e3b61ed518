"""Images that stand whole in their slots, as they do for a tier in memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ckpt.save import slot_pool_settings


@contextmanager
def whole_slots() -> Iterator[None]:
    """Let no image of this process pass through a ring in the block."""
    passes = slot_pool_settings._may_pass_in_waves
    slot_pool_settings._may_pass_in_waves = lambda *_: False
    try:
        yield
    finally:
        slot_pool_settings._may_pass_in_waves = passes

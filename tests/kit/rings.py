"""Rings for images that pass through memory in waves."""

from __future__ import annotations

import torch

from ckpt.staging.ring import Ring, Spill
from ckpt.staging.window import RingWindow


def ring_of(frames: int, spill: int = 0, *, step: int) -> Ring:
    """Return a ring with this number of frames of ``step`` bytes, and the most frames of its
    spill.
    """
    shared = Spill(lambda: True, step)
    shared.allow(spill * step)
    return Ring(frames * step, shared, lambda: True)


def copy_bytes(window: RingWindow, data: bytes, start: int, end: int) -> None:
    """Copy bytes into one piece of an image, for which the window has a frame."""
    form = torch.empty(end - start, dtype=torch.uint8, device="meta")
    window.place(form, start).copy_(torch.frombuffer(bytearray(data[start:end]), dtype=torch.uint8))

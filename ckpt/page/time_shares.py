"""The parts of the bar that shows where the time of a run went. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ckpt.observe.time_spent import TimeSpent
from ckpt.page.charts import WIDTH

_MEANING: Final = {
    "training": "jobs trained",
    "stall": "saves stopped the training",
    "restore": "jobs restored a step",
    "repeats": "training after a step that a restore went back to",
    "down": "no job ran",
}


@dataclass(frozen=True, slots=True)
class TimeShare:
    """A part of the bar, in the units of an image that is ``WIDTH`` wide."""

    name: str
    meaning: str
    seconds: float
    percent: str
    x: float
    width: float


def time_shares(time: TimeSpent | None) -> list[TimeShare]:
    """Return the parts of the bar, from left to right; an empty list if nothing is known."""
    if time is None or time.total <= 0:
        return []
    shares: list[TimeShare] = []
    x = 0.0
    for name, meaning in _MEANING.items():
        seconds: float = getattr(time, name)
        width = seconds / time.total * WIDTH
        percent = f"{seconds / time.total:.1%}".replace("%", " %")
        shares.append(TimeShare(name, meaning, seconds, percent, round(x, 2), round(width, 2)))
        x += width
    return shares

"""Format sizes, speeds, times and lists of ranks for logs, reports and the command line."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

_UNITS: Final = ("kB", "MB", "GB", "TB", "PB", "EB")
_MOST_RANKS: Final = 16


def size(nbytes: float) -> str:
    """Return ``nbytes`` in decimal units with three significant digits, such as '1.50 GB'."""
    if nbytes < 1000:
        return f"{nbytes:.0f} B"
    # A number from 999.5 on would be rounded to 1000, and one from 9.995 on to 10.00.
    power = next((n for n in range(1, len(_UNITS)) if nbytes < 999.5 * 1000**n), len(_UNITS))
    number = nbytes / 1000**power
    return f"{number:.{2 if number < 9.995 else 1 if number < 99.95 else 0}f} {_UNITS[power - 1]}"


def rank_list(ranks: Collection[int]) -> str:
    """Return rank numbers as a text such as '0, 3, 4', in ascending order. After the first 16
    numbers, ' ...' stands for the others.
    """
    return ", ".join(map(str, sorted(ranks)[:_MOST_RANKS])) + (
        " ..." if len(ranks) > _MOST_RANKS else ""
    )


def rate(nbytes: float, seconds: float) -> str:
    """Return a speed such as '2.41 GB/s' or '310 kB/s'."""
    return f"{size(nbytes / max(seconds, 1e-9))}/s"


def duration(seconds: float) -> str:
    """Return a time such as '4.1 ms' or '12.30 s'."""
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{seconds * 1e3:.1f} ms"

"""Sum up the difference of two checkpoints by the parts of the state.

A *part* is all tensors whose names have the same first levels. A `Movement` says how far a tensor
has moved from one checkpoint to the other, also as a multiple of its norm (``ratio``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ckpt.catalog.difference import Difference
from ckpt.catalog.tensor_movement import Movement

_MOST_PARTS: Final = 12
"""The state is cut into as fine parts as it has at most this number of."""
_LEVEL_SEPARATOR: Final = re.compile(r"[/.]")
TITLES: Final = ("part", "tensors", "equal", "other values", "unlike")


@dataclass(frozen=True, slots=True)
class PartDifference:
    """The difference of the tensors of one part.

    Attributes:
        part: The name that all names of the part begin with.
        equal: How many tensors are equal to the bit.
        values: How many have other values.
        unlike: How many only one checkpoint has, or have another dtype or shape, or could not be
            compared.
        movement: How far the tensors with other values have moved; None if they were not read.
        most_moved: The tensor that has moved most; empty if none was read.
    """

    part: str
    equal: int
    values: int
    unlike: int
    movement: Movement | None
    most_moved: str

    @property
    def cells(self) -> tuple[str, ...]:
        """The cells below ``TITLES``."""
        counts = (self.equal + self.values + self.unlike, self.equal, self.values, self.unlike)
        return (self.part, *(f"{count:,}" for count in counts))


def part_differences(
    names: Collection[str], difference: Difference, movements: Mapping[str, Movement]
) -> list[PartDifference]:
    """Return the difference of each part, in the order of their names.

    Args:
        names: The names of the tensors of both checkpoints.
        difference: The difference of the checkpoints.
        movements: How far each tensor has moved, by its name. Tensors that were not read are left
            out, and so are those of one element, such as the count of an optimizer's steps.
    """
    changed_names = set(difference.other_values)
    unlike_names = {
        *difference.only_one,
        *difference.only_two,
        *difference.other_kinds,
        *difference.other_layouts,
    }
    parts: dict[str, list[str]] = {}
    depth = _depth(names)
    for name in sorted(names):
        parts.setdefault(_part(name, depth), []).append(name)
    return [
        _part_difference(part, members, changed_names, unlike_names, movements)
        for part, members in parts.items()
    ]


def most_moved_line(parts: Sequence[PartDifference], movements: Mapping[str, Movement]) -> str:
    """Return a line that says what has moved most below each of the first names of the state, such
    as "model" and "optimizer"; empty if no tensor has other values.
    """
    groups: dict[str, list[PartDifference]] = {}
    for part in parts:
        if part.values:
            groups.setdefault(part.part.partition("/")[0], []).append(part)
    if not groups:
        return ""
    if not movements:
        counts = {name: sum(part.values for part in group) for name, group in groups.items()}
        text = ", ".join(f"{count:,} of {name}" for name, count in counts.items())
        return f"tensors with other values: {text}; --values says how far they have moved"
    texts: list[str] = []
    for group in groups.values():
        # A part that was not read comes after all others.
        part = max(group, key=lambda part: -1.0 if part.movement is None else part.movement.ratio)
        if part.movement is not None:
            name = part.most_moved
            detail = "" if name == part.part else f" ({name} by {percent(movements[name])})"
            texts.append(f"{part.part} by {percent(part.movement)}{detail}")
    return f"moved most, in percent of the norm: {'; '.join(texts)}" if texts else ""


def percent(movement: Movement) -> str:
    """Return a movement in percent of the norm as text."""
    ratio = movement.ratio
    if math.isfinite(ratio):
        return f"{100 * ratio:,.0f} %" if ratio >= 1 else f"{100 * ratio:.3g} %"
    return "inf" if math.isinf(movement.distance) else "all of it (from 0)"


def _part_difference(
    part: str,
    members: Sequence[str],
    changed_names: Collection[str],
    unlike_names: Collection[str],
    movements: Mapping[str, Movement],
) -> PartDifference:
    """Return the difference of the part whose tensors have the names ``members``."""
    read_names = [name for name in members if name in movements]
    total: Movement | None = None
    for name in read_names:
        total = movements[name] if total is None else total + movements[name]
    changed_count = sum(name in changed_names for name in members)
    unlike_count = sum(name in unlike_names for name in members)
    return PartDifference(
        part=part,
        equal=len(members) - changed_count - unlike_count,
        values=changed_count,
        unlike=unlike_count,
        movement=total,
        most_moved=max(read_names, key=lambda name: movements[name].ratio, default=""),
    )


def _depth(names: Collection[str]) -> int:
    """Return at how many levels of the names the state is cut into parts."""
    deepest = max((len(_LEVEL_SEPARATOR.split(name)) for name in names), default=1)
    depths = (
        depth
        for depth in range(deepest, 1, -1)
        if len({_part(name, depth) for name in names}) <= _MOST_PARTS
    )
    return next(depths, 1)


def _part(name: str, depth: int) -> str:
    """Return the first ``depth`` levels of a name, such as 'model/layers.3'."""
    ends = [match.start() for match in _LEVEL_SEPARATOR.finditer(name)]
    return name if len(ends) < depth else name[: ends[depth - 1]]

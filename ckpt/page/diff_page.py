"""The contents of the page that compares two steps.

The *movement* of a tensor says how far its elements in both steps are apart. A *part* of the state
is all tensors whose names begin alike. In a part, tensors with other ``values`` have other bytes,
and ``unlike`` ones are in one step only, or have another dtype or shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from ckpt.catalog.difference import Difference, compare
from ckpt.catalog.part_difference import PartDifference, most_moved_line, part_differences
from ckpt.catalog.tensor_movement import Movement
from ckpt.catalog.tensor_reader import StepReader
from ckpt.errors import ConfigError
from ckpt.model.dtype import DTYPES
from ckpt.observe.run_view import RunView, StepView
from ckpt.page.run_pages import StepOpener

MOST_READ_BYTES: Final = 8 << 30
"""The page reads tensors with other values if both checkpoints together have at most this many
bytes of them.
"""
_MOST_MOVES: Final = 25
Measure = Callable[[StepReader, StepReader, str], Movement | None]
"""Reads a tensor of two steps, and returns how far it has moved; None if it holds no numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffPage:
    """The contents of the page that compares two steps.

    Attributes:
        row_a, row_b: The steps.
        url_a, url_b: The tiers that they were read from.
        difference: The difference between them.
        parts: The difference of each part of the state that differs.
        most_moved: A line that says what has moved most; empty if nothing has other values.
        read_bytes: The bytes that must be read to say how far the tensors have moved.
        is_read: Whether they were read.
        moves: The tensors that have moved most, and how far, in descending order.
    """

    row_a: StepView
    row_b: StepView
    url_a: str
    url_b: str
    difference: Difference
    parts: Sequence[PartDifference]
    most_moved: str
    read_bytes: int
    is_read: bool = False
    moves: Mapping[str, Movement] = field(default_factory=dict[str, Movement])


def diff_page(
    opener: StepOpener, run: RunView, name_a: str, name_b: str, measure: Measure | None
) -> DiffPage:
    """Return the page that compares two steps.

    The steps are compared by checksums alone. With ``measure``, the tensors with other values are
    read, unless they have more than ``MOST_READ_BYTES``.

    Raises:
        ConfigError: The name of a step is empty.
        CkptError: No tier has the step, or it cannot be read.
    """
    if not name_a or not name_b:
        raise ConfigError("compare what? Give two steps")
    row_a, url_a, reader_a = opener.step(run, name_a)
    row_b, url_b, reader_b = opener.step(run, name_b)
    difference = compare(reader_a, reader_b, read=False)
    read_bytes = 2 * sum(
        math.prod(reader_a.tensors[name].shape) * DTYPES[reader_a.tensors[name].dtype].itemsize
        for name in difference.other_values
    )
    is_read = measure is not None and read_bytes <= MOST_READ_BYTES
    movements: dict[str, Movement] = {}
    if measure is not None and is_read:
        # Without scalars, since the count of an optimizer's steps would move most
        for name in difference.other_values:
            if not reader_a.tensors[name].shape:
                continue
            if (movement := measure(reader_a, reader_b, name)) is not None:
                movements[name] = movement
    parts = part_differences(
        reader_a.tensors.keys() | reader_b.tensors.keys(), difference, movements
    )
    names_by_ratio = sorted(movements, key=lambda name: movements[name].ratio, reverse=True)
    return DiffPage(
        row_a=row_a,
        row_b=row_b,
        url_a=url_a,
        url_b=url_b,
        difference=difference,
        parts=[part for part in parts if part.values or part.unlike],
        most_moved=most_moved_line(parts, movements) if movements else "",
        read_bytes=read_bytes,
        is_read=is_read,
        moves={name: movements[name] for name in names_by_ratio[:_MOST_MOVES]},
    )

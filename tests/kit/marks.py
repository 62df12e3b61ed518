"""Leave tests, parameters of tests, and large sizes to ``make torture``."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest


def is_torture(config: pytest.Config) -> bool:
    """Return whether the run was asked for the tests marked ``torture``."""
    return "torture" in config.option.markexpr.replace("not torture", "")


def each_once(*axes: Iterable[object]) -> list[Any]:
    """Return all combinations of the values of several parameters.

    CI takes each value once, with a value of each other parameter, and ``make torture`` the rest.
    """
    lists = [list(axis) for axis in axes]
    chosen = {
        tuple((turn + place) % len(values) for place, values in enumerate(lists))
        for turn in range(max(map(len, lists)))
    }
    return [
        pytest.param(
            *(values[index] for values, index in zip(lists, indices, strict=True)),
            marks=() if indices in chosen else pytest.mark.torture,
        )
        for indices in product(*(range(len(values)) for values in lists))
    ]


def torture(*values: object) -> list[Any]:
    """Return the values, or tuples of values, that only ``make torture`` takes."""
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.torture)
        for value in values
    ]

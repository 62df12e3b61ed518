"""Leave tests, parameters of tests, and large sizes to ``make torture``."""

from __future__ import annotations

from typing import Any

import pytest


def is_torture(config: pytest.Config) -> bool:
    """Return whether the run was asked for the tests marked ``torture``."""
    return "torture" in config.option.markexpr.replace("not torture", "")


def torture(*values: object) -> list[Any]:
    """Return the values, or tuples of values, that only ``make torture`` takes."""
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.torture)
        for value in values
    ]

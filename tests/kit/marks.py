"""Mark parameters of tests."""

from __future__ import annotations

from typing import Any

import pytest


def torture(*values: object) -> list[Any]:
    """Return the values, or tuples of values, that only ``make torture`` takes."""
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.torture)
        for value in values
    ]

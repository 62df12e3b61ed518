"""The length of the parts of large objects: a mebibyte in CI, and what the store takes in torture.

The bytes are most of what a test of uploads costs, and their number changes nothing but the number
of the parts.
"""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Any

import pytest

from tests.kit.marks import is_torture

PART_BYTES = "part_bytes"
"""The name of the fixture. ``make torture`` takes each test that uses it."""
_FEW = 1 << 20


def parts_of(constant: str) -> Any:
    """Return a fixture that shortens the parts of the stores of a module, and returns the length.

    ``constant`` is the name of the length with that of its module: ``package.module.NAME``.
    """

    @pytest.fixture(name=PART_BYTES)
    def part_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
        if not is_torture(request.config):
            monkeypatch.setattr(constant, _FEW)
        return int(resolve_name(constant))

    return part_bytes

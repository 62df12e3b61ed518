"""Leave to ``make torture`` what other classes test of the same code in CI."""

from __future__ import annotations

import pytest


def pytest_itemcollected(item: pytest.Item) -> None:
    """A class of tests may have the attribute ``repeats``: the names of tests, for each server."""
    repeats = getattr(getattr(item, "cls", None), "repeats", {})
    share = item.callspec.params.get("share") if hasattr(item, "callspec") else None
    if getattr(item, "originalname", item.name) in repeats.get(share, ()):
        item.add_marker("torture")

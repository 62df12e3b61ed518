"""The packages of ``make lowest``."""

from __future__ import annotations

from tests.versions.lowest import CLIENTS, requirements


def test_each_package_is_named_once_with_one_version() -> None:
    pinned = list(requirements())[: -len(CLIENTS)]
    names = [each.partition("==")[0].partition("[")[0] for each in pinned]
    assert len(names) == len(set(names))
    assert all("==" in each for each in pinned)
    assert {"torch", "fsspec", "opentelemetry-sdk"} <= set(names)

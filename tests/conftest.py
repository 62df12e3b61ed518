"""Fixtures for all tests; the servers live in tests/servers.py."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("ckpt.storage.testing.conformance", "ckpt.storage.testing.uploads")

from tests.servers import fake_gcs, moto_server, rclone_s3  # noqa: E402

__all__ = ["fake_gcs", "moto_server", "rclone_s3"]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What is marked ``torture`` runs only when it is asked for."""
    if "torture" not in config.option.markexpr:
        kept = [item for item in items if not item.get_closest_marker("torture")]
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("torture")])
        items[:] = kept

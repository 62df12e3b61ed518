"""Fixtures for all tests; the servers live in tests/servers.py."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("ckpt.storage.testing.conformance", "ckpt.storage.testing.uploads")

from tests.servers import fake_gcs, moto_server, rclone_s3  # noqa: E402

__all__ = ["fake_gcs", "moto_server", "rclone_s3"]

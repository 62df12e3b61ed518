"""Look into stores, and let them fail."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

import ckpt.storage.tiers
from ckpt.catalog.index import committed
from ckpt.catalog.verify import verify_step
from ckpt.pipeline.workers import Workers
from ckpt.storage.api import StorageBackend
from ckpt.storage.registry import open_backend
from ckpt.storage.testing import FaultyBackend, Rule


def whole(root: Path | str) -> list[int]:
    """Steps listed below ``root``, each of which verifies."""
    backend = open_backend(str(root))
    with Workers("check", 2) as workers:
        for ref in committed(backend):
            report = verify_step(backend, ref, workers=workers, on_progress=lambda *_: None)
            assert not report.faults, report.faults
    return sorted({ref.step for ref in committed(backend)})


def faulty(monkeypatch: pytest.MonkeyPatch, where: Path, rules: list[Rule]) -> None:
    """Let the store of the tier ``where`` fail by ``rules``."""

    def opened(url: str, options: Mapping[str, object]) -> StorageBackend:
        backend = open_backend(url, options)
        return FaultyBackend(backend, rules) if url == str(where) else backend

    monkeypatch.setattr(ckpt.storage.tiers, "open_backend", opened)

"""Look into stores, and let them fail."""

from __future__ import annotations

import threading
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
    """The steps that are listed below ``root``. All of them verify."""
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


class Gated:
    """A store that lets uploads through while its gate is open."""

    def __init__(self, url: str) -> None:
        self.inner = open_backend(url)
        self.open = threading.Event()
        self.began: list[str] = []

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def upload(self, key, size):
        self.began.append(key)
        assert self.open.wait(30)
        return self.inner.upload(key, size)


@pytest.fixture
def gated(tmp_path, monkeypatch):
    far = Gated(str(tmp_path / "far"))

    def opened(url, options):
        return far if url == str(tmp_path / "far") else open_backend(url, options)

    monkeypatch.setattr(ckpt.storage.tiers, "open_backend", opened)
    yield far
    far.open.set()

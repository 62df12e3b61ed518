"""Read stores, and make them fail."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import ckpt.storage.tiers
from ckpt.catalog.step_listing import committed
from ckpt.catalog.verify import verify_step
from ckpt.pipeline.workers import Workers
from ckpt.storage.api import StorageBackend
from ckpt.storage.registry import open_backend
from ckpt.storage.testing import FaultyBackend, Rule


def whole(root: Path | str, options: Mapping[str, object] | None = None) -> list[int]:
    """Return the steps that are listed below ``root``, after a check that all of them verify."""
    backend = open_backend(str(root), options)
    with Workers("check", 2) as workers:
        for ref in committed(backend):
            report = verify_step(backend, ref, workers=workers, on_progress=lambda *_: None)
            assert not report.faults, report.faults
    return sorted({ref.step for ref in committed(backend)})


class Wrapped:
    """A store, or an upload, that acts as ``inner`` except for what a subclass overrides."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def wrap_stores(
    patch: pytest.MonkeyPatch, wrapped: Callable[[str, StorageBackend], object]
) -> None:
    """Use ``wrapped(url, store)`` as the store of each tier that is opened."""
    tiers: Any = ckpt.storage.tiers
    opened = tiers.open_backend

    def open_wrapped(url: str, options: Mapping[str, object] | None = None) -> object:
        return wrapped(url, opened(url, options))

    patch.setattr(tiers, "open_backend", open_wrapped)


def faulty(monkeypatch: pytest.MonkeyPatch, where: Path | str, rules: Sequence[Rule]) -> None:
    """Make the store of the tier ``where`` fail by ``rules``."""
    wrap_stores(
        monkeypatch,
        lambda url, store: FaultyBackend(store, rules) if url == str(where) else store,
    )


class Gated(Wrapped):
    """A store that lets uploads through while its gate is open."""

    def __init__(self, url: str) -> None:
        super().__init__(open_backend(url))
        self.open = threading.Event()
        self.began: list[str] = []

    def upload(self, key: str, size: int) -> Any:
        self.began.append(key)
        assert self.open.wait(30)
        return self.inner.upload(key, size)


@pytest.fixture
def gated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gated]:
    far = Gated(str(tmp_path / "far"))
    wrap_stores(monkeypatch, lambda url, store: far if url == str(tmp_path / "far") else store)
    yield far
    far.open.set()

"""Fixtures and data that the parts of the conformance tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor  # noqa: TID251 - a test's own threads
from typing import TypeVar

import numpy as np
import pytest

from ckpt.storage.api import StorageBackend, Upload, read_object

OpenRoot = Callable[[str], StorageBackend]
T = TypeVar("T")


def payload(nbytes: int, seed: int = 0) -> bytes:
    """Return bytes that differ at every place, the same for the same arguments."""
    return np.random.default_rng([nbytes, seed]).bytes(nbytes)


def page_aligned(data: bytes, shift: int = 0) -> memoryview:
    """Return a copy of ``data`` that begins ``shift`` bytes after a page boundary."""
    room = np.zeros(len(data) + 4096 + shift, dtype=np.uint8)
    start = -room.ctypes.data % 4096 + shift
    view = room.data[start : start + len(data)]
    view[:] = data
    return view


def send(upload: Upload, data: memoryview, order: Callable[[list[int]], list[int]] = list) -> None:
    """Write all parts of ``data``, one after another, in the given order."""
    for offset in order(list(range(0, data.nbytes, upload.part_bytes))):
        upload.write(offset, data[offset : offset + upload.part_bytes])


def store(backend: StorageBackend, key: str, data: bytes) -> None:
    """Write a large object in parts."""
    upload = backend.upload(key, len(data))
    view = page_aligned(data)
    send(upload, view)
    assert upload.finish().size == len(data)


def fetch(backend: StorageBackend, key: str) -> bytes:
    """Return a whole object."""
    return read_object(backend, key, limit=1 << 30)


def at_once(work: Callable[[int], T], count: int) -> list[T]:
    """Run ``work(0) ... work(count - 1)``, each in its own thread."""
    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(work, range(count)))


class Suite:
    """The fixtures of the suite; ``open_root`` is the subclass's."""

    part_bytes_most = 8 << 20

    @pytest.fixture
    def open_root(self) -> OpenRoot:
        """Override: ``open_root(name) -> StorageBackend``."""
        raise NotImplementedError("define the fixture open_root in your subclass")

    @pytest.fixture
    def roots(self, open_root: OpenRoot) -> Iterator[OpenRoot]:
        """Return an ``open_root`` that closes what it has opened."""
        opened: list[StorageBackend] = []

        def open_one(name: str) -> StorageBackend:
            opened.append(open_root(name))
            return opened[-1]

        yield open_one
        for backend in opened:
            backend.close()

    @pytest.fixture
    def backend(self, roots: OpenRoot) -> StorageBackend:
        return roots("root")

    def large(self, backend: StorageBackend) -> bytes:
        """Return three parts and an odd rest."""
        part = backend.capabilities.part_bytes
        assert part <= self.part_bytes_most, (
            "set part_bytes_most to run the suite with parts this large"
        )
        return payload(3 * part + 4096 + 77)

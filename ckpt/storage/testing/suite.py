"""Fixtures and helpers that all conformance tests share."""

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
    """Return ``nbytes`` random bytes, which are the same for the same arguments."""
    return np.random.default_rng([nbytes, seed]).bytes(nbytes)


def page_aligned(data: bytes, shift: int = 0) -> memoryview:
    """Return a copy of ``data`` that begins ``shift`` bytes after a page boundary."""
    buffer = np.zeros(len(data) + 4096 + shift, dtype=np.uint8)
    start = -buffer.ctypes.data % 4096 + shift
    view = buffer.data[start : start + len(data)]
    view[:] = data
    return view


def send(upload: Upload, data: memoryview, order: Callable[[list[int]], list[int]] = list) -> None:
    """Write all parts of ``data`` to ``upload``, one after another, without finishing it.

    ``order`` takes the offsets of the parts and returns them in the order of the writes.
    """
    for offset in order(list(range(0, data.nbytes, upload.part_bytes))):
        upload.write(offset, data[offset : offset + upload.part_bytes])


def store(backend: StorageBackend, key: str, data: bytes) -> None:
    """Write the object ``key`` with an upload, and check the size that ``finish`` reports."""
    upload = backend.upload(key, len(data))
    view = page_aligned(data)
    send(upload, view)
    assert upload.finish().size == len(data)


def fetch(backend: StorageBackend, key: str) -> bytes:
    """Return all bytes of the object ``key``."""
    return read_object(backend, key, limit=1 << 30)


def at_once(work: Callable[[int], T], count: int) -> list[T]:
    """Run ``work(0)`` to ``work(count - 1)``, each in its own thread, and return their results in
    this order.
    """
    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(work, range(count)))


class Suite:
    """The fixtures of the conformance tests. A subclass defines the fixture ``open_root``.

    Attributes:
        part_bytes_most: The largest ``Capabilities.part_bytes`` that the tests accept, since they
            hold several parts in memory. Override it for a backend with larger parts.
    """

    part_bytes_most = 8 << 20

    @pytest.fixture
    def open_root(self) -> OpenRoot:
        """Return a function that takes the name of a root and opens a backend on that root. A
        subclass must override this fixture.
        """
        raise NotImplementedError("define the fixture open_root in your subclass")

    @pytest.fixture
    def roots(self, open_root: OpenRoot) -> Iterator[OpenRoot]:
        """Yield ``open_root``. Close all backends that it opened when the test ends."""
        backends: list[StorageBackend] = []

        def open_and_note(name: str) -> StorageBackend:
            backends.append(open_root(name))
            return backends[-1]

        yield open_and_note
        for backend in backends:
            backend.close()

    @pytest.fixture
    def backend(self, roots: OpenRoot) -> StorageBackend:
        return roots("root")

    def large(self, backend: StorageBackend) -> bytes:
        """Return data of three whole parts and a shorter last part of odd length."""
        part_bytes = backend.capabilities.part_bytes
        assert part_bytes <= self.part_bytes_most, (
            "set part_bytes_most to run the suite with parts this large"
        )
        return payload(3 * part_bytes + 4096 + 77)

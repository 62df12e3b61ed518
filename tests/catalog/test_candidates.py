"""Which steps are tried if stores fail halfway."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import numpy as np
import pytest

from ckpt.catalog.candidates import candidates
from ckpt.errors import AccessDenied
from ckpt.pipeline.workers import Workers
from ckpt.storage.api import StorageBackend
from ckpt.storage.registry import open_backend
from ckpt.storage.testing.faulty import FaultyBackend, Raise, Rule
from tests.checkpoints import Written, write_checkpoint


@pytest.fixture
def workers() -> Iterator[Workers]:
    with Workers("test", 4) as group:
        yield group


def store(*attempts: str) -> tuple[StorageBackend, dict[str, Written]]:
    backend = open_backend(f"memory://{uuid.uuid4().hex}")
    state = {"w": np.arange(6.0)}
    return backend, {name: write_checkpoint(backend, 1, state, attempt=name) for name in attempts}


def unreadable(backend: StorageBackend) -> StorageBackend:
    """A store that lists, and gives sizes, but cannot be read."""
    return FaultyBackend(
        backend, [Rule(verb="read_into", key="manifest", fault=Raise(AccessDenied))]
    )


def test_a_store_that_fails_when_rivals_are_compared_is_told_of_not_passed_over(
    workers: Workers,
) -> None:
    backend, _ = store("aaaaaa", "bbbbbb")
    with pytest.raises(AccessDenied):
        list(candidates([unreadable(backend)], None, workers=workers))


def test_what_it_held_is_had_from_the_next_store(workers: Workers) -> None:
    near, _ = store("aaaaaa", "bbbbbb")
    far, written = store("aaaaaa")
    (found,) = candidates([unreadable(near), far], None, workers=workers)
    assert (found.ref, found.nearest, found.reachable) == (written["aaaaaa"].ref, 1, (1,))


def test_an_attempt_whose_date_cannot_be_read_is_tried_first(workers: Workers) -> None:
    """It may be the youngest. If it is damaged, the restore says so, and tries the other one."""
    near, _ = store("bbbbbb")
    damaged = write_checkpoint(near, 1, {"w": np.arange(6.0)}, attempt="aaaaaa", created_at=3e9)
    near.put(damaged.ref.manifest, [b"{}"])
    found = candidates([near], None, workers=workers)
    assert [each.ref.attempt for each in found] == ["aaaaaa", "bbbbbb"]
    # Another store has an intact manifest.
    far, _ = store()
    write_checkpoint(far, 1, {"w": np.arange(6.0)}, attempt="aaaaaa", created_at=1.0)
    found = candidates([near, far], None, workers=workers)
    assert [each.ref.attempt for each in found] == ["bbbbbb", "aaaaaa"]


def test_a_store_that_fails_while_the_others_hold_nothing_leads_out(workers: Workers) -> None:
    near, far = (
        open_backend(f"memory://{uuid.uuid4().hex}"),
        open_backend(f"memory://{uuid.uuid4().hex}"),
    )
    down = FaultyBackend(far, [Rule(verb="folders", fault=Raise(AccessDenied))])
    with pytest.raises(
        AccessDenied,
        match=r"no other tier has a step.*take that tier out to begin without a checkpoint",
    ):
        list(candidates([near, down], None, workers=workers))

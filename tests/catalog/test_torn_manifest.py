"""A manifest that cannot be read is never that of a listed step."""

from __future__ import annotations

import pytest

import ckpt
from ckpt import CheckpointManager, Tier
from ckpt.catalog.step_listing import committed
from ckpt.storage.registry import open_backend
from ckpt.storage.testing.conformance import fetch

STORES = ["file", "memory", "dir"]


def torn(content: bytes, how: str) -> bytes:
    return {
        "empty": b"",
        "a few bytes": content[:30],
        "half": content[: len(content) // 2],
        "other bytes": b"x" * len(content),
        "one bit": content[:-9] + bytes([content[-9] ^ 1]) + content[-8:],
    }[how]


@pytest.fixture(params=STORES)
def tier(request, tmp_path):
    places = {
        "file": Tier(str(tmp_path)),
        "memory": Tier(f"memory://torn-{tmp_path.name}"),
        "dir": Tier(f"dir::file://{tmp_path}/dir"),
    }
    return places[request.param]


@pytest.mark.parametrize("how", ["empty", "a few bytes", "half", "other bytes", "one bit"])
def test_a_torn_manifest_is_not_listed_and_not_restored(tier, how):
    with CheckpointManager(tier) as manager:
        manager.save({"a": 1}, step=1)
        manager.save({"a": 2}, step=2)
    backend = open_backend(tier.url, tier.options)
    newest = committed(backend)[0]
    backend.put(newest.manifest, [torn(fetch(backend, newest.manifest), how)])
    with CheckpointManager(tier) as manager:
        assert manager.steps() == [1]
        assert manager.latest_step() == 1
        state = {"a": 0}
        manager.restore(state)
        assert state == {"a": 1}
        manager.save({"a": 3}, step=3)
        assert manager.steps() == [1, 3]
    with ckpt.open(tier.url, 1) as opened:
        assert opened.steps() == [3, 1]


def test_an_empty_manifest_makes_no_committed_step(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        manager.save({"a": 1}, step=1)
    backend = open_backend(str(tmp_path))
    [ref] = committed(backend)
    backend.put(ref.manifest, [b""])
    assert committed(backend) == []


def test_a_manifest_is_read_once(tmp_path, monkeypatch):
    with CheckpointManager(tmp_path) as manager:
        for step in range(3):
            manager.save({"a": 1}, step=step)
        assert manager.steps() == [0, 1, 2]
        monkeypatch.setattr("ckpt.catalog.step_listing.read_packed", pytest.fail)
        assert manager.steps() == [0, 1, 2]
        assert manager.latest_step() == 2

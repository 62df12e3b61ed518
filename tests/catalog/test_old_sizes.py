"""A store that tells an old size of each record, once, as sshfs does after a replacement.

No reader takes the cut record for a damaged one, and nothing is removed or written again for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from ckpt.catalog.finalize import read_fragments
from ckpt.catalog.inventory import Inventory
from ckpt.catalog.late_metrics import add_metrics
from ckpt.catalog.step_listing import creation_time, read_manifest
from ckpt.catalog.transfer import fetch_step
from ckpt.catalog.verify import StepFolder, verify_step
from ckpt.coordination.committer import SharedStore
from ckpt.coordination.step_files import put_manifest
from ckpt.errors import ManifestCorrupt, ObjectNotFound
from ckpt.model.keys import StepRef
from ckpt.pipeline.workers import Workers
from ckpt.root.owner import Owner, claim, confirm, read_owner
from ckpt.root.pins import all_pins, note_of, put_pin
from ckpt.storage.api import ObjectInfo, read_record
from ckpt.storage.registry import open_backend
from tests.checkpoints import write_checkpoint
from tests.kit.stores import Wrapped

ME = Owner.of_this_process("mine00")
Change = Callable[[int], int]
Store = Callable[[], Any]


class OldSizes(Wrapped):
    """A store whose first ``head`` of a record tells a size that ``change`` has altered."""

    def __init__(self, root: Path, change: Change) -> None:
        super().__init__(open_backend(str(root)))
        self._change = change
        self._seen: set[str] = set()

    def head(self, key: str) -> ObjectInfo:
        info: ObjectInfo = self.inner.head(key)
        if key in self._seen or key.endswith(".safetensors"):
            return info
        self._seen.add(key)
        return replace(info, size=self._change(info.size))


@pytest.fixture(params=[lambda size: size // 2, lambda size: size + 9], ids=["shorter", "longer"])
def change(request: pytest.FixtureRequest) -> Change:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def ref(tmp_path: Path) -> StepRef:
    store = open_backend(str(tmp_path / "root"))
    ref = write_checkpoint(store, 7, {"x": np.arange(60_000.0)}, world_size=2).ref
    claim(store, ME)
    put_pin(store, ref, 1000, "a reason")
    add_metrics([store], 7, {"loss": 0.5}, own="")
    return ref


@pytest.fixture
def store(tmp_path: Path, change: Change) -> Store:
    return lambda: OldSizes(tmp_path / "root", change)


def test_the_owner_is_found(store: Store, ref: StepRef) -> None:
    owner = read_owner(store())
    assert owner is not None
    assert owner == msgspec.structs.replace(ME, root=owner.root)  # The record names its root
    assert confirm(store(), ME)


def test_the_step_is_read_listed_and_verified(store: Store, ref: StepRef) -> None:
    assert read_manifest(store(), ref).step == 7
    assert creation_time(store(), ref) > 0
    [held] = Inventory(store()).look()
    assert (held.state, held.reason, held.metrics) == ("committed", "", {"loss": 0.5})
    assert note_of(store(), all_pins(store())[0]).reason == "a reason"
    with Workers("test", 2) as workers:
        assert verify_step(store(), ref, workers=workers).intact
        assert len(read_fragments(StepFolder(store(), ref, workers))) == 2


def test_the_fragment_of_another_rank_is_merged(store: Store, ref: StepRef) -> None:
    named = read_manifest(open_backend(store().url), ref).fragments[1]
    assert len(SharedStore(store()).read(ref, named)) == named.size


def test_a_put_whose_reply_was_lost_is_found_done(store: Store, ref: StepRef) -> None:
    put_manifest(store(), ref.manifest, Path(store().url, ref.manifest).read_bytes())


def test_a_copy_removes_no_manifest_and_writes_nothing_again(
    store: Store, ref: StepRef, tmp_path: Path, change: Change
) -> None:
    with Workers("test", 2) as workers:
        fetch_step([store()], StepFolder(open_backend(str(tmp_path / "copy")), ref, workers))
        copied: Any = OldSizes(tmp_path / "copy", change)
        before = {path: path.stat().st_ino for path in (tmp_path / "copy").rglob("*")}
        fetch_step([store()], StepFolder(copied, ref, workers))
    assert {path: path.stat().st_ino for path in (tmp_path / "copy").rglob("*")} == before


def test_a_record_that_stays_damaged_is_read_twice_and_a_missing_one_once(tmp_path: Path) -> None:
    (tmp_path / "record").write_bytes(b"record")
    reads: list[bytes] = []

    def decode(data: bytes) -> None:
        reads.append(data)
        raise ManifestCorrupt("record", "not a record")

    backend = open_backend(str(tmp_path))
    with pytest.raises(ManifestCorrupt):
        read_record(backend, "record", decode, limit=100)
    assert reads == [b"record", b"record"]
    with pytest.raises(ManifestCorrupt, match="more than the 5 allowed"):
        read_record(backend, "record", decode, limit=5)
    with pytest.raises(ObjectNotFound):
        read_record(backend, "missing", decode, limit=100)
    assert len(reads) == 2

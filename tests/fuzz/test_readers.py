"""Any content of a tier gives each reader a value or one of our errors, within bounds of time and
memory.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import strategies as st

from ckpt import CheckpointManager
from ckpt.catalog.step_listing import committed, read_manifest, read_packed
from ckpt.errors import CkptError
from ckpt.model.checksum import checksum
from ckpt.model.fragment_columns import fragment_of
from ckpt.model.keys import fragment_name
from ckpt.model.manifest import Manifest, Packed
from ckpt.model.record_encoding import pack, unpack
from ckpt.model.validate import check_manifest
from ckpt.plan.merge import merge
from ckpt.plan.restore import plan_restore
from ckpt.root.owner import read_owner
from ckpt.state.match.match_state import match
from ckpt.storage.api import StorageBackend, read_object
from ckpt.storage.registry import open_backend
from tests.faults.conftest import Count, tally
from tests.fuzz.mutations import WILD, mutated
from tests.fuzz.records import (
    BODIES,
    FRAGMENT,
    MANIFEST,
    SCALE,
    fuzz,
    record_ref,
    reported,
    target,
)
from tests.kit.damage import sealed

__all__ = ["tally"]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> StorageBackend:
    """A store with that state."""
    root = tmp_path_factory.mktemp("saved")
    with CheckpointManager(root) as manager:
        manager.save(target(), 1)
    return open_backend(str(root))


@pytest.fixture(scope="module")
def saved(store: StorageBackend) -> Manifest:
    """Return the manifest of that state, with its fragment filled in."""
    return read_manifest(store, committed(store)[0])


@SCALE
@pytest.mark.parametrize("kind", [Manifest, Packed])
def test_a_record_changed_anywhere_is_read_or_refused(
    kind: Any, examples: int, tally: Count
) -> None:
    def check(body: Any) -> None:
        try:
            record = unpack(sealed(body), kind, key="k")
            if kind is Manifest:
                check_manifest(record, key="k")
                match({}, record, rank=0, world_size=1)
            else:
                fragment_of(record, key="k")
                merge([(record, record_ref(record))])
        except CkptError as refused:
            reported(refused)

    tally("fuzz", fuzz(examples, mutated(BODIES[kind]), check))


@SCALE
def test_a_tree_changed_anywhere_is_restored_or_refused(
    saved: Manifest, examples: int, tally: Count
) -> None:
    """The test does what a restore does, without the bytes: it matches, plans, and sets the values
    that are not tensors.
    """
    state = target()

    def check(parts: tuple[Any, Any]) -> None:
        tree, per_rank = parts
        manifest = msgspec.structs.replace(
            saved,
            tree=msgspec.Raw(msgspec.json.encode(tree)),
            per_rank={"0": msgspec.Raw(msgspec.json.encode(per_rank))},
        )
        try:
            matched = match(state, manifest, rank=0, world_size=1)
            plan_restore(manifest, matched.leaves)
        except CkptError as refused:
            reported(refused)

    tree, per_rank = json.loads(bytes(saved.tree)), json.loads(bytes(saved.per_rank["0"]))
    whole = st.tuples(mutated(tree), st.just(per_rank)) | st.tuples(
        st.just(tree), mutated(per_rank)
    )
    tally("fuzz", fuzz(examples, whole, check))


@SCALE
def test_a_manifest_on_a_tier_is_restored_or_refused(
    store: StorageBackend, examples: int, tally: Count
) -> None:
    """A whole restore of a checkpoint whose manifest was changed and got a new checksum.

    Its data is gone.
    """
    import uuid

    name = uuid.uuid4().hex
    backend = open_backend(f"memory://{name}")
    ref = committed(store)[0]
    body = json.loads(msgspec.json.encode(read_packed(store, ref)[0]))
    key = ref.key(fragment_name(0))
    backend.put(key, [read_object(store, key, limit=1 << 20)])
    state = target()

    def check(changed: Any) -> None:
        backend.put(ref.manifest, [sealed(changed)])
        try:
            with CheckpointManager(f"memory://{name}") as manager:
                manager.restore(state)
        except CkptError as refused:
            reported(refused)

    tally("fuzz", fuzz(examples // 10, mutated(body), check))


@SCALE
def test_bytes_of_any_kind_are_no_record_and_no_owner(examples: int, tally: Count) -> None:
    packed = [pack(MANIFEST), pack(FRAGMENT)]
    backend = open_backend("memory://fuzz-owner")

    def check(data: bytes) -> None:
        for kind in (Manifest, Packed):
            try:
                unpack(data, kind, key="k")
            except CkptError:
                continue
            assert data in packed
        backend.put("writer.json", [data])
        read_owner(backend)

    cut = st.tuples(st.sampled_from(packed), st.integers(0, 5000), st.binary(max_size=40)).map(
        lambda parts: parts[0][: parts[1]] + parts[2] + parts[0][parts[1] + len(parts[2]) :]
    )
    zstd = st.binary(max_size=200).map(
        lambda frame: b"ckpt-zstd " + checksum(frame).encode() + b"\n" + frame
    )
    owner = st.sampled_from(WILD).map(
        lambda node: (
            msgspec.json.encode(
                {"attempt": node, "host": "h", "machine": "m", "pid": node, "started": node}
            )
            if not isinstance(node, float) or abs(node) < 1e300
            else b"{}"
        )
    )
    tally("fuzz", fuzz(examples, st.binary(max_size=300) | cut | zstd | owner, check))

from __future__ import annotations

import uuid
from typing import Any, TypeVar

import msgspec
import numpy as np
import pytest

from ckpt.catalog.inventory import Inventory
from ckpt.catalog.rollbacks import put_rollback
from ckpt.catalog.step_listing import Listing, committed, find, is_committed, read_manifest
from ckpt.errors import (
    AccessDenied,
    FormatTooNew,
    ManifestCorrupt,
    NoCheckpoint,
    ObjectNotFound,
    StorageError,
    TransientStorageError,
)
from ckpt.model.box_layouts import Run
from ckpt.model.checksum import checksum
from ckpt.model.keys import StepRef
from ckpt.model.manifest import Manifest, Tensor
from ckpt.model.record_encoding import pack
from ckpt.model.rollback import roll_back
from ckpt.root.attempts import step_refs
from ckpt.root.claim_marker import claim_committed_for_removal
from ckpt.storage.api import StorageBackend
from ckpt.storage.registry import open_backend
from ckpt.storage.testing.faulty import FaultyBackend, Raise, Rule
from tests.checkpoints import Arrays, write_checkpoint

ARRAYS: Arrays = {
    "w": np.arange(12, dtype=np.float32).reshape(4, 3),
    "b": np.arange(5, dtype=np.int64),
}


@pytest.fixture
def backend() -> StorageBackend:
    return open_backend(f"memory://{uuid.uuid4().hex}")


def test_a_step_is_listed_if_and_only_if_its_manifest_is_there(backend: StorageBackend) -> None:
    old = write_checkpoint(backend, 1, ARRAYS).ref
    half = write_checkpoint(backend, 2, ARRAYS, commit=False).ref
    assert step_refs(backend) == [half, old]
    assert committed(backend) == [old]
    assert not is_committed(backend, half)
    assert find(backend, None) == [old]


def test_an_object_store_lists_its_manifests_and_is_asked_for_none_of_them(
    backend: StorageBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in range(20):
        write_checkpoint(backend, step, ARRAYS)
    listing = Listing([backend])
    assert listing.steps() == list(range(20))  # The first call reads each manifest
    monkeypatch.setattr(type(backend), "head", pytest.fail)
    assert listing.steps() == list(range(20))
    assert len(find(backend, None)) == 20


def test_steps_are_ordered_as_numbers_beyond_nine_digits(backend: StorageBackend) -> None:
    for step in (7, 10_000_000_000, 999_999_999):
        write_checkpoint(backend, step, ARRAYS)
    assert [ref.step for ref in find(backend, None)] == [10_000_000_000, 999_999_999, 7]


def test_folders_that_are_not_ours_are_left_alone(backend: StorageBackend) -> None:
    for name in (
        "step-1.abcxyz",
        "step-000000001.ABC123",
        "step-000000001",
        "logs",
        "step-000000001.abcxyz.bak",
    ):
        backend.put(f"{name}/manifest.json", [b"{}"])
    backend.put("step-000000009.abcxyz", [b"a file, not a folder"])
    assert step_refs(backend) == []


def test_of_two_attempts_the_younger_comes_first(backend: StorageBackend) -> None:
    write_checkpoint(backend, 5, ARRAYS, attempt="zzzzzz", created_at=100.0)
    write_checkpoint(backend, 5, ARRAYS, attempt="aaaaaa", created_at=200.0)
    assert [ref.attempt for ref in find(backend, 5)] == ["aaaaaa", "zzzzzz"]


def test_of_two_attempts_the_damaged_one_comes_last(backend: StorageBackend) -> None:
    write_checkpoint(backend, 5, ARRAYS, attempt="zzzzzz", created_at=200.0)
    write_checkpoint(backend, 5, ARRAYS, attempt="aaaaaa", created_at=100.0)
    backend.put(StepRef(5, "zzzzzz").manifest, [b"{"])
    assert [ref.attempt for ref in find(backend, None)] == ["aaaaaa", "zzzzzz"]


def test_a_store_that_does_not_answer_is_not_taken_for_damage(backend: StorageBackend) -> None:
    for attempt in ("aaaaaa", "zzzzzz"):
        write_checkpoint(backend, 5, ARRAYS, attempt=attempt)
    faulty = FaultyBackend(backend, [Rule(verb="read_into", fault=Raise(AccessDenied))])
    with pytest.raises(AccessDenied):
        find(faulty, None)


def test_a_manifest_in_a_bad_sector_hides_no_other_step(backend: StorageBackend) -> None:
    for step, attempt in ((1, "aaaaaa"), (2, "aaaaaa"), (2, "zzzzzz")):
        write_checkpoint(backend, step, ARRAYS, attempt=attempt)
    bad = Rule(
        verb="read_into",
        key="zzzzzz",
        fault=Raise(lambda key: StorageError(key, "Input/output error")),
    )
    damaged, *others = Inventory(FaultyBackend(backend, [bad]), for_display=True).look()
    assert "Input/output error" in damaged.reason
    assert {held.state for held in others} == {"committed"}
    assert [ref.attempt for ref in find(FaultyBackend(backend, [bad]), 2)] == ["aaaaaa", "zzzzzz"]


def test_a_store_that_stutters_is_asked_again(backend: StorageBackend) -> None:
    ref = write_checkpoint(backend, 1, ARRAYS).ref
    rules = [
        Rule(verb=verb, fault=Raise(TransientStorageError), nth=1)
        for verb in ("folders", "head", "read_into")
    ]
    faulty = FaultyBackend(backend, rules)
    assert find(faulty, None) == [ref]
    assert read_manifest(faulty, ref).step == 1


@pytest.mark.parametrize(
    ("files", "step", "expected"),
    [
        ([], None, "empty, or does not exist"),
        (["notes.txt"], None, "no steps, but other files, such as 'notes.txt'"),
        (
            ["step-000000004.abcxyz/rank-00000.json"],
            None,
            r"1 save\(s\) were begun, none was committed",
        ),
        (["step-000000004.abcxyz/rank-00000.json"], 4, "step 4 was begun, but never committed"),
        (["step-000000004.abcxyz/manifest.json"], 5, "step 5 is not there; the newest is 4$"),
        (
            [f"step-{step:09d}.abcxyz/manifest.json" for step in range(10)]
            + ["step-000000009.defuvw/manifest.json", "step-000000010.abcxyz/rank-00000.json"],
            12,
            "step 12 is not there; the newest are 9, 8, 7, 6, 5$",
        ),
        (["step-000000004.abcxyz/rank-00000.json"], 12, "step 12 is not there$"),
    ],
)
def test_where_nothing_is_found_the_error_says_what_is_there_instead(
    backend: StorageBackend, files: list[str], step: int | None, expected: str
) -> None:
    for key in files:
        backend.put(key, [b"x"])
    with pytest.raises(NoCheckpoint, match=expected):
        find(backend, step)


def test_steps_of_an_abandoned_branch_are_not_the_newest(backend: StorageBackend) -> None:
    for step in (8, 16, 23, 24):
        backend.put(f"step-{step:09d}.abcxyz/manifest.json", [b"x"])
    rollback = roll_back([], StepRef(16, "abcxyz"), [StepRef(24, "abcxyz")])
    assert rollback is not None
    put_rollback(backend, rollback)
    with pytest.raises(NoCheckpoint, match=r"step 300 is not there; the newest are 16, 8$"):
        find(backend, 300)


def test_a_step_that_is_being_removed_is_told_as_such(backend: StorageBackend) -> None:
    ref = write_checkpoint(backend, 1, ARRAYS).ref
    claim_committed_for_removal(backend, ref)
    backend.delete(ref.manifest)
    with pytest.raises(NoCheckpoint, match="step 1 is being removed"):
        find(backend, 1)


def test_a_manifest_that_is_not_there_is_not_found(backend: StorageBackend) -> None:
    with pytest.raises(ObjectNotFound):
        read_manifest(backend, StepRef(3, "abcxyz"))


def test_a_manifest_in_the_wrong_folder_is_refused(backend: StorageBackend) -> None:
    packed = pack(write_checkpoint(backend, 1, ARRAYS).stored)
    for ref in (StepRef(2, "abcxyz"), StepRef(1, "othera")):
        backend.put(ref.manifest, [packed])
        with pytest.raises(ManifestCorrupt, match="it is that of step 1"):
            read_manifest(backend, ref)


# -- manifests that we would never have written ----------------------------------------------------


T = TypeVar("T", bound=msgspec.Struct)


def replaced(record: T, **changes: object) -> T:
    return msgspec.structs.replace(record, **changes)


def with_file(manifest: Manifest, **changes: object) -> Manifest:
    return replaced(manifest, files=(replaced(manifest.files[0], **changes), *manifest.files[1:]))


def with_fragment(manifest: Manifest, **changes: object) -> Manifest:
    return replaced(
        manifest, fragments=(replaced(manifest.fragments[0], **changes), *manifest.fragments[1:])
    )


def with_tensor(manifest: Manifest, **changes: object) -> Manifest:
    return replaced(
        manifest, tensors=(replaced(manifest.tensors[0], **changes), *manifest.tensors[1:])
    )


def with_run(manifest: Manifest, **changes: object) -> Manifest:
    index = manifest.layout_of[0]
    runs = manifest.layouts[index]
    changed = (replaced(runs[0], **changes), *runs[1:])
    return replaced(
        manifest, layouts=(*manifest.layouts[:index], changed, *manifest.layouts[index + 1 :])
    )


NONSENSE = {
    "a name that climbs": lambda m: with_file(m, name="../x"),
    "an absolute name": lambda m: with_file(m, name="/etc/passwd"),
    "the name of another rank": lambda m: with_file(m, name="rank-00001.safetensors"),
    "a fragment that climbs": lambda m: with_fragment(m, name="../../rank-00000.json"),
    "a fragment of another rank": lambda m: with_fragment(m, name="rank-00001.json"),
    "a file twice": lambda m: replaced(m, files=(m.files[0], m.files[0])),
    "a fragment less": lambda m: replaced(m, fragments=m.fragments[1:]),
    "a file of a negative rank": lambda m: with_file(m, rank=-1),
    "a fragment of negative size": lambda m: with_fragment(m, size=-1),
    "no ranks": lambda m: replaced(m, world_size=0),
    "a rank too many": lambda m: replaced(m, world_size=3),
    "chunks of nothing": lambda m: replaced(m, chunk_bytes=0),
    "a larger file than its chunks": lambda m: with_file(m, size=m.files[0].size + 1),
    "a hole": lambda m: with_run(m, shape=(1,)),
    "a box that sticks out": lambda m: with_run(m, offsets=(100,)),
    "a box before the beginning": lambda m: with_run(m, offsets=(-1,)),
    "a box of other dimensions": lambda m: with_run(m, offsets=(0, 0)),
    "a box in the file of a stranger": lambda m: with_run(m, rank=7),
    "a box in the file of another rank": lambda m: with_run(m, rank=1, levels=()),
    "another dtype": lambda m: with_tensor(m, dtype="float32"),
    "an unknown dtype": lambda m: with_tensor(m, dtype="os.system"),
    "another shape": lambda m: with_tensor(m, shape=(6,)),
    "an impossible shape": lambda m: with_tensor(m, shape=(-1,)),
    "a tensor twice": lambda m: replaced(m, tensors=(m.tensors[0], m.tensors[0])),
    "a tie to nothing": lambda m: replaced(m, tied={"x": "y"}),
    "a tie of what is stored": lambda m: replaced(m, tied={"w": "b"}),
    "a tensor too large to list its chunks": lambda m: replaced(
        with_file(m, size=1 << 59),
        tensors=(Tensor("b", "uint8", (1 << 59,), ()),),
        layouts=((Run(0, (0,), (1 << 59,), ()),),),
        layout_of=(0,),
    ),
}


@pytest.mark.parametrize("change", list(NONSENSE.values()), ids=list(NONSENSE))
@pytest.mark.timeout(20)
def test_a_manifest_that_we_would_not_have_written_is_refused(
    backend: StorageBackend, change: Any
) -> None:
    written = write_checkpoint(
        backend, 1, {"b": np.arange(5, dtype=np.int64), "w": np.ones(4)}, world_size=2
    )
    backend.put(written.ref.manifest, [pack(change(written.stored))])
    with pytest.raises(ManifestCorrupt):
        read_manifest(backend, written.ref)


def test_a_truncated_manifest_is_refused_wherever_it_was_cut(backend: StorageBackend) -> None:
    written = write_checkpoint(backend, 1, ARRAYS)
    packed = pack(written.manifest)
    for length in range(len(packed)):
        backend.put(written.ref.manifest, [packed[:length]])
        with pytest.raises(ManifestCorrupt):
            read_manifest(backend, written.ref)


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"null", b"\x00" * 40, b"\xff\xfe", b"[" * 5000, b"\x28\xb5\x2f\xfd junk"]
)
def test_what_is_no_manifest_at_all_is_refused(backend: StorageBackend, data: bytes) -> None:
    ref = StepRef(1, "abcxyz")
    backend.put(ref.manifest, [data])
    with pytest.raises(ManifestCorrupt):
        read_manifest(backend, ref)


def test_a_later_format_says_that_ckpt_must_be_upgraded(backend: StorageBackend) -> None:
    body = b'{"format":9,"something":"new"}'
    ref = StepRef(1, "abcxyz")
    backend.put(
        ref.manifest, [b'{"checksum":"' + checksum(body).encode() + b'","body":' + body + b"}"]
    )
    with pytest.raises(FormatTooNew, match="upgrade with pip"):
        read_manifest(backend, ref)

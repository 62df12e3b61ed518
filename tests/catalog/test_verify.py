from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from ckpt.catalog.verify import VerifyReport, verify_step
from ckpt.errors import (
    AccessDenied,
    ChecksumMismatch,
    IntegrityError,
    StorageError,
    TransientStorageError,
)
from ckpt.model.checksum import checksum
from ckpt.model.keys import StepRef
from ckpt.model.manifest import Chunk, File, StoredFile
from ckpt.model.record_encoding import pack
from ckpt.pipeline.chunk_reader import RUN_BYTES, runs_of
from ckpt.pipeline.workers import Workers
from ckpt.plan.restore import chunks_of
from ckpt.storage.api import StorageBackend, read_object
from ckpt.storage.registry import open_backend
from ckpt.storage.testing.faulty import FaultyBackend, Raise, Rule
from tests.catalog.small import IMPATIENT, SMALL
from tests.checkpoints import Arrays, Written, write_checkpoint
from tests.kit.marks import torture


@pytest.fixture
def backend() -> StorageBackend:
    return open_backend(f"memory://{uuid.uuid4().hex}")


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with Workers("test", 3) as group:
        yield group


def check(backend: StorageBackend, ref: StepRef, workers: Workers) -> VerifyReport:
    return verify_step(backend, ref, workers=workers, retry=IMPATIENT)


def keys(written: Written) -> list[str]:
    manifest, ref = written.manifest, written.ref
    names = [file.name for file in manifest.files] + [
        fragment.name for fragment in manifest.fragments
    ]
    return [ref.key(name) for name in names]


def content(backend: StorageBackend, key: str) -> bytes:
    return read_object(backend, key, limit=1 << 30)


def test_an_intact_step_has_no_faults(backend: StorageBackend, workers: Workers) -> None:
    written = write_checkpoint(backend, 1, SMALL, world_size=3)
    reported: list[tuple[int, int]] = []
    report = verify_step(
        backend,
        written.ref,
        workers=workers,
        on_progress=lambda done, total: reported.append((done, total)),
    )
    assert report.intact
    assert report.verified_bytes == written.manifest.nbytes
    assert report.seconds > 0
    assert reported[-1] == (report.verified_bytes, report.verified_bytes)
    assert reported == sorted(reported)


@pytest.mark.parametrize("stride", [11, *torture(1)])
def test_any_flipped_bit_of_any_file_is_found(
    backend: StorageBackend, workers: Workers, stride: int
) -> None:
    written = write_checkpoint(backend, 1, SMALL, chunk_bytes=64)
    for key in [*keys(written), written.ref.manifest]:
        whole = content(backend, key)
        for position in range(0, len(whole), stride):
            bad = bytearray(whole)
            bad[position] ^= 1 << position % 8
            backend.put(key, [bad])
            faults = check(backend, written.ref, workers).faults
            assert [fault.key for fault in faults] == [key], (key, position)
            if key.endswith(".safetensors"):
                (fault,) = faults
                assert fault.offset is not None
                assert fault.nbytes is not None
                assert fault.offset <= position < fault.offset + fault.nbytes
                assert isinstance(fault.error(), ChecksumMismatch)
        backend.put(key, [whole])
    assert check(backend, written.ref, workers).intact


def test_every_file_that_is_missing_cut_or_added_to_is_found(
    backend: StorageBackend, workers: Workers
) -> None:
    written = write_checkpoint(backend, 1, SMALL, world_size=2, chunk_bytes=64)
    for key in keys(written):
        whole = content(backend, key)
        for damaged in (b"", whole[:1], whole[:-1], whole + b"\0", whole + whole):
            backend.put(key, [damaged])
            assert {fault.key for fault in check(backend, written.ref, workers).faults} == {key}
        backend.delete(key)
        (fault,) = check(backend, written.ref, workers).faults
        assert (fault.key, fault.what) == (key, "is missing")
        assert type(fault.error()) is IntegrityError
        backend.put(key, [whole])


def test_all_faults_are_told_not_only_the_first(backend: StorageBackend, workers: Workers) -> None:
    written = write_checkpoint(backend, 1, SMALL, world_size=4)
    for key in keys(written):
        backend.delete(key)
    assert len(check(backend, written.ref, workers).faults) == 8


def test_a_manifest_that_is_gone_or_damaged_is_a_fault(
    backend: StorageBackend, workers: Workers
) -> None:
    ref = write_checkpoint(backend, 1, SMALL, commit=False).ref
    assert [fault.what for fault in check(backend, ref, workers).faults] == ["is missing"]
    backend.put(ref.manifest, [b"{}"])
    assert [fault.key for fault in check(backend, ref, workers).faults] == [ref.manifest]


def test_a_fragment_of_another_save_is_found_even_with_the_right_checksum(
    backend: StorageBackend, workers: Workers
) -> None:
    other = write_checkpoint(backend, 2, SMALL)
    stranger = content(backend, other.ref.key("rank-00000.json"))
    written = write_checkpoint(backend, 1, SMALL)
    named = msgspec.structs.replace(
        written.manifest.fragments[0], size=len(stranger), checksum=checksum(stranger)
    )
    backend.put(written.ref.key(named.name), [stranger])
    backend.put(
        written.ref.manifest, [pack(msgspec.structs.replace(written.stored, fragments=(named,)))]
    )
    assert [fault.what for fault in check(backend, written.ref, workers).faults] == [
        "belongs to another save"
    ]


def test_a_fragment_that_contradicts_the_file_table_is_found(
    backend: StorageBackend, workers: Workers
) -> None:
    written = write_checkpoint(backend, 1, SMALL)
    file = written.stored.files[0]
    changed = msgspec.structs.replace(
        written.stored, files=(msgspec.structs.replace(file, size=file.size - 1),)
    )
    backend.put(written.ref.manifest, [pack(changed)])
    faults = [fault.what for fault in check(backend, written.ref, workers).faults]
    assert faults[0] == "its data file is not the one that the manifest names"
    assert "added to" in faults[1]


def test_a_store_that_stutters_is_asked_again(backend: StorageBackend, workers: Workers) -> None:
    written = write_checkpoint(backend, 1, SMALL)
    rules = [
        Rule(verb=verb, fault=Raise(TransientStorageError), nth=1) for verb in ("read_into", "head")
    ]
    assert check(FaultyBackend(backend, rules), written.ref, workers).intact


@pytest.mark.parametrize("error", [AccessDenied, TransientStorageError])
@pytest.mark.parametrize("key", ["manifest", "rank-00000.json", "safetensors"])
def test_a_store_that_cannot_be_asked_is_an_error_not_a_fault(
    backend: StorageBackend, workers: Workers, error: type[StorageError], key: str
) -> None:
    written = write_checkpoint(backend, 1, SMALL)
    with pytest.raises(error):
        check(
            FaultyBackend(backend, [Rule(verb="read_into", key=key, fault=Raise(error))]),
            written.ref,
            workers,
        )


def test_a_bad_sector_is_narrowed_down_to_its_chunk(
    backend: StorageBackend, workers: Workers
) -> None:
    class BadSector(FaultyBackend):
        def read_into(self, key: str, offset: int, out: memoryview) -> None:
            if key.endswith("safetensors") and offset <= 4169 < offset + out.nbytes:
                raise StorageError(key, "Input/output error")
            super().read_into(key, offset, out)

    written = write_checkpoint(backend, 1, SMALL, chunk_bytes=32)
    (fault,) = check(BadSector(backend, []), written.ref, workers).faults
    assert (fault.offset, fault.nbytes) == (4168, 8)
    assert "Input/output error" in fault.what


def test_large_files_are_verified_on_disk(tmp_path: Path, workers: Workers) -> None:
    backend = open_backend(str(tmp_path))
    big: Arrays = {
        "w": np.random.default_rng(0).random((3_000, 1_001)),
        "h": np.ones((70, 999), dtype=np.float16),
    }
    written = write_checkpoint(backend, 1, big, world_size=2, chunk_bytes=1 << 20)
    assert check(backend, written.ref, workers).verified_bytes == written.manifest.nbytes
    path = tmp_path / keys(written)[0]
    data = bytearray(path.read_bytes())
    data[5_000_000] ^= 4
    path.write_bytes(data)
    (fault,) = check(backend, written.ref, workers).faults
    assert fault.offset is not None
    assert fault.offset <= 5_000_000 < fault.offset + (fault.nbytes or 0)


def test_runs_cover_a_file_in_order_and_keep_to_the_limit() -> None:
    lengths = [4096, RUN_BYTES, 1, RUN_BYTES - 1, 1, 5, 3 * RUN_BYTES, 7]
    file = File("k", 0, sum(lengths), tuple(Chunk(length, "") for length in lengths))
    runs = runs_of(chunks_of(StoredFile.of(StepRef(1, "abcdefghijkl"), file, None)))
    assert [chunk.nbytes for run in runs for chunk in run.reads] == lengths
    assert all(run.nbytes <= RUN_BYTES or len(run.reads) == 1 for run in runs)
    assert [run.offset for run in runs] == [
        sum(run.nbytes for run in runs[:i]) for i in range(len(runs))
    ]

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from ckpt.catalog.step_listing import is_committed, read_manifest
from ckpt.catalog.transfer import _remove_files_without_entry, fetch_step
from ckpt.catalog.verify import StepFolder, verify_step
from ckpt.errors import (
    AccessDenied,
    ChecksumMismatch,
    CkptError,
    IntegrityError,
    ObjectExists,
    OutOfSpace,
    TransientStorageError,
)
from ckpt.model.checksum import checksum
from ckpt.model.keys import StepRef, data_name
from ckpt.model.record_encoding import pack
from ckpt.pipeline import stored_image
from ckpt.pipeline.workers import Workers
from ckpt.plan.reads_on_other_tier import same_chunks
from ckpt.root.claim_marker import claim_committed_for_removal
from ckpt.storage.api import (
    Buffer,
    Capabilities,
    ObjectInfo,
    PutUpload,
    StorageBackend,
    Upload,
    read_object,
)
from ckpt.storage.registry import open_backend
from ckpt.storage.testing.faulty import FaultyBackend, LoseReply, Raise, Rule, flip_byte
from tests.catalog.small import IMPATIENT, SMALL
from tests.checkpoints import Arrays, Written, write_checkpoint
from tests.kit.marks import each_once


def memory() -> StorageBackend:
    return open_backend(f"memory://{uuid.uuid4().hex}")


@pytest.fixture
def source() -> StorageBackend:
    return memory()


@pytest.fixture
def destination() -> StorageBackend:
    return memory()


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with Workers("test", 3) as group:
        yield group


def objects(backend: StorageBackend) -> dict[str, bytes]:
    return {info.key: read_object(backend, info.key, limit=1 << 30) for info in backend.list("")}


def data_key(written: Written, rank: int = 0) -> str:
    return written.ref.key(written.manifest.files[rank].name)


class Uploads(FaultyBackend):
    """Any store, with uploads in small parts.

    It counts what is begun, finished and aborted, and the parts under way.
    """

    def __init__(
        self,
        inner: StorageBackend,
        rules: Sequence[Rule] = (),
        *,
        part_bytes: int,
        parallel_parts: bool = True,
    ) -> None:
        super().__init__(inner, rules)
        self.part_bytes, self.begun, self.open, self.most_running = part_bytes, 0, 0, 0
        self._capabilities = Capabilities(
            put_if_absent=True, shared=False, part_bytes=part_bytes, parallel_parts=parallel_parts
        )

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def upload(self, key: str, size: int) -> Upload:
        self.begun += 1
        self.open += 1
        return _Counted(self, PutUpload(self, key, size), key, size)


class _Counted:
    def __init__(self, store: Uploads, inner: PutUpload, key: str, size: int) -> None:
        self._store, self._inner, self._key, self._size, self._over = store, inner, key, size, False
        self._running = 0

    @property
    def part_bytes(self) -> int:
        return self._store.part_bytes

    def write(self, offset: int, data: memoryview) -> None:
        self._running += 1
        self._store.most_running = max(self._store.most_running, self._running)
        assert offset % self.part_bytes == 0
        assert not self._over
        assert data.nbytes == min(self.part_bytes, self._size - offset)
        self._inner.write(offset, data)
        self._running -= 1

    def finish(self, size: int | None = None) -> ObjectInfo:
        assert not self._over
        self._over = True
        self._store.open -= 1
        return self._inner.finish(size)

    def abort(self) -> None:
        if self._over:  # finishing failed
            return
        self._over = True
        self._store.open -= 1


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_fetched_step_is_the_same_to_the_byte(
    source: StorageBackend, destination: StorageBackend, workers: Workers, world_size: int
) -> None:
    written = write_checkpoint(source, 7, SMALL, world_size=world_size)
    reported: list[tuple[int, int]] = []
    report = fetch_step(
        [source],
        StepFolder(destination, written.ref, workers),
        on_progress=lambda done, total: reported.append((done, total)),
    )
    assert objects(destination) == objects(source)
    assert report.nbytes == report.copied_bytes == written.manifest.nbytes
    assert reported[-1] == (report.nbytes, report.nbytes)


@pytest.mark.parametrize(
    ("part_bytes", "span_bytes", "parallel_parts"),
    each_once([7, 100, 4096, 5000, 1 << 20], [1, 300, 6000], [True, False]),
)
def test_parts_and_spans_of_any_size_fit_together(
    source: StorageBackend,
    workers: Workers,
    monkeypatch: pytest.MonkeyPatch,
    part_bytes: int,
    span_bytes: int,
    parallel_parts: bool,
) -> None:
    monkeypatch.setattr("ckpt.pipeline.chunk_reader.RUN_BYTES", span_bytes)
    written = write_checkpoint(source, 7, {"w": np.arange(2000.0)}, world_size=2, chunk_bytes=256)
    destination = Uploads(memory(), part_bytes=part_bytes, parallel_parts=parallel_parts)
    fetch_step([source], StepFolder(destination, written.ref, workers))
    assert objects(destination) == objects(source)
    assert (destination.begun, destination.open) == (2, 0)
    assert parallel_parts or destination.most_running == 1


def test_from_disk_to_disk(tmp_path: Path, workers: Workers) -> None:
    source, destination = open_backend(str(tmp_path / "a")), open_backend(str(tmp_path / "b"))
    big: Arrays = {
        "w": np.random.default_rng(0).random((6_000, 1_001)),
        "h": np.ones((70, 999), dtype=np.float16),
    }
    written = write_checkpoint(source, 1, big, world_size=2, chunk_bytes=3 << 20)
    fetch_step([source], StepFolder(destination, written.ref, workers))
    for path in (tmp_path / "a").rglob("*.*"):
        if path.is_file():
            assert (
                tmp_path / "b" / path.relative_to(tmp_path / "a")
            ).read_bytes() == path.read_bytes()
    assert verify_step(destination, written.ref, workers=workers).intact


@pytest.mark.parametrize("stride", [5, pytest.param(1, marks=pytest.mark.torture)])
def test_no_flipped_bit_is_ever_committed(
    source: StorageBackend, workers: Workers, stride: int
) -> None:
    written = write_checkpoint(source, 1, SMALL, chunk_bytes=64)
    for key, whole in objects(source).items():
        for position in range(0, len(whole), stride if len(whole) < 1000 else 13 * stride):
            bad = bytearray(whole)
            bad[position] ^= 1 << position % 8
            source.put(key, [bad])
            destination = Uploads(memory(), part_bytes=100)
            with pytest.raises(IntegrityError):
                fetch_step([source], StepFolder(destination, written.ref, workers))
            assert not is_committed(destination, written.ref)
            assert not key.endswith(".safetensors") or objects(destination) == {}
            assert destination.open == 0
        source.put(key, [whole])


def test_no_missing_cut_or_longer_file_is_ever_committed(
    source: StorageBackend, workers: Workers
) -> None:
    written = write_checkpoint(source, 1, SMALL, world_size=2, chunk_bytes=64)
    for key, whole in objects(source).items():
        for damaged in (b"", whole[:1], whole[:-1], whole + b"\0", None):
            if damaged is None:
                source.delete(key)
            else:
                source.put(key, [damaged])
            destination = memory()
            with pytest.raises(IntegrityError):
                fetch_step([source], StepFolder(destination, written.ref, workers))
            assert not is_committed(destination, written.ref)
        source.put(key, [whole])


def test_a_fetch_that_was_cut_short_goes_on_where_it_was(
    source: StorageBackend, workers: Workers
) -> None:
    written = write_checkpoint(source, 1, SMALL, world_size=3)
    store = memory()
    last = written.manifest.files[-1]
    broken = FaultyBackend(store, [Rule(verb="upload", key=last.name, fault=Raise(OutOfSpace))])
    with Workers("one", 1) as one, pytest.raises(OutOfSpace):
        fetch_step([source], StepFolder(broken, written.ref, one))
    assert not is_committed(store, written.ref)
    report = fetch_step([source], StepFolder(store, written.ref, workers))
    assert report.copied_bytes == last.size
    assert objects(store) == objects(source)


@pytest.fixture(params=[3, 16])
def floats(request: pytest.FixtureRequest, source: StorageBackend) -> Written:
    arrays = {"w": (np.random.default_rng(1).standard_normal((64, 2000)) * 0.02).astype(np.float32)}
    return write_checkpoint(source, 7, arrays, world_size=request.param, chunk_bytes=8000)


def test_a_step_is_encoded_for_its_destination_and_decoded_again(
    source: StorageBackend, destination: StorageBackend, workers: Workers, floats: Written
) -> None:
    reported: list[tuple[int, int]] = []
    report = fetch_step(
        [source],
        StepFolder(destination, floats.ref, workers),
        codec="zstd",
        on_progress=lambda done, total: reported.append((done, total)),
    )
    nbytes = floats.manifest.nbytes
    assert reported[-1] == (nbytes, nbytes)
    assert report.nbytes == report.copied_bytes < nbytes * 0.95
    assert report.nbytes == sum(
        len(data) for key, data in objects(destination).items() if "encoded" in key
    )
    manifest = read_manifest(destination, floats.ref)
    assert manifest.codecs == ("zstd",)
    assert same_chunks(manifest, read_manifest(source, floats.ref))
    assert verify_step(destination, floats.ref, workers=workers).intact
    again = fetch_step([source], StepFolder(destination, floats.ref, workers), codec="zstd")
    assert (again.copied_bytes, again.nbytes) == (0, report.nbytes)
    back, alike = memory(), memory()
    fetch_step([destination], StepFolder(back, floats.ref, workers), codec="none")
    assert objects(back) == objects(source)
    fetch_step([destination], StepFolder(alike, floats.ref, workers), codec="zstd:3")
    assert objects(alike) == objects(destination)


def test_a_fetch_for_another_codec_goes_on_where_it_was(
    source: StorageBackend, workers: Workers, floats: Written
) -> None:
    whole, store = memory(), memory()
    fetch_step([source], StepFolder(whole, floats.ref, workers), codec="zstd")
    rules = [Rule(verb="put", key="manifest", fault=Raise(OutOfSpace))]
    with pytest.raises(OutOfSpace):
        fetch_step(
            [source], StepFolder(FaultyBackend(store, rules), floats.ref, workers), codec="zstd"
        )
    assert not is_committed(store, floats.ref)
    key = floats.ref.key(data_name(1, is_encoded=True))
    flip_byte(store, key, 4096 + 500)
    report = fetch_step([source], StepFolder(store, floats.ref, workers), codec="zstd")
    assert report.copied_bytes == len(objects(whole)[key])
    assert objects(store) == objects(whole)
    flip_byte(store, key, 4096 + 500)
    report = fetch_step([source], StepFolder(store, floats.ref, workers), codec="zstd")
    assert report.copied_bytes == len(objects(whole)[key])
    assert objects(store) == objects(whole)


def test_the_marker_of_a_removal_stays_when_old_files_are_cleared(
    source: StorageBackend, workers: Workers
) -> None:
    """A job may remove the step as soon as it is committed."""
    written = write_checkpoint(source, 7, SMALL)
    extra = written.ref.key(data_name(0, is_encoded=True))
    source.put(extra, [b"in another encoding"])
    assert claim_committed_for_removal(source, written.ref)
    _remove_files_without_entry(StepFolder(source, written.ref, workers), written.manifest)
    keys = {info.key for info in source.list("")}
    assert written.ref.claim_marker in keys
    assert extra not in keys


def test_damage_at_the_source_is_not_encoded(
    source: StorageBackend, destination: StorageBackend, workers: Workers, floats: Written
) -> None:
    flip_byte(source, floats.ref.key(data_name(1)), 4096 + 500)
    with pytest.raises(ChecksumMismatch):
        fetch_step([source], StepFolder(destination, floats.ref, workers), codec="zstd")
    assert not is_committed(destination, floats.ref)
    assert floats.ref.key(data_name(1, is_encoded=True)) not in objects(destination)


def test_a_step_that_is_there_already_keeps_its_encoding(
    source: StorageBackend, destination: StorageBackend, workers: Workers, floats: Written
) -> None:
    fetch_step([source], StepFolder(destination, floats.ref, workers))
    before = objects(destination)
    assert (
        fetch_step(
            [source], StepFolder(destination, floats.ref, workers), codec="zstd"
        ).copied_bytes
        == 0
    )
    assert objects(destination) == before


def test_files_already_there_are_not_trusted_for_their_size(
    source: StorageBackend, destination: StorageBackend, workers: Workers
) -> None:
    written = write_checkpoint(source, 1, SMALL, world_size=2)
    fetch_step([source], StepFolder(destination, written.ref, workers))
    for key, whole in objects(destination).items():
        bad = bytearray(whole)
        bad[len(bad) // 2] ^= 1
        destination.put(key, [bad])
        fetch_step([source], StepFolder(destination, written.ref, workers))
        assert objects(destination) == objects(source), key


def test_a_second_fetch_copies_nothing(source: StorageBackend, workers: Workers) -> None:
    written = write_checkpoint(source, 1, SMALL, world_size=2)
    destination = Uploads(memory(), part_bytes=100)
    fetch_step([source], StepFolder(destination, written.ref, workers))
    again = fetch_step([source], StepFolder(destination, written.ref, workers))
    assert (again.copied_bytes, again.nbytes, destination.begun) == (0, written.manifest.nbytes, 2)


def test_another_manifest_of_the_same_attempt_is_not_overwritten(
    source: StorageBackend, destination: StorageBackend, workers: Workers
) -> None:
    written = write_checkpoint(source, 1, SMALL)
    other = write_checkpoint(destination, 1, SMALL, world_size=2)
    with pytest.raises(ObjectExists):
        fetch_step([source], StepFolder(destination, written.ref, workers))
    assert read_object(destination, written.ref.manifest, limit=1 << 20) == pack(other.stored)


def test_a_manifest_of_a_later_format_is_not_taken_for_a_damaged_one(
    source: StorageBackend, destination: StorageBackend, workers: Workers
) -> None:
    written = write_checkpoint(source, 1, SMALL)
    later = b'{"format":99}'
    record = b'{"checksum":"' + checksum(later).encode() + b'","body":' + later + b"}"
    destination.put(written.ref.manifest, [record])
    with pytest.raises(ObjectExists, match="another manifest"):
        fetch_step([source], StepFolder(destination, written.ref, workers))
    assert read_object(destination, written.ref.manifest, limit=1000) == record


def test_the_manifest_is_written_last(source: StorageBackend, workers: Workers) -> None:
    written = write_checkpoint(source, 1, SMALL, world_size=2)
    order: list[str] = []

    class Watched(Uploads):
        def put(self, key: str, parts: Sequence[Buffer], *, if_absent: bool = False) -> ObjectInfo:
            order.append(key)
            return super().put(key, parts, if_absent=if_absent)

    fetch_step([source], StepFolder(Watched(memory(), part_bytes=4096), written.ref, workers))
    kinds = [
        key.rpartition("/")[2].rpartition(".")[2] if "manifest" not in key else "manifest"
        for key in order
    ]
    assert kinds == ["safetensors", "safetensors", "json", "json", "claim", "manifest"]


def test_a_lost_reply_to_the_commit_is_no_failure(
    source: StorageBackend, destination: StorageBackend, workers: Workers
) -> None:
    written = write_checkpoint(source, 1, SMALL)
    rules = [Rule(verb="put", key="manifest", fault=LoseReply(TransientStorageError), nth=1)]
    fetch_step(
        [source], StepFolder(FaultyBackend(destination, rules), written.ref, workers, IMPATIENT)
    )
    assert objects(destination) == objects(source)


def test_stuttering_stores_are_asked_again(
    source: StorageBackend, destination: StorageBackend, workers: Workers
) -> None:
    written = write_checkpoint(source, 1, SMALL)
    stutter = {
        verb: Rule(verb=verb, fault=Raise(TransientStorageError), nth=1)
        for verb in ("head", "read_into", "upload", "write", "finish", "put")
    }
    fetch_step(
        [FaultyBackend(source, [stutter["head"], stutter["read_into"]])],
        StepFolder(
            FaultyBackend(destination, list(stutter.values())), written.ref, workers, IMPATIENT
        ),
    )
    assert objects(destination) == objects(source)


@pytest.mark.parametrize("error", [OutOfSpace, AccessDenied, TransientStorageError])
@pytest.mark.parametrize("verb", ["upload", "write", "put"])
def test_a_failing_destination_is_its_own_error_and_leaves_no_step(
    source: StorageBackend, workers: Workers, verb: str, error: type[CkptError]
) -> None:
    written = write_checkpoint(source, 1, SMALL, world_size=3)
    store = memory()
    rules = [Rule(verb=verb, fault=Raise(error))]  # type: ignore[arg-type]
    with pytest.raises(error):
        fetch_step(
            [source], StepFolder(FaultyBackend(store, rules), written.ref, workers, IMPATIENT)
        )
    assert not is_committed(store, written.ref)


def test_an_interrupted_fetch_aborts_its_uploads(source: StorageBackend) -> None:
    written = write_checkpoint(source, 1, {"w": np.arange(5000.0)}, chunk_bytes=64, world_size=3)
    destination = Uploads(memory(), part_bytes=100)

    def interrupt(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with Workers("test", 3) as workers, pytest.MonkeyPatch.context() as patch:
        patch.setattr("ckpt.pipeline.chunk_reader.RUN_BYTES", 512)
        with pytest.raises(KeyboardInterrupt):
            fetch_step(
                [source], StepFolder(destination, written.ref, workers), on_progress=interrupt
            )
    assert destination.open == 0
    assert not is_committed(destination, written.ref)


def test_memory_does_not_grow_with_the_file(
    source: StorageBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that takes bytes at once frees spans and parts, so only what workers hold
    is alive.
    """
    alive: list[int] = [0, 0]

    class Memory(bytearray):
        def __del__(self) -> None:
            alive[0] -= len(self)

    def counted(nbytes: int) -> memoryview:
        alive[0] += nbytes
        alive[1] = max(alive)
        return memoryview(Memory(nbytes))

    monkeypatch.setattr(stored_image, "fresh_memory", counted)
    monkeypatch.setattr("ckpt.pipeline.chunk_reader.RUN_BYTES", 1024)
    written = write_checkpoint(source, 1, {"w": np.arange(40_000.0)}, chunk_bytes=512)

    store = memory()

    class Copies(_Counted):
        """A store that copies the bytes and does not keep the memory."""

        def write(self, offset: int, data: memoryview) -> None:
            super().write(offset, memoryview(bytes(data)))

    class SmallParts(Uploads):
        def upload(self, key: str, size: int) -> Upload:
            return Copies(self, PutUpload(self, key, size), key, size)

    destination = SmallParts(store, part_bytes=1000)
    with Workers("test", 3) as workers:
        fetch_step([source], StepFolder(destination, written.ref, workers))
    assert objects(destination) == objects(source)
    assert alive[0] == 0
    assert alive[1] <= 6 * (4096 + 2 * 1000)


def test_a_step_that_is_not_there_is_not_found(
    source: StorageBackend, destination: StorageBackend, workers: Workers
) -> None:
    with pytest.raises(CkptError):
        fetch_step([source], StepFolder(destination, StepRef(9, "abcxyz"), workers))
    assert objects(destination) == {}

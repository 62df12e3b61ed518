from __future__ import annotations

import itertools
import threading
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ckpt.errors import CkptError, OutOfSpace, TransientStorageError
from ckpt.model.checksum import checksum
from ckpt.model.manifest import Chunk
from ckpt.pipeline.image_writer import ImageWrite, write_image
from ckpt.pipeline.workers import Workers
from ckpt.staging.window import RingWindow
from ckpt.storage.api import Capabilities, PutUpload, StorageBackend, Upload, read_object
from ckpt.storage.testing import Crash, FaultyBackend, LoseReply, Raise, Rule, SimulatedCrash
from tests.kit.rings import ring_of
from tests.kit.stores import Wrapped
from tests.pipeline.whole import Whole

PART = 8 << 20
IMAGE = np.random.default_rng(3).bytes(2 * PART + 12345)


def lengths(size: int, *cuts: int) -> list[int]:
    edges = [0, *sorted({cut for cut in cuts if 0 < cut < size}), size]
    return [b - a for a, b in itertools.pairwise(edges)]


WHOLE = lengths(len(IMAGE), 4096, PART)


def table_of(image: bytes, chunks: list[int]) -> tuple[Chunk, ...]:
    end, found = 0, []
    for nbytes in chunks:
        found.append(Chunk(nbytes, checksum(image[end : end + nbytes])))
        end += nbytes
    return tuple(found)


class InTurn(Wrapped):
    """A store that takes one small part at a time, and fails if two come at once."""

    def __init__(
        self, inner: StorageBackend, part_bytes: int = PART, parallel: bool = False
    ) -> None:
        super().__init__(inner)
        self.capabilities: Capabilities = replace(
            inner.capabilities, part_bytes=part_bytes, parallel_parts=parallel
        )
        self.threads: set[int] = set()

    def upload(self, key: str, size: int) -> Upload:
        upload = PutUpload(self, key, size)
        write = upload.write

        def noted(offset: int, data: memoryview) -> None:
            self.threads.add(threading.get_ident())
            write(offset, data)

        upload.write = noted  # type: ignore[method-assign]
        return upload


def write(
    backend,
    workers,
    retry,
    *,
    image: bytes = IMAGE,
    chunks: list[int] = WHOLE,
    on_bytes=lambda _: None,
):
    source = Whole(memoryview(image))
    job = ImageWrite(
        source=source,
        chunks=chunks,
        key="step/rank",
        workers=workers,
        retry=retry,
        on_bytes=on_bytes,
    )
    return write_image(job, backend)


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize(
    ("size", "cuts"),
    [
        (1, ()),
        (1000, (1,)),
        (1000, (64, 128, 192, 999)),
        (1024, (64, 512)),
        (1025, (1024,)),
        (4096, tuple(range(1, 4096, 7))),
        (4097, (100, 3000)),
    ],
)
def test_the_object_is_the_image_and_the_table_its_checksums(
    memory, workers, retry, size, cuts, parallel
):
    image, chunks = IMAGE[:size], lengths(size, *cuts)
    written: list[int] = []
    backend = InTurn(memory, 64, parallel)
    assert write(
        backend, workers, retry, image=image, chunks=chunks, on_bytes=written.append
    ) == table_of(image, chunks)
    assert read_object(memory, "step/rank", limit=size) == image
    assert sum(written) == size


@pytest.mark.parametrize(
    "cuts",
    [(4096,), (4096, PART), (4096, PART + 1, 2 * PART), tuple(range(0, len(IMAGE), 1 << 20))],
)
def test_parts_and_chunks_need_not_meet(memory, workers, retry, cuts):
    chunks = lengths(len(IMAGE), *cuts)
    assert write(memory, workers, retry, chunks=chunks) == table_of(IMAGE, chunks)
    assert read_object(memory, "step/rank", limit=len(IMAGE)) == IMAGE


def test_a_store_that_takes_one_part_at_a_time_is_written_by_one_thread(memory, workers, retry):
    backend = InTurn(memory)
    assert write(backend, workers, retry) == table_of(IMAGE, WHOLE)
    assert backend.threads == {threading.get_ident()}


def test_the_next_part_is_got_while_one_is_written_one_at_a_time(memory, workers, retry):
    """If parts are read from another store, both stores are busy."""
    image = memoryview(np.random.default_rng(3).bytes(5000))
    got = {start: threading.Event() for start in range(0, 6000, 1000)}
    got[5000].set()  # there is none after the last

    class Far(Whole):
        def view(self, start: int, end: int) -> memoryview:
            got[start].set()
            return super().view(start, end)

    class Slow(InTurn):
        def upload(self, key: str, size: int) -> Upload:
            upload = super().upload(key, size)
            write = upload.write

            def wait_for_next(offset: int, data: memoryview) -> None:
                assert got[offset + 1000].wait(60)
                write(offset, data)

            upload.write = wait_for_next  # type: ignore[method-assign]
            return upload

    known = (Chunk(5000, checksum(image)),)
    store = Slow(memory, part_bytes=1000, parallel=False)
    job = ImageWrite(
        source=Far(image),
        chunks=[5000],
        key="k",
        workers=workers,
        retry=retry,
        on_bytes=lambda _: None,
        hashed_chunks=known,
    )
    found = write_image(job, store)
    assert found == known
    assert read_object(memory, "k", limit=6000) == image


def test_a_part_is_tried_again_by_itself(memory, workers, retry):
    faulty = FaultyBackend(memory, [Rule(verb="write", nth=2, fault=Raise(TransientStorageError))])
    written: list[int] = []
    assert write(faulty, workers, retry, on_bytes=written.append) == table_of(IMAGE, WHOLE)
    assert [call.verb for call in faulty.calls].count("write") == 4
    assert sum(written) == len(IMAGE)  # what was written twice is counted once
    assert read_object(memory, "step/rank", limit=len(IMAGE)) == IMAGE


@pytest.mark.parametrize(
    "fault",
    [Raise(TransientStorageError), LoseReply(TransientStorageError)],
    ids=["raise", "lost reply"],
)
@pytest.mark.parametrize("verb", ["upload", "write", "finish"])
def test_each_step_is_tried_again_after_a_transient_error(memory, workers, retry, verb, fault):
    faulty = FaultyBackend(memory, [Rule(verb=verb, nth=1, fault=fault)])
    assert write(faulty, workers, retry) == table_of(IMAGE, WHOLE)
    assert read_object(memory, "step/rank", limit=len(IMAGE)) == IMAGE


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize(("verb", "nth"), [("write", 1), ("write", 3), ("finish", 1)])
def test_a_lasting_error_aborts_the_upload_and_nothing_is_visible(
    memory, workers, retry, verb, nth, parallel
):
    memory.put("step/rank", [b"old"])
    rule = Rule(verb=verb, nth=nth, fault=Raise(OutOfSpace))
    inner = FaultyBackend(memory, [rule])
    backend = inner if parallel else NotParallel(inner)
    with pytest.raises(OutOfSpace):
        write(backend, workers, retry)
    assert [call.verb for call in inner.calls][-1] == "abort"
    assert read_object(memory, "step/rank", limit=10) == b"old"


class NotParallel:
    def __init__(self, inner: FaultyBackend) -> None:
        self.inner = inner
        self.capabilities = replace(inner.capabilities, parallel_parts=False)

    def upload(self, key: str, size: int) -> Upload:
        return self.inner.upload(key, size)


def test_a_transient_error_that_stays_is_raised_after_the_last_try(memory, workers, retry):
    faulty = FaultyBackend(memory, [Rule(verb="write", fault=Raise(TransientStorageError))])
    with pytest.raises(TransientStorageError):
        write(faulty, workers, retry)
    assert list(memory.list("")) == []


def test_an_upload_that_cannot_begin_is_an_error_and_nothing_is_aborted(memory, workers, retry):
    faulty = FaultyBackend(memory, [Rule(verb="upload", fault=Raise(OutOfSpace))])
    with pytest.raises(OutOfSpace):
        write(faulty, workers, retry)
    assert [call.verb for call in faulty.calls] == ["upload"]


@pytest.mark.parametrize("verb", ["write", "finish"])
def test_a_crash_leaves_nothing_visible(memory, workers, retry, verb):
    faulty = FaultyBackend(memory, [Rule(verb=verb, fault=Crash("before"))])
    with pytest.raises(SimulatedCrash):
        write(faulty, workers, retry)
    assert list(memory.list("")) == []


class Noted(list):
    """Lengths of chunks that take time, and count how often they are requested."""

    asked = 0

    def __getitem__(self, index):
        time.sleep(0.005)
        self.asked += 1
        return super().__getitem__(index)


@pytest.mark.parametrize("busy", [True, False])
@pytest.mark.parametrize("parallel", [True, False])
def test_the_image_is_not_read_after_the_failure_is_raised(memory, retry, parallel, busy):
    """The slot may be filled again, or freed, as soon as the error is raised."""
    inner = FaultyBackend(memory, [Rule(verb="write", nth=1, fault=Raise(OutOfSpace))])
    chunks = Noted(lengths(len(IMAGE), *range(0, len(IMAGE), 1 << 20)))
    go_on = threading.Event()
    with Workers("test", 1 if parallel or busy else 2) as workers:
        if busy and not parallel:  # the thread that would hash has other work
            workers.submit(go_on.wait, 10)
        with pytest.raises(OutOfSpace):
            write(inner if parallel else NotParallel(inner), workers, retry, chunks=chunks)
        asked = chunks.asked
        go_on.set()
        time.sleep(0.05)
    assert chunks.asked == asked


class Mistaken(Wrapped):
    """A foreign store with a mistake in it."""

    def upload(self, key: str, size: int) -> Any:
        upload = self.inner.upload(key, size)
        write = upload.write

        def mistaken(offset: int, data: memoryview) -> None:
            if not offset:
                raise ZeroDivisionError("a mistake")
            write(offset, data)

        upload.write = mistaken
        return upload


@pytest.mark.timeout(20)
def test_whatever_a_store_raises_nobody_waits_for_room_in_a_ring_any_more(memory, workers, retry):
    size = 160 << 20
    window = RingWindow(ring_of(3, step=32 << 20), size)
    ended: list[CkptError] = []

    def copy() -> None:
        try:
            for end in range(1 << 20, size + 1, 1 << 20):
                window.wait_room(end)
                window.land(end)
        except CkptError as error:
            ended.append(error)

    job = ImageWrite(
        source=window,
        chunks=lengths(size, *range(0, size, 4 << 20)),
        key="step/rank",
        workers=workers,
        retry=retry,
        on_bytes=lambda _: None,
    )
    copier = threading.Thread(target=copy)
    copier.start()
    with pytest.raises(ZeroDivisionError):
        write_image(job, Mistaken(memory))
    copier.join()
    assert "a mistake" in str(ended[0])

from __future__ import annotations

import itertools
import threading
from dataclasses import replace

import numpy as np
import pytest

from ckpt.codec.registry import Encoder, encoder_of
from ckpt.errors import ChecksumMismatch, OutOfSpace, StagingError, TransientStorageError
from ckpt.model.box import Box
from ckpt.model.checksum import checksum
from ckpt.model.keys import StepRef, data_name
from ckpt.model.manifest import Chunk, Encoding, File, Shard, StoredFile, Tensor
from ckpt.pipeline.encoded_writer import widths_of, write_encoded
from ckpt.pipeline.image_writer import ImageWrite
from ckpt.pipeline.stored_image import StoredImage
from ckpt.staging.window import RingWindow, Window
from ckpt.storage.api import PutUpload, read_object
from ckpt.storage.testing import FaultyBackend, LoseReply, Raise, Rule, flip_byte
from tests.kit.rings import copy_bytes, ring_of
from tests.kit.stores import Wrapped
from tests.pipeline.whole import Whole

MIB = 1 << 20
FLOATS = (np.random.default_rng(4).standard_normal(7 * MIB) * 0.02).astype(np.float32).tobytes()
IMAGE = bytes(4096) + FLOATS + np.random.default_rng(5).bytes(3 * MIB + 5)
REF = StepRef(1, "abcdefghijkl")
KEY = REF.key(data_name(0))
CHUNKS = [4096, *[MIB * 4] * 7, 3 * MIB, 5]
WIDTHS = [1, *[4] * 7, 1, 1]
TABLE = tuple(
    Chunk(b - a, checksum(IMAGE[a:b]))
    for a, b in itertools.pairwise(itertools.accumulate(CHUNKS, initial=0))
)


def encoder(codec: str) -> Encoder:
    found = encoder_of(codec)
    assert found is not None
    return found


def write(backend, workers, retry, *, source=None, codec="zstd", on_bytes=lambda _: None, **more):
    job = ImageWrite(
        source=source or Whole(memoryview(IMAGE)),
        chunks=CHUNKS,
        key=KEY,
        workers=workers,
        retry=retry,
        on_bytes=on_bytes,
        **more,
    )
    return write_encoded(job, backend, encoder(codec), WIDTHS)


def image_of(backend, lengths, retry, table=TABLE) -> StoredImage:
    file = File(data_name(0), 0, sum(chunk.nbytes for chunk in table), table)
    stored = StoredFile.of(REF, file, Encoding(0, "zstd", tuple(lengths)))
    return StoredImage.of(backend, stored, retry)


class OneByOne(Wrapped):
    """A store that takes one part at a time.

    It keeps the parts until the end, or says that it does not.
    """

    takes_parts = False

    def __init__(self, inner) -> None:
        super().__init__(inner)
        self.capabilities = replace(
            inner.capabilities, part_bytes=MIB, parallel_parts=False, takes_parts=self.takes_parts
        )
        self.inside = threading.Lock()

    def upload(self, key: str, size: int) -> PutUpload:
        upload = PutUpload(self, key, size)
        write = upload.write

        def alone(offset: int, data: memoryview) -> None:
            assert self.inside.acquire(blocking=False), "two parts at once"
            write(offset, data)
            self.inside.release()

        upload.write = alone  # type: ignore[method-assign]
        return upload


class Taking(OneByOne):
    """A store that puts everything at the end, as S3 does for small objects."""

    takes_parts = True


@pytest.mark.parametrize("known", [(), TABLE])
@pytest.mark.parametrize("wrap", [lambda b: b, OneByOne, Taking])
def test_chunks_lie_one_after_another_and_decode_to_the_image(
    memory, workers, retry, wrap, known
) -> None:
    reported: list[int] = []
    chunks, lengths = write(
        wrap(memory), workers, retry, hashed_chunks=known, on_bytes=reported.append
    )
    assert chunks == TABLE
    assert sum(reported) == len(IMAGE)
    assert memory.head(KEY).size == sum(lengths) < len(IMAGE) * 0.9
    assert list(lengths[-2:]) == CHUNKS[-2:], "noise is stored raw"
    source = image_of(memory, lengths, retry)
    assert source.size == len(IMAGE)
    for a, b in [
        (0, 4096),
        (0, 9 * MIB),
        (4096, 4096 + 4 * MIB),
        (5 * MIB + 3, 21 * MIB),
        (len(IMAGE) - 9, len(IMAGE)),
    ]:
        assert source.view(a, b) == IMAGE[a:b]


def test_the_same_image_gives_the_same_file_whoever_is_faster(memory, workers, retry) -> None:
    files = set()
    for _ in range(3):
        write(memory, workers, retry)
        files.add(checksum(read_object(memory, KEY, limit=1 << 30)))
    assert len(files) == 1


def test_an_encoded_file_can_be_encoded_or_left_raw_on_the_next_tier(
    memory, workers, retry
) -> None:
    _, lengths = write(memory, workers, retry)
    near = read_object(memory, KEY, limit=1 << 30)
    again, _ = write(memory, workers, retry, source=image_of(memory, lengths, retry))
    assert again == TABLE
    assert read_object(memory, KEY, limit=1 << 30) == near
    memory.put(KEY, [IMAGE])
    from_raw, _ = write(memory, workers, retry, source=image_of(memory, CHUNKS, retry))
    assert from_raw == TABLE


@pytest.mark.parametrize("encoded", [True, False])
def test_no_byte_of_a_damaged_chunk_is_handed_on(memory, workers, retry, encoded) -> None:
    lengths: list[int] = list(CHUNKS)
    memory.put(KEY, [IMAGE])
    if encoded:
        _, lengths = write(memory, workers, retry)
    there = bytearray(read_object(memory, KEY, limit=1 << 30))
    place = sum(lengths[:2]) + lengths[2] // 2
    there[place] ^= 1
    memory.put(KEY, [bytes(there)])
    stored, starts = image_of(memory, lengths, retry), list(itertools.accumulate(CHUNKS, initial=0))
    assert stored.view(0, starts[2]) == IMAGE[: starts[2]]
    for span in ((starts[2], starts[3]), (0, starts[3]), (starts[3] - 1, starts[3] + 1)):
        with pytest.raises(ChecksumMismatch):
            stored.view(*span)
    assert stored.view(starts[3], len(IMAGE)) == IMAGE[starts[3] :]


@pytest.mark.parametrize(
    ("verb", "nth"), [("upload", 1), ("write", 1), ("write", 3), ("finish", 1)]
)
def test_a_part_is_tried_again(memory, workers, retry, verb, nth) -> None:
    for fault in (Raise(TransientStorageError), LoseReply(TransientStorageError)):
        if isinstance(fault, LoseReply) and verb == "finish":
            continue  # a memory upload ends once
        backend = FaultyBackend(memory, [Rule(verb=verb, nth=nth, fault=fault)])
        chunks, lengths = write(backend, workers, retry)
        assert chunks == TABLE
        assert image_of(memory, lengths, retry).view(0, len(IMAGE)) == IMAGE


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_lasting_error_is_raised_and_leaves_nothing(memory, workers, retry, nth) -> None:
    backend = FaultyBackend(memory, [Rule(verb="write", nth=nth, fault=Raise(OutOfSpace))])
    with pytest.raises(OutOfSpace):
        write(backend, workers, retry)
    assert list(memory.list("")) == []
    assert [call.verb for call in backend.calls].count("abort") == 1


def test_an_image_that_never_lands_ends_it(memory, workers, retry) -> None:
    window = Window(memoryview(bytearray(IMAGE)), len(IMAGE))
    window.land(10 * MIB)
    timer = threading.Timer(0.1, window.fail, [StagingError("gone")])
    timer.start()
    with pytest.raises(StagingError, match="gone"):
        write(memory, workers, retry, source=window)
    timer.join()
    assert list(memory.list("")) == []


def test_a_ring_smaller_than_the_image(memory, workers, retry) -> None:
    image = IMAGE * 4
    chunks, widths = CHUNKS * 4, WIDTHS * 4
    window = RingWindow(ring_of(5, step=16 * MIB), len(image))

    def copy() -> None:
        for start in range(0, len(image), MIB):
            end = min(len(image), start + MIB)
            window.wait_room(end)
            copy_bytes(window, image, start, end)
            window.land(end)

    copier = threading.Thread(target=copy, daemon=True)
    copier.start()
    job = ImageWrite(
        source=window,
        chunks=chunks,
        key=KEY,
        workers=workers,
        retry=retry,
        on_bytes=lambda _: None,
    )
    table, lengths = write_encoded(job, memory, encoder("zstd"), widths)
    copier.join()
    assert [chunk.nbytes for chunk in table] == chunks
    stored = image_of(memory, lengths, retry, table)
    assert stored.view(0, len(image)) == image


@pytest.mark.parametrize("encoded", [False, True])
def test_small_chunks_are_read_back_by_requests_as_large_as_ever(
    memory, workers, retry, encoded
) -> None:
    """If the nearer tier is itself far, each request costs a round trip. A drain in parts of 8 MiB
    has one request for each, and two for their ragged ends.
    """
    chunks = [4096, *[MIB // 2] * 79, MIB // 2 - 4096 + 5]
    image = (FLOATS * 2)[: sum(chunks)]
    edges = list(itertools.accumulate(chunks, initial=0))
    table = tuple(Chunk(b - a, checksum(image[a:b])) for a, b in itertools.pairwise(edges))
    lengths = tuple(chunks)
    if encoded:
        job = ImageWrite(
            source=Whole(memoryview(image)),
            chunks=chunks,
            key=KEY,
            workers=workers,
            retry=retry,
            on_bytes=lambda _: None,
        )
        _, lengths = write_encoded(job, memory, encoder("zstd"), [4] * len(chunks))
        assert sum(lengths) < len(image)
    else:
        memory.put(KEY, [image])
    asked: list[int] = []
    read_into = memory.read_into

    def counted(key: str, offset: int, out: memoryview) -> None:
        asked.append(out.nbytes)
        read_into(key, offset, out)

    memory.read_into = counted
    stored = image_of(memory, lengths, retry, table)
    for start in range(0, len(image), 8 * MIB):
        end = min(start + 8 * MIB, len(image))
        assert stored.view(start, end) == image[start:end]
    assert len(asked) <= 2 * 6
    assert max(asked) <= 16 * MIB
    assert sum(asked) <= 1.1 * sum(lengths)
    asked.clear()
    assert image_of(memory, lengths, retry, table).view(1, len(image)) == image[1:]
    assert len(asked) == 4
    at = edges[40] + 7 if not encoded else list(itertools.accumulate(lengths, initial=0))[40] + 7
    data = bytearray(read_object(memory, KEY, limit=len(image)))
    data[at] ^= 1
    memory.put(KEY, [bytes(data)])
    with pytest.raises(ChecksumMismatch) as damaged:
        stored.view(16 * MIB, 24 * MIB)
    assert damaged.value.offset <= at < damaged.value.offset + lengths[40]


def test_a_ring_too_small_for_a_chunk_is_refused(memory, workers, retry) -> None:
    window = RingWindow(ring_of(2, step=16 * MIB), 100 * MIB)
    with pytest.raises(StagingError, match="too small for its tier: give it 4 MiB more"):
        write(memory, workers, retry, source=window)


def test_widths_follow_the_tensors_of_a_file() -> None:
    def tensor(name: str, dtype: str, offset: int, count: int) -> Tensor:
        shard = Shard(0, offset, (0,), (count,))
        assert isinstance(shard.box, Box)
        return Tensor(name, dtype, (count,), (shard,))

    tensors = [
        tensor("a", "float32", 4096, 8),
        tensor("b", "bfloat16", 4128, 4),
        tensor("none", "float64", 4136, 0),
        tensor("c", "bool", 4136, 3),
    ]
    assert widths_of([4096, 16, 16, 8, 3], tensors) == [1, 4, 4, 2, 1]


def test_a_damaged_chunk_is_named_by_key_and_place(memory, workers, retry) -> None:
    table, lengths = write(memory, workers, retry)
    starts = list(itertools.accumulate(lengths, initial=0))
    encoded = [
        i for i, length in enumerate(lengths) if length < table[i].nbytes and table[i].nbytes > 4096
    ]
    for index in encoded[:3]:
        flip_byte(memory, KEY, starts[index])
        begin = sum(CHUNKS[:index])
        with pytest.raises(ChecksumMismatch) as caught:
            image_of(memory, lengths, retry).view(begin, begin + CHUNKS[index])
        assert (caught.value.key, caught.value.offset) == (KEY, starts[index])
        assert caught.value.nbytes == lengths[index]
    assert encoded

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.errors import StagingError
from ckpt.staging.window import Window


def in_thread(work):
    found: list[object] = []

    def run() -> None:
        try:
            found.append(work())
        except StagingError as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, found


def test_bytes_are_seen_once_they_have_landed_and_not_before():
    window = Window(memoryview(bytearray(b"abcdef")), 6)
    window.land(2)
    assert bytes(window.view(0, 2)) == b"ab"
    reader, found = in_thread(lambda: bytes(window.view(1, 4)))
    time.sleep(0.05)
    assert not found
    window.land(3)
    time.sleep(0.05)
    assert not found
    window.land(6)
    reader.join(5)
    assert found == [b"bcd"]


def test_landing_never_goes_back():
    window = Window(memoryview(bytearray(8)), 8)
    window.land(6)
    window.land(2)
    assert window.view(0, 6).nbytes == 6


def test_a_failure_reaches_those_that_wait_for_bytes_and_for_room():
    window = Window(memoryview(bytearray(4)), 100)
    reader, read = in_thread(lambda: window.view(0, 1))
    copier, room = in_thread(lambda: window.wait_room(5))
    time.sleep(0.02)
    window.fail(StagingError("lost"))
    reader.join(5)
    copier.join(5)
    assert [str(one) for one in (*read, *room)] == ["lost", "lost"]
    window.fail(StagingError("later"))
    with pytest.raises(StagingError, match="lost"):  # the first error is the cause
        window.view(0, 1)


def test_an_image_that_fits_needs_no_room_and_stays():
    window = Window(memoryview(bytearray(b"abcd")), 4, "/dev/shm/x")
    assert window.whole
    assert window.path == "/dev/shm/x"
    window.wait_room(4)
    window.land(4)
    for _ in range(2):  # one tier after the other
        assert bytes(window.view(1, 3)) == b"bc"
        window.written(1, 3)
        window.hashed(1, 3)


def test_a_ring_frees_what_is_both_written_and_hashed_whatever_the_order():
    window = Window(memoryview(bytearray(10)), 25, "/dev/shm/x")
    assert window.path is None  # the file never holds the whole image
    window.wait_room(10)
    window.land(10)
    window.written(4, 8)
    window.hashed(0, 8)
    copier, room = in_thread(lambda: window.wait_room(18))
    time.sleep(0.05)
    assert not room
    window.written(0, 4)
    copier.join(5)
    assert room == [None]


@given(
    size=st.integers(1, 200),
    capacity=st.integers(8, 64).map(lambda n: n * 2),
    piece=st.integers(1, 4),
    part=st.integers(1, 5),
    chunk=st.integers(1, 7),
)
def test_everything_passes_through_a_ring_unharmed(size, capacity, piece, part, chunk):
    """A copier, a writer and a hasher use different strides. All bytes arrive, and none is
    overwritten before both have read it.
    """
    data = bytes(i % 251 for i in range(size))
    memory = bytearray(capacity)
    window = Window(memoryview(memory), size)

    def copy() -> None:
        for start in range(0, size, piece):
            end = min(size, start + piece)
            window.wait_room(end)
            for o in range(start, end):
                memory[o % capacity] = data[o]
            window.land(end)

    def take(stride: int, tell) -> bytes:
        found = b""
        for start in range(0, size, stride):
            end = min(size, start + stride)
            found += bytes(window.view(start, end))
            tell(start, end)
        return found

    writer, written = in_thread(lambda: take(part, window.written))
    hasher, hashed = in_thread(lambda: take(chunk, window.hashed))
    copy()
    writer.join(10)
    hasher.join(10)
    assert written == hashed == [data]

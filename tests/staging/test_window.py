from __future__ import annotations

import logging
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ckpt.errors import HostMemoryExhausted, StagingError
from ckpt.staging.memory_budget import Room
from ckpt.staging.ring import Ring, Spill
from ckpt.staging.window import RingWindow, Window
from tests.kit.rings import copy_bytes, ring_of

STEP = 16
"""The bytes of a frame here."""


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
    window = RingWindow(ring_of(1, step=STEP), 100)
    reader, read = in_thread(lambda: window.view(0, 1))
    copier, room = in_thread(lambda: window.wait_room(STEP + 1))
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
        window.note_written(1, 3)
        window.note_hashed(1, 3)


def test_a_ring_frees_a_piece_that_is_both_written_and_hashed_whatever_the_order():
    window = RingWindow(ring_of(2, step=STEP), 3 * STEP)
    window.wait_room(2 * STEP)
    window.land(2 * STEP)
    assert window.path is None  # no file holds the whole image
    assert window.rereadable
    window.note_written(STEP, 2 * STEP)
    window.note_hashed(0, 2 * STEP - 1)
    assert not window.has_room(3 * STEP)
    copier, room = in_thread(lambda: window.wait_room(3 * STEP))
    window.note_hashed(2 * STEP - 1, 2 * STEP)  # the second piece, before the first
    copier.join(5)
    assert room == [None]
    assert not window.rereadable


def test_bytes_that_are_written_again_count_once():
    """A full disk refuses the file after some parts, and gets all of them again."""
    window = RingWindow(ring_of(1, step=STEP), 2 * STEP)
    window.wait_room(STEP)
    window.land(STEP)
    window.note_written(0, STEP // 2)
    window.note_written(0, STEP // 2)
    window.note_hashed(0, STEP)
    assert not window.has_room(2 * STEP)


def test_an_optimizer_that_waits_gets_the_rest_of_the_image_into_the_spill():
    ring = ring_of(2, spill=3, step=STEP)
    window = RingWindow(ring, 6 * STEP)
    window.wait_room(2 * STEP)
    assert not window.has_room(3 * STEP)
    copier, room = in_thread(lambda: window.wait_room(5 * STEP))
    assert ring.spill.count == 0
    window.hurry()
    copier.join(5)
    assert room == [None]
    assert ring.spill.count == 3
    assert not window.has_room(6 * STEP)  # more is not allowed, so the optimizer waits
    window.abandon()
    ring.reclaim()
    assert ring.spill.count == 3  # for the next save, which need not wait for pages
    following = RingWindow(ring, 6 * STEP)
    assert following.has_room(5 * STEP)


def test_the_spill_is_freed_when_the_last_saves_did_not_need_it():
    ring = ring_of(2, spill=3, step=STEP)
    for saves in range(9):
        assert ring.spill.count == (3 if saves else 0)
        window = RingWindow(ring, 5 * STEP)
        if not saves:
            window.hurry()
            window.wait_room(5 * STEP)
        window.abandon()
        window.hurry()  # the optimizer's step comes after the end of the save
        ring.reclaim()
    assert ring.spill.count == 0


def refuse(*_: object) -> None:
    raise HostMemoryExhausted(STEP, "Cannot allocate memory")


@pytest.mark.parametrize("why", ["pages", "budget"])
def test_a_spill_without_memory_lets_the_optimizer_wait_as_before(monkeypatch, caplog, why):
    room = Room(memory=STEP - 1, shared_bytes=0, ranks=1)
    with monkeypatch.context() as patched:
        if why == "pages":
            patched.setattr("ckpt.staging.ring.Slot.prefault", refuse)
        else:
            patched.setattr("ckpt.staging.ring.measure", lambda *_, **__: room)
        ring = ring_of(1, spill=5, step=STEP)
        window = RingWindow(ring, 2 * STEP)
        window.hurry()
        window.wait_room(STEP)
        assert not window.has_room(2 * STEP)
        assert ring.spill.count == 0
        assert caplog.text.count("an optimizer's step may wait") == 1
        window.land(STEP)
        window.note_written(0, STEP)
        window.note_hashed(0, STEP)
        assert window.has_room(2 * STEP)
        window.abandon()
        ring.reclaim()
    window = RingWindow(ring, 2 * STEP)  # There is memory again
    window.hurry()
    window.wait_room(2 * STEP)
    assert ring.spill.count == 1


def test_the_spill_leaves_the_reserve_to_the_training(monkeypatch, caplog):
    """It grows only above the reserve, and gives frames back if the training takes more."""
    caplog.set_level(logging.INFO, "ckpt")
    machine = SimpleNamespace(free=9 * STEP)

    def room(*_: object, **__: object) -> Room:
        return Room(memory=machine.free, shared_bytes=0, ranks=1)

    grow = Spill.grow

    def take(spill: Spill, *arguments: Any) -> None:
        grow(spill, *arguments)
        machine.free -= STEP * spill.has_free

    monkeypatch.setattr("ckpt.staging.ring.measure", room)
    monkeypatch.setattr("ckpt.staging.ring.free_memory", lambda: machine.free)
    monkeypatch.setattr(Spill, "grow", take)
    ring = ring_of(1, spill=8, step=STEP)
    ring.spill.allow(8 * STEP, reserve_bytes=5 * STEP)
    window = RingWindow(ring, 9 * STEP)
    window.hurry()
    window.wait_room(5 * STEP)
    assert not window.has_room(6 * STEP)
    assert ring.spill.count == 4
    window.abandon()
    ring.reclaim()
    machine.free -= 3 * STEP
    window = RingWindow(ring, 9 * STEP)
    window.hurry()
    assert ring.spill.count == 1
    assert "little memory is free" in caplog.text
    window.abandon()
    ring.reclaim()
    ring.spill.allow(8 * STEP, reserve_bytes=2 * STEP, ranks=2)
    machine.free = 3 * STEP  # of the 4 that two ranks leave free: each makes room for its half
    RingWindow(ring, 9 * STEP).hurry()
    assert ring.spill.count == 0


def test_ctrl_c_while_the_spill_grows_leaves_its_count_right(monkeypatch):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    ring = ring_of(1, spill=1, step=STEP)
    window = RingWindow(ring, 9 * STEP)
    monkeypatch.setattr("ckpt.staging.ring.Slot.prefault", interrupted)
    with pytest.raises(KeyboardInterrupt):
        window.reserve([(0, 1)])
    assert ring.spill.count == 0


def test_bytes_of_several_frames_are_parts_of_the_memory_itself():
    ring = ring_of(3, step=STEP)
    window = RingWindow(ring, 3 * STEP)
    data = bytes(range(3 * STEP))
    for start in range(0, 3 * STEP, STEP):
        window.wait_room(start + STEP)
        copy_bytes(window, data, start, start + STEP)
    window.land(3 * STEP)
    parts = window.parts(STEP - 3, 2 * STEP + 5)
    assert [len(part) for part in parts] == [3, STEP, 5]
    assert b"".join(parts) == bytes(window.view(STEP - 3, 2 * STEP + 5))
    copy_bytes(window, bytes(3 * STEP), STEP, 2 * STEP)
    assert bytes(parts[1]) == bytes(STEP)  # no copy


def test_memory_that_is_reserved_leaves_the_ring_to_the_copy():
    ring = ring_of(2, spill=2, step=STEP)
    window = RingWindow(ring, 6 * STEP)
    assert window.reserve([(STEP, STEP + 3), (3 * STEP - 1, 3 * STEP)])
    assert not window.reserve([(5 * STEP, 6 * STEP)])
    window.wait_room(4 * STEP)  # pieces 0 and 3 are in the ring
    window.abandon()
    ring.reclaim()
    assert ring.spill.count == 2


def test_a_reserved_piece_that_was_written_before_the_copy_came_to_it_takes_no_frame():
    """The bytes before the next copy land with the last one, those of reserved pieces included."""
    ring = ring_of(1, spill=2, step=STEP)
    window = RingWindow(ring, 4 * STEP)
    assert window.reserve([(STEP, 3 * STEP)])
    window.wait_room(STEP)
    window.land(3 * STEP)
    for note in (window.note_written, window.note_hashed):
        note(0, 3 * STEP)
    assert window.has_room(4 * STEP)
    window.land(4 * STEP)
    for note in (window.note_written, window.note_hashed):
        note(3 * STEP, 4 * STEP)
    assert not window._frames


def test_a_header_of_any_length_needs_one_frame():
    data = bytes(range(5 * STEP))
    window = RingWindow(ring_of(2, step=STEP), len(data), header=data[: 4 * STEP + 3])
    assert window.resident_bytes == 4 * STEP
    assert bytes(window.view(0, 4 * STEP)) == data[: 4 * STEP]
    assert window.has_room(5 * STEP)
    copy_bytes(window, data, 4 * STEP + 3, 5 * STEP)
    window.land(5 * STEP)
    assert bytes(window.view(1, 5 * STEP)) == data[1:]
    assert [len(part) for part in window.parts(2, 5 * STEP)] == [4 * STEP - 2, STEP]
    window.hurry()
    window.abandon()
    assert window._ring.spill._frames_to_keep == 0  # the frames of the ring suffice


@given(
    size=st.integers(1, 200),
    header=st.integers(0, 200),
    frames=st.integers(4, 8),
    spill=st.integers(0, 6),
    piece=st.integers(1, STEP),
    part=st.integers(1, 9),
    chunk=st.integers(1, 13),
    hurry=st.integers(0, 200),
)
def test_everything_passes_through_a_ring_unharmed(
    size, header, frames, spill, piece, part, chunk, hurry
):
    """A copier, a writer and a hasher use different strides. All bytes arrive, and none is
    overwritten before both have read it.
    """
    data = bytes(i % 251 for i in range(size))
    ring = ring_of(frames, spill, step=STEP)
    header = min(header, size)
    window = RingWindow(ring, size, data[:header])

    def copy_all() -> None:
        start = header
        while start < size:
            end = min(size, start + piece, (start // STEP + 1) * STEP)
            if start >= hurry:
                window.hurry()
            window.wait_room(end)
            copy_bytes(window, data, start, end)
            window.land(end)
            start = end
        window.land(size)

    def take(stride: int, tell) -> bytes:
        found = b""
        for start in range(0, size, stride):
            end = min(size, start + stride)
            found += bytes(window.view(start, end))
            tell(start, end)
        return found

    writer, written = in_thread(lambda: take(part, window.note_written))
    hasher, hashed = in_thread(lambda: take(chunk, window.note_hashed))
    copy_all()
    writer.join(10)
    hasher.join(10)
    assert written == hashed == [data]
    window.abandon()
    ring.reclaim()
    assert ring.spill.count <= spill


class Images(RuleBasedStateMachine):
    """Images pass through two rings with one spill, in any order of copies, writes, hashes,
    hurries, reservations, failures and ends.
    """

    def __init__(self) -> None:
        super().__init__()
        spill = Spill(lambda: True, STEP)
        spill.allow(3 * STEP)
        self.rings = [Ring(2 * STEP, spill, lambda: True) for _ in range(2)]
        self.spill = spill
        self.images: list[Model | None] = [None, None]
        self.count = 0

    @rule(which=st.integers(0, 1), size=st.integers(1, 9 * STEP))
    def begin(self, which: int, size: int) -> None:
        if self.images[which] is None:
            self.count += 1
            self.images[which] = Model(self.rings[which], size, self.count)

    @rule(which=st.integers(0, 1), length=st.integers(1, 2 * STEP))
    def copy(self, which: int, length: int) -> None:
        if (image := self.images[which]) is not None:
            image.copy(length)

    @rule(which=st.integers(0, 1), use=st.integers(0, 1), share=st.floats(0, 1))
    def use(self, which: int, use: int, share: float) -> None:
        if (image := self.images[which]) is not None:
            image.use(use, share)

    @rule(which=st.integers(0, 1))
    def hurry(self, which: int) -> None:
        if (image := self.images[which]) is not None:
            image.window.hurry()

    @rule(which=st.integers(0, 1), start=st.integers(0, 9 * STEP))
    def reserve(self, which: int, start: int) -> None:
        if (image := self.images[which]) is not None and image.landed == 0 and start < image.size:
            image.window.reserve([(start, start + 1)])

    @rule(which=st.integers(0, 1), fails=st.booleans())
    def end(self, which: int, fails: bool) -> None:
        if (image := self.images[which]) is not None:
            if fails:
                image.window.note_loss(StagingError("disk full"))
                with pytest.raises(StagingError, match="disk full"):
                    image.window.view(0, 1)
            image.window.abandon()
            self.rings[which].reclaim()
            self.images[which] = None

    @invariant()
    def memory_is_bounded_and_bytes_are_right(self) -> None:
        assert self.spill.count <= 3
        for image in self.images:
            if image is not None:
                image.check()


class Model:
    def __init__(self, ring: Ring, size: int, seed: int) -> None:
        self.window, self.size, self.landed = RingWindow(ring, size), size, 0
        self.data = bytes((seed * 89 + i * 7) % 251 for i in range(size))
        self.used: tuple[set[int], set[int]] = (set(), set())

    def copy(self, length: int) -> None:
        end = min(self.size, self.landed + length)
        if self.landed < end and self.window.has_room(end):
            for start in range(self.landed // STEP * STEP, end, STEP):
                first, last = max(start, self.landed), min(start + STEP, end)
                copy_bytes(self.window, self.data, first, last)
            self.window.land(end)
            self.landed = end

    def use(self, use: int, share: float) -> None:
        """Write or hash a random run of the bytes that have landed and are not yet used."""
        waiting = sorted(set(range(self.landed)) - self.used[use])
        if waiting:
            start = waiting[int(share * (len(waiting) - 1))]
            end = start + 1
            while end < self.landed and end - start < 5 and end not in self.used[use]:
                end += 1
            assert bytes(self.window.view(start, end)) == self.data[start:end]
            (self.window.note_written if use == 0 else self.window.note_hashed)(start, end)
            self.used[use].update(range(start, end))

    def check(self) -> None:
        """Everything that has landed and was not given back is what was copied."""
        for start in range(0, self.landed, STEP):
            piece = range(start, min(self.size, start + STEP))
            if not all(set(piece) <= used for used in self.used):
                end = min(self.landed, piece.stop)
                assert bytes(self.window.view(start, end)) == self.data[start:end]


TestImages = Images.TestCase

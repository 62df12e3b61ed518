"""The view of one image while it is copied from the state to memory and written to a tier.

A byte of the image has *landed* when it was copied from the state. The bytes land in order, and can
be written as soon as they have landed. The memory of a `Window` holds the whole image. If the slot
is smaller than the image, a `RingWindow` lets the image pass through the frames of a ring, piece by
piece (see ``ckpt.staging.ring``).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from typing import Final

import torch

from ckpt.errors import CkptError, StagingError
from ckpt.locks import Condition
from ckpt.staging.copies import PIECE_BYTES
from ckpt.staging.ring import Frame, Ring
from ckpt.staging.slot import Slot

_WRITE: Final = 0
_HASH: Final = 1
"""The two uses of the bytes of an image in a ring: the indices in ``RingWindow._uses``."""


class Window:
    """An image that is in memory as a whole.

    ``_landed_bytes`` have landed. ``_change`` is notified when more have, or when the image has
    ended (``_has_ended``): it has failed, or is not written any more.

    Thread safety: the copying thread calls ``wait_room``, ``land`` and ``fail``. The threads that
    write the image call ``view``, ``note_written``, ``note_hashed`` and ``note_loss``. Any thread
    may call ``abandon`` and ``hurry``.

    Args:
        memory: The memory of the image.
        size: The bytes of the image.
        path: The path of the memory's file in /dev/shm; None for anonymous memory.
    """

    whole = True
    """Whether the whole image is in memory, so that its bytes can be read more than once."""
    hurries = True
    """Whether the copy goes on without regard to the memory that it takes."""
    piece_bytes = PIECE_BYTES
    """The most bytes that land together."""
    ring_bytes = 0
    """The bytes of the ring that the image passes through; 0 if it is in memory as a whole."""

    def __init__(self, memory: memoryview, size: int, path: str | None = None) -> None:
        self.size, self.capacity, self.path = size, len(memory), path
        self.resident_bytes = 0
        """The bytes at the begin of the image that take no part of the capacity, since they stay in
        other memory.
        """
        self._memory = memory
        self._landed_bytes = 0
        self._error: CkptError | None = None
        self._is_abandoned = False
        self._change = Condition()

    @property
    def rereadable(self) -> bool:
        """Return True if all bytes that have landed can be read again."""
        return True

    # -- the copying side --------------------------------------------------------------------------

    def has_room(self, end: int) -> bool:  # noqa: ARG002 - for a `RingWindow`
        """Return True if ``wait_room`` would not wait."""
        return True

    def wait_room(self, end: int) -> None:
        """Wait until there is memory for the bytes up to ``end``.

        Raises:
            CkptError: ``fail``, ``note_loss`` or ``abandon`` was called, so there may never be
            memory.
        """

    def place(self, form: torch.Tensor, start: int) -> torch.Tensor:  # noqa: ARG002 - as above
        """Return the memory for the bytes of the image from ``start`` on, as a tensor like
        ``form``. ``wait_room`` must have returned for these bytes.
        """
        return form

    def reserve(self, ranges: Iterable[tuple[int, int]]) -> bool:  # noqa: ARG002 - as above
        """Take the memory for some ranges of bytes now, and return True. If there is not enough
        memory, return False.
        """
        return True

    def hurry(self) -> None:
        """Let the copy go on without regard to the memory that it takes, because an optimizer waits
        for it.
        """

    def land(self, end: int) -> None:
        """Declare that the bytes up to ``end`` have landed."""
        with self._change:
            self._landed_bytes = max(self._landed_bytes, end)
            self._change.notify_all()

    def fail(self, error: CkptError) -> None:
        """Declare that no more bytes will land, because of ``error``.

        All calls of ``wait_room`` and ``view``, waiting or later, then raise the first such error.
        """
        with self._change:
            self._error = self._error or error
            self._change.notify_all()

    # -- the streaming side ------------------------------------------------------------------------

    def view(self, start: int, end: int) -> memoryview:
        """Wait until the bytes ``start`` to ``end`` have landed, and return them.

        Raises:
            CkptError: ``fail``, ``note_loss`` or ``abandon`` has ended the image with this error.
                The bytes may have landed before.
        """
        self._wait_landed(end)
        return self._memory[start:end]

    def parts(self, start: int, end: int) -> Sequence[memoryview]:
        """Do what ``view`` does, but return bytes of several frames as several parts."""
        return [self.view(start, end)]

    def note_written(self, start: int, end: int) -> None:
        """Declare that bytes ``start`` to ``end`` are on the tier."""

    def note_hashed(self, start: int, end: int) -> None:
        """Declare that bytes ``start`` to ``end`` are in the chunk table."""

    def note_loss(self, error: CkptError) -> None:
        """Declare that a part of the image will never be written, because of ``error``.

        The image stays usable for the next tier if it is in memory as a whole. Otherwise it fails,
        since it cannot make progress.
        """

    def abandon(self) -> None:
        """Declare that no more bytes will be written. Calls of ``wait_room`` and ``view`` then
        raise ``StagingError``, or the error of ``fail`` if the image has failed.
        """
        with self._change:
            self._is_abandoned = True
            self._change.notify_all()

    @property
    def _is_given_up(self) -> bool:
        return self._error is not None or self._is_abandoned

    def _wait_landed(self, end: int) -> None:
        if self._landed_bytes >= end and not self._is_given_up:
            return  # Most chunks are read after the copy, and each would take the lock
        with self._change:
            self._change.wait_for(lambda: self._is_given_up or self._landed_bytes >= end)
            self._raise_if_given_up()

    def _raise_if_given_up(self) -> None:
        if self._error:
            raise self._error
        if self._is_abandoned:
            raise StagingError("the image is not written any more")


class RingWindow(Window):
    """An image that passes through the frames of a ring.

    A frame is given back when its piece is both written and hashed, in any order of the pieces.
    Until ``hurry`` is called, the copy takes only frames that exist, and so runs just ahead of the
    writers. From then on, the spill grows for what is left to copy.

    Pieces that hold nothing but the header take no frame, since the save plan keeps the header in
    memory. So a header of any length passes. These pieces are the first ``resident_bytes`` of the
    image, and ``_first_piece`` is the piece after them. The frames of ``_passed_pieces`` were given
    back.

    ``_frames`` has the frame of each piece that has one now. The copy has had one for each piece
    before ``_next_piece``, and ``reserve`` has taken ``_reserved_frames`` ahead of it.
    ``_frame_bytes`` is the size of a frame and of a piece. ``hurries`` is True once ``hurry`` was
    called. ``_tell_need`` tells the spill once how many frames this save needs.

    ``_uses`` has two sets of bytes: those that were written, and those that were hashed.

    Args:
        ring: The ring. All of its frames are free, and only one window uses it at a time.
        size: The bytes of the image.
        header: The first bytes of the image, which must not change.
    """

    whole = False

    def __init__(self, ring: Ring, size: int, header: bytes = b"") -> None:
        super().__init__(memoryview(b""), size)
        self._ring, self._frame_bytes = ring, ring.spill.frame_bytes
        self.piece_bytes = self._frame_bytes
        self.ring_bytes = ring.frames * self._frame_bytes
        # A range that begins within a frame needs one frame more, and the copy fills another one.
        self.capacity = self.ring_bytes - 2 * self._frame_bytes
        self._change = ring.spill.change
        self._frames: dict[int, Frame] = {}
        self._first_piece, rest = divmod(len(header), self._frame_bytes)
        self.resident_bytes = self._landed_bytes = len(header) - rest
        self._header = memoryview(header)
        # Only the header's last piece, which the data shares, takes a frame.
        if rest and (frame := ring.take()) is not None:
            frame.data[:rest] = self._header[-rest:]
            self._frames[self._first_piece] = frame
        self._passed_pieces: set[int] = set()
        self._next_piece, self._reserved_frames = self._first_piece, 0
        self._uses = (_Ranges(), _Ranges())  # The bytes that were written, and those hashed
        self.hurries = self._has_told_need = False

    @property
    def rereadable(self) -> bool:
        with self._change:
            return not self._passed_pieces and not self._is_given_up

    def has_room(self, end: int) -> bool:
        return self._take_room(end, wait=False)

    def wait_room(self, end: int) -> None:
        self._take_room(end, wait=True)

    def _take_room(self, end: int, *, wait: bool) -> bool:
        """Take the frames for the bytes up to ``end``. Return False if there are too few now, and
        ``wait`` is False.
        """
        while self._next_piece * self._frame_bytes < end:
            with self._change:
                frame = self._frames.get(self._next_piece)
                # A piece that ``reserve`` took may have been written and given back by now.
                has_passed = self._next_piece in self._passed_pieces
            if frame is None and not has_passed:
                if (frame := self._take_frame(wait=wait)) is None:
                    return False
                with self._change:
                    self._frames[self._next_piece] = frame
            # A new ring has untouched pages. This thread touches them, and not the call of a save.
            if frame is not None:
                frame.populate()
            self._next_piece += 1
        return True

    def place(self, form: torch.Tensor, start: int) -> torch.Tensor:
        return self._frames[start // self._frame_bytes].place(form, start % self._frame_bytes)

    def reserve(self, ranges: Iterable[tuple[int, int]]) -> bool:
        """Do what `Window.reserve` does: take frames for some ranges of bytes now."""
        pieces = {
            piece
            for start, end in ranges
            for piece in range(start // self._frame_bytes, -(-end // self._frame_bytes))
        }
        for piece in sorted(pieces - self._frames.keys()):
            # The frames of the ring itself stay free, so that the copy makes progress.
            if (frame := self._ring.borrow()) is None:
                return False
            with self._change:
                self._frames[piece] = frame
            self._reserved_frames += 1
        return True

    def hurry(self) -> None:
        with self._change:
            self.hurries = True
            pieces = -(-self.size // self._frame_bytes) - self._first_piece
            self._change.notify_all()
        self._tell_need(pieces - len(self._passed_pieces) - self._ring.frames)

    def abandon(self) -> None:
        super().abandon()
        self._tell_need(0)

    def view(self, start: int, end: int) -> memoryview:
        """Do what `Window.view` does. Bytes of several pieces are joined in other memory."""
        parts = self.parts(start, end)
        return parts[0] if len(parts) == 1 else memoryview(b"".join(parts))

    def parts(self, start: int, end: int) -> Sequence[memoryview]:
        self._wait_landed(end)
        frame_bytes, resident = self._frame_bytes, self.resident_bytes
        head = [self._header[start : min(end, resident)]] if start < resident else []
        start = max(start, resident)
        return head + [
            self._frames[piece].data[
                max(start - piece * frame_bytes, 0) : min(end - piece * frame_bytes, frame_bytes)
            ]
            for piece in range(start // frame_bytes, -(-end // frame_bytes))
        ]

    def note_written(self, start: int, end: int) -> None:
        self._note_use(_WRITE, start, end)

    def note_hashed(self, start: int, end: int) -> None:
        self._note_use(_HASH, start, end)

    def note_loss(self, error: CkptError) -> None:
        self.fail(error)

    def _take_frame(self, *, wait: bool) -> Frame | None:
        """Return a free frame; None if there is none and ``wait`` is False."""
        while True:
            with self._change:
                if wait:
                    self._change.wait_for(self._has_frame)
                elif not self._has_frame():
                    return None
                self._raise_if_given_up()
                if (frame := self._ring.take()) is not None:
                    return frame
                self._ring.spill.begin_growth()
            self._ring.grow()  # Without the lock, since it takes milliseconds

    def _has_frame(self) -> bool:
        """Return True if a frame can be taken or made, or if the image was given up."""
        may_grow = self._ring.spill.may_grow(hurries=self.hurries)
        return self._is_given_up or self._ring.has_free or may_grow

    def _note_use(self, use: int, start: int, end: int) -> None:
        """Note a use (``_WRITE`` or ``_HASH``) of some bytes. Give back the frames of the pieces
        that have had both.
        """
        with self._change:
            self._uses[use].add(start, end)
            for piece in range(start // self._frame_bytes, -(-end // self._frame_bytes)):
                piece_start, piece_end = (
                    piece * self._frame_bytes,
                    min(self.size, (piece + 1) * self._frame_bytes),
                )
                if piece in self._frames and all(
                    ranges.covers(piece_start, piece_end) for ranges in self._uses
                ):
                    self._ring.give_back(self._frames.pop(piece))
                    self._passed_pieces.add(piece)

    def _tell_need(self, frames: int) -> None:
        """Tell the spill, once for each image, how many frames the image needed."""
        with self._change:
            has_told, self._has_told_need = self._has_told_need, True
        if not has_told:
            self._ring.spill.need(max(self._reserved_frames, frames))


class _Ranges:
    """A set of integers, as a union of ranges."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def add(self, start: int, end: int) -> None:
        """Add the integers from ``start`` up to ``end``, without it."""
        # The ranges from ``low`` to ``high`` overlap or touch the new one, and are joined with it.
        low, high = bisect_left(self._ends, start), bisect_right(self._starts, end)
        if low < high:
            start, end = min(start, self._starts[low]), max(end, self._ends[high - 1])
        self._starts[low:high], self._ends[low:high] = [start], [end]

    def covers(self, start: int, end: int) -> bool:
        """Return True if the set has all integers from ``start`` up to ``end``, without it."""
        index = bisect_right(self._starts, start) - 1
        return index >= 0 and self._ends[index] >= end


def begin_image(slot: Slot, nbytes: int, header: bytes) -> Window:
    """Begin an image of ``nbytes`` in ``slot`` with ``header``, and return its window."""
    if nbytes > slot.capacity:
        assert isinstance(slot, Ring)
        return RingWindow(slot, nbytes, header)
    slot.view[: len(header)] = header
    return Window(slot.view[:nbytes], nbytes, slot.path)

"""Track the progress of an image: which bytes have landed, and which are already written.

A byte of an image has *landed* when it was copied from the state to the buffer. The bytes land in
order, and can be written as soon as they have landed. If the buffer is smaller than the image, it
is a ring: byte ``o`` of the image is at ``o % capacity``. Bytes that were written and hashed make
room for later bytes. In this way, a state of any size passes through the buffer in waves.
"""

from __future__ import annotations

from ckpt.errors import CkptError, StagingError
from ckpt.locks import Condition


class Window:
    """The part of one image that is in its buffer.

    Thread safety: the copying thread calls ``wait_room``, ``land`` and ``fail``. The threads that
    write the image call ``view``, ``written``, ``hashed`` and ``lost``. Any thread may call
    ``abandon``.

    Args:
        memory: The buffer. If it is a ring, its length must be a multiple of
            ``copies.PIECE_BYTES``.
        size: The bytes of the image.
        path: The path of the buffer's file in /dev/shm; None for anonymous memory.
    """

    def __init__(self, memory: memoryview, size: int, path: str | None = None) -> None:
        self.size, self.capacity = size, len(memory)
        self.path = path if self.whole else None
        self._memory = memory
        self._landed = 0
        self._uses = (_Prefix(), _Prefix())
        self._error: CkptError | None = None
        self._changed = Condition()

    @property
    def whole(self) -> bool:
        """Return True if the whole image fits into the buffer, so that its bytes can be read more
        than once.
        """
        return self.size <= self.capacity

    # -- the copying side --------------------------------------------------------------------------

    def wait_room(self, end: int) -> None:
        """Wait until the buffer has room for the bytes up to ``end``.

        Raises:
            CkptError: ``fail``, ``lost`` or ``abandon`` was called, so the buffer may never have
                room.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._error or end - self._freed() <= self.capacity)
            if self._error:
                raise self._error

    def land(self, end: int) -> None:
        """Declare that the bytes up to ``end`` have landed."""
        with self._changed:
            self._landed = max(self._landed, end)
            self._changed.notify_all()

    def fail(self, error: CkptError) -> None:
        """Declare that no more bytes will land, because of ``error``.

        All calls of ``wait_room`` and ``view``, waiting or later, then raise the first such error.
        """
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    # -- the streaming side ------------------------------------------------------------------------

    def view(self, start: int, end: int) -> memoryview:
        """Wait until the bytes ``start`` to ``end`` have landed, and return them.

        The result is a view of the buffer, or a copy if the bytes cross the end of a ring.

        Raises:
            CkptError: ``fail``, ``lost`` or ``abandon`` has ended the image with this error. The
                bytes may have landed before.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._error or self._landed >= end)
            if self._error:
                raise self._error
        if self.whole:
            return self._memory[start:end]
        first, last = start % self.capacity, end % self.capacity or self.capacity
        if first < last:
            return self._memory[first:last]
        return memoryview(bytes(self._memory[first:]) + bytes(self._memory[:last]))

    def written(self, start: int, end: int) -> None:
        """Declare that bytes ``start`` to ``end`` are on the tier."""
        self._used(0, start, end)

    def hashed(self, start: int, end: int) -> None:
        """Declare that bytes ``start`` to ``end`` are in the chunk table."""
        self._used(1, start, end)

    def lost(self, error: CkptError) -> None:
        """Declare that a part of the image will never be written, because of ``error``.

        A ring then fails, since it cannot make progress. An image that fits into the buffer stays
        usable for the next tier.
        """
        if not self.whole:
            self.fail(error)

    def abandon(self) -> None:
        """Declare that no more bytes will be written. Calls of ``wait_room`` and ``view`` then
        raise ``StagingError``, or the earlier error if the image has failed before.
        """
        self.fail(StagingError("the image is not written any more"))

    def _used(self, use: int, start: int, end: int) -> None:
        if not self.whole:
            with self._changed:
                self._uses[use].add(start, end)
                self._changed.notify_all()

    def _freed(self) -> int:
        return 0 if self.whole else min(use.end for use in self._uses)


class _Prefix:
    """Ranges that are added in any order. ``end`` is the start of the first gap between them."""

    def __init__(self) -> None:
        self.end = 0
        self._ahead: dict[int, int] = {}

    def add(self, start: int, end: int) -> None:
        self._ahead[start] = end
        while self.end in self._ahead:
            self.end = self._ahead.pop(self.end)

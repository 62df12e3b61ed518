"""The progress of an image: how far it is copied, and how far it is written.

Writing begins with the first bytes that have landed. If the buffer is smaller than the image it is
a
ring: byte ``o`` of the image is at ``o % capacity``, and bytes that were written and hashed make
room for later ones. So a state of any size can be staged, in waves.
"""

from __future__ import annotations

from ckpt.errors import CkptError, StagingError
from ckpt.locks import Condition


class Window:
    """The part of one image that is in memory.

    Thread safety: the thread that copies calls ``wait_room``, ``land`` and ``fail``. Threads that
    stream call ``view``, ``written``, ``hashed`` and ``lost``. Any thread may call ``abandon``.

    Args:
        memory: The buffer. A ring's length must be a multiple of every part's.
        size: Bytes of the image.
        path: The file in /dev/shm that the buffer is, if it is one.
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
        """Whether all of the image stays in memory and can be read again."""
        return self.size <= self.capacity

    # -- the copying side --------------------------------------------------------------------------

    def wait_room(self, end: int) -> None:
        """Return when bytes up to ``end`` may be copied to the buffer.

        Raises:
            StagingError: The buffer never gets room.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._error or end - self._freed() <= self.capacity)
            if self._error:
                raise self._error

    def land(self, end: int) -> None:
        """Declare that bytes up to ``end`` are complete."""
        with self._changed:
            self._landed = max(self._landed, end)
            self._changed.notify_all()

    def fail(self, error: CkptError) -> None:
        """Declare that no more bytes will land."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    # -- the streaming side ------------------------------------------------------------------------

    def view(self, start: int, end: int) -> memoryview:
        """Return bytes ``start`` to ``end`` once they have landed.

        It is the buffer's own memory, and a copy only if the bytes cross the end of a ring.

        Raises:
            CkptError: They never land.
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
        """Declare that a part of the image is never written. A ring makes no progress any more.

        An image that fits into the buffer is complete for the next tier.
        """
        if not self.whole:
            self.fail(error)

    def abandon(self) -> None:
        """Declare that no more bytes are written, so a copy that waits for room ends."""
        self.fail(StagingError("the image is not written any more"))

    def _used(self, use: int, start: int, end: int) -> None:
        if not self.whole:
            with self._changed:
                self._uses[use].add(start, end)
                self._changed.notify_all()

    def _freed(self) -> int:
        return 0 if self.whole else min(use.end for use in self._uses)


class _Prefix:
    """Ranges that come in any order, and where the first gap begins."""

    def __init__(self) -> None:
        self.end = 0
        self._ahead: dict[int, int] = {}

    def add(self, start: int, end: int) -> None:
        self._ahead[start] = end
        while self.end in self._ahead:
            self.end = self._ahead.pop(self.end)

from __future__ import annotations

from collections.abc import Sequence

from ckpt.errors import CkptError


class Whole:
    """An image that is all in memory."""

    path = None
    rereadable = True
    resident_bytes = 0

    def __init__(self, memory: memoryview) -> None:
        self._memory, self.size, self.capacity = memory, len(memory), len(memory)

    def view(self, start: int, end: int) -> memoryview:
        return self._memory[start:end]

    def parts(self, start: int, end: int) -> Sequence[memoryview]:
        return [self.view(start, end)]

    def note_written(self, start: int, end: int) -> None:
        """Keep the image."""

    def note_hashed(self, start: int, end: int) -> None:
        """Keep the image."""

    def note_loss(self, error: CkptError) -> None:
        """Keep the image."""

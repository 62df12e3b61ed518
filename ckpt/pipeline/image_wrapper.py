"""An image that gives its bytes as another image does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckpt.errors import CkptError
from ckpt.pipeline.image_writer import Source


@dataclass(frozen=True, slots=True)
class ImageWrapper:
    """A `Source` that passes each call on to ``image``. A subclass looks at the bytes on their way.

    Thread safety: the threads that may use ``image`` may use this object in the same way.
    """

    image: Source

    @property
    def size(self) -> int:
        return self.image.size

    @property
    def path(self) -> str | None:
        return self.image.path

    @property
    def capacity(self) -> int:
        return self.image.capacity

    @property
    def resident_bytes(self) -> int:
        return self.image.resident_bytes

    @property
    def rereadable(self) -> bool:
        return self.image.rereadable

    def view(self, start: int, end: int) -> memoryview:
        return self.image.view(start, end)

    def parts(self, start: int, end: int) -> Sequence[memoryview]:
        return self.image.parts(start, end)

    def note_written(self, start: int, end: int) -> None:
        self.image.note_written(start, end)

    def note_hashed(self, start: int, end: int) -> None:
        self.image.note_hashed(start, end)

    def note_loss(self, error: CkptError) -> None:
        self.image.note_loss(error)

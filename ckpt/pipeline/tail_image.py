"""The end of an image, as the data file of an increment holds it.

An *increment* is a data file without the first chunks of its image, which the file of another step
has.
"""

from __future__ import annotations

from collections.abc import Sequence

from ckpt.errors import CkptError
from ckpt.pipeline.image_writer import Source
from ckpt.storage.api import aligned_memory


class TailImage:
    """A `Source` with a header of its own, and the bytes of another image from ``start`` on. The
    header stays in its own memory, and takes no part of ``capacity``.

    Thread safety: any thread may call all methods, if this is so for ``image``.

    Args:
        image: The whole image.
        start: The number of bytes of ``image`` that are left out.
        header: The bytes before the others.
    """

    path = None

    def __init__(self, image: Source, start: int, header: bytes) -> None:
        self._image, self._header = image, memoryview(header)
        self._shift = start - len(header)  # From a position in the file to that in the image
        self.size = image.size - self._shift
        self.resident_bytes = len(header)
        is_whole = image.capacity >= image.size
        self.capacity = self.size if is_whole else image.capacity

    @property
    def rereadable(self) -> bool:
        return self._image.rereadable

    def view(self, start: int, end: int) -> memoryview:
        """Return the bytes of the file from ``start`` to ``end``. Raises what the image raises."""
        if len(parts := self.parts(start, end)) == 1:
            return parts[0]
        memory = aligned_memory(end - start)
        offset = 0
        for part in parts:
            memory[offset : offset + part.nbytes] = part
            offset += part.nbytes
        return memory

    def parts(self, start: int, end: int) -> Sequence[memoryview]:
        """Do what ``view`` does, without a copy."""
        header = self._header[start:end]
        image_range = self._image_range(start, end)
        parts = self._image.parts(*image_range) if image_range else ()
        return [header, *parts] if header.nbytes else parts

    def note_written(self, start: int, end: int) -> None:
        if image_range := self._image_range(start, end):
            self._image.note_written(*image_range)

    def note_hashed(self, start: int, end: int) -> None:
        if image_range := self._image_range(start, end):
            self._image.note_hashed(*image_range)

    def note_loss(self, error: CkptError) -> None:
        self._image.note_loss(error)

    def _image_range(self, start: int, end: int) -> tuple[int, int] | None:
        """Return the bytes of the image among those of the file from ``start`` to ``end``."""
        begin = max(start, self._header.nbytes)
        return (begin + self._shift, end + self._shift) if begin < end else None

"""Decompress zstd frames whose content has a known size.

Thread safety:
    Any thread may call the function. zstd releases the GIL while it works.
"""

from __future__ import annotations

import threading

import zstandard

_local = threading.local()


def decompress_frame(frame: memoryview, size: int) -> bytes:
    """Return the content of a zstd frame, which must have ``size`` bytes. Raise ``ValueError``
    before memory is allocated if the frame claims another size.

    Raises:
        ValueError: The content has another size.
        zstandard.ZstdError: This is no zstd frame.
    """
    if zstandard.frame_content_size(frame) != size:
        raise ValueError("a frame has another length")
    if (decompressor := getattr(_local, "decompressor", None)) is None:
        decompressor = _local.decompressor = zstandard.ZstdDecompressor()
    content: bytes = decompressor.decompress(frame, max_output_size=size, allow_extra_data=False)
    if len(content) != size:
        raise ValueError("a frame has another length")
    return content

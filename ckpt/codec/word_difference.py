"""The difference between two chunks of equal length. It is short if few words change.

A difference consists of the gaps between the words that change, and of the changes: the new word
minus the old one, as integers. A small step of a floating-point number changes its word by one or
two, so the changes compress well. A gap is the number of unchanged words before a changed one. It
is one byte if it is below 255. Otherwise a byte of 255 (``_LONG_GAP_BYTE``) stands for as many
words, and the gap goes on in the next byte. The changes are cut into byte planes: plane *k* has
byte *k* of every change. The gaps are one zstd frame, and the planes are another. docs/format.md
describes the layout.

Thread safety:
    Any thread may call the functions. zstd and NumPy release the GIL while they work.
"""

from __future__ import annotations

import struct
import threading
from typing import Any, Final

import numpy as np
import zstandard

from ckpt.codec.zstd_decompress import decompress_frame

_HEAD: Final = struct.Struct("<BIII")
"""The size of a word, the number of changed words, the bytes of the gaps, and those of their frame.
"""
_WIDTHS: Final = (1, 2, 4, 8)
_MOST_CHANGED_SHARE: Final = 0.5
"""The largest share of changed words. Above it, the difference would not be clearly shorter than
the chunk.
"""
_LEVEL: Final = 1
_LONG_GAP_BYTE: Final = 255
"""A byte of this value adds as many words to the gap, and the next byte goes on with it."""

_local = threading.local()

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Words = np.ndarray[Any, np.dtype[np.unsignedinteger[Any]]]
Positions = np.ndarray[Any, np.dtype[np.int64]]


def difference(old: memoryview, new: memoryview, width: int) -> list[memoryview] | None:
    """Return the pieces of the difference that changes ``old`` to ``new``.

    The result is empty if the two are equal, and None if too many words of ``width`` bytes change.
    """
    old_words, new_words = _words(old, width), _words(new, width)
    positions: Positions = np.flatnonzero(old_words != new_words)
    if not positions.size:
        return []
    if positions.size > _MOST_CHANGED_SHARE * old_words.size:
        return None
    gaps = _pack_gaps(positions)
    changes = _zigzag(new_words[positions] - old_words[positions])
    planes = np.ascontiguousarray(changes.view(np.uint8).reshape(-1, width).T)
    gap_frame, change_frame = (_compressor().compress(part.data) for part in (gaps, planes))
    head = _HEAD.pack(width, positions.size, gaps.size, len(gap_frame))
    return [memoryview(head), memoryview(gap_frame), memoryview(change_frame)]


def apply_difference(code: memoryview, data: memoryview, *, is_reverse: bool = False) -> None:
    """Change ``data`` by the difference ``code``, or back if ``is_reverse`` is set. An empty
    difference changes nothing.

    Raises:
        ValueError: ``code`` is no difference of a chunk of this length. ``data`` is as it was.
    """
    if not code.nbytes:
        return
    try:
        width, change_count, gap_bytes, gap_frame_bytes = _HEAD.unpack_from(code)
        if width not in _WIDTHS or data.nbytes % width:
            raise ValueError("not a difference of a chunk of this length")
        words, gap_frame_end = _words(data, width), _HEAD.size + gap_frame_bytes
        # The gaps have a byte for each change, and one more for each long gap.
        if change_count > words.size or gap_bytes > change_count + words.size // _LONG_GAP_BYTE:
            raise ValueError("more changes than there are words")
        gaps = np.frombuffer(
            decompress_frame(code[_HEAD.size : gap_frame_end], gap_bytes), dtype=np.uint8
        )
        positions = _unpack_gaps(gaps)
        if positions.size != change_count or (change_count and positions[-1] >= words.size):
            raise ValueError("the gaps do not add up")
        content = decompress_frame(code[gap_frame_end:], change_count * width)
        planes = np.frombuffer(content, dtype=np.uint8).reshape(width, change_count)
    except (struct.error, zstandard.ZstdError) as error:
        raise ValueError("not a difference") from error
    changes = _unzigzag(np.ascontiguousarray(planes.T).view(words.dtype).reshape(change_count))
    if is_reverse:
        words[positions] -= changes
    else:
        words[positions] += changes


def _words(data: memoryview, width: int) -> Words:
    return np.frombuffer(data, dtype=f"<u{width}")


def _pack_gaps(positions: Positions) -> Bytes:
    """Return the gaps before the changed words, in bytes."""
    gaps = np.diff(positions, prepend=-1) - 1
    long_counts = gaps // _LONG_GAP_BYTE
    total = int(long_counts.sum())
    if not total:
        return gaps.astype(np.uint8)
    code = np.full(gaps.size + total, _LONG_GAP_BYTE, dtype=np.uint8)
    code[np.arange(gaps.size) + np.cumsum(long_counts)] = gaps % _LONG_GAP_BYTE
    return code


def _unpack_gaps(code: Bytes) -> Positions:
    """Return the positions of the changed words, from which ``_pack_gaps`` made ``code``.

    Each position is the sum of all bytes up to the last byte of its gap, and of the changed words
    before it.
    """
    is_last = code != _LONG_GAP_BYTE
    ends = np.cumsum(code, dtype=np.int64) + np.cumsum(is_last, dtype=np.int64)
    positions: Positions = ends[is_last] - 1
    return positions


def _zigzag(changes: Words) -> Words:
    """Return small numbers for changes that are small up or down: 0, -1, 1, -2 become 0, 1, 2, 3.

    ``~sign + 1`` has no bit set for a change up, and all bits for a change down.
    """
    sign = changes >> changes.dtype.type(8 * changes.itemsize - 1)
    return (changes << changes.dtype.type(1)) ^ (~sign + changes.dtype.type(1))


def _unzigzag(codes: Words) -> Words:
    """Return the changes from which ``_zigzag`` made ``codes``."""
    unit = codes.dtype.type(1)
    sign = codes & unit
    return (codes >> unit) ^ (~sign + unit)


def _compressor() -> zstandard.ZstdCompressor:
    if (compressor := getattr(_local, "compressor", None)) is None:
        compressor = _local.compressor = zstandard.ZstdCompressor(level=_LEVEL)
    return compressor

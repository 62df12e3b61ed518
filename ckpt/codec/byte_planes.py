"""A chunk <-> fewer bytes: its elements are cut into byte planes, and zstd Huffman-codes each plane
that becomes shorter.

Of a trained model's weights, the exponents compress and the mantissas do not. An element is rotated
left by one bit, so that its exponent is its top byte. Then the smallest exponent of the chunk is
subtracted, and the bits that this frees at the top (at most two) are shifted out. The top plane
gets mantissa bits instead. With them, Huffman codes lose less by their whole numbers of bits, and
zstd finds fewer matches that are not worth their cost. The lowest plane then has free bits, and is
stored without them. docs/format.md has the layout.

Any thread may call everything here. zstd and NumPy release the GIL while they work.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import zstandard

from ckpt.codec.registry import Codec

Words = np.ndarray[Any, np.dtype[np.unsignedinteger[Any]]]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_HEAD: Final = struct.Struct("<BBBB")
_MOST_SHIFT: Final = 2
"""A third bit would add 0.07 % on weights (docs/decisions/0011)."""
_BLOCK: Final = 1 << 18
"""The number of elements that are rotated at once, in the processor's cache."""
_SAMPLE: Final = 4096
_SAMPLES: Final = 16
"""This many runs of ``_SAMPLE`` elements show whether coding a plane is worth it."""
_WORTH: Final = 0.98
_DEFAULT_LEVEL: Final = 1
_MOST_LEVEL: Final = 12
"""At higher levels, zstd takes hundreds of MiB per thread."""
_MOST_BYTES: Final = 64 << 20
"""The size of the largest chunk that is encoded; see docs/format.md."""

_local = threading.local()


class BytePlanes:
    """Encodes chunks (see ``registry.Encode``).

    Args:
        level: If one is given, that level's search is tried beside Huffman coding alone, and the
            shorter result is taken.
    """

    def __init__(self, level: int | None = None) -> None:
        self._level = level
        self._local = threading.local()  # A compressor serves one thread at a time

    def encode(self, chunk: memoryview, width: int) -> list[memoryview]:
        """Encode a chunk. See ``registry.Encode``."""
        if not width < chunk.nbytes <= _MOST_BYTES or chunk.nbytes % width:
            return [chunk]
        words: Words = np.frombuffer(chunk, dtype=f"<u{width}")
        room = self._room(words)
        sample, shift, _ = _split(_sampled(words), room)
        plans = [
            self._plan(plane, width, 0 if index else shift) for index, plane in enumerate(sample)
        ]
        if not any(plans) and not shift:
            return [chunk]
        planes, shift, base = _split(words, room)
        shifts = [shift, *[0] * (width - 1)]
        body = [_shortest(*each, room) for each in zip(planes, plans, shifts, strict=True)]
        head = _HEAD.pack(width, shift, base, 0) + struct.pack(
            f"<{width}I", *(each.nbytes for each in body)
        )
        pieces = [memoryview(head), *body]
        return pieces if sum(piece.nbytes for piece in pieces) < chunk.nbytes else [chunk]

    def _plan(self, sample: Bytes, width: int, shift: int) -> zstandard.ZstdCompressor | None:
        """Return the way to make a plane shorter than it is without its ``shift`` free bits.

        Returns None if there is no such way.
        """
        huffman, level = self._compressors()
        tried = [level] if width == 1 else [huffman] if self._level is None else [huffman, level]
        lengths = [len(compressor.compress(sample.data)) for compressor in tried]
        best = min(lengths)
        return (
            tried[lengths.index(best)] if best < _WORTH * sample.nbytes * (8 - shift) / 8 else None
        )

    def _room(self, words: Words) -> Bytes:
        """Return memory for planes, the same for every chunk of this thread. The first touch of
        fresh memory takes longer than the split.
        """
        nbytes = words.itemsize * _padded(words.size)
        room: Bytes | None = getattr(self._local, "room", None)
        if room is None or room.size < nbytes:
            room = self._local.room = np.empty(nbytes, dtype=np.uint8)
        return room

    def _compressors(self) -> tuple[zstandard.ZstdCompressor, zstandard.ZstdCompressor]:
        if (found := getattr(self._local, "made", None)) is None:
            # This is the least search that zstd can do. What is left is Huffman coding.
            settings = zstandard.ZstdCompressionParameters(
                window_log=17,
                hash_log=6,
                chain_log=6,
                search_log=1,
                min_match=7,
                target_length=0,
                strategy=zstandard.STRATEGY_FAST,
            )
            level = _DEFAULT_LEVEL if self._level is None else self._level
            found = (
                zstandard.ZstdCompressor(compression_params=settings),
                zstandard.ZstdCompressor(level=level),
            )
            self._local.made = found
        return found


def decode(data: memoryview, out: memoryview) -> None:
    """Fill ``out`` with the chunk that was encoded as ``data`` (see ``registry.Decode``)."""
    try:
        _decode(data, out)
    except (struct.error, zstandard.ZstdError) as error:
        raise ValueError("not an encoded chunk") from error


def _decode(data: memoryview, out: memoryview) -> None:
    width, shift, base, zero = _HEAD.unpack_from(data)
    if (
        width not in (1, 2, 4, 8)
        or shift > (_MOST_SHIFT if width > 1 else 0)
        or zero
        or out.nbytes % width
    ):
        raise ValueError("not the head of an encoded chunk")
    lengths = struct.unpack_from(f"<{width}I", data, _HEAD.size)
    start, size = _HEAD.size + 4 * width, out.nbytes // width
    if start + sum(lengths) != data.nbytes or not all(0 < length <= size for length in lengths):
        raise ValueError("the lengths of its planes do not add up")
    planes: list[Bytes] = []
    for index, length in enumerate(lengths):
        planes.append(_plane(data[start : start + length], size, 0 if index else shift))
        start += length
    _join(planes, np.frombuffer(out, dtype=f"<u{width}"), shift, base)


def _plane(data: memoryview, size: int, shift: int) -> Bytes:
    if data.nbytes == size:
        return np.frombuffer(data, dtype=np.uint8)
    if shift and data.nbytes == _packed_bytes(size, shift):
        return _unpack(data, size, shift)
    return np.frombuffer(_unpacked(data, size), dtype=np.uint8)


def _unpacked(frame: memoryview, size: int) -> bytes:
    """Return the unpacked frame. Its size is known, so a frame that claims another size gets no
    memory.
    """
    if zstandard.frame_content_size(frame) != size:
        raise ValueError("a plane has another length")
    if (decompressor := getattr(_local, "decompressor", None)) is None:
        decompressor = _local.decompressor = zstandard.ZstdDecompressor()
    plane: bytes = decompressor.decompress(frame, max_output_size=size, allow_extra_data=False)
    if len(plane) != size:
        raise ValueError("a plane has another length")
    return plane


def _shortest(
    plane: Bytes, plan: zstandard.ZstdCompressor | None, shift: int, room: Bytes
) -> memoryview:
    """Return a plane compressed, or without its ``shift`` free bits, or as it is.

    A reader distinguishes the three by their length, so a form that is no shorter than the next is
    not used.
    """
    least = plane.size
    if shift:
        least = min(least, _packed_bytes(plane.size, shift))
    if plan is not None and len(code := plan.compress(plane.data)) < least:
        return memoryview(code)
    return plane.data if least == plane.size else _pack(room, plane.size, shift)


def _sampled(words: Words) -> Words:
    """Return a few runs of elements from all over the array."""
    if words.size <= _SAMPLES * _SAMPLE:
        return words
    starts = np.linspace(0, words.size - _SAMPLE, _SAMPLES, dtype=np.int64)
    return np.concatenate([words[start : start + _SAMPLE] for start in starts])


def _split(words: Words, room: Bytes) -> tuple[Sequence[Bytes], int, int]:
    """Return the byte planes, lowest first, made in ``room``, by how many bits the turned elements
    were shifted, and the exponent that was subtracted before.
    """
    width = words.itemsize
    if width == 1:
        return [words.view(np.uint8)], 0, 0
    one, bits = words.dtype.type, 8 * width
    base, shift = _span(words)
    planes = room[: width * _padded(words.size)].reshape(width, -1)[:, : words.size]
    scratch = np.empty((2, min(_BLOCK, words.size)), dtype=words.dtype)
    # Work on whole words, since NumPy has no vector instructions to shift bytes.
    for start in range(0, words.size, _BLOCK):
        block = slice(start, start + _BLOCK)
        part = words[block]
        moved, sign = scratch[:, : part.size]
        for index in range(1, width):
            np.right_shift(part, one(8 * index - 1 - shift), out=moved)
            np.copyto(planes[index, block], moved, casting="unsafe")
        planes[-1, block] -= np.uint8(base << shift & 255)
        np.right_shift(part, one(bits - 1), out=sign)
        np.left_shift(sign, one(shift), out=sign)
        np.left_shift(part, one(1 + shift), out=moved)
        np.bitwise_or(moved, sign, out=moved)
        np.copyto(planes[0, block], moved, casting="unsafe")
    return list(planes), shift, base


def _span(words: Words) -> tuple[int, int]:
    """Return the least exponent of all (as the top byte of a turned element), and how many bits are
    free at the top without it. The free bits are not worth it if there are none.
    """
    one, bits = words.dtype.type, 8 * words.itemsize
    unsigned = one(2 ** (bits - 1) - 1)
    lowest, highest = 2 ** (bits - 1), 0
    for start in range(0, words.size, _BLOCK):
        part = words[start : start + _BLOCK] & unsigned
        lowest, highest = min(lowest, int(part.min())), max(highest, int(part.max()))
    base = lowest >> (bits - 9)
    shift = min(_MOST_SHIFT, 8 - ((highest >> (bits - 9)) - base).bit_length())
    return (base, shift) if shift else (0, 0)


def _run_words(size: int, shift: int) -> int:
    return -(-size // (8 // shift * 8))


def _packed_bytes(size: int, shift: int) -> int:
    return _run_words(size, shift) * 8 * (8 // shift - 1)


def _masks(shift: int) -> np.uint64:
    """Return a mask of the lowest ``shift`` bits of each of eight bytes."""
    return np.uint64(((1 << shift) - 1) * 0x0101010101010101)


def _padded(size: int) -> int:
    """Return room for a plane, and for the zeros that ``_pack`` needs behind it."""
    return -(-size // 64) * 64


def _pack(room: Bytes, size: int, shift: int) -> memoryview:
    """Pack the lowest plane, the first ``size`` bytes of ``room``, without the ``shift`` bits that
    are zero in each of its bytes. The last of 8 / shift runs is spread over the others, in place.
    """
    count, words = 8 // shift, _run_words(size, shift)
    whole = room[: count * words * 8]
    whole[size:] = 0
    runs = whole.view("<u8").reshape(count, words)
    for index, run in enumerate(runs[:-1], 1):
        run |= (runs[-1] >> np.uint64(shift * index)) & _masks(shift)
    return whole[: (count - 1) * words * 8].data


def _unpack(packed: memoryview, size: int, shift: int) -> Bytes:
    runs = np.frombuffer(packed, dtype="<u8").reshape(8 // shift - 1, -1)
    plane = np.zeros((8 // shift, runs.shape[1]), dtype="<u8")
    np.bitwise_and(runs, ~_masks(shift), out=plane[:-1])
    for index, run in enumerate(runs, 1):
        plane[-1] |= (run & _masks(shift)) << np.uint64(shift * index)
    return plane.reshape(-1).view(np.uint8)[:size]


def _join(planes: Sequence[Bytes], out: Words, shift: int, base: int) -> None:
    """Undo ``_split``.

    Planes that no save has made give some bytes, whose checksum does not match.
    """
    width = out.itemsize
    if width == 1:
        out[:] = planes[0]
        return
    one, bits = out.dtype.type, 8 * width
    scratch = np.empty(min(_BLOCK, out.size), dtype=out.dtype)
    for start in range(0, out.size, _BLOCK):
        block = slice(start, start + _BLOCK)
        part = out[block]
        moved = scratch[: part.size]
        np.copyto(part, planes[-1][block])
        for plane in reversed(planes[:-1]):
            np.left_shift(part, one(8), out=part)
            np.copyto(moved, plane[block])
            np.bitwise_or(part, moved, out=part)
        np.right_shift(part, one(1 + shift), out=part)
        np.add(part, one(base << (bits - 9)), out=part)
        np.right_shift(moved, one(shift), out=moved)  # The lowest plane holds the sign bit
        np.left_shift(moved, one(bits - 1), out=moved)
        np.bitwise_or(part, moved, out=part)


CODEC: Final = Codec(
    encoder=lambda level: BytePlanes(level).encode, decode=decode, levels=range(1, _MOST_LEVEL + 1)
)

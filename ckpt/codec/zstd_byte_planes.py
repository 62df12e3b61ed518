"""The codec ``zstd``. It cuts the elements of a chunk into byte planes: byte plane *k* consists of
byte *k* of every element. Then zstd Huffman-codes each plane that becomes shorter in this way.

The exponents of a trained model's weights compress well, and the mantissas do not. So each element
is rotated left by one bit, which makes its exponent its top byte. Then the smallest exponent of the
chunk is subtracted, and the bits that this frees at the top of every element (at most two) are
shifted out. The top plane gets mantissa bits in their place. These bits reduce two losses in the
top plane: Huffman codes are rounded to whole bits, and zstd uses some matches that take more bytes
than they save. After the shift, the lowest bits of every byte of the lowest plane are zero. They
are called free bits here, and the plane is stored without them. docs/format.md describes the layout
of an encoded chunk.

Thread safety:
    Any thread may call every function and method. zstd and NumPy release the GIL while they work.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import zstandard

from ckpt.codec.registry import Codec
from ckpt.codec.zstd_decompress import decompress_frame

Words = np.ndarray[Any, np.dtype[np.unsignedinteger[Any]]]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_HEAD: Final = struct.Struct("<BBBB")
"""The bytes of an element, the bits of the shift, the exponent that was subtracted, and a zero.
The lengths of the planes follow.
"""
_MOST_SHIFT: Final = 2
"""The most bits by which elements are shifted. A third bit would save only 0.07 % more of a model's
weights (docs/decisions/0011).
"""
_BLOCK_ELEMENTS: Final = 1 << 18
"""The number of elements that are rotated at once, so that they stay in the processor's cache."""
_RUN_ELEMENTS: Final = 4096
_SAMPLE_RUNS: Final = 16
"""The number of runs of ``_RUN_ELEMENTS`` elements that are compressed on trial, to find out which
planes become shorter.
"""
_MOST_RATIO: Final = 0.98
"""A plane is compressed only if compression makes its sample shorter than this fraction of the
length that the sample has without its free bits.
"""
_DEFAULT_LEVEL: Final = 1
_MOST_LEVEL: Final = 12
"""The highest level that a setting may name. At higher levels, zstd takes hundreds of MiB per
thread.
"""
_MOST_CHUNK_BYTES: Final = 64 << 20
"""The size of the largest chunk that is encoded. Larger chunks are stored raw."""


class BytePlanes:
    """Encodes chunks (see ``registry.Encode``).

    Args:
        level: A zstd level to try on a sample of each plane, beside Huffman coding alone. The plane
            is compressed in the way that makes the sample shorter. With None, only Huffman coding
            is tried. For chunks without floating point numbers, only the level is tried, or level 1
            if ``level`` is None.
    """

    def __init__(self, level: int | None = None) -> None:
        self._level = level
        self._local = threading.local()  # A compressor serves one thread at a time

    def encode(self, chunk: memoryview, width: int) -> list[memoryview]:
        """Encode a chunk whose elements have ``width`` bytes. See ``registry.Encode``."""
        if not width < chunk.nbytes <= _MOST_CHUNK_BYTES or chunk.nbytes % width:
            return [chunk]
        words: Words = np.frombuffer(chunk, dtype=f"<u{width}")
        memory = self._plane_memory(words)
        # Choose the compressors on a sample. Only the lowest plane has free bits.
        sample_planes, shift, _ = _split(_sample(words), memory)
        compressors = [
            self._best_compressor(plane, width, 0 if index else shift)
            for index, plane in enumerate(sample_planes)
        ]
        if not any(compressors) and not shift:
            return [chunk]
        planes, shift, least_exponent = _split(words, memory)
        shifts = [shift, *[0] * (width - 1)]
        encoded_planes = [
            _encode_plane(*arguments, memory)
            for arguments in zip(planes, compressors, shifts, strict=True)
        ]
        head = _HEAD.pack(width, shift, least_exponent, 0) + struct.pack(
            f"<{width}I", *(plane.nbytes for plane in encoded_planes)
        )
        pieces = [memoryview(head), *encoded_planes]
        return pieces if sum(piece.nbytes for piece in pieces) < chunk.nbytes else [chunk]

    def _best_compressor(
        self, sample: Bytes, width: int, shift: int
    ) -> zstandard.ZstdCompressor | None:
        """Return the compressor that makes ``sample`` shortest. Return None if the result is not
        clearly shorter (see ``_MOST_RATIO``) than ``sample`` without the ``shift`` free bits of
        each byte.
        """
        huffman_compressor, level_compressor = self._compressors()
        compressors = (
            [level_compressor]
            if width == 1
            else [huffman_compressor]
            if self._level is None
            else [huffman_compressor, level_compressor]
        )
        lengths = [len(compressor.compress(sample.data)) for compressor in compressors]
        best = min(lengths)
        return (
            compressors[lengths.index(best)]
            if best < _MOST_RATIO * sample.nbytes * (8 - shift) / 8
            else None
        )

    def _plane_memory(self, words: Words) -> Bytes:
        """Return memory for the planes of ``words``. All chunks of a thread share this memory,
        since the first touch of fresh memory takes longer than the split into planes.
        """
        nbytes = words.itemsize * _padded_size(words.size)
        memory: Bytes | None = getattr(self._local, "memory", None)
        if memory is None or memory.size < nbytes:
            memory = self._local.memory = np.empty(nbytes, dtype=np.uint8)
        return memory

    def _compressors(self) -> tuple[zstandard.ZstdCompressor, zstandard.ZstdCompressor]:
        """Return the compressors of this thread: for Huffman coding alone, and for the level."""
        if (compressors := getattr(self._local, "compressors", None)) is None:
            # With these settings, zstd searches for matches as little as it can, so the compression
            # consists almost only of Huffman coding.
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
            compressors = (
                zstandard.ZstdCompressor(compression_params=settings),
                zstandard.ZstdCompressor(level=level),
            )
            self._local.compressors = compressors
        return compressors


def decode(data: memoryview, out: memoryview) -> None:
    """Fill ``out`` with the chunk that was encoded as ``data`` (see ``registry.Decode``)."""
    try:
        _decode(data, out)
    except (struct.error, zstandard.ZstdError) as error:
        raise ValueError("not an encoded chunk") from error


def _decode(data: memoryview, out: memoryview) -> None:
    """Fill ``out`` with the chunk that was encoded as ``data``. Other errors than ``ValueError``
    may be raised for invalid data.
    """
    width, shift, least_exponent, reserved_byte = _HEAD.unpack_from(data)
    if (
        width not in (1, 2, 4, 8)
        or shift > (_MOST_SHIFT if width > 1 else 0)
        or reserved_byte
        or out.nbytes % width
    ):
        raise ValueError("not the head of an encoded chunk")
    lengths = struct.unpack_from(f"<{width}I", data, _HEAD.size)
    start, plane_size = _HEAD.size + 4 * width, out.nbytes // width
    if start + sum(lengths) != data.nbytes or not all(
        0 < length <= plane_size for length in lengths
    ):
        raise ValueError("the lengths of its planes do not add up")
    planes: list[Bytes] = []
    for index, length in enumerate(lengths):
        planes.append(
            _decode_plane(data[start : start + length], plane_size, 0 if index else shift)
        )
        start += length
    _join(planes, np.frombuffer(out, dtype=f"<u{width}"), shift, least_exponent)


def _decode_plane(data: memoryview, size: int, shift: int) -> Bytes:
    """Return the plane of ``size`` bytes from which ``_encode_plane`` made ``data``. The length of
    ``data`` tells how it is stored. The plane has ``shift`` free bits.
    """
    if data.nbytes == size:
        return np.frombuffer(data, dtype=np.uint8)
    if shift and data.nbytes == _packed_bytes(size, shift):
        return _unpack(data, size, shift)
    return np.frombuffer(decompress_frame(data, size), dtype=np.uint8)


def _encode_plane(
    plane: Bytes, compressor: zstandard.ZstdCompressor | None, shift: int, memory: Bytes
) -> memoryview:
    """Return the shortest form of ``plane``: compressed by ``compressor``, packed without its
    ``shift`` free bits, or unchanged.

    A reader distinguishes the three forms by their lengths. So the compressed form is used only if
    it is shorter than the packed form, and the packed form only if it is shorter than the plane.
    ``memory`` holds all planes, the lowest one first.
    """
    shortest_length = plane.size
    if shift:
        shortest_length = min(shortest_length, _packed_bytes(plane.size, shift))
    if (
        compressor is not None
        and len(compressed_plane := compressor.compress(plane.data)) < shortest_length
    ):
        return memoryview(compressed_plane)
    if shortest_length == plane.size:
        return plane.data
    return _pack(memory, plane.size, shift)  # The lowest plane is the begin of ``memory``


def _sample(words: Words) -> Words:
    """Return one array of ``_SAMPLE_RUNS`` runs of ``_RUN_ELEMENTS`` elements, taken at equal
    distances from ``words``. Return ``words`` itself if it has no more elements than these runs.
    """
    if words.size <= _SAMPLE_RUNS * _RUN_ELEMENTS:
        return words
    starts = np.linspace(0, words.size - _RUN_ELEMENTS, _SAMPLE_RUNS, dtype=np.int64)
    return np.concatenate([words[start : start + _RUN_ELEMENTS] for start in starts])


def _split(words: Words, memory: Bytes) -> tuple[Sequence[Bytes], int, int]:
    """Return the byte planes of ``words`` (lowest first), the number of bits by which the rotated
    elements were shifted, and the exponent that was subtracted from them before.

    The planes are views of ``memory``, except for elements of one byte, which are a plane already.
    """
    width = words.itemsize
    if width == 1:
        return [words.view(np.uint8)], 0, 0
    scalar, bits = words.dtype.type, 8 * width
    least_exponent, shift = _least_exponent_and_shift(words)
    planes = memory[: width * _padded_size(words.size)].reshape(width, -1)[:, : words.size]
    scratch = np.empty((2, min(_BLOCK_ELEMENTS, words.size)), dtype=words.dtype)
    # Work on whole words, since NumPy has no vector instructions to shift bytes.
    for start in range(0, words.size, _BLOCK_ELEMENTS):
        block = slice(start, start + _BLOCK_ELEMENTS)
        part = words[block]
        buffer, sign = scratch[:, : part.size]
        # In an element, the byte ``index`` of the rotated and shifted element begins one bit and
        # ``shift`` bits lower. The lowest byte is made below: the rotation puts the sign at its
        # end, and the shift puts the free bits after the sign.
        for index in range(1, width):
            np.right_shift(part, scalar(8 * index - 1 - shift), out=buffer)
            np.copyto(planes[index, block], buffer, casting="unsafe")
        planes[-1, block] -= np.uint8(least_exponent << shift & 255)  # Both modulo 256
        np.right_shift(part, scalar(bits - 1), out=sign)
        np.left_shift(sign, scalar(shift), out=sign)
        np.left_shift(part, scalar(1 + shift), out=buffer)
        np.bitwise_or(buffer, sign, out=buffer)
        np.copyto(planes[0, block], buffer, casting="unsafe")
    return list(planes), shift, least_exponent


def _least_exponent_and_shift(words: Words) -> tuple[int, int]:
    """Return the smallest exponent (the top byte of a rotated element), and the number of bits (at
    most ``_MOST_SHIFT``) that its subtraction frees at the top of every element.

    Returns (0, 0) if the subtraction frees no bit, since it would then save nothing.
    """
    scalar, bits = words.dtype.type, 8 * words.itemsize
    # Without the sign, the top byte of the rotated element begins at the bit ``bits - 9``.
    mask = scalar(2 ** (bits - 1) - 1)
    lowest, highest = 2 ** (bits - 1), 0
    for start in range(0, words.size, _BLOCK_ELEMENTS):
        part = words[start : start + _BLOCK_ELEMENTS] & mask
        lowest, highest = min(lowest, int(part.min())), max(highest, int(part.max()))
    least_exponent = lowest >> (bits - 9)
    shift = min(_MOST_SHIFT, 8 - ((highest >> (bits - 9)) - least_exponent).bit_length())
    return (least_exponent, shift) if shift else (0, 0)


def _run_words(size: int, shift: int) -> int:
    """Return the number of 64-bit words in a run of a plane of ``size`` bytes (see ``_pack``)."""
    return -(-size // (8 // shift * 8))


def _packed_bytes(size: int, shift: int) -> int:
    """Return the length of a packed plane of ``size`` bytes (see ``_pack``)."""
    return _run_words(size, shift) * 8 * (8 // shift - 1)


def _low_bits(shift: int) -> np.uint64:
    """Return a mask of the lowest ``shift`` bits of each of eight bytes."""
    return np.uint64(((1 << shift) - 1) * 0x0101010101010101)


def _padded_size(size: int) -> int:
    """Return how many bytes of memory a plane of ``size`` bytes needs, together with the zeros that
    ``_pack`` puts behind the plane.
    """
    return -(-size // 64) * 64


def _pack(memory: Bytes, size: int, shift: int) -> memoryview:
    """Pack the lowest plane in place, and return the packed plane.

    The plane is the first ``size`` bytes of ``memory``. The lowest ``shift`` bits of each byte are
    zero. The plane is cut into 8 / ``shift`` runs of equal length, and the bits of the last run are
    put into the zero bits of the other runs.
    """
    run_count, run_words = 8 // shift, _run_words(size, shift)
    padded_plane = memory[: run_count * run_words * 8]
    padded_plane[size:] = 0
    runs = padded_plane.view("<u8").reshape(run_count, run_words)
    for index, run in enumerate(runs[:-1], 1):
        run |= (runs[-1] >> np.uint64(shift * index)) & _low_bits(shift)
    return padded_plane[: (run_count - 1) * run_words * 8].data


def _unpack(data: memoryview, size: int, shift: int) -> Bytes:
    """Return the lowest plane, of ``size`` bytes, from which ``_pack`` made ``data``."""
    runs = np.frombuffer(data, dtype="<u8").reshape(8 // shift - 1, -1)
    plane = np.zeros((8 // shift, runs.shape[1]), dtype="<u8")
    np.bitwise_and(runs, ~_low_bits(shift), out=plane[:-1])
    for index, run in enumerate(runs, 1):
        plane[-1] |= (run & _low_bits(shift)) << np.uint64(shift * index)
    return plane.reshape(-1).view(np.uint8)[:size]


def _join(planes: Sequence[Bytes], out: Words, shift: int, least_exponent: int) -> None:
    """Fill ``out`` with the elements from which ``_split`` made ``planes``.

    Invalid planes raise no error here. They give wrong elements, which the caller detects by the
    checksum of the chunk.
    """
    width = out.itemsize
    if width == 1:
        out[:] = planes[0]
        return
    scalar, bits = out.dtype.type, 8 * width
    scratch = np.empty(min(_BLOCK_ELEMENTS, out.size), dtype=out.dtype)
    for start in range(0, out.size, _BLOCK_ELEMENTS):
        block = slice(start, start + _BLOCK_ELEMENTS)
        part = out[block]
        buffer = scratch[: part.size]
        np.copyto(part, planes[-1][block])
        for plane in reversed(planes[:-1]):
            np.left_shift(part, scalar(8), out=part)
            np.copyto(buffer, plane[block])
            np.bitwise_or(part, buffer, out=part)
        # Undo the shift and the rotation, and add the exponent again.
        np.right_shift(part, scalar(1 + shift), out=part)
        np.add(part, scalar(least_exponent << (bits - 9)), out=part)
        np.right_shift(buffer, scalar(shift), out=buffer)  # The lowest plane holds the sign bit
        np.left_shift(buffer, scalar(bits - 1), out=buffer)
        np.bitwise_or(part, buffer, out=part)


CODEC: Final = Codec(
    encoder=lambda level: BytePlanes(level).encode, decode=decode, levels=range(1, _MOST_LEVEL + 1)
)

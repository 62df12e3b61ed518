from __future__ import annotations

import itertools

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from ckpt.codec.zstd_byte_planes import BytePlanes, decode
from ckpt.model.checksum import checksum
from tests.kit.examples import examples

ENCODER = BytePlanes()
NORMAL = np.random.default_rng(1).standard_normal(300_001).astype(np.float32) * np.float32(0.02)


def encode(raw: bytes, width: int, encoder: BytePlanes = ENCODER) -> bytes:
    return b"".join(encoder.encode(memoryview(raw), width))


def decoded(data: bytes, nbytes: int, digest: str | None = None) -> bytes:
    out = bytearray(nbytes)
    decode(memoryview(data), memoryview(out))
    if digest not in (None, checksum(out)):
        raise ValueError("another chunk")
    return bytes(out)


def there_and_back(raw: bytes, width: int, encoder: BytePlanes = ENCODER) -> int:
    data = encode(raw, width, encoder)
    if len(data) == len(raw):
        assert data == raw
    else:
        assert len(data) < len(raw)
        assert decoded(data, len(raw)) == raw
    return len(data)


def bf16(values: np.ndarray) -> bytes:
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()


@pytest.mark.parametrize("level", [None, 3])
@pytest.mark.parametrize(
    ("raw", "width", "least"),
    [
        (NORMAL.tobytes(), 4, 1.20),
        (bf16(NORMAL), 2, 1.51),
        (NORMAL.astype(np.float16).tobytes(), 2, 1.05),
        (NORMAL.astype(np.float64).tobytes(), 8, 1.8),  # 29 of the 52 bits of mantissa are zero
        ((NORMAL**2).tobytes(), 4, 1.18),
        (np.arange(100_000).tobytes(), 1, 3.0),
    ],
)
def test_what_has_structure_gets_shorter(
    raw: bytes, width: int, least: float, level: int | None
) -> None:
    assert len(raw) / there_and_back(raw, width, BytePlanes(level)) > least


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_noise_stays_as_it_is_and_is_not_copied(width: int) -> None:
    raw = memoryview(np.random.default_rng(2).bytes(1 << 20))
    assert ENCODER.encode(raw, width)[0] is raw


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_one_value_everywhere_is_nearly_nothing(width: int) -> None:
    for value in (b"\0", b"\xff", b"\x3f"):
        assert there_and_back(value * (1 << 20), width) < 3000


@pytest.mark.parametrize("count", [0, 1, 2, 3, 15, 31, 33, 63, 65, 1000, 65537, 262144, 262145])
@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_every_length_comes_back(count: int, width: int) -> None:
    there_and_back(
        np.resize(NORMAL.astype(f"f{width}" if width > 1 else "i1"), count).tobytes(), width
    )


@pytest.mark.parametrize("spread", [1e0, 1e10, 1e19, 1e38])
def test_exponents_may_lie_anywhere(spread: float) -> None:
    """The shift is two bits, one, or none."""
    values = np.concatenate(
        [NORMAL, NORMAL / np.float32(spread), [np.float32(0)] * (spread > 1e30)]
    )
    there_and_back(values.astype(np.float32).tobytes(), 4)
    there_and_back(bf16(values), 2)


@settings(max_examples=examples(60))
@given(
    st.sampled_from([1, 2, 4, 8]),
    st.integers(0, 2**32),
    st.integers(1, 5000),
    st.integers(0, 63),
    st.integers(0, 2**63 - 1),
)
def test_any_bits_come_back(width: int, seed: int, count: int, bits: int, offset: int) -> None:
    """The bits include nan, infinities and subnormal numbers, as runs of values of any range."""
    words = np.random.default_rng(seed).integers(
        0, 2 ** min(bits, 63), count, dtype=np.uint64, endpoint=True
    )
    there_and_back((words + np.uint64(offset)).astype(f"<u{width}").tobytes(), width)


@pytest.mark.parametrize(
    "raw", [NORMAL.tobytes(), bf16(NORMAL), np.arange(9000).tobytes(), bytes(5000)], ids=len
)
def test_damage_gives_our_error_or_the_same_bytes(raw: bytes) -> None:
    width = 4 if len(raw) == NORMAL.nbytes else 2
    data, digest = encode(raw, width), checksum(raw)
    random = np.random.default_rng(3)
    places = [*range(min(40, len(data))), *random.integers(0, len(data), 60)]
    found = 0
    for place in places:
        damaged = bytearray(data)
        damaged[place] ^= 1 << int(random.integers(8))
        try:  # zstd frames have bits without a meaning
            assert decoded(bytes(damaged), len(raw), digest) == raw
        except ValueError:
            found += 1
    assert found > len(places) / 2
    for end in (0, 1, 3, 4, 12, len(data) // 2, len(data) - 1):
        with pytest.raises(ValueError):
            decoded(data[:end], len(raw), digest)
    with pytest.raises(ValueError):
        decoded(data + b"\0", len(raw), digest)


@settings(max_examples=examples(300))
@given(st.binary(max_size=200), st.integers(0, 4096))
def test_nonsense_gives_our_error(data: bytes, nbytes: int) -> None:
    with pytest.raises(ValueError):
        decoded(data, nbytes, "0" * 32)


@settings(max_examples=examples(200))
@given(
    st.sampled_from([1, 2, 4, 8]),
    st.integers(0, 3),
    st.integers(0, 255),
    st.binary(max_size=64),
    st.data(),
)
def test_nonsense_behind_a_good_head_gives_our_error(
    width: int, shift: int, base: int, body: bytes, more: st.DataObject
) -> None:
    cuts = sorted(
        more.draw(st.lists(st.integers(0, len(body)), min_size=width - 1, max_size=width - 1))
    )
    edges = [0, *cuts, len(body)]
    lengths = b"".join((b - a).to_bytes(4, "little") for a, b in itertools.pairwise(edges))
    head = bytes([width, shift, base, 0])
    with pytest.raises(ValueError):
        decoded(head + lengths + body, more.draw(st.integers(0, 40)) * width, "0" * 32)


def test_a_frame_that_claims_more_than_the_manifest_gets_no_memory() -> None:
    import zstandard

    bomb = zstandard.ZstdCompressor(level=19).compress(bytes(1 << 30))
    with pytest.raises(ValueError):
        decoded(bytes([1, 0, 0, 0]) + len(bomb).to_bytes(4, "little") + bomb, 1 << 20)


def by_the_book(data: bytes, nbytes: int, packed: list[int]) -> bytes:
    """Decode as docs/format.md says, one element after another."""
    import zstandard

    width, shift, base, zero = data[:4]
    assert zero == 0
    size, place = nbytes // width, 4 + 4 * width
    planes: list[bytes] = []
    for k in range(width):
        length = int.from_bytes(data[4 + 4 * k : 8 + 4 * k], "little")
        piece, place = data[place : place + length], place + length
        r = -(-size * shift // 64)
        if length == size:
            planes.append(piece)
        elif k == 0 and shift and length == (8 // shift - 1) * 8 * r:
            g, mask = 8 // shift, (1 << shift) - 1
            runs = [piece[i * 8 * r : (i + 1) * 8 * r] for i in range(g - 1)]
            last = [
                sum((runs[i - 1][j] & mask) << (shift * i) for i in range(1, g))
                for j in range(8 * r)
            ]
            planes.append(bytes([byte & ~mask for byte in b"".join(runs)] + last)[:size])
            packed.append(shift)
        else:
            planes.append(zstandard.ZstdDecompressor().decompress(piece))
    assert place == len(data)
    bits, found = 8 * width, bytearray()
    for element in zip(*planes, strict=True):
        word = (int.from_bytes(bytes(element), "little") >> shift) + (base << (bits - 8))
        if width > 1:
            word = word >> 1 | (word & 1) << (bits - 1)
        found += word.to_bytes(width, "little")
    return bytes(found)


def test_the_page_about_the_format_is_enough_to_read_it() -> None:
    packed: list[int] = []
    small = NORMAL[:5003]
    for values in (
        small,
        small * np.where(np.arange(5003) % 2, np.float32(1), np.float32(2.0**-60)),
    ):
        for raw, width in (
            (values.tobytes(), 4),
            (bf16(values), 2),
            (values.astype(np.float64).tobytes(), 8),
        ):
            data = encode(raw, width)
            assert len(data) < len(raw)
            assert by_the_book(data, len(raw), packed) == raw
    raw = np.arange(9000).tobytes()
    assert by_the_book(encode(raw, 1), len(raw), packed) == raw
    assert set(packed) == {1, 2}, "both ways to pack are met"

"""A difference leads from any chunk to any other of its length, or says that it does not."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.codec.word_difference import apply_difference, difference

LENGTH = 4096


def code_of(old: bytes, new: bytes, width: int) -> bytes:
    pieces = difference(memoryview(old), memoryview(new), width)
    assert pieces is not None
    return b"".join(pieces)


def applied(code: bytes, old: bytes) -> bytes:
    data = bytearray(old)
    apply_difference(memoryview(code), memoryview(data))
    return bytes(data)


@given(
    width=st.sampled_from([1, 2, 4, 8]),
    seed=st.integers(0, 1000),
    changes=st.dictionaries(st.integers(0, LENGTH // 8 - 1), st.integers(0, 255), max_size=200),
)
def test_any_change_is_applied(width: int, seed: int, changes: dict[int, int]) -> None:
    old = np.random.default_rng(seed).integers(0, 256, LENGTH, dtype=np.uint8).tobytes()
    words = np.frombuffer(old, dtype=f"<u{width}").copy()
    for position, byte in changes.items():
        words[position] = byte << (8 * width - 8)
    new = words.tobytes()
    code = code_of(old, new, width)
    assert applied(code, old) == new
    data = bytearray(new)
    apply_difference(memoryview(code), memoryview(data), is_reverse=True)
    assert data == old


@pytest.mark.parametrize("gap", [0, 1, 253, 254, 255, 256, 509, 510, 511, 1800])
def test_any_gap_is_kept(gap: int) -> None:
    words = np.zeros(2048, dtype="<u2")
    words[[gap, 2 * gap + 1 if gap < 1000 else gap + 1]] = 1
    old = bytes(LENGTH)
    assert applied(code_of(old, words.tobytes(), 2), old) == words.tobytes()


def test_chunks_that_are_equal_need_nothing() -> None:
    assert difference(memoryview(bytes(8)), memoryview(bytes(8)), 2) == []
    assert applied(b"", bytes(8)) == bytes(8)


def test_too_many_changes_have_no_difference() -> None:
    assert difference(memoryview(bytes(8)), memoryview(b"\1" * 8), 2) is None


def test_small_steps_are_short() -> None:
    generator = np.random.default_rng(0)
    old = generator.integers(0, 1 << 16, 1 << 16, dtype=np.uint16)
    changes = (generator.random(1 << 16) < 0.02) * generator.choice([-1, 1], 1 << 16)
    new = old + changes.astype(np.uint16)
    assert len(code_of(old.tobytes(), new.tobytes(), 2)) < 0.016 * old.nbytes


@given(data=st.data())
def test_damage_is_found_or_ends_in_other_bytes(data: st.DataObject) -> None:
    old = bytes(range(256)) * 4
    words = np.frombuffer(old, dtype="<u2").copy()
    words[::7] += 3
    code = bytearray(code_of(old, words.tobytes(), 2))
    position = data.draw(st.integers(0, len(code) - 1))
    code[position] ^= data.draw(st.integers(1, 255))
    with suppress(ValueError):
        assert len(applied(bytes(code), old)) == len(old)


@pytest.mark.parametrize("length", [0, 1, 12, 13, 20])
def test_a_difference_that_is_cut_changes_nothing(length: int) -> None:
    old = bytes(LENGTH)
    words = np.zeros(LENGTH // 2, dtype="<u2")
    words[5] = 1
    code = code_of(old, words.tobytes(), 2)[:length]
    if not code:
        return
    data = bytearray(old)
    with pytest.raises(ValueError, match=r"."):
        apply_difference(memoryview(code), memoryview(data))
    assert data == old


def test_a_difference_of_a_longer_chunk_changes_nothing() -> None:
    words = np.zeros(LENGTH, dtype="<u2")
    words[-1] = 1
    code = code_of(bytes(2 * LENGTH), words.tobytes(), 2)
    with pytest.raises(ValueError, match=r"do not add up|more changes"):
        applied(code, bytes(64))

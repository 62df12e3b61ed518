from __future__ import annotations

import numpy as np
import pytest

from ckpt.errors import ChecksumMismatch
from ckpt.model.checksum import CHECKSUM_PATTERN, checksum, verify


def test_the_checksum_is_xxh3_128():
    assert checksum(b"") == "99aa06d3014798d86001c324468d497f"
    assert checksum(b"abc") == "06b05ab6733a618578af5f94892f3950"


def test_bytes_and_views_of_any_item_size_have_the_same_checksum():
    array = np.arange(100, dtype=np.float32)
    raw = array.tobytes()
    assert (
        checksum(raw)
        == checksum(bytearray(raw))
        == checksum(memoryview(raw))
        == checksum(array.data)
    )


def test_parts_have_the_checksum_of_the_whole():
    raw = memoryview(np.random.default_rng(0).bytes(1000))
    for cut in (0, 1, 239, 240, 241, 1000):
        assert checksum(raw[:cut], raw[cut:]) == checksum(raw)
    assert checksum(raw[:3], raw[3:700], raw[700:]) == checksum(raw)


def test_every_flipped_bit_changes_it():
    data = bytearray(range(64))
    known = {checksum(data)}
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        known.add(checksum(data))
        data[bit // 8] ^= 1 << bit % 8
    assert len(known) == 1 + 8 * len(data)
    assert all(CHECKSUM_PATTERN.fullmatch(text) for text in known)


def test_a_mismatch_names_the_key_and_the_bytes():
    verify(b"data", checksum(b"data"), key="step/rank", offset=7)
    with pytest.raises(ChecksumMismatch, match="'step/rank', bytes 7 to 11") as caught:
        verify(b"date", checksum(b"data"), key="step/rank", offset=7)
    assert (caught.value.key, caught.value.offset, caught.value.nbytes) == ("step/rank", 7, 4)

"""Compute and verify checksums.

A checksum is the xxh3_128 hash of the raw (unencoded) bytes, written as 32 lower-case hexadecimal
digits. Equal chunks therefore have equal checksums on all tiers. A checksum detects damage, but
does not protect against an attacker who can write to the store. The computation releases the GIL
for large buffers, and reaches 12 to 33 GB/s on one core.
"""

from __future__ import annotations

import re
from typing import Final

import xxhash

from ckpt.errors import ChecksumMismatch

CHECKSUM_BYTES: Final = 16
"""The size of a checksum in its binary form, which packed fragments and the merge use."""
CHECKSUM_PATTERN: Final = re.compile(f"[0-9a-f]{{{2 * CHECKSUM_BYTES}}}")


def checksum(data: memoryview | bytes | bytearray, *more: memoryview) -> str:
    """Return the checksum of ``data``, and of ``more`` after it as if all were joined."""
    if not more:
        return xxhash.xxh3_128_hexdigest(data)
    stream = xxhash.xxh3_128(data)
    for part in more:
        stream.update(part)
    return stream.hexdigest()


def verify(data: memoryview | bytes, digest: str, *, key: str, offset: int) -> None:
    """Raise ``ChecksumMismatch`` if the checksum of ``data`` is not ``digest``.

    Args:
        key: The key of the file that ``data`` was read from, for the error.
        offset: The position of ``data`` in that file in bytes, for the error.
    """
    if checksum(data) != digest:
        raise ChecksumMismatch(key, offset, len(data))

"""The form of the requests and answers between nodes, and what a node says of itself."""

from __future__ import annotations

import struct
from typing import Final

import msgspec

MAGIC: Final = b"ckp1"
TOKEN_BYTES: Final = 32
REQUEST: Final = struct.Struct(f">4s{TOKEN_BYTES}sHQQH")
"""Magic, token, tier, offset, length, bytes of the key. The key follows."""
ANSWER: Final = struct.Struct(">4sBQ")
"""Magic, outcome, size of the object. Its bytes follow."""
OK, NOT_THERE, FAILED = 0, 1, 2
CONNECT_SECONDS: Final = 5.0
ANSWER_SECONDS: Final = 60.0
"""How long either side waits for the other's next bytes."""


class Step(msgspec.Struct, frozen=True):
    """The contents of one step's folder on one node: whether it has the manifest, and each file's
    size.
    """

    listed: bool
    files: dict[str, int]


class Peer(msgspec.Struct, frozen=True):
    """What one node offers: its addresses, and its steps by tier and folder.

    A node without addresses does not serve.
    """

    rank: int
    addresses: tuple[str, ...]
    port: int
    token: str
    tiers: dict[int, dict[str, Step]]

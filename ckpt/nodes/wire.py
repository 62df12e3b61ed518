"""The format of the requests and answers between nodes, and the records that nodes post about
themselves.
"""

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
"""The outcomes: the bytes follow, the object does not exist or may not be read, or the store has
failed.
"""
CONNECT_SECONDS: Final = 5.0
"""How long a node waits for a connection, and a server until a requested step is allowed."""
ANSWER_SECONDS: Final = 60.0
"""How long the sender and the receiver of an answer wait until more bytes can be sent or arrive."""


class Step(msgspec.Struct, frozen=True):
    """The contents of a step's folder on one node.

    Attributes:
        listed: Whether the folder has the manifest.
        files: The size of each data file, by its name.
    """

    listed: bool
    files: dict[str, int]


class Peer(msgspec.Struct, frozen=True):
    """The server of one node, and the steps on the node's local tiers.

    Attributes:
        rank: The lowest rank of the node, which runs the server.
        addresses: The addresses of the server. Empty if the node has no server.
        port: The port of the server.
        token: The token that requests must contain, in hexadecimal.
        tiers: For each local tier, by its index: the steps, by the names of their folders.
    """

    rank: int
    addresses: tuple[str, ...]
    port: int
    token: str
    tiers: dict[int, dict[str, Step]]

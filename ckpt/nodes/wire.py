"""The format of the requests and answers between nodes, and the records that nodes post about
themselves.
"""

from __future__ import annotations

import struct
from typing import Final

import msgspec

from ckpt.model.rollback import Rollback

MAGIC: Final = b"ckp1"
TOKEN_BYTES: Final = 32
REQUEST: Final = struct.Struct(f">4s{TOKEN_BYTES}sHQQH")
"""The fields of a request: magic, token, index of the tier, offset, length, and the number of bytes
of the key. The key follows.
"""
ANSWER: Final = struct.Struct(">4sBQ")
"""The fields of an answer: magic, outcome, and size of the object. If the outcome is ``OK``, the
requested bytes follow.
"""
OK, NOT_THERE, FAILURE = 0, 1, 2
"""The outcomes of a request. ``OK``: the requested bytes follow. ``NOT_THERE``: the object does not
exist, or may not be read. ``FAILURE``: the store has failed, or the request is not valid.
"""
CONNECT_SECONDS: Final = 5.0
"""How long a node waits for a connection. Also how long a server waits until a requested step is
allowed.
"""
ANSWER_SECONDS: Final = 60.0
"""How long the sender of an answer waits until it can send more bytes, and how long the receiver
waits until more bytes arrive.
"""


class StepFiles(msgspec.Struct, frozen=True):
    """The contents of a step's folder on one node.

    Attributes:
        has_manifest: Whether the folder has the manifest.
        files: The size of each data file, by its name.
    """

    has_manifest: bool
    files: dict[str, int]


class Peer(msgspec.Struct, frozen=True):
    """The server of one node, and the steps on the node's local tiers.

    Attributes:
        rank: The lowest rank of the node, which runs the server.
        addresses: The addresses of the server. Empty if the node has no server.
        port: The port of the server.
        token: The token that requests must contain, in hexadecimal.
        tiers: For each local tier, by its index: the steps, by the names of their folders.
        rollback: The rollback that counts on the local tiers; None if there is none.
        heads: The folder of the newest step of each attempt on the local tiers.
    """

    rank: int
    addresses: tuple[str, ...]
    port: int
    token: str
    tiers: dict[int, dict[str, StepFiles]]
    rollback: Rollback | None = None
    heads: tuple[str, ...] = ()

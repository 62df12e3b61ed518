"""Sends messages that are too long for one request to the job's store, compressed and in pieces.

torch's store closes the connection of a client that sends more than 8 MiB at once. A *subject* is
the name of an exchange, on which each rank may post one message.
"""

from __future__ import annotations

import time
from base64 import b64decode, b64encode
from typing import Final

import zstandard

from ckpt.coordination.coordinator import Coordinator
from ckpt.errors import CommitError

_PIECE_BYTES: Final = 4 << 20


def send(coordinator: Coordinator, subject: str, data: bytes) -> int:
    """Post ``data`` on ``subject``, and return the number of pieces, which ``drop`` needs."""
    # The job's store only takes text.
    text = b64encode(zstandard.ZstdCompressor(level=3).compress(data))
    pieces = [text[offset : offset + _PIECE_BYTES] for offset in range(0, len(text), _PIECE_BYTES)]
    for number, piece in enumerate(pieces[1:], 1):
        coordinator.post(f"{subject}/{number}", piece)
    # The first piece is posted last, so that a rank that has received it finds the other pieces.
    coordinator.post(f"{subject}/0", b"%d:" % len(pieces) + pieces[0])
    return len(pieces)


def receive(
    coordinator: Coordinator, subject: str, rank: int, *, limit: int, timeout: float
) -> bytes:
    """Return the data that ``rank`` sent on ``subject``.

    Args:
        coordinator: The connection to the other ranks.
        subject: The subject of the message.
        rank: The rank that has sent the message.
        limit: The largest size of the data in bytes.
        timeout: How many seconds to wait for the message.

    Raises:
        CommitError: The data has not arrived, is damaged, or has more than ``limit`` bytes.
    """
    deadline = time.monotonic() + timeout
    count, _, head = _receive_piece(coordinator, f"{subject}/0", rank, deadline).partition(b":")
    try:
        numbers = range(1, int(count))
        rest = [
            _receive_piece(coordinator, f"{subject}/{number}", rank, deadline) for number in numbers
        ]
        frame = b64decode(b"".join([head, *rest]), validate=True)
        if not 0 <= zstandard.frame_content_size(frame) <= limit:
            raise CommitError(f"rank {rank} sent more than the {limit} bytes that it announced")
        return zstandard.ZstdDecompressor().decompress(
            frame, max_output_size=limit, allow_extra_data=False
        )
    except (ValueError, zstandard.ZstdError) as error:
        raise CommitError(f"what rank {rank} sent is damaged: {error}") from None


def drop(coordinator: Coordinator, subject: str, pieces: int) -> None:
    """Remove the pieces of a message that this rank sent. The call never raises."""
    for number in range(pieces):
        coordinator.forget(f"{subject}/{number}")


def _receive_piece(coordinator: Coordinator, subject: str, rank: int, deadline: float) -> bytes:
    messages = coordinator.collect(subject, {rank}, timeout=max(0.0, deadline - time.monotonic()))
    if rank not in messages:
        raise CommitError(f"what rank {rank} was to send did not come")
    return messages[rank]

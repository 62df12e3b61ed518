"""Encode manifests and fragments to bytes and back. A *record* is either of the two.

A record is stored as JSON, ``{"checksum":"<32 hex digits>","body":{...}}``. The checksum covers the
exact bytes of the body, and the file has no other bytes than the body, the checksum and the fixed
punctuation. A flipped, missing or added byte is therefore found before the body is decoded.

A record of 1 MiB or more is compressed. It is then stored as the line ``ckpt-zstd <32 hex digits>``
and a zstd frame that holds the JSON. The digits are the checksum of the frame. This second checksum
is needed because a frame has bits that do not change the bytes that it unpacks to.
"""

from __future__ import annotations

import threading
from typing import Any, Final, TypeVar

import msgspec

from ckpt.errors import FormatTooNew, FormatTooOld, ManifestCorrupt
from ckpt.model.checksum import CHECKSUM_BYTES, checksum
from ckpt.model.manifest import FORMAT

MAX_RECORD_BYTES: Final = 4 << 30
"""The most bytes of a record. If a store or a frame states a larger size, the record is refused
before memory is allocated for it.
"""
MAX_EXPANSION: Final = 256
"""The largest ratio of the unpacked size to the size of a zstd frame.

A reader refuses a frame that states a larger unpacked size, so that a small forged file cannot use
much memory. A record that would exceed the ratio is stored uncompressed.
"""

_COMPRESS_FROM_BYTES: Final = 1 << 20
_FRAME_PREFIX: Final = b"ckpt-zstd "
_PREFIX_BYTES: Final = len(_FRAME_PREFIX) + 2 * CHECKSUM_BYTES + 1  # Includes the end of the line


class _Envelope(msgspec.Struct, forbid_unknown_fields=True):
    checksum: str
    body: msgspec.Raw


class _Version(msgspec.Struct):
    format: int


Record = TypeVar("Record", bound=msgspec.Struct)

_json_encoder = msgspec.json.Encoder(order="deterministic")
_envelope_decoder = msgspec.json.Decoder(_Envelope)
_version_decoder = msgspec.json.Decoder(_Version)
_decoders: dict[type[msgspec.Struct], msgspec.json.Decoder[Any]] = {}
_creation_lock = threading.Lock()


def pack(record: msgspec.Struct) -> bytes:
    """Return the bytes of a record. The same record gives the same bytes on every machine."""
    body = _json_encoder.encode(record)
    text = b'{"checksum":"' + checksum(body).encode() + b'","body":' + body + b"}"
    if len(text) < _COMPRESS_FROM_BYTES:
        return text
    frame = compress(text)
    if len(text) > MAX_EXPANSION * len(frame):
        return text
    return _FRAME_PREFIX + checksum(frame).encode() + b"\n" + frame


def unpack(data: bytes, kind: type[Record], *, key: str) -> Record:
    """Return the record that ``pack`` has encoded to ``data``.

    Args:
        kind: The type of the record.
        key: The name of the record in errors.

    Raises:
        ManifestCorrupt: The data is truncated, damaged, not JSON, or another kind of record.
        FormatTooNew, FormatTooOld: The record is in another format.
    """
    version, body = _open_envelope(data, key)
    if version != FORMAT:
        raise (FormatTooNew if version > FORMAT else FormatTooOld)(key, version, FORMAT)
    try:
        return _decoder_of(kind).decode(body)
    except (msgspec.MsgspecError, UnicodeError, RecursionError, ValueError) as error:
        raise ManifestCorrupt(key, str(error)[:200]) from None


def _decoder_of(kind: type[Record]) -> msgspec.json.Decoder[Record]:
    """Return the JSON decoder for a type of record. The first call for a type creates the decoder.

    The lock is needed because msgspec 0.22 crashes if two threads use a struct type for the first
    time at once. All other modules create the decoders of their structs on import.
    """
    if (decoder := _decoders.get(kind)) is None:
        with _creation_lock:
            decoder = _decoders.setdefault(kind, msgspec.json.Decoder(kind))
    return decoder


def _open_envelope(data: bytes, key: str) -> tuple[int, msgspec.Raw]:
    """Check that no byte of a record has changed. Return the format number and the body of the
    record. Raises ``ManifestCorrupt`` if a byte has changed.
    """
    raw = _open_frame(data, key) if data.startswith(_FRAME_PREFIX) else data
    try:
        envelope = _envelope_decoder.decode(raw)
        body = bytes(envelope.body)
        if checksum(body) != envelope.checksum:
            raise ManifestCorrupt(
                key, "its checksum does not match its content (truncated or damaged)"
            )
        version = _version_decoder.decode(envelope.body).format
    except (msgspec.MsgspecError, UnicodeError, RecursionError, ValueError) as error:
        raise ManifestCorrupt(key, str(error)[:200]) from None
    # The JSON reader accepts some changed bytes, for example white space.
    if raw != b'{"checksum":"' + envelope.checksum.encode() + b'","body":' + body + b"}":
        raise ManifestCorrupt(key, "bytes outside of its body were changed")
    return version, envelope.body


def _open_frame(data: bytes, key: str) -> bytes:
    """Return the JSON of a compressed record. Raises ``ManifestCorrupt`` if a byte has changed."""
    frame = data[_PREFIX_BYTES:]
    if data[:_PREFIX_BYTES] != _FRAME_PREFIX + checksum(frame).encode() + b"\n":
        raise ManifestCorrupt(key, "its checksum does not match its content (truncated or damaged)")
    return decompress(frame, key, at_most=min(MAX_RECORD_BYTES, MAX_EXPANSION * len(frame)))


def compress(data: bytes) -> bytes:
    """Return ``data`` compressed to one zstd frame."""
    import zstandard  # This import would slow down ``import ckpt``

    return zstandard.ZstdCompressor(level=3).compress(data)


def decompress(frame: bytes, key: str, *, at_most: int) -> bytes:
    """Return the bytes that a zstd frame unpacks to.

    Args:
        key: The name of the record in errors.
        at_most: The most bytes that the frame may unpack to.

    Raises:
        ManifestCorrupt: The frame is damaged, does not state its unpacked size, or states a size of
            more than ``at_most`` bytes. No memory is allocated for a size that is refused.
    """
    import zstandard

    try:
        size = zstandard.frame_content_size(frame)
        if not 0 <= size <= at_most:
            raise ManifestCorrupt(key, f"{len(frame)} bytes claim to unpack to {size} bytes")
        return zstandard.ZstdDecompressor().decompress(
            frame, max_output_size=size, allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise ManifestCorrupt(key, str(error)) from None

"""Recognize the kind of a file by its first bytes, for errors about files of the wrong kind."""

from __future__ import annotations

import os
from typing import Final

_BEGINNINGS: Final = (
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file (Keras, or PyTables)"),
    (b"GGUF", "a GGUF file"),
    (b"\x93NUMPY", "an array of numpy.save"),
    (b"\x1f\x8b", "compressed with gzip: unpack it first"),
    (b"\x28\xb5\x2f\xfd", "compressed with zstd: unpack it first"),
    (b"BZh", "compressed with bzip2: unpack it first"),
    (b"\xfd7zXZ\x00", "compressed with xz: unpack it first"),
    (b"\x7fELF", "a program"),
    (b"version https://git-lfs", "a pointer of Git LFS, not the file itself: git lfs pull"),
)
_HEAD_BYTES: Final = 4096


def is_torch(path: str) -> bool:
    """Return True if the file begins as a file of ``torch.save`` since torch 1.6. Return False if
    the file cannot be read.
    """
    try:
        with open(path, "rb") as file:
            head = file.read(300)
    except OSError:
        return False
    return head.startswith(b"PK\x03\x04") and b"data.pkl" in head


def describe_file(path: str) -> str:
    """Return a text that names the kind of a file, such as "a zip archive". The text is empty if
    the kind is unknown, if the file cannot be read, or if it may be a damaged file of
    ``torch.save``.
    """
    try:
        size = os.path.getsize(path)
        with open(path, "rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError:
        return ""
    if not head.strip(b"\x00"):  # Damage may fill a file with zeros
        return ""
    for prefix, name in _BEGINNINGS:
        if head.startswith(prefix):
            return name
    if head[8:9] == b"{" and 2 <= int.from_bytes(head[:8], "little") < size:
        return "a safetensors file: give --format safetensors"
    if head.startswith(b"PK\x03\x04"):
        if b"data.pkl" in head[:300]:
            return ""  # This is a file of ``torch.save``, which must be damaged
        return "an archive of numpy.savez" if b".npy" in head[:200] else "a zip archive"
    if head[257:262] == b"ustar":
        return "a tar archive: unpack it first"
    return _kind_of_text(head)


def _kind_of_text(head: bytes) -> str:
    """Return the kind of text that ``head``, the begin of a file, is; empty if it is no text."""
    try:
        text = head[: _HEAD_BYTES - 4].decode().lstrip()
    except UnicodeDecodeError:
        return ""
    if not all(char.isprintable() or char.isspace() for char in text):
        return ""
    if text.startswith(("<!DOCTYPE", "<!doctype", "<html", "<?xml")):
        return "a web page, as a download that failed leaves one"
    return "JSON" if text.startswith(("{", "[")) else "text"

"""Find the files of a step, and damage them."""

from __future__ import annotations

from pathlib import Path

import msgspec

from ckpt.catalog.step_listing import committed
from ckpt.catalog.verify import VerifyReport, verify_step
from ckpt.config import Tier
from ckpt.model.checksum import checksum
from ckpt.model.keys import parse_folder
from ckpt.pipeline.workers import Workers
from ckpt.storage.registry import open_backend


def files(root: Path, step: int) -> dict[str, Path]:
    (folder,) = (
        path for path in root.iterdir() if (ref := parse_folder(path.name)) and ref.step == step
    )
    return {
        "data": folder / "rank-00000.safetensors",
        "manifest": folder / "manifest.json",
        "fragment": folder / "rank-00000.json",
    }


def folder_of(root: Tier) -> Path:
    """Return the folder of the only step on a tier."""
    [folder] = Path(root.url).glob("step-*")
    return folder


def data_of(root: Tier) -> Path:
    """Return the data file of the only step of a job with one rank."""
    [data] = [file for file in folder_of(root).glob("rank-*") if file.suffix != ".json"]
    return data


def look(root: Tier) -> VerifyReport:
    """Compare the only step on a tier with its checksums."""
    backend = open_backend(root.url)
    [ref] = committed(backend)
    with Workers("check", 2) as workers:
        return verify_step(backend, ref, workers=workers)


def flip(path: Path, position: int = -100) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 0x10
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def garbage(path: Path) -> None:
    path.write_bytes(b"\x00\xff{}" * 500)


def sealed(body: object) -> bytes:
    """Return the envelope of a record, with a right checksum. Bytes are a body that is encoded."""
    packed = body if isinstance(body, bytes) else msgspec.json.encode(body)
    return b'{"checksum":"' + checksum(packed).encode() + b'","body":' + packed + b"}"

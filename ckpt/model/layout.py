"""The only place that builds or reads a key below the root of a tier."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from ckpt.errors import ManifestCorrupt

MANIFEST: Final = "manifest.json"
OWNER: Final = "writer.json"
"""Who writes to this root: attempt, host and process. See docs/format.md."""

_STEP: Final = re.compile(r"step-([0-9]{9,18})\.([0-9a-z]{6,32})")
_FILE: Final = re.compile(r"rank-[0-9]{5,}\.(safetensors|encoded|json)")


@dataclass(frozen=True, slots=True, order=True)
class StepRef:
    """One attempt at one step: a folder below the root. Orders by step."""

    step: int
    attempt: str

    @property
    def folder(self) -> str:
        return f"step-{self.step:09d}.{self.attempt}"

    @property
    def manifest(self) -> str:
        return f"{self.folder}/{MANIFEST}"

    def key(self, name: str) -> str:
        """Key of a file named in the manifest; a name that is not one of ours never becomes a key."""
        if not _FILE.fullmatch(name):
            raise ManifestCorrupt(self.manifest, f"{name[:80]!r} is not the name of a checkpoint file")
        return f"{self.folder}/{name}"


def parse_folder(name: str) -> StepRef | None:
    """None for a folder that is not ours."""
    match = _STEP.fullmatch(name)
    ref = StepRef(int(match.group(1)), match.group(2)) if match else None
    return ref if ref is not None and ref.folder == name else None  # more zeros than we write: not ours


def is_file_name(name: str) -> bool:
    """Whether a file in a step's folder is one that a save makes."""
    return name == MANIFEST or _FILE.fullmatch(name) is not None


def data_name(rank: int, *, encoded: bool = False) -> str:
    """An encoded file is no safetensors file, and is not called one."""
    return f"rank-{rank:05d}.{'encoded' if encoded else 'safetensors'}"


def fragment_name(rank: int) -> str:
    return f"rank-{rank:05d}.json"

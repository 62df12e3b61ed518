"""The only place that builds or reads a key below the root of a tier."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from numbers import Integral
from operator import index
from typing import Final, SupportsIndex, cast

from ckpt.errors import ConfigError, ManifestCorrupt

MANIFEST: Final = "manifest.json"
CLAIM_MARKER: Final = "verdict"
"""The object that decides between finishing and removing a save. See docs/format.md."""
OWNER: Final = "writer.json"
"""The record of the job that writes to the root. See docs/format.md."""
PINS: Final = "pins"
"""The folder of the pins. See docs/format.md."""
WATCHERS: Final = "watchers"
"""The folder of what watchers have handled. See docs/format.md."""

_STEP: Final = re.compile(r"step-([0-9]{9,18})\.([0-9a-z]{6,32})")
_LATE_METRICS: Final = re.compile(r"metrics-[0-9a-f]{32}\.json")
_FILE: Final = re.compile(r"rank-[0-9]{5,}\.(safetensors|encoded|json)")
_END_NOTE: Final = re.compile(r"rank-([0-9]{5,})\.ended")
_RANK_MARKER: Final = re.compile(r"rank-([0-9]{5,})\.verdict")


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

    @property
    def claim_marker(self) -> str:
        return f"{self.folder}/{CLAIM_MARKER}"

    def late_metrics(self, content: str) -> str:
        """Return the key of metrics that were added later. ``content`` is their checksum."""
        return f"{self.folder}/metrics-{content}.json"

    def end_note(self, rank: int) -> str:
        """Return the key of the note that a rank has ended, and that its node has its files."""
        return f"{self.folder}/rank-{rank:05d}.ended"

    def rank_marker(self, rank: int) -> str:
        """Return the key of the object that decides who has the files of a rank on a shared tier:
        the rank, which removes them, or the agent of another node, which brings them.
        """
        return f"{self.folder}/rank-{rank:05d}.verdict"

    def key(self, name: str) -> str:
        """Return the key of a file that the manifest names. A name that is not one of ours never
        becomes a key.
        """
        if not _FILE.fullmatch(name):
            raise ManifestCorrupt(
                self.manifest, f"{name[:80]!r} is not the name of a checkpoint file"
            )
        return f"{self.folder}/{name}"


def parse_folder(name: str) -> StepRef | None:
    """Return the attempt that a folder's name says, or None for a folder that is not ours."""
    match = _STEP.fullmatch(name)
    ref = StepRef(int(match.group(1)), match.group(2)) if match else None
    # A name with more zeros than ckpt writes is not ours.
    return ref if ref is not None and ref.folder == name else None


def is_file_name(name: str) -> bool:
    """Return True if ckpt writes a file of this name into a step's folder."""
    known = name in {MANIFEST, CLAIM_MARKER} or is_late_metrics(name)
    return known or is_about_rank(name) or _FILE.fullmatch(name) is not None


def is_fragment(name: str) -> bool:
    """Return True if a file of this name describes what a rank made durable."""
    return name.startswith("rank-") and name.endswith(".json")


def noted_rank(name: str) -> int | None:
    """Return the rank whose end a file of this name notes; None if it is no such file."""
    match = _END_NOTE.fullmatch(name)
    return int(match[1]) if match else None


def marked_rank(name: str) -> int | None:
    """Return the rank whose files a marker of this name is about; None if it is no such marker."""
    match = _RANK_MARKER.fullmatch(name)
    return int(match[1]) if match else None


def is_about_rank(name: str) -> bool:
    """Return True if a file of this name says something about a rank, and is not written by it as
    a part of the step.
    """
    return noted_rank(name) is not None or marked_rank(name) is not None


def is_late_metrics(name: str) -> bool:
    """Return True if a file of this name has metrics that were added later."""
    return _LATE_METRICS.fullmatch(name) is not None


def data_name(rank: int, *, encoded: bool = False) -> str:
    """Return the name of a rank's data file. An encoded file has another suffix, since it is no
    safetensors file.
    """
    return f"rank-{rank:05d}.{'encoded' if encoded else 'safetensors'}"


def fragment_name(rank: int) -> str:
    return f"rank-{rank:05d}.json"


def rank_of(name: str) -> int:
    """Return the rank of a data file or of a fragment of this name."""
    return int(name.partition(".")[0].removeprefix("rank-"))


def whole_ranks(names: Collection[str]) -> set[int]:
    """Return the ranks whose fragment and data file are both among the names of a folder."""
    return {
        rank
        for rank in {rank_of(name) for name in names if is_fragment(name)}
        if data_name(rank) in names or data_name(rank, encoded=True) in names
    }


def step_of(state: object, step: object, *, last: int | None) -> int:
    """Return the step to save: the one given, else ``state["step"]``, else the one after ``last``.

    Raises:
        ConfigError: It is no whole number from 0 on. NumPy's and torch's integers are, too.
    """
    if step is None:
        own = state.get("step") if isinstance(state, Mapping) else None
        counts = isinstance(own, int | Integral) and not isinstance(own, bool)
        step = own if counts else 0 if last is None else last + 1
    try:
        number = -1 if isinstance(step, bool) else index(cast(SupportsIndex, step))
    except TypeError:
        number = -1
    if not 0 <= number < 10**18:
        raise ConfigError(
            f"step={step!r}: a step is a whole number from 0 on, with at most 18 digits"
        )
    return number

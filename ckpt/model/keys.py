"""Build and parse the keys of all objects below the root of a tier.

No other module builds or parses keys. docs/format.md describes the objects. An *attempt* is one
incarnation of a job. It may try a step several times, and each further *try* has a number, the
*trial*. A *fragment* is the record of what one rank has written.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Final, SupportsIndex, cast

from ckpt.errors import ConfigError, ManifestCorrupt

STEP_PREFIX: Final = "step-"
"""What the names of the folders of all steps begin with."""
MANIFEST: Final = "manifest.json"
CLAIM_MARKER: Final = "claim"
"""The name of the claim marker in the folder of a step."""
OWNER: Final = "writer.json"
"""The key of the record that names the owner of the root."""
PINS: Final = "pins"
"""The name of the folder that holds the pins."""
WATCHERS: Final = "watchers"
"""The name of the folder that records which steps each watcher has handled."""
ROLLBACKS: Final = "rollbacks"
"""The name of the folder that holds the rollbacks."""

_PATH_TO_ROOT: Final = re.compile(r"(\.\.)(/\.\.)*(/(?!\.{1,2}(/|$))[^/\0]+)+")
_MOST_PATH_CHARACTERS: Final = 4096
_STEP: Final = re.compile(r"step-([0-9]{9,18})\.([a-z]{6,32})")
_TRIAL: Final = re.compile(r"t([a-j]+)$")
_LETTERS: Final = str.maketrans("0123456789", "abcdefghij")
_DIGITS: Final = str.maketrans("abcdefghij", "0123456789")
_LATE_METRICS: Final = re.compile(r"metrics-[0-9a-f]{32}\.json")
_ROLLBACK: Final = re.compile(ROLLBACKS + r"/([0-9]{6,9})\.json")
_FILE: Final = re.compile(r"rank-[0-9]{5,}\.(safetensors|encoded|json|delta)")
_END_NOTE: Final = re.compile(r"rank-([0-9]{5,})\.ended")
_RANK_MARKER: Final = re.compile(r"rank-([0-9]{5,})\.claim")


@dataclass(frozen=True, slots=True, order=True)
class StepRef:
    """The identity of one attempt at one step. Each attempt has a folder below the root.

    Instances are ordered by step, and then by attempt.
    """

    step: int
    attempt: str

    def retry(self, trial: int) -> StepRef:
        """Return the reference of the try ``trial`` of the same job at the same step.

        The digits of the number are letters, so that the step stays the last number in the name of
        the folder.
        """
        suffix = f"t{trial}".translate(_LETTERS) if trial else ""
        return StepRef(self.step, self.job + suffix)

    @property
    def job(self) -> str:
        """The attempt of the job, without the number of the try."""
        return _TRIAL.sub("", self.attempt)

    @property
    def trial(self) -> int:
        """The number of the try. It is greater than that of each earlier try of the job at the
        step, and of each step that the job saved before it went back.
        """
        match = _TRIAL.search(self.attempt)
        return int(match[1].translate(_DIGITS)) if match else 0

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
        """Return the key of a file of metrics that were added after the commit. ``content`` is the
        checksum of the file.
        """
        return f"{self.folder}/metrics-{content}.json"

    def delta(self, rank: int) -> str:
        """Return the key of the delta file of a rank."""
        return self.key(f"rank-{rank:05d}.delta")

    def end_note(self, rank: int) -> str:
        """Return the key of the end note of a rank. The agent that holds the rank's files writes
        the note to a shared tier after the rank has ended.
        """
        return f"{self.folder}/rank-{rank:05d}.ended"

    def rank_marker(self, rank: int) -> str:
        """Return the key of the marker of a rank on a shared tier. Only one process can create the
        marker: either the rank, which then removes its files of the step, or the agent of another
        node, which then copies these files to the tier.
        """
        return f"{self.folder}/rank-{rank:05d}.claim"

    def key(self, name: str) -> str:
        """Return the key of the file ``name`` of this attempt.

        Raises:
            ManifestCorrupt: ``name`` is not the name of a data file or fragment. Such a name in a
                manifest could lead out of the folder.
        """
        if not _FILE.fullmatch(name):
            raise ManifestCorrupt(
                self.manifest, f"{name[:80]!r} is not the name of a checkpoint file"
            )
        return f"{self.folder}/{name}"


StepId = int | StepRef
"""A step: its number, which stands for all attempts at it, or one attempt."""


def parse_folder(name: str) -> StepRef | None:
    """Return the step and attempt that the name of a folder states, or None if ckpt never gives a
    folder this name.
    """
    match = _STEP.fullmatch(name)
    ref = StepRef(int(match.group(1)), match.group(2)) if match else None
    # ``_STEP`` also matches a name with more leading zeros than ckpt writes.
    return ref if ref is not None and ref.folder == name else None


@dataclass(frozen=True, slots=True, order=True)
class BaseRef:
    """The step that an increment names as its base.

    Attributes:
        root: The path to the root that has the step, relative to the root of the increment, such as
            "../base-run"; empty if it is the same root.
        ref: The step.
    """

    root: str
    ref: StepRef

    @property
    def name(self) -> str:
        return f"{self.root}/{self.ref.folder}" if self.root else self.ref.folder


def parse_base(name: str) -> BaseRef | None:
    """Return the base that an increment names, or None if ckpt never gives a base this name.

    A path to another root goes up at least once, then down at least once, and is normalized.
    """
    root, slash, folder = name.rpartition("/")
    is_path = len(root) <= _MOST_PATH_CHARACTERS and _PATH_TO_ROOT.fullmatch(root)
    ref = parse_folder(folder) if is_path or not slash else None
    return None if ref is None else BaseRef(root, ref)


def rollback_key(number: int) -> str:
    """Return the key of the rollback with this number."""
    return f"{ROLLBACKS}/{number:06d}.json"


def rollback_number(key: str) -> int | None:
    """Return the number of the rollback that ``key`` belongs to; None if it is no such key."""
    match = _ROLLBACK.fullmatch(key)
    return int(match[1]) if match and rollback_key(int(match[1])) == key else None


def is_file_name(name: str) -> bool:
    """Return True if ckpt writes a file of this name into a step's folder."""
    is_fixed_name = name in {MANIFEST, CLAIM_MARKER} or is_late_metrics(name)
    return is_fixed_name or is_about_rank(name) or _FILE.fullmatch(name) is not None


def is_fragment(name: str) -> bool:
    """Return True if ``name`` is the name of a fragment."""
    return name.startswith("rank-") and name.endswith(".json")


def noted_rank(name: str) -> int | None:
    """Return the rank that an end note of this name belongs to; None if ``name`` is not the name of
    an end note (see ``StepRef.end_note``).
    """
    match = _END_NOTE.fullmatch(name)
    return int(match[1]) if match else None


def marked_rank(name: str) -> int | None:
    """Return the rank that a marker of this name belongs to; None if ``name`` is not the name of
    the marker of a rank (see ``StepRef.rank_marker``).
    """
    match = _RANK_MARKER.fullmatch(name)
    return int(match[1]) if match else None


def is_about_rank(name: str) -> bool:
    """Return True if ``name`` is the name of an end note or of the marker of a rank.

    These files are about a rank, and are not a part of the checkpoint.
    """
    return noted_rank(name) is not None or marked_rank(name) is not None


def is_late_metrics(name: str) -> bool:
    """Return True if a file of this name holds metrics that were added after the commit."""
    return _LATE_METRICS.fullmatch(name) is not None


def data_name(rank: int, *, is_encoded: bool = False) -> str:
    """Return the name of a rank's data file. An encoded file has another suffix, because it is not
    a safetensors file.
    """
    return f"rank-{rank:05d}.{'encoded' if is_encoded else 'safetensors'}"


def fragment_name(rank: int) -> str:
    return f"rank-{rank:05d}.json"


def rank_of(name: str) -> int:
    """Return the rank that the name of a data file or fragment states."""
    return int(name.partition(".")[0].removeprefix("rank-"))


def whole_ranks(names: Collection[str]) -> set[int]:
    """Return the ranks whose fragment and data file are both among ``names``, the names in the
    folder of a step.
    """
    return {
        rank
        for rank in {rank_of(name) for name in names if is_fragment(name)}
        if data_name(rank) in names or data_name(rank, is_encoded=True) in names
    }


def step_of(state: object, step: object, *, last: int | None) -> int:
    """Return the number of the step to save.

    The number is ``step`` if ``step`` is not None. Otherwise it is ``state["step"]`` if that is an
    integer. Otherwise it is the number after ``last``, or 0 if ``last`` is None.

    A NumPy integer is accepted for both. A torch tensor with one integer is accepted only for
    ``step``: in ``state["step"]`` it does not count as an integer.

    Raises:
        ConfigError: The number is not an integer from 0 to 10**18 - 1.
    """
    if step is None:
        state_step = state.get("step") if isinstance(state, Mapping) else None
        is_integer = isinstance(state_step, int | Integral) and not isinstance(state_step, bool)
        step = state_step if is_integer else 0 if last is None else last + 1
    try:
        number = -1 if isinstance(step, bool) else operator.index(cast(SupportsIndex, step))
    except TypeError:
        number = -1  # Is refused below
    if not 0 <= number < 10**18:
        raise ConfigError(
            f"step={step!r}: a step is a whole number from 0 on, with at most 18 digits"
        )
    return number

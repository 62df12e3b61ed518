"""Errors of restores: a checkpoint does not fit the target, or there is no checkpoint.

The target is the state that a restore fills.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from heapq import nsmallest
from itertools import islice
from typing import Final

from ckpt.errors.base import CkptError, few, quoted_name

_MOST_COMPARED: Final = 20_000
"""How many names of a checkpoint are compared with a missing name, which takes 0.2 s."""


_KIND_WORDS: Final = {"per_rank": "PerRank"}
"""Kinds of values whose names in a manifest are not those that a user writes."""


class RestoreError(CkptError):
    """The checkpoint does not fit the target, or there is no checkpoint to restore."""

    exit_code = 7


class NoCheckpoint(RestoreError):
    """The root has no checkpoint, or none of the wanted step."""

    def __init__(self, root: str, detail: str = "") -> None:
        self.root, self.detail = root, detail
        super().__init__(f"no checkpoint in {root}" + (f": {detail}" if detail else ""))


class EntryMissing(RestoreError):
    """The target has names that the checkpoint does not have.

    Attributes:
        names: The names in the target.
        step: The step.
        sources: Each of ``names`` -> the name that was looked for in the checkpoint. The two names
            differ if the user has passed ``rename``.
        near: Names in the checkpoint that are like the missing ones.
    """

    def __init__(
        self,
        names: Sequence[str],
        step: int,
        sources: Mapping[str, str] | None = None,
        *,
        present: Collection[str] = (),
        way: str = "give the name that it was saved under (rename=; ckpt show lists the names), "
        "take it out of the state, restore another step, or let it keep what it has "
        "(strict=False)",
    ) -> None:
        """``present`` are the names in the checkpoint. ``way`` is the part of the message that
        advises the user. The default is for the restore of a state.
        """
        self.names, self.step, self.sources = tuple(names), step, dict(sources or {})
        quoted_names = [quoted_name(name, self.sources.get(name, name)) for name in self.names]
        source_names = [self.sources.get(name, name) for name in self.names[:3]]
        self.near = _similar_names(source_names, present)
        examples = self.near or nsmallest(3, present)
        rest_count = len(present) - len(examples) if not self.near else 0
        suffix = f" and {rest_count} more" if rest_count else ""
        contents = f"; it has {few(examples)}{suffix}" if present else ""
        way = _dotted_rename(self.sources, present) or way
        super().__init__(f"step {step} has no {few(quoted_names, quote=False)}{contents}: {way}")


def _similar_names(names: Sequence[str], present: Collection[str]) -> tuple[str, ...]:
    """Return the names of ``present`` that are most like ``names``, at most three."""
    candidates = list(islice(present, _MOST_COMPARED))
    matches = [match for name in names for match in get_close_matches(name, candidates, n=2)]
    return tuple(dict.fromkeys(matches))[:3]


def _dotted_rename(sources: Mapping[str, str], present: Collection[str]) -> str:
    """Return the text that proposes a renaming for a module inside of a saved module, whose names
    have a dot there instead of a slash. It is empty if no such module is among the first of
    ``sources``: there may be many, and each is compared with all names.

    ``sources`` maps each name in the target to the name that was looked for in the checkpoint.
    ``present`` are the names in the checkpoint.
    """
    for name, source in islice(sources.items(), 3):
        stem = source.rstrip(".")
        if name != stem and any(entry.startswith(f"{stem}.") for entry in present):
            return (
                f"{stem!r} is inside of a module, and its names have a dot: give "
                f'rename={{"{name}/*": "{stem}.*"}}'
            )
    return ""


class EntryUnexpected(RestoreError):
    """The checkpoint has names that the target does not have."""

    def __init__(self, names: Sequence[str], step: int) -> None:
        self.names, self.step = tuple(names), step
        super().__init__(
            f"step {step} also holds {few(names)}, which the state given has no place for: "
            f'give it one, say what you want (only="model", or exclude={names[0]!r}), or leave all '
            "such names (strict=False)"
        )


class ShapeMismatch(RestoreError):
    """A tensor has another shape in the checkpoint than in the target."""

    def __init__(
        self, name: str, saved_shape: Sequence[int], target_shape: Sequence[int], source: str = ""
    ) -> None:
        self.name, self.saved, self.wanted, self.source = (
            name,
            tuple(saved_shape),
            tuple(target_shape),
            source or name,
        )
        label = quoted_name(name, self.source)
        super().__init__(
            f"{label} is saved with shape {list(saved_shape)}, the target has "
            f"{list(target_shape)}: build the "
            "target with the sizes of the saved one (ckpt show lists its shapes), or restore other "
            "names alone (only=)"
        )


class DtypeMismatch(RestoreError):
    """A tensor has another dtype in the checkpoint than in the target."""

    def __init__(
        self, name: str, saved_dtype: str, target_dtype: str, source: str = "", way: str = ""
    ) -> None:
        self.name, self.saved, self.wanted, self.source = (
            name,
            saved_dtype,
            target_dtype,
            source or name,
        )
        label = quoted_name(name, self.source)
        super().__init__(
            f"{label} is saved as {saved_dtype}, the target is {target_dtype}{way and ': '}{way}"
        )


class KindMismatch(RestoreError):
    """A name has another kind of value in the checkpoint than in the target, such as a tensor
    instead of a plain value.
    """

    def __init__(self, name: str, saved_kind: str, target_kind: str) -> None:
        self.name, self.saved, self.wanted = name, saved_kind, target_kind
        kind = (
            "a module, or a dict that has a tensor under each of its names"
            if saved_kind == "module"
            else "one of its kind"
        )
        saved_word = _KIND_WORDS.get(saved_kind, saved_kind)
        target_word = _KIND_WORDS.get(target_kind, target_kind)
        super().__init__(
            f"{name!r} is a {saved_word} in the checkpoint and a {target_word} in the target: give "
            f"the state {kind}, or let it keep what it has (exclude={name!r})"
        )


class OptimizerMismatch(RestoreError):
    """The checkpoint has the state of another kind of optimizer than the target."""

    def __init__(
        self, name: str, category: str, saved_names: Sequence[str], target_names: Sequence[str]
    ) -> None:
        self.name, self.saved, self.wanted = name, tuple(saved_names), tuple(target_names)
        super().__init__(
            f"{name!r} was saved by another kind of optimizer: it has the {category} "
            f"{few(saved_names)}, "
            f"the target has {few(target_names)} instead: "
            f"take the optimizer out of the state, or let it keep what it has (exclude={name!r})"
        )

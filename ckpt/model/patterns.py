"""Which part of a state a save or a restore is about: patterns of names.

The manifest of a save that has left a part out keeps its patterns in the metadata under
``left_out``, with those that fitted a name on some rank. A restore then knows what is missing on
purpose.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final

import msgspec

from ckpt.errors import ConfigError, ManifestCorrupt
from ckpt.model.values import parse

LEFT_OUT: Final = "left_out"
Names = str | Sequence[str] | None
"""Patterns as a user gives them."""
_MAGIC: Final = re.compile(r"[*?\[]")


@dataclass(frozen=True, slots=True)
class Patterns:
    """Names as ``ckpt show`` prints them.

    Attributes:
        only: Names, each with all below it, or patterns of the shell, whose ``*`` takes slashes and
            dots too. None: everything.
        exclude: Names and patterns of what is left out of that.
    """

    only: tuple[str, ...] | None = None
    exclude: tuple[str, ...] = ()

    def takes(self, name: str) -> bool:
        """Return True if the patterns take this name, or all names below it."""
        return (self.only is None or _fitting(name, self.only) != []) and not self.excludes(name)

    def excludes(self, name: str) -> bool:
        """Return True if ``exclude`` has this name."""
        return bool(name and self.exclude and _fitting(name, self.exclude))

    def fitting(self, name: str) -> list[str]:
        """Return the patterns that match the name, or a name that it is below."""
        return _fitting(name, (*(self.only or ()), *self.exclude))

    def reaches(self, name: str) -> bool:
        """Return True if a name below this one may match."""
        if self.only is None:
            return True
        heads = [_MAGIC.split(each, maxsplit=1)[0] for each in self.only]
        return any(
            f"{head}/".startswith(f"{name}/") or f"{name}/".startswith(head) for head in heads
        )


WHOLE: Final = Patterns()


def patterns_for(only: Names, exclude: Names) -> Patterns:
    """Return the patterns that a user gave. Raises ``ConfigError`` for other values."""
    if only is None and exclude is None:
        return WHOLE
    return Patterns(
        None if only is None else as_patterns("only", only),
        () if exclude is None else as_patterns("exclude", exclude),
    )


def as_patterns(setting: str, given: str | Sequence[str]) -> tuple[str, ...]:
    """Return what a user gave as ``setting``.

    Raises:
        ConfigError: It is neither a pattern nor several.
    """
    found = (given,) if isinstance(given, str) else tuple(given) if _is_iterable(given) else ()
    if not found or not all(isinstance(each, str) and each for each in found):
        raise ConfigError(
            f'{setting}={given!r}: give names or patterns such as "model/*", or leave it out'
        )
    return found


def unfitting(patterns: Iterable[str]) -> ConfigError:
    """Return the error for patterns that fit no name of the state on any rank."""
    names = ", ".join(map(repr, patterns))
    return ConfigError(
        f"no name of the state fits {names}: names are as `ckpt show` prints them, in "
        "a model parted by dots; an optimizer's state is taken for a parameter as a whole "
        "(optimizer/model/weight), and its settings together (a restore takes them as "
        "optimizer/param_groups, a save with any of the state); a list or an object is saved as a "
        "whole"
    )


def left_out(patterns: Patterns, used: Collection[str]) -> dict[str, Any]:
    """Return what the metadata keeps of a save by ``patterns``; ``used`` are those that fitted."""
    if patterns == WHOLE:
        return {}
    only = {} if patterns.only is None else {"only": list(patterns.only)}
    exclude = {"exclude": list(patterns.exclude)} if patterns.exclude else {}
    return {**only, **exclude, "used": dict.fromkeys(sorted(used), True)}


def patterns_of(metadata: msgspec.Raw) -> tuple[Patterns, list[str]]:
    """Return the patterns in the metadata of a manifest, and those of them that fitted no name.

    Raises:
        ManifestCorrupt: They are none that ckpt writes.
    """
    if f'"{LEFT_OUT}"'.encode() not in bytes(metadata):
        # Metadata without patterns is the usual case, and is not parsed.
        return WHOLE, []
    found = parse(metadata, "metadata")
    if not isinstance(found, Mapping) or LEFT_OUT not in found:
        return WHOLE, []
    try:
        kept = found[LEFT_OUT]
        only = as_patterns("only", kept["only"]) if "only" in kept else None
        exclude = as_patterns("exclude", kept["exclude"]) if "exclude" in kept else ()
        idle = [each for each in (*(only or ()), *exclude) if each not in kept["used"]]
    except (ConfigError, LookupError, TypeError) as error:
        raise ManifestCorrupt("metadata", f"{LEFT_OUT}: {error!r}"[:200]) from None
    return Patterns(only, exclude), idle


def _is_iterable(given: object) -> bool:
    return isinstance(given, Iterable)


def _fitting(name: str, patterns: Iterable[str]) -> list[str]:
    return [
        each
        for each in patterns
        if fnmatchcase(name, short := each.rstrip("/"))
        or fnmatchcase(name, f"{short}/*")
        or fnmatchcase(f"{name}/", each)
    ]

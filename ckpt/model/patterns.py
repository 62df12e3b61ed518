"""Patterns of names, which select a part of a state for a save or a restore.

If a save leaves out a part of the state, the metadata of its manifest records the patterns under
``left_out``. It also records the patterns that matched a name on some rank. A restore can then
tell which names are missing on purpose.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final

import msgspec

from ckpt.errors import ConfigError, ManifestCorrupt
from ckpt.errors.base import few
from ckpt.model.values import parse

LEFT_OUT: Final = "left_out"
Names = str | Sequence[str] | None
"""One pattern or several, as a user passes them; None if the user passes none."""
_WILDCARD: Final = re.compile(r"[*?\[]")


@dataclass(frozen=True, slots=True)
class Patterns:
    """A selection of names, which are written as ``ckpt show`` prints them.

    A pattern is a name, which matches itself and all names below it, or a shell pattern, in which
    ``*`` also matches slashes and dots. A pattern that matches every name below a name also matches
    that name, as ``model/*`` matches ``model``.

    Attributes:
        only: The patterns of the selected names; None to select all names.
        exclude: The patterns of the names that are removed from the selection by ``only``.
    """

    only: tuple[str, ...] | None = None
    exclude: tuple[str, ...] = ()

    def takes(self, name: str) -> bool:
        """Return True if ``name`` is selected: ``only`` matches it and ``exclude`` does not."""
        return (self.only is None or _matches(name, self.only) != []) and not self.excludes(name)

    def excludes(self, name: str) -> bool:
        """Return True if a pattern of ``exclude`` matches ``name`` or a name above it."""
        return bool(name and self.exclude and _matches(name, self.exclude))

    def matches(self, name: str) -> list[str]:
        """Return the patterns of ``only`` and ``exclude`` that match ``name`` or a name above
        it.
        """
        return _matches(name, (*(self.only or ()), *self.exclude))

    def reaches(self, name: str) -> bool:
        """Return True if ``only`` may match a name below ``name``."""
        if self.only is None:
            return True
        literal_prefixes = [_WILDCARD.split(pattern, maxsplit=1)[0] for pattern in self.only]
        return any(
            f"{prefix}/".startswith(f"{name}/") or f"{name}/".startswith(prefix)
            for prefix in literal_prefixes
        )


WHOLE: Final = Patterns()


def patterns_for(only: Names, exclude: Names) -> Patterns:
    """Return the ``Patterns`` for the arguments ``only`` and ``exclude`` of a user.

    Raises:
        ConfigError: An argument is neither None, nor a pattern, nor several patterns.
    """
    if only is None and exclude is None:
        return WHOLE
    return Patterns(
        None if only is None else as_patterns("only", only),
        () if exclude is None else as_patterns("exclude", exclude),
    )


def as_patterns(setting: str, value: str | Sequence[str]) -> tuple[str, ...]:
    """Return ``value``, which is one pattern or several patterns from a user, as a tuple.
    ``setting`` is the name of the user's argument, for the error.

    Raises:
        ConfigError: ``value`` is neither a pattern nor several patterns.
    """
    patterns = (value,) if isinstance(value, str) else tuple(value) if _is_iterable(value) else ()
    if not patterns or not all(isinstance(pattern, str) and pattern for pattern in patterns):
        raise ConfigError(
            f'{setting}={value!r}: give names or patterns such as "model/*", or leave it out'
        )
    return patterns


def no_match_error(patterns: Iterable[str], names: Iterable[str] = ()) -> ConfigError:
    """Return the error for patterns that match no name of the state on any rank. ``names`` are the
    outermost names of the state, if they are known here.
    """
    entries = few(list(names))
    present = f"; it has {entries}" if entries else ""
    return ConfigError(
        f"no name of the state fits {', '.join(map(repr, patterns))}{present}: names are as `ckpt "
        "show` prints them, in a model parted by dots (model/encoder.*); an optimizer's state is "
        "taken for a parameter as a whole (optimizer/model/weight), and its settings together (a "
        "restore takes them as optimizer/param_groups, a save with any of the state); a list or "
        "an object is saved as a whole"
    )


def left_out(patterns: Patterns, matches: Collection[str]) -> dict[str, Any]:
    """Return the value that the metadata of a save stores under ``left_out``; empty if the save
    selects the whole state.

    Args:
        patterns: The patterns of the save.
        matches: The patterns that matched a name on this rank.
    """
    if patterns == WHOLE:
        return {}
    only = {} if patterns.only is None else {"only": list(patterns.only)}
    exclude = {"exclude": list(patterns.exclude)} if patterns.exclude else {}
    return {**only, **exclude, "used": dict.fromkeys(sorted(matches), True)}


def patterns_of(metadata: msgspec.Raw) -> tuple[Patterns, list[str]]:
    """Return the patterns that the metadata of a manifest records, and the list of the patterns
    that matched no name on any rank. Return ``WHOLE`` and an empty list if the metadata records no
    patterns.

    Raises:
        ManifestCorrupt: The record of the patterns is invalid.
    """
    if f'"{LEFT_OUT}"'.encode() not in bytes(metadata):
        # Usually the metadata has no patterns. This check then saves the time of parsing it.
        return WHOLE, []
    fields = parse(metadata, "metadata")
    if not isinstance(fields, Mapping) or LEFT_OUT not in fields:
        return WHOLE, []
    try:
        record = fields[LEFT_OUT]
        only = as_patterns("only", record["only"]) if "only" in record else None
        exclude = as_patterns("exclude", record["exclude"]) if "exclude" in record else ()
        idle_patterns = [
            pattern for pattern in (*(only or ()), *exclude) if pattern not in record["used"]
        ]
    except (ConfigError, LookupError, TypeError) as error:
        raise ManifestCorrupt("metadata", f"{LEFT_OUT}: {error!r}"[:200]) from None
    return Patterns(only, exclude), idle_patterns


def _is_iterable(value: object) -> bool:
    return isinstance(value, Iterable)


def _matches(name: str, patterns: Iterable[str]) -> list[str]:
    """Return the patterns that match ``name``, a name above it, or all names below it."""
    return [
        pattern
        for pattern in patterns
        if fnmatchcase(name, stem := pattern.rstrip("/"))
        or fnmatchcase(name, f"{stem}/*")
        or fnmatchcase(f"{name}/", pattern)
    ]

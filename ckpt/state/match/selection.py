"""Define the settings of a restore: the names that it fills, the names under which it finds them in
the checkpoint, and how strict it is.

DDP puts ``module.`` before all names of a state dict, and an import removes it. The state dict of a
module whose only child is called ``module`` looks the same, and only the module in the state shows
the difference. So ``with_prefix`` adds rules that give such a module its prefix back.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from ckpt.checks import check_bool
from ckpt.errors import ConfigError
from ckpt.model.patterns import Names, Patterns, patterns_for
from ckpt.state.match.saved_nodes import SavedState

Rename = Mapping[str, str] | Callable[[str], str]
"""A renaming as the user gives it: a dict of names or patterns in the state -> names in the
checkpoint (see `RenameRules`), or a function from a name in the state to the name in the
checkpoint.
"""


@dataclass(frozen=True, slots=True)
class _Rule:
    """One rule of a renaming.

    Attributes:
        pattern: The pattern for names in the state.
        expression: The pattern as a regular expression. It has a group for each ``*``, and a last
            group for the rest of a name below the pattern.
        parts: The name in the checkpoint, split at each ``*``.
    """

    pattern: str
    expression: re.Pattern[str]
    parts: tuple[str, ...]

    def apply(self, name: str) -> str | None:
        """Return the name in the checkpoint, or None if the rule does not match ``name``."""
        if (match := self.expression.fullmatch(name)) is None:
            return None
        *stars, rest = match.groups(default="")
        if len(self.parts) == 1:  # The name in the checkpoint has no star
            return self.parts[0] + rest
        parts_and_texts = zip(self.parts, [*stars, rest], strict=True)
        return "".join(part + text for part, text in parts_and_texts)


@dataclass(frozen=True, slots=True)
class RenameRules:
    """The rules by which names in the state become names in the checkpoint.

    The first rule that matches a name counts. A name that no rule matches does not change. A rule
    such as ``{"model/encoder.*": "model/backbone.*"}`` matches a name of the state, and all names
    below it, and gives the name in the checkpoint. A ``*`` matches any text, including dots and
    slashes, and as few characters as possible. It stands for the same text in the name in the
    checkpoint, which has as many ``*`` as the pattern, or none. An optimizer's state of a parameter
    is renamed like the parameter, unless a rule names the state.

    Attributes:
        rules: The rules.
        function: A function that the user gave in place of rules. It takes a name in the state and
            returns the name in the checkpoint. It is None if there is no such function.
    """

    rules: tuple[_Rule, ...] = ()
    function: Callable[[str], str] | None = None

    @classmethod
    def of(cls, rename: Rename | None) -> RenameRules:
        """Return the renaming that the user gave as ``rename``; None means no renaming.

        Raises:
            ConfigError: ``rename`` is no valid renaming.
        """
        if rename is None:
            return cls()
        if isinstance(rename, Mapping):
            if not rename:
                raise ConfigError(
                    'rename={}: give {"name in the state": "name in the checkpoint"}, or leave it '
                    "out"
                )
            return cls(tuple(_checked_rule(name, source) for name, source in rename.items()))
        if callable(rename):
            return cls(function=rename)
        raise ConfigError(
            f"rename={rename!r}: give a dict of names in the state to names in the checkpoint, or "
            "a function from one to the other"
        )

    def __bool__(self) -> bool:
        return bool(self.rules) or self.function is not None

    @property
    def patterns(self) -> tuple[str, ...]:
        """The patterns of the rules."""
        return tuple(rule.pattern for rule in self.rules)

    def source(self, name: str) -> tuple[str, str | None]:
        """Return the name in the checkpoint for ``name``, a name in the state. Also return the
        pattern of the rule that gave it, or None if no rule did.

        Raises:
            ConfigError: The user's function raises, or does not return a name.
        """
        for rule in self.rules:
            if (source := rule.apply(name)) is not None:
                return source, rule.pattern
        return (name if self.function is None else _call_rename(self.function, name)), None


NO_RENAME: Final = RenameRules()


def _checked_rule(name: Any, source: Any) -> _Rule:
    """Return the rule from the pattern ``name`` to ``source``, as the user gave them."""
    if not (
        isinstance(name, str) and isinstance(source, str) and name.strip("/") and source.strip("/")
    ):
        raise ConfigError(
            f"rename={{{name!r}: {source!r}}}: both must be names, such as 'model/encoder.*'"
        )
    stars, source_stars = name.count("*"), source.count("*")
    if source_stars not in (0, stars):
        raise ConfigError(
            f"rename={{{name!r}: {source!r}}}: each * stands for the same text on both sides, so "
            "both need as many (or the second none)"
        )
    text = "(.*?)".join(map(re.escape, name.rstrip("/").split("*")))
    return _Rule(name, re.compile(f"{text}(/.*)?", re.DOTALL), tuple(source.rstrip("/").split("*")))


def _call_rename(function: Callable[[str], str], name: str) -> str:
    """Return what the user's function returns for ``name``."""
    try:
        source = function(name)
    except Exception as error:
        raise ConfigError(f"rename({name!r}) failed: {error!r}") from error
    if not isinstance(source, str) or not source:
        raise ConfigError(
            f"rename({name!r}) gave {source!r}: give the name in the checkpoint, the same if "
            "nothing changes"
        )
    return source


@dataclass(frozen=True, slots=True)
class Selection(Patterns):
    """The part of a state that a restore fills. Values that no pattern matches stay as they are.

    Attributes:
        strict: True if the restore fails when the state or the checkpoint has a name that the other
            one lacks. A name that the save left out on purpose is no error. If False, a target that
            the checkpoint lacks stays as it is, and a value that the state lacks is not read.
        rename_rules: The rules by which names in the state become names in the checkpoint.
        cast: True if the restore may convert a saved dtype to that of the target.
    """

    strict: bool = True
    rename_rules: RenameRules = NO_RENAME
    cast: bool = False

    @classmethod
    def of(
        cls,
        only: Names = None,
        exclude: Names = None,
        *,
        strict: bool = True,
        rename: Rename | None = None,
        cast: bool = False,
    ) -> Selection:
        """Return the selection for the arguments that the user gave to ``restore``.

        Raises:
            ConfigError: An argument is not valid.
        """
        check_bool("strict", strict)
        check_bool("cast", cast)
        rename_rules = RenameRules.of(rename)
        patterns = patterns_for(only, exclude)
        return cls(
            patterns.only, patterns.exclude, strict=strict, rename_rules=rename_rules, cast=cast
        )

    @property
    def is_part(self) -> bool:
        """Whether the selection leaves out a part of the state."""
        return self.only is not None or bool(self.exclude)


WHOLE_STATE = Selection()


PREFIX: Final = "module."
REMOVED_PREFIX: Final = "imported_without_prefix"
"""The key of the list of modules from whose names an import has removed the prefix, in the metadata
of the checkpoint.
"""


def modules_without_prefix(checkpoint: SavedState) -> list[str]:
    """Return the paths of the modules from whose names an import has removed the prefix."""
    paths: Any = checkpoint.metadata.get(REMOVED_PREFIX, ())
    return [path for path in paths if isinstance(path, str)]


def with_prefix(
    rename_rules: RenameRules, checkpoint: SavedState, entries: Mapping[str, Iterable[str]]
) -> RenameRules:
    """Return ``rename_rules`` with a rule for each module that has the prefix in all of its names,
    if an import has removed this prefix from the names of the checkpoint.

    Args:
        rename_rules: The renaming that the user gave.
        checkpoint: The checkpoint.
        entries: The names of the entries of each module of the state, by its path.
    """
    if rename_rules.function is not None:  # The user has named every entry
        return rename_rules
    rules = {
        f"{path}/{PREFIX}*": f"{path}/*"
        for path in modules_without_prefix(checkpoint)
        if path in entries and all(name.startswith(PREFIX) for name in entries[path])
    }
    return (
        RenameRules((*rename_rules.rules, *RenameRules.of(rules).rules)) if rules else rename_rules
    )

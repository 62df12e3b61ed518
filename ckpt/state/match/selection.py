"""Define the settings of a restore: the names that it fills, the names under which it finds them in
the checkpoint, and how strict it is.
"""

from __future__ import annotations

from dataclasses import dataclass

from ckpt.errors import ConfigError
from ckpt.model.patterns import Names, Patterns, patterns_for
from ckpt.state.match.renaming import NO_RENAME, Rename, RenameRules


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
        for setting, value in (("strict", strict), ("cast", cast)):
            if not isinstance(value, bool):
                raise ConfigError(f"{setting}={value!r}: give True or False")
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

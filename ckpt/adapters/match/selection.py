"""Define the settings of a restore: the names that it fills, the names under which it finds them in
the checkpoint, and how strict it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckpt.adapters.match.renaming import SAME, Rename, Renaming
from ckpt.errors import ConfigError
from ckpt.model.patterns import Patterns, as_patterns


@dataclass(frozen=True, slots=True)
class Selection(Patterns):
    """The part of a state that a restore fills. Values that no pattern matches stay as they are.

    Attributes:
        strict: True if the restore fails when the state or the checkpoint has a name that the other
            one lacks. A name that the save left out on purpose is no error. If False, a target that
            the checkpoint lacks stays as it is, and a value that the state lacks is not read.
        renaming: The rules by which names in the state become names in the checkpoint.
        cast: True if the restore may convert a saved dtype to that of the target.
    """

    strict: bool = True
    renaming: Renaming = SAME
    cast: bool = False

    @classmethod
    def of(
        cls,
        only: str | Sequence[str] | None,
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
        renaming = Renaming.of(rename)
        patterns = None if only is None else as_patterns("only", only)
        return cls(patterns, strict=strict, renaming=renaming, cast=cast)


ALL = Selection()

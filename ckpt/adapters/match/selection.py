"""Which names a restore is about, and how it takes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckpt.adapters.match.renaming import SAME, Rename, Renaming
from ckpt.errors import ConfigError
from ckpt.model.patterns import Patterns, as_patterns


@dataclass(frozen=True, slots=True)
class Selection(Patterns):
    """The part of a state that a restore fills. Values that no pattern fits stay as they are.

    Attributes:
        strict: Whether names must be on both sides. If not, a target without a value in the
            checkpoint stays as it is, and a value without a target is not read.
        renaming: The rules for names of the state that are other names in the checkpoint.
        cast: Whether a dtype may be converted to that of the target.
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
        """Return the selection that a user gave. Raises ``ConfigError`` for other values."""
        for setting, value in (("strict", strict), ("cast", cast)):
            if not isinstance(value, bool):
                raise ConfigError(f"{setting}={value!r}: give True or False")
        renaming = Renaming.of(rename)
        patterns = None if only is None else as_patterns("only", only)
        return cls(patterns, strict=strict, renaming=renaming, cast=cast)


ALL = Selection()

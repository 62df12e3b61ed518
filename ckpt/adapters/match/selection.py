"""Which names a restore is about, and how it takes them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

from ckpt.adapters.match.renaming import SAME, Rename, Renaming
from ckpt.errors import ConfigError

_MAGIC: Final = re.compile(r"[*?\[]")


@dataclass(frozen=True, slots=True)
class Selection:
    """Names as ``ckpt show`` prints them.

    Attributes:
        only: Names, each with all below it, or patterns of the shell, whose ``*`` takes slashes and
            dots too; what none of them fits keeps what it has. None: everything.
        strict: Whether names must be on both sides. If not, a target that the checkpoint has no
            value for keeps what it has, and what has no target is left.
        renaming: What names of the state are called in the checkpoint.
        cast: Whether a dtype may be converted to that of the target.
    """

    only: tuple[str, ...] | None = None
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
        if only is None:
            return cls(None, strict, renaming, cast)
        patterns = (
            (only,) if isinstance(only, str) else tuple(only) if isinstance(only, Iterable) else ()
        )
        if not patterns or not all(isinstance(pattern, str) and pattern for pattern in patterns):
            raise ConfigError(
                f'only={only!r}: give names or patterns such as "model/*", or leave it out'
            )
        return cls(patterns, strict, renaming, cast)

    def takes(self, name: str) -> bool:
        """Return True if the selection has this name, or all names below it."""
        return self.only is None or bool(self.fitting(name))

    def fitting(self, name: str) -> list[str]:
        """The patterns that fit it, or something that it is below."""
        return [
            each
            for each in self.only or ()
            if _fits(name, each.rstrip("/")) or fnmatchcase(f"{name}/", each)
        ]

    def reaches(self, name: str) -> bool:
        """Return True if a name below this one may match."""
        if self.only is None:
            return True
        heads = [_MAGIC.split(each, maxsplit=1)[0] for each in self.only]
        return any(
            f"{head}/".startswith(f"{name}/") or f"{name}/".startswith(head) for head in heads
        )


def _fits(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}/*")


ALL = Selection()

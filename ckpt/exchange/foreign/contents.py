"""What an import reads: the state of a source, and the files that it is from."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from ckpt.errors import ConfigError, IntegrityError

State = dict[str, Any]


class EngineOptimizer(State):
    """The state dict of an optimizer in an engine of DeepSpeed.

    Attributes:
        extra: The values of ``ExtraValues.extra``.
    """

    def __init__(self, values: State, extra: State) -> None:
        super().__init__(values)
        self.extra = extra


@dataclass(slots=True)
class Contents:
    """The state of a source.

    Attributes:
        state: The state.
        files: The names in the folder that the state is from, with subfolders; empty for a file.
        notes: Notes for the user about the source.
        library: The name of the library that has written the source, if it is known.
        leftovers: The names in the folder that the state is not from.
    """

    state: State
    files: list[str] = field(default_factory=list[str])
    notes: list[str] = field(default_factory=list[str])
    library: str = ""
    leftovers: list[str] = field(default_factory=list[str])


def left_aside(names: Collection[str], files: Collection[str]) -> list[str]:
    """Return the names in a folder that are not among ``files``, sorted."""
    return sorted(set(names).difference(files))


def check_name(folder: str, name: object) -> str:
    """Return ``name``, a file name from an index or table of contents of ``folder``. Raises
    ``IntegrityError`` if it is not the plain name of a file in the folder.
    """
    if (
        not isinstance(name, str)
        or os.path.basename(name) != name
        or "\0" in name
        or name in ("", ".", "..")
    ):
        raise IntegrityError(f"{folder} names a file outside of itself: {str(name)[:80]!r}")
    return name


def merge(source: str, parts: Iterable[tuple[str, State]]) -> State:
    """Return the values of all ``parts`` in one state.

    Args:
        source: The folder of the files.
        parts: The name and the state of each file.

    Raises:
        ConfigError: Two files have a value of the same name.
    """
    state: State = {}
    files: dict[str, str] = {}
    for name, part in parts:
        for key in part:
            if key in state:
                raise ConfigError(
                    f"{source}: both {files[key]} and {name} hold {key!r}: name the one file to "
                    "import instead of the folder"
                )
        state |= part
        files |= dict.fromkeys(part, name)
    return state

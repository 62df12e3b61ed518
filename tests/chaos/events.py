"""Events of files that ckpt-chaos does not count itself.

Its counter learns of a file when Python opens, renames or removes it, and of some writers of files.
It learns neither of calls on a descriptor nor of calls of the C library.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any, Final

Count = Callable[[str, str, bool], bool]
"""Counts an event (its kind, its path, and True if it can be cut short), and dies if its turn has
come. It returns True if the caller must cut the write short and die.
"""

KILLED: Final = 137
RENAME: Final = "renameat2"


def arm(count: Count, is_watched: Callable[[str], bool]) -> None:
    """Count the calls that write to files, sync, cut or link them, and the renames of libc."""

    def path_of(descriptor: int) -> str | None:
        try:
            path = os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:
            return None
        return path if is_watched(path) else None

    def writing(name: str) -> Callable[..., int]:
        call = getattr(os, name)

        def write(descriptor: int, data: Any, *words: Any) -> int:
            path = path_of(descriptor)
            if path is not None and count(f"os.{name}", path, True):
                part = memoryview(data).cast("B")
                call(descriptor, part[: part.nbytes // 2], *words)
                os._exit(KILLED)
            return call(descriptor, data, *words)

        return write

    def changing(name: str) -> Callable[..., None]:
        call = getattr(os, name)

        def change(descriptor: int, *words: Any) -> None:
            path = path_of(descriptor)
            if path is not None:
                count(f"os.{name}", path, False)
            call(descriptor, *words)

        return change

    def linking(source: Any, target: Any, **words: Any) -> None:
        if is_watched(os.fsdecode(target)):
            count("os.link", os.fsdecode(target), False)
        link(source, target, **words)

    def renaming(call: Any) -> Callable[..., int]:
        def rename(
            from_folder: int, source: bytes, to_folder: int, target: bytes, flags: int
        ) -> int:
            if is_watched(os.fsdecode(target)):
                count(RENAME, os.fsdecode(target), False)
            return int(call(from_folder, source, to_folder, target, flags))

        return rename

    def function_of(library: ctypes.CDLL, name: Any) -> Any:
        found = getitem(library, name)
        return renaming(found) if name == RENAME else found

    link, getitem = os.link, ctypes.CDLL.__getitem__
    for name in ("write", "pwrite"):
        setattr(os, name, writing(name))
    for name in ("fsync", "fdatasync", "ftruncate"):
        setattr(os, name, changing(name))
    os.link = linking  # type: ignore[assignment]
    ctypes.CDLL.__getitem__ = function_of  # type: ignore[method-assign]

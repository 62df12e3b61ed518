"""What a loss of power may leave of a disk.

Everything that was forced is left, and any part of what was not.

The module models the worst that POSIX allows. A write is safe when its file was fsynced, and a name
when its folder was. Until then each may be there or not, independently of the others, and a part of
a write may be there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.syscalls import Op

SECTOR_BYTES = 512
Change = tuple[int, bytes | None]
"""Bytes at an offset; None: the file is cut, or lengthened with zeros, to there."""
Survives = Callable[[], float]
"""How much of a change that was not forced survives, from 0 to 1: asked for each."""


@dataclass(eq=False)
class File:
    safe: bytes = b""
    pending: list[Change] = field(default_factory=list)

    def after(self, survives: Survives) -> bytes:
        content = bytearray(self.safe)
        for offset, data in self.pending:
            share = survives()
            if data is None:
                if share >= 0.5:
                    content[offset:] = b""
                    content += bytes(offset - len(content))
            elif (
                kept := data
                if share >= 1
                else data[: int(len(data) * share) // SECTOR_BYTES * SECTOR_BYTES]
            ):
                content += bytes(max(0, offset - len(content)))
                content[offset : offset + len(kept)] = kept
        return bytes(content)

    def sync(self) -> None:
        self.safe, self.pending = self.after(lambda: 1.0), []


Names = dict[str, "File | Folder"]
Naming = tuple[tuple[str, "File | Folder | None"], ...]
"""Names that change together: to what, or None for a name that goes."""


@dataclass(eq=False)
class Folder:
    safe: Names = field(default_factory=dict)
    pending: list[Naming] = field(default_factory=list)

    def after(self, survives: Survives) -> Names:
        names = dict(self.safe)
        for change in self.pending:
            if survives() >= 0.5:
                for name, node in change:
                    names.pop(name, None)
                    if node is not None:
                        names[name] = node
        return names

    def sync(self) -> None:
        self.safe, self.pending = self.after(lambda: 1.0), []


class Disk:
    """A folder that existed, and was empty, when the recording began."""

    def __init__(self, root: Path) -> None:
        self._base, self._root = str(root), Folder()
        self._now: Names = {self._base: self._root}

    def play(self, op: Op) -> None:
        """Apply one more call."""
        match op.verb:
            case "create" | "mkdir":
                self._put(op.path, File() if op.verb == "create" else Folder())
            case "unlink" | "rmdir":
                del self._now[op.path]
                self._name(op.path, ((os.path.basename(op.path), None),))
            case "link":
                self._put(op.to, self._now[op.path])
            case "rename":
                assert os.path.dirname(op.path) == os.path.dirname(op.to), (
                    "the engine renames within a folder"
                )
                node = self._now[op.to] = self._now.pop(op.path)
                self._name(
                    op.to, ((os.path.basename(op.path), None), (os.path.basename(op.to), node))
                )
            case "write" | "ftruncate":
                file = self._now[op.path]
                assert isinstance(file, File)
                file.pending.append((op.offset, op.data if op.verb == "write" else None))
            case "fsync":
                self._now[op.path].sync()
            case _:
                raise AssertionError(op.verb)

    def after(self, survives: Survives) -> dict[str, bytes | None]:
        """Return files with their content and folders (None) below the root that exist when power
        is back.
        """
        found: dict[str, bytes | None] = {}
        self._gather(self._root, "", survives, found)
        return found

    def _gather(
        self, folder: Folder, path: str, survives: Survives, found: dict[str, bytes | None]
    ) -> None:
        for name, node in folder.after(survives).items():
            place = f"{path}/{name}" if path else name
            if isinstance(node, Folder):
                found[place] = None
                self._gather(node, place, survives, found)
            else:
                found[place] = node.after(survives)

    def _put(self, path: str, node: File | Folder) -> None:
        self._now[path] = node
        self._name(path, ((os.path.basename(path), node),))

    def _name(self, path: str, change: Naming) -> None:
        folder = self._now[os.path.dirname(path)]
        assert isinstance(folder, Folder)
        folder.pending.append(change)


def build(root: Path, content: Iterable[tuple[str, bytes | None]]) -> None:
    """Make these files and folders."""
    root.mkdir()
    for path, data in content:
        (root / path).mkdir() if data is None else (root / path).write_bytes(data)

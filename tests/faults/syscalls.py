"""The system calls by which the posix backend changes a disk, recorded or made to fail at the n-th.

While it is entered, ``Syscalls(root)`` replaces the functions of ``os`` (and two of libc's) for
paths below ``root`` and descriptors opened there. The record is enough to make the disk again as it
was after any call: see power.py.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ckpt_backends.folder import direct_io, posix

CHANGING = (
    "open",
    "mkdir",
    "rmdir",
    "rename",
    "link",
    "unlink",
    "write",
    "pwrite",
    "ftruncate",
    "fallocate",
    "fsync",
    "close",
)
READING = ("stat", "scandir", "preadv", "readv")


@dataclass(frozen=True, slots=True)
class Op:
    """One call that succeeded.

    ``path`` is that of the file or folder, below the root. A rename goes ``to`` another name.
    ``data`` is at ``offset``.
    """

    verb: str
    path: str
    to: str = ""
    offset: int = 0
    data: bytes = b""


@dataclass(slots=True)
class Mark:
    """Something that the caller learned between two calls."""

    what: str


@dataclass
class Syscalls:
    """Any thread may call it, one at a time.

    Attributes:
        fail: Called before each call with its name and path; an errno makes the call fail.
        log: Ops and marks in order.
        failed: The paths of the calls that failed, in order.
    """

    root: Path
    fail: Callable[[str, str], int | None] = lambda verb, path: None
    log: list[Op | Mark] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    calls: int = 0
    _lock: Any = field(default_factory=threading.RLock)
    _opened: dict[int, str] = field(default_factory=dict)

    def mark(self, what: str) -> None:
        with self._lock:
            self.log.append(Mark(what))

    @contextmanager
    def entered(self, *, reading: bool = False) -> Iterator[Syscalls]:
        """Replace the functions. With ``reading``, calls that change nothing may fail too."""
        with pytest.MonkeyPatch.context() as patch:
            for name in (*CHANGING, *(READING if reading else ())):
                if name != "fallocate":
                    patch.setattr(os, name, self._wrapped(name, getattr(os, name)))
            patch.setattr(
                direct_io, "_rename_noreplace", self._renamed(direct_io._rename_noreplace)
            )
            patch.setattr(posix, "reserve", self._reserved(direct_io.reserve))
            yield self

    def _inside(self, place: object) -> str | None:
        if isinstance(place, int):
            return self._opened.get(place)
        path, root = os.path.abspath(os.fspath(place)), str(self.root)  # type: ignore[call-overload]
        return path if path == root or path.startswith(root + "/") else None

    def _ask(self, verb: str, path: str) -> None:
        self.calls += 1
        if code := self.fail(verb, path):
            self.failed.append(path)
            raise OSError(code, os.strerror(code), path)

    def _wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            path = self._inside(args[0])
            if path is None:
                return real(*args, **kwargs)
            with self._lock:
                if name == "close":  # the descriptor is closed even if close fails
                    self._opened.pop(args[0], None)
                    real(*args)
                    return self._ask(name, path)
                self._ask(name, path)
                before = os.path.lexists(path) if name == "open" else False
                offset = os.lseek(args[0], 0, os.SEEK_CUR) if name == "write" else 0
                result = real(*args, **kwargs)
                self._note(name, path, args, result, before=before, offset=offset)
                return result

        return call

    def _note(
        self, name: str, path: str, args: tuple[Any, ...], result: Any, *, before: bool, offset: int
    ) -> None:
        match name:
            case "open":
                self._opened[result] = path
                if args[1] & os.O_CREAT and not before:
                    self.log.append(Op("create", path))
            case "rename" | "link":
                self.log.append(Op(name, path, to=os.path.abspath(args[1])))
                if name == "rename":
                    self._moved(path, os.path.abspath(args[1]))
            case "write" | "pwrite":
                at = args[2] if name == "pwrite" else offset
                self.log.append(
                    Op("write", path, offset=at, data=bytes(memoryview(args[1]).cast("B")[:result]))
                )
            case "ftruncate":
                self.log.append(Op(name, path, offset=args[1]))
            case "mkdir" | "rmdir" | "unlink" | "fsync":
                self.log.append(Op(name, path))
            case _:
                pass

    def _moved(self, source: str, target: str) -> None:
        self._opened = {fd: target if path == source else path for fd, path in self._opened.items()}

    def _renamed(self, real: Callable[[str, str], bool]) -> Callable[[str, str], bool]:
        def call(source: str, target: str) -> bool:
            if self._inside(source) is None:
                return real(source, target)
            with self._lock:
                self._ask("rename", source)
                done = real(source, target)
                if done:
                    self.log.append(Op("rename", source, to=target))
                    self._moved(source, target)
                return done

        return call

    def _reserved(self, real: Callable[[int, int], None]) -> Callable[[int, int], None]:
        def call(fd: int, size: int) -> None:
            path = self._inside(fd)
            if path is None:
                real(fd, size)
                return
            with self._lock:
                self._ask("fallocate", path)
                real(fd, size)
                self.log.append(Op("ftruncate", path, offset=size))

        return call

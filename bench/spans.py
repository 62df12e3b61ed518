"""Record what each thread of a save does, and when, by wrapping functions of ckpt.

A *span* is a time for which a thread is in one function and in no wrapped function that this one
calls. So the spans of a thread never overlap, and a time without a span is one in which the thread
does nothing for a save.
"""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from ckpt import CheckpointManager
from ckpt.coordination.committer import Committer
from ckpt.pipeline import image_writer
from ckpt.save.active_save import ActiveSave
from ckpt.save.rank_files import RankFiles
from ckpt.save.saver import Saver
from ckpt.save.tier_writer import TierWriter
from ckpt.staging import snapshot
from ckpt.staging.ring import Frame, Spill
from ckpt.staging.snapshot import Snapshot
from ckpt.staging.window import RingWindow, Window
from ckpt_backends.folder import posix
from ckpt_backends.folder.direct_io import DirectWriter
from ckpt_backends.folder.posix import PosixBackend

_THREADS: Final = {
    "MainThread": "training",
    "ckpt-copy": "copying",
    "ckpt-write": "writing",
    "ckpt-save": "streaming",
}
ROLES: Final = tuple(_THREADS.values())
"""What threads do in a save. Several threads may have the role "writing"."""
FSYNC: Final = "fsync of a file"
FSYNC_FOLDER: Final = "fsync of a folder"


@dataclass(frozen=True, slots=True)
class Span:
    """What one thread did from ``begin`` to ``end``, in seconds after the call of the save."""

    thread: str
    name: str
    begin: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    @property
    def role(self) -> str:
        """One of ``ROLES``."""
        return self.thread.partition(" ")[0]

    @property
    def kind(self) -> tuple[int, str]:
        """The index of the role in ``ROLES``, and the name."""
        return ROLES.index(self.role), self.name


class Spans:
    """The spans of all threads, while ``recording`` lasts."""

    def __init__(self) -> None:
        self._spans: list[Span] = []
        self._open = threading.local()

    def since(self, began: float) -> list[Span]:
        """Return the spans, with times counted from ``began``, and forget them."""
        spans, self._spans = self._spans, []
        return [
            Span(one.thread, one.name, one.begin - began, one.end - began)
            for one in spans
            if one.end > began
        ]

    def wrap(self, call: Callable[..., Any], name: str | Callable[..., str]) -> Callable[..., Any]:
        """Return a function that does what ``call`` does, and records it under ``name``, which may
        depend on the arguments.
        """

        def recorded(*arguments: Any, **settings: Any) -> Any:
            self._begin(name if isinstance(name, str) else name(*arguments))
            try:
                return call(*arguments, **settings)
            finally:
                self._end()

        return recorded

    def _begin(self, name: str) -> None:
        now = time.perf_counter()
        stack: list[list[Any]] = self._open.__dict__.setdefault("stack", [])
        if stack:
            self._add(stack[-1][0], stack[-1][1], now)
        stack.append([name, now])

    def _end(self) -> None:
        now = time.perf_counter()
        stack: list[list[Any]] = self._open.stack
        name, begin = stack.pop()
        self._add(name, begin, now)
        if stack:
            stack[-1][1] = now

    def _add(self, name: str, begin: float, end: float) -> None:
        base, _, number = threading.current_thread().name.partition("_")
        if (shown := _THREADS.get(base)) is not None:
            shown += f" {int(number) + 1}" if base == "ckpt-write" else ""
            self._spans.append(Span(shown, name, begin, end))


def _of_descriptor(descriptor: int) -> str:
    return FSYNC_FOLDER if stat.S_ISDIR(os.fstat(descriptor).st_mode) else FSYNC


def _of_put(_: object, key: str, *_arguments: object) -> str:
    return "put the manifest" if "manifest" in key else "put the fragment"


_NAMES: Final[tuple[tuple[Any, str, str | Callable[..., str]], ...]] = (
    (CheckpointManager, "save_async", "the call"),
    (Snapshot, "fence", "the optimizer waits"),
    (ActiveSave, "copy_late", "other work of the copy"),
    (snapshot, "copy_now", "copy"),
    (Snapshot, "_ask_witness", "compare a sample"),
    (RingWindow, "wait_room", "wait for a frame"),
    (Frame, "populate", "touch pages"),
    (Spill, "grow", "grow the spill"),
    (Saver, "_stream", "other work of the stream"),
    (TierWriter, "_reason_to_abort", "owner and history"),
    (PosixBackend, "upload", "create the file"),
    (posix._PosixUpload, "finish", "publish the file"),
    (RankFiles, "write", "wait for the writers"),
    (RankFiles, "put_fragment", "make the fragment"),
    (PosixBackend, "put", _of_put),
    (Snapshot, "confirm", "wait for the comparison"),
    (Committer, "commit", "votes and merge"),
    (image_writer._Job, "write", "other work of a part"),
    (image_writer._Job, "hash", "other work of a hash"),
    (DirectWriter, "write", "write"),
    (image_writer, "checksum", "hash"),
    (Window, "_wait_landed", "wait for the copy"),
    (posix, "reserve", "reserve space"),
    (os, "fsync", _of_descriptor),
)


@contextmanager
def recording(spans: Spans) -> Generator[None]:
    """Record in ``spans`` while the block runs. Only one block may run in a process."""
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in _NAMES]
    for (owner, name, original), (_, _, shown) in zip(originals, _NAMES, strict=True):
        setattr(owner, name, spans.wrap(original, shown))
    try:
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)

"""Contenders at work: one process each, taking turns in rounds, and what they have written
loaded back and compared.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, cast

from bench.compare import differences
from bench.floors import Floors
from bench.measure import MemorySampler, tree_bytes
from bench.process import BenchError, Process
from bench.runner import Bench, Shape, label
from ckpt.observe.journal_files import journal_folder
from ckpt.storage.registry import open_backend
from ckpt.storage.urls import is_folder

_More = ParamSpec("_More")


class Session:
    """One contender at work in a process of its own."""

    def __init__(self, bench: Bench, name: str, shape: Shape, folder: str | None = None) -> None:
        self.name, self.shape = name, shape
        self._bench = bench
        self.folder = folder or bench.place()
        if not folder:  # another root is the contender's to make
            os.makedirs(self.folder)
        self.process = bench.process()
        self.process.tell("setup", **vars(shape))
        self.setup: dict[str, Any] = {}
        self.base_bytes = self.peak_bytes = self.disk_bytes = self.compared = 0
        self._step = 0
        self.kept: list[tuple[str, dict[str, Any], list[str]]] = []

    def prepare(self) -> None:
        """Wait for the state, and get the contender ready; off the clock, and what it begins in
        the background too.
        """
        self.setup = self.process.hear()
        with MemorySampler(self.process.pid) as memory:
            self.setup |= self.process.ask("warm")
        self.base_bytes = memory.peak_bytes
        self.process.ask("prepare", name=self.name, folder=self.folder)
        if not self._bench.quick:
            self.process.settle()

    def save(self, verb: str, *, compare: bool = True, saves: int = 1, **command: Any) -> Any:
        """Let the contender save; what it wrote is kept for `check` if it is to be compared,
        else deleted.
        """
        before = self._entries()
        step, self._step = self._step + 1, self._step + saves
        with MemorySampler(self.process.pid) as memory:
            answer = self.process.ask(verb, step=step, compare=compare, **command)
        self.peak_bytes = max(self.peak_bytes, memory.peak_bytes)
        made = sorted(self._entries() - before)
        self.disk_bytes = sum(map(tree_bytes, made)) // saves
        if compare:
            self.kept.append((answer["path"], answer["saved"], made))
        else:
            _delete(made)
        return answer

    def check(self, checker: Checker) -> None:
        """Load back what was kept, and delete it.

        Raises ``BenchError`` if it is not what was saved.
        """
        kept, self.kept = self.kept, []
        for path, saved, made in kept:
            checker.load(self.name, path, saved)
            self.compared += 1
            _delete(made)

    @property
    def added_bytes(self) -> int:
        """Host memory that saving took, over working alone."""
        return max(0, self.peak_bytes - self.base_bytes)

    @property
    def label(self) -> str:
        return label(self.name)

    def delete(self) -> None:
        """Delete what was kept and is not to be compared any more."""
        for _, _, made in self.kept:
            _delete(made)
        self.kept = []

    def close(self) -> None:
        self.process.ask("close")
        self.process.end()

    def _entries(self) -> set[str]:
        if not os.path.isdir(self.folder):
            return set()
        return {entry.path for entry in os.scandir(self.folder) if entry.name.startswith("step-")}


class Heat:
    """The sessions of one heat. A contender that fails leaves it; the others go on."""

    def __init__(
        self,
        bench: Bench,
        case: str,
        shape: Shape,
        names: Sequence[str],
        roots: Mapping[str, str] | None = None,
    ) -> None:
        self._roots = roots or {}
        self.bench, self.case, self.shape = bench, case, shape
        self.sessions: dict[str, Session] = {}
        self.floors: Floors
        self._names = names

    def __enter__(self) -> Self:
        for name in self._names:
            self.sessions[name] = Session(self.bench, name, self.shape, self._roots.get(name))
        self.each(0, Session.prepare)
        made = [session.setup["nbytes"] for session in self.sessions.values()]
        self.floors = Floors(made[0] if made else self.shape.size)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for session in self.sessions.values():
            session.process.end(0 if kind else 20)

    def each(
        self,
        number: int,
        work: Callable[Concatenate[Session, _More], Any],
        *args: _More.args,
        **kwargs: _More.kwargs,
    ) -> None:
        """Let everybody work in turn, another one first with each ``number``."""
        names = list(self.sessions)
        shift = number % len(names) if names else 0
        for name in names[shift:] + names[:shift]:
            self.bench.show(f"{self.case}, {label(name)}")
            try:
                work(self.sessions[name], *args, **kwargs)
            except BenchError as error:
                self.bench.fail(self.case, name, error)
                self.sessions.pop(name).process.end(0)

    def drop(self, name: str, reason: str) -> None:
        """Leave out one that has not failed."""
        self.bench.skip(self.case, name, reason)
        self.sessions.pop(name).process.end()

    def finish(self) -> None:
        """End all contenders, then compare what they have left: a state and its images need not
        fit beside the state that is loaded into.
        """
        self.each(0, Session.close)
        with Checker(self.bench, self.shape) as checker:
            self.each(0, Session.check, checker)


class Checker:
    """A process with a state of the same form, which checkpoints are loaded into.

    A load that fails costs its process.
    """

    def __init__(self, bench: Bench, shape: Shape) -> None:
        self._bench, self._shape = bench, shape
        self._process: Process | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._process is not None:
            self._process.end()
            self._process = None

    def load(self, name: str, path: str, saved: dict[str, Any], *, cold: bool = False) -> float:
        """Seconds of a load into a spoiled state.

        Raises ``BenchError`` if that does not hold then what was saved.
        """
        if self._process is None:
            self._process = self._bench.process()
            self._process.ask("setup", **vars(self._shape))
        try:
            answer = self._process.ask("load", name=name, path=path, cold=cold)
        except BenchError:
            self._process.end(0)
            self._process = None
            raise
        if wrong := differences(saved, answer["loaded"]):
            raise BenchError(
                f"what was loaded is not what was saved: {len(wrong)} differ, "
                f"{', '.join(wrong[:3])}"
            )
        return cast(float, answer["seconds"])


def clear(root: str) -> None:
    """Delete a root that is a contender's own, in host memory too, and the journal beside it."""
    backend = open_backend(root)
    try:
        for info in list(backend.list("")):
            backend.delete(info.key)
    finally:
        backend.close()
    with contextlib.suppress(OSError):  # no folder here, or not empty
        os.rmdir(root)
    if is_folder(root):
        shutil.rmtree(journal_folder(root), ignore_errors=True)


def _delete(entries: Sequence[str]) -> None:
    """Delete, and let the file system finish with it: what it puts off would be on the clock of
    the next call of fsync.
    """
    for path in entries:
        (shutil.rmtree if os.path.isdir(path) else os.unlink)(path)
    for folder in {os.path.dirname(path) for path in entries}:
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        os.fsync(descriptor)
        os.close(descriptor)

"""The machinery all scenarios share: who is alive at once, who works when, and that nothing counts before it has been compared.

**Heats.** One process per contender, so that peaks of memory do not mix. As many of them as fit into memory are alive at once and work one at a time, in
rounds: within a round each is measured once, then the floors, and the order moves on by one with each round. A machine that changes its pace does so for all
of them, and a floor is measured right after what it is compared with.

**Comparing.** The contents of the state are hashed (128 bits per tensor) when it is saved. A checkpoint is loaded into another, spoiled state in a process
of its own and hashed again. A contender whose checkpoint does not give back the same has no numbers, and its reason is in the table.
"""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Concatenate, Final, Literal, ParamSpec, Self, cast

from rich.console import Console

from bench.compare import differences
from bench.contenders import ALL, missing
from bench.floors import WINDOW_BYTES, Floors
from bench.machine import conditions, free_memory_bytes, load
from bench.measure import MemorySampler, tree_bytes
from bench.process import BenchError, Process
from bench.result import Column, Failure, Line, Result

_SPARE_MEMORY: Final = 0.85
_WORKER_BYTES: Final = 350 << 20  # a process with torch and a contender's own


# Who is measured first and so side by side, and is still measured when time is short.
_FIRST: Final = ("ckpt.save_async", "torch_checkpointing", "dcp.best", "dcp.async_save", "torch.save")
PEERS: Final = ("torch_checkpointing", "dcp.best", "dcp.async_save")


# Copies of the state that a contender holds in memory while it saves; one where nothing is said. Ours does with one if there is no room for two.
_IMAGES: Final = {"torch.save": 0, "safetensors": 0, "dcp.save": 0, "ckpt.save": 2, "ckpt.save_async": 2}

_More = ParamSpec("_More")


@dataclass(frozen=True)
class Shape:
    """The state to be made: bare tensors, or a GPT of ``count`` layers with AdamW."""

    kind: Literal["training", "raw"]
    size: int
    count: int
    batch: int = 1

    def need_bytes(self, name: str, *, least: bool = False) -> int:
        """Memory for one contender: the state, gradients, and as many images or copies as were seen of it. ``least``: what it can do with."""
        images = min(1, _IMAGES.get(name, 1)) if least else _IMAGES.get(name, 1)
        gradients = self.size // 3 if self.kind == "training" else 0
        return self.size * (1 + images) + gradients + _WORKER_BYTES

    def check_bytes(self) -> int:
        """Memory to load one back: a state, and once more what is read before it lands."""
        return self.size * 2 + _WORKER_BYTES


class Bench:
    """One run of one scenario: its folder on the disk in question, its clock, and who failed."""

    def __init__(
        self,
        scenario: str,
        folder: str,
        names: Sequence[str],
        budget_seconds: float,
        console: Console,
        *,
        memory_bytes: int = 0,
        quick: bool = False,
    ) -> None:
        self.scenario, self.console, self.quick = scenario, console, quick
        self.names = sorted(
            (name for name in names if name not in missing()),
            key=lambda name: _FIRST.index(name) if name in _FIRST else len(_FIRST),
        )
        self.failures: list[Failure] = []
        self.skipped = [Failure("", name, why) for name, why in missing().items() if name in names]
        self.budget_seconds = budget_seconds
        self._memory_bytes = memory_bytes
        self._began = time.monotonic()
        self._serial = itertools.count()
        self._processes: list[Process] = []
        os.makedirs(folder, exist_ok=True)
        self._place = tempfile.TemporaryDirectory(
            prefix=f"ckpt-bench-{scenario}-", dir=folder, ignore_cleanup_errors=True
        )
        self.folder = self._place.name
        self.conditions = conditions(self.folder)
        self._status = console.status(scenario)  # shown on a terminal only

    def __enter__(self) -> Self:
        self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._status.stop()
        for process in self._processes:
            process.end(0)
        self._place.cleanup()

    def over(self) -> bool:
        """Whether the scenario's time is up."""
        return self.left() < 0

    def left(self) -> float:
        """Seconds of the scenario's time that remain."""
        return self.budget_seconds - (time.monotonic() - self._began)

    def show(self, text: str) -> None:
        """What is going on now."""
        self._status.update(f"{self.scenario}: {text}")

    def say(self, text: str) -> None:
        self.console.print(
            f"[dim]{time.monotonic() - self._began:5.0f} s[/] {text}", highlight=False, soft_wrap=True
        )

    def fail(self, case: str, name: str, error: BaseException) -> None:
        reason = error.reason if isinstance(error, BenchError) else f"{type(error).__name__}: {error}"
        self.failures.append(Failure(case, name, reason))
        self.console.print(f"[bold red]{case}, {label(name)}: {reason}[/]", highlight=False, soft_wrap=True)

    def skip(self, case: str, name: str, reason: str) -> None:
        self.skipped.append(Failure(case, name, reason))
        self.say(f"{case}, {label(name)}: left out, {reason}")

    def failed(self, case: str, name: str) -> bool:
        return any((one.case, one.name) == (case, name) for one in (*self.failures, *self.skipped))

    def ours_and_best(self) -> list[str]:
        """Our asynchronous save, and the strongest of the peers asked for."""
        peers = [name for name in PEERS if name in self.names]
        return [name for name in self.names if name == "ckpt.save_async"] + peers[:1]

    def process(self) -> Process:
        process = Process(os.path.join(self.folder, f"log-{next(self._serial)}"))
        self._processes.append(process)
        return process

    def place(self) -> str:
        """A path of its own below the folder."""
        return os.path.join(self.folder, f"place-{next(self._serial)}")

    def heats(
        self,
        case: str,
        shape: Shape,
        names: Sequence[str] | None = None,
        *,
        need: Callable[[str], int] | None = None,
        beside_bytes: int = 0,
    ) -> Iterator[list[str]]:
        """Lots of contenders that fit into memory together; those that do not even alone, or come when time is up, are left out."""
        room = self.room(beside_bytes)
        need = need or shape.need_bytes
        lot: list[str] = []
        for name in names if names is not None else self.names:
            if need(name) > room >= shape.need_bytes(name, least=True):
                yield from self._in_time(case, [name])  # alone, with what there is
                continue
            if need(name) > room:
                want, have = need(name) >> 20, max(0, room) >> 20
                self.skip(case, name, f"needs {want} MiB of memory, {have} MiB are free for it")
                continue
            if lot and sum(need(each) for each in (*lot, name)) > room:
                yield from self._in_time(case, lot)
                lot = []
            lot.append(name)
        yield from self._in_time(case, lot)

    def room(self, beside_bytes: int = 0) -> int:
        """Memory for contenders: what is free or was allowed, without the floors' buffers and ``beside_bytes``."""
        free = int(free_memory_bytes() * _SPARE_MEMORY)
        return min(free, self._memory_bytes or free) - 2 * WINDOW_BYTES - beside_bytes

    def _in_time(self, case: str, lot: list[str]) -> Iterator[list[str]]:
        if lot and self.over():
            for name in lot:
                self.skip(case, name, f"the {self.budget_seconds:.0f} s of this scenario were over")
        elif lot:
            yield lot

    def result(
        self, title: str, columns: Sequence[Column], notes: Sequence[str], lines: list[Line], **more: Any
    ) -> Result:
        """The lines of those that did not fail, with the conditions at the end of the run."""
        told = {
            **self.conditions,
            "quick": self.quick,
            "load_end": load(),
            "run_seconds": round(time.monotonic() - self._began, 1),
            **more,
        }
        kept = [line for line in lines if not self.failed(line.case, line.name)]
        order = [*ALL]
        kept.sort(key=lambda line: order.index(line.name) if line.name in order else len(order))
        return Result(self.scenario, title, columns, notes, kept, self.failures, self.skipped, told)


class Session:
    """One contender at work in a process of its own."""

    def __init__(self, bench: Bench, name: str, shape: Shape, folder: str | None = None) -> None:
        self.name, self.shape = name, shape
        self._bench = bench
        self.folder = folder or bench.place()
        self.process = bench.process()
        self.process.tell("setup", **vars(shape))
        self.setup: dict[str, Any] = {}
        self.base_bytes = self.peak_bytes = self.disk_bytes = self.compared = 0
        self._step = 0
        self.kept: list[tuple[str, dict[str, Any], list[str]]] = []

    def prepare(self) -> None:
        """Wait for the state, and get the contender ready; off the clock, and what it begins in the background too."""
        self.setup = self.process.hear()
        with MemorySampler(self.process.pid) as memory:
            self.setup |= self.process.ask("warm")
        self.base_bytes = memory.peak_bytes
        self.process.ask("prepare", name=self.name, folder=self.folder)
        if not self._bench.quick:
            self.process.settle()

    def save(self, verb: str, *, compare: bool = True, saves: int = 1, **command: Any) -> Any:
        """Let the contender save; what it wrote is kept for `check` if it is to be compared, else deleted."""
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
        """Load back what was kept, and delete it. Raises ``BenchError`` if it is not what was saved."""
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
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
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
        """End all contenders, then compare what they have left: a state and its images need not fit beside the state that is loaded into."""
        self.each(0, Session.close)
        with Checker(self.bench, self.shape) as checker:
            self.each(0, Session.check, checker)


class Checker:
    """A process with a state of the same form, which checkpoints are loaded into. A load that fails costs its process."""

    def __init__(self, bench: Bench, shape: Shape) -> None:
        self._bench, self._shape = bench, shape
        self._process: Process | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._process is not None:
            self._process.end()
            self._process = None

    def load(self, name: str, path: str, saved: dict[str, Any], *, cold: bool = False) -> float:
        """Seconds of a load into a spoiled state. Raises ``BenchError`` if that does not hold then what was saved."""
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
                f"what was loaded is not what was saved: {len(wrong)} differ, {', '.join(wrong[:3])}"
            )
        return cast(float, answer["seconds"])


def label(name: str) -> str:
    """As people know it."""
    return ALL[name].label if name in ALL else name


def size_label(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:g} GiB" if size_bytes >= 1 << 30 else f"{size_bytes / 2**20:g} MiB"


def _delete(entries: Sequence[str]) -> None:
    """Delete, and let the file system finish with it: what it puts off would be on the clock of whoever fsyncs next."""
    for path in entries:
        (shutil.rmtree if os.path.isdir(path) else os.unlink)(path)
    for folder in {os.path.dirname(path) for path in entries}:
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        os.fsync(descriptor)
        os.close(descriptor)

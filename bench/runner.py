"""The machinery that all scenarios share: which contenders are alive at once, which one works when,
and the comparison of each checkpoint before its numbers count.

**Heats.** One process per contender, so that peaks of memory do not mix. As many of them as fit
into memory are alive at once and work one at a time, in rounds: within a round each is measured
once, then the floors, and the order moves on by one with each round. A machine that changes its
pace does so for all of them, and a floor is measured right after what it is compared with.

**Comparing.** The contents of the state are hashed (128 bits per tensor) when it is saved. A
checkpoint is loaded into another, spoiled state in a process of its own and hashed again
(``bench.heat``). A contender whose checkpoint does not give back the same has no numbers, and its
reason is in the table.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Literal, Self

from rich.console import Console

from bench.contenders import ALL, missing
from bench.floors import WINDOW_BYTES
from bench.machine import conditions, free_memory_bytes, load
from bench.process import BenchError, Process
from bench.result import Column, Failure, Line, Result

_SPARE_MEMORY: Final = 0.85
_WORKER_BYTES: Final = 350 << 20  # a process with torch and a contender's own


# These are measured first, and so side by side. They are measured also when time is short.
_FIRST: Final = (
    "ckpt.save_async",
    "torch_checkpointing",
    "dcp.best",
    "dcp.async_save",
    "torch.save",
    "ckpt.save",
)
LOT: Final = 6  # the first of these are measured even when time is up
PEERS: Final = ("torch_checkpointing", "dcp.best", "dcp.async_save")


# Copies of the state that a contender holds in memory while it saves; one where nothing is said.
# Ours does with one if there is no room for two.
_IMAGES: Final = {
    "torch.save": 0,
    "safetensors": 0,
    "dcp.save": 0,
    "ckpt.save": 2,
    "ckpt.save_async": 2,
}


@dataclass(frozen=True)
class Shape:
    """The state to be made: bare tensors, or a GPT of ``count`` layers with AdamW."""

    kind: Literal["training", "raw"]
    size: int
    count: int
    batch: int = 1

    def need_bytes(self, name: str, *, least: bool = False) -> int:
        """Memory for one contender: the state, gradients, and as many images or copies as were
        seen of it. ``least``: what it can do with.
        """
        images = min(1, _IMAGES.get(name, 1)) if least else _IMAGES.get(name, 1)
        gradients = self.size // 3 if self.kind == "training" else 0
        return self.size * (1 + images) + gradients + _WORKER_BYTES

    def check_bytes(self) -> int:
        """Memory to load one back: a state, and once more what is read before it lands."""
        return self.size * 2 + _WORKER_BYTES


class Bench:
    """One run of one scenario: its folder on the disk in question, its clock, and its failures."""

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
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
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
            f"[dim]{time.monotonic() - self._began:5.0f} s[/] {text}",
            highlight=False,
            soft_wrap=True,
        )

    def fail(self, case: str, name: str, error: BaseException) -> None:
        reason = (
            error.reason if isinstance(error, BenchError) else f"{type(error).__name__}: {error}"
        )
        self.failures.append(Failure(case, name, reason))
        self.console.print(
            f"[bold red]{case}, {label(name)}: {reason}[/]", highlight=False, soft_wrap=True
        )

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
        """Lots of contenders that fit into memory together.

        A contender is left out if it does not fit even alone, or if the time is up. The first
        lot is never left out.
        """
        room = self.room(beside_bytes)
        need = need or shape.need_bytes
        fitting: dict[str, int] = {}
        for name in self.names if names is None else names:
            if (want := need(name)) <= room:
                fitting[name] = want
            elif shape.need_bytes(name, least=True) <= room:
                fitting[name] = room  # alone, with what there is
            else:
                reason = (
                    f"needs {want >> 20} MiB of memory, {max(0, room) >> 20} MiB are free for it"
                )
                self.skip(case, name, reason)
        for number, lot in enumerate(lots(fitting, room)):
            if number and self.over():
                for name in lot:
                    self.skip(
                        case, name, f"the {self.budget_seconds:.0f} s of this scenario were over"
                    )
            else:
                yield lot

    def room(self, beside_bytes: int = 0) -> int:
        """Memory for contenders: what is free or was allowed, without the floors' buffers and
        ``beside_bytes``.
        """
        free = int(free_memory_bytes() * _SPARE_MEMORY)
        return min(free, self._memory_bytes or free) - 2 * WINDOW_BYTES - beside_bytes

    def result(
        self,
        title: str,
        columns: Sequence[Column],
        notes: Sequence[str],
        lines: list[Line],
        **more: Any,
    ) -> Result:
        """The lines of those that did not fail, with the conditions at the end of the run."""
        described = {
            **self.conditions,
            "quick": self.quick,
            "load_end": load(),
            "run_seconds": round(time.monotonic() - self._began, 1),
            **more,
        }
        kept = [line for line in lines if not self.failed(line.case, line.name)]
        cases, order = list(dict.fromkeys(line.case for line in lines)), list(ALL)
        kept.sort(
            key=lambda line: (
                cases.index(line.case),
                order.index(line.name) if line.name in order else len(order),
            )
        )
        return Result(
            self.scenario, title, columns, notes, kept, self.failures, self.skipped, described
        )


def lots(needs: Mapping[str, int], room: int) -> list[list[str]]:
    """The names in their order, in lots of at most ``LOT`` whose needs fit into ``room``
    together.
    """
    found: list[list[str]] = []
    used = 0
    for name, need in needs.items():
        if not found or len(found[-1]) == LOT or used + need > room:
            found.append([])
            used = 0
        found[-1].append(name)
        used += need
    return found


def label(name: str) -> str:
    """As people know it."""
    return ALL[name].label if name in ALL else name


def size_label(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:g} GiB" if size_bytes >= 1 << 30 else f"{size_bytes / 2**20:g} MiB"

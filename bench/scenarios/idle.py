"""Rounds of saves while nothing else runs: what `raw`, `small` and `growth` have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from bench.heat import Heat, Session
from bench.measure import Spread
from bench.result import Column, Line
from bench.runner import Bench, Shape, label

PATIENCE: Final = 0.2  # of the scenario's time: whose saves would take longer than that is left out

SAFE: Final = Column("safe_seconds", "safe", "seconds")
DURABLE: Final = Column("durable_seconds", "durable", "seconds")
OVER_COPY: Final = Column("safe_over_copy", "safe / copy", "ratio")
OVER_WRITE: Final = Column("durable_over_write", "durable / write", "ratio")
FIRST_SAFE: Final = Column("first_safe_seconds", "first: safe", "seconds")
FIRST_DURABLE: Final = Column("first_durable_seconds", "first: durable", "seconds")
CALL: Final = Column("call_seconds", "call", "seconds")
ON_DISK: Final = Column("disk_bytes", "on disk", "bytes")
MEMORY: Final = Column("added_memory_bytes", "memory added", "bytes")
SAVES: Final = Column("saves", "saves", "count")

NOTES: Final = (
    "**safe**: seconds from the call until the state may be changed, when nothing can overlap. "
    "**durable**: until all is written and fsynced; "
    "`ckpt` fsyncs itself, the files and folders of the others are fsynced by the bench before "
    "the clock stops.",
    "Medians of the later saves (how many: *saves*), after the **first** save of each process, "
    "which is in no median. "
    "Lowest, highest and single values are in the CSV and JSON.",
    "**copy**, **write**: the machine itself, right after each save. A warm copy of as many bytes "
    "by one thread; 8 MiB `O_DIRECT` writes by 4 threads into a preallocated file, "
    "with fsync. A ratio is the median of the ratios of each save to what was measured right "
    "after it.",
    "The first and the last checkpoint of each contender were loaded back in another process and "
    "compared; one that differs has no numbers here.",
)


@dataclass
class Seen:
    """What the rounds have shown of one contender: its saves, and a floor right after each but
    the first.
    """

    session: Session
    answers: list[dict[str, Any]] = field(default_factory=list)
    copies: list[float] = field(default_factory=list)
    writes: list[float] = field(default_factory=list)


def measure(
    bench: Bench, case: str, shape: Shape, repeats: int, names: Sequence[str] | None = None
) -> list[Line]:
    """The first save of each, then ``repeats`` rounds with floors; one line for each contender
    and floor.
    """
    kept: dict[str, Seen] = {}
    for lot in bench.heats(case, shape, names):
        with Heat(bench, case, shape, lot) as heat:
            seen = {name: Seen(session) for name, session in heat.sessions.items()}
            for number in range(repeats + 1):
                heat.each(number, _visit, seen, heat, compare=number in (0, repeats))
                if number == 1:
                    _leave_out_the_slow(heat, repeats, seen)
            heat.finish()
            kept |= {name: seen[name] for name in heat.sessions}
    lines = [_line(case, name, seen) for name, seen in kept.items()]
    if kept:
        copy = Spread.of(value for seen in kept.values() for value in seen.copies)
        write = Spread.of(value for seen in kept.values() for value in seen.writes)
        lines.append(Line(case, "floor.copy", "floor: warm copy", {SAFE.key: copy}))
        lines.append(Line(case, "floor.write", "floor: O_DIRECT write", {DURABLE.key: write}))
    for line in lines:
        safe, durable = line.median(SAFE.key), line.median(DURABLE.key)
        if safe is not None and durable is not None:
            bench.say(f"{case}, {line.label}: safe {safe * 1e3:.1f} ms, durable {durable:.3f} s")
    return lines


def _visit(session: Session, everyone: dict[str, Seen], heat: Heat, *, compare: bool) -> None:
    seen = everyone[session.name]
    seen.answers.append(session.save("idle", compare=compare))
    if len(seen.answers) > 1:
        seen.copies.append(heat.floors.copy())
        seen.writes.append(heat.floors.write(heat.bench.folder))


def _leave_out_the_slow(heat: Heat, repeats: int, seen: dict[str, Seen]) -> None:
    """A first save may start a process or make memory: the second tells how long the others will
    take.
    """
    for name in list(heat.sessions):
        second = seen[name].answers[1]["durable"]
        if second * repeats > heat.bench.budget_seconds * PATIENCE:
            heat.drop(name, f"its second save took {second:.0f} s")


def _line(case: str, name: str, seen: Seen) -> Line:
    first, *later = seen.answers
    numbers: dict[str, Any] = {
        f"{of}_seconds": Spread.of(one[of] for one in later) for of in ("call", "safe", "durable")
    }
    numbers |= {f"first_{of}_seconds": first[of] for of in ("call", "safe", "durable")}
    numbers[OVER_COPY.key] = Spread.ratio([one["safe"] for one in later], seen.copies)
    numbers[OVER_WRITE.key] = Spread.ratio([one["durable"] for one in later], seen.writes)
    numbers |= {
        SAVES.key: len(later),
        ON_DISK.key: seen.session.disk_bytes,
        MEMORY.key: seen.session.added_bytes,
        "state_bytes": seen.session.setup["nbytes"],
        "tensors": seen.session.setup["tensors"],
    }
    return Line(case, name, label(name), numbers)

"""Scenario 4: how fast a checkpoint lands in the tensors of a live training.

Each contender saves once; then each has a process of its own, as a resumed job is one, that loads
again and again into a spoiled state, cold and warm in turn. *Cold*: the files are fsynced and
evicted from the page cache, with ``posix_fadvise`` and, where it may be written,
``/proc/sys/vm/drop_caches``. What the host of a virtual machine, or the disk, still holds in its
own memory cannot be evicted: the direct read beside it has the same advantage.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from bench import plots
from bench.floors import Floors
from bench.heat import Checker, Heat, Session, clear
from bench.measure import Spread
from bench.process import BenchError
from bench.result import Column, Line, Result
from bench.runner import Bench, Shape, label, size_label
from bench.scenarios import option

# Who reads what another has written in the same way, and what reading is called.
SAME: Final = {
    "dcp.async_save": "dcp.save",
    "dcp.best": "dcp.save",
    "torchsnapshot.async_take": "torchsnapshot.take",
    "ckpt.save": "ckpt.save_async",
}
_LABELS: Final = {
    "torch.save": "torch.load",
    "safetensors": "safetensors",
    "dcp.save": "DCP load",
    "torch_checkpointing": "torch_checkpointing",
    "torchsnapshot.take": "torchsnapshot restore",
    "nvrx": "nvidia-resiliency-ext",
    "ckpt.save_async": "ckpt restore",
    "ckpt.memory": "ckpt restore, memory tier",
}
_IN_MEMORY: Final = {"ckpt.memory"}
_COLUMNS = (
    Column("cold_seconds", "cold", "seconds"),
    Column("cold_bytes_per_second", "cold", "per_second"),
    Column("cold_over_read", "cold / direct read", "ratio"),
    Column("warm_seconds", "warm", "seconds"),
    Column("warm_bytes_per_second", "warm", "per_second"),
    Column("first_cold_seconds", "first, cold", "seconds"),
    Column("loads", "loads", "count"),
)
_NOTES = (
    "Seconds, and bytes of the state per second, from the call until everything is in the live "
    "model and optimizer. **cold**: the files were evicted from the page cache right before. "
    "**warm**: right after a cold load; a reader that uses the page cache finds the files "
    "there; ckpt neither fills that cache nor reads through it. **memory tier**: what a memory "
    "tier had kept in `/dev/shm` for the process that comes after; nothing there is ever cold. "
    "**first**: the first load of its process, in no median.",
    "**direct read**: as many bytes read with `O_DIRECT` (8 MiB, 4 threads) into warm memory, in "
    "the same round. The host of a virtual machine may hold the disk in its own memory: for all "
    "alike.",
    "Medians of the later loads (how many: *loads*), in rounds in which contenders take turns. "
    "The state is overwritten before each load and compared after it.",
)


@dataclass(frozen=True, kw_only=True)
class Options:
    size_mib: tuple[int, ...] = option((1024,), "of the AdamW state, one or several")
    repeats: int = option(5, "loads of each kind after the first")
    layers: int = option(6, "of the model; sets the number of tensors")
    budget_seconds: float = option(110.0, "after which no other contender is begun")


QUICK = Options(size_mib=(8,), repeats=2, layers=2, budget_seconds=40)


@dataclass
class _Seen:
    """A checkpoint, the process that loads it, and what was seen."""

    session: Session
    checker: Checker
    first: float = 0.0
    cold: list[float] = field(default_factory=list)
    warm: list[float] = field(default_factory=list)


def run(bench: Bench, options: Options) -> Result:
    own = [SAME[name] if SAME.get(name) in bench.names else name for name in bench.names]
    if "ckpt.save_async" in own:
        own += _IN_MEMORY
    lines: list[Line] = []
    for mib in options.size_mib:
        shape = Shape("training", mib << 20, options.layers)
        lines += _measure(bench, shape, options.repeats, list(dict.fromkeys(own)))
    return bench.result("Loading a checkpoint into a live training", _COLUMNS, _NOTES, lines)


def _measure(bench: Bench, shape: Shape, repeats: int, names: Sequence[str]) -> list[Line]:
    case = size_label(shape.size)
    lines: list[Line] = []
    reads: list[float] = []
    beside = 2 * shape.size  # while the checkpoints are made
    for lot in bench.heats(
        case, shape, names, need=lambda _: shape.check_bytes(), beside_bytes=beside
    ):
        with contextlib.ExitStack() as stack:
            seen = _saved(bench, case, shape, lot, stack)
            floors = _rounds(bench, case, seen, repeats)
        lines += [_line(case, name, one, floors) for name, one in seen.items()]
        reads += floors
    if lines:
        numbers = {
            "cold_seconds": Spread.of(reads),
            "cold_bytes_per_second": _speed(lines[0], reads),
        }
        lines.append(Line(case, "floor.read", "floor: O_DIRECT read", dict(numbers)))
    for line in lines:
        bench.say(f"{case}, {line.label}: cold {line.median('cold_seconds'):.2f} s")
    return lines


def _saved(
    bench: Bench, case: str, shape: Shape, names: Sequence[str], stack: contextlib.ExitStack
) -> dict[str, _Seen]:
    """Save a checkpoint with each contender, in processes that have ended.

    ``stack`` frees what the tiers in memory hold.
    """
    seen: dict[str, _Seen] = {}
    for name in names:
        roots = {name: f"shm://bench-{secrets.token_hex(6)}"} if name in _IN_MEMORY else {}
        for root in roots.values():
            stack.callback(clear, root)
        with Heat(bench, case, shape, [name], roots) as heat:
            heat.each(0, lambda session: session.save("idle"))
            heat.each(0, Session.close)
            seen |= {each: _Seen(one, Checker(bench, shape)) for each, one in heat.sessions.items()}
    return seen


def _rounds(bench: Bench, case: str, seen: dict[str, _Seen], repeats: int) -> list[float]:
    """Let each contender load, in turn. One that fails leaves ``seen``. Returns the floors."""
    floors: list[float] = []
    direct = Floors(next(iter(seen.values())).session.setup["nbytes"]) if seen else None
    for number in range(repeats + 1):
        order = list(seen)
        shift = number % max(1, len(order))
        for name in order[shift:] + order[:shift]:
            bench.show(f"{case}, {label(name)}")
            try:
                _visit(name, seen[name], number)
            except BenchError as error:
                bench.fail(case, name, error)
                seen.pop(name).checker.close()
        if number and direct:
            floors.append(direct.read(bench.folder))
    for one in seen.values():
        one.checker.close()
        one.session.delete()
    return floors


def _visit(name: str, seen: _Seen, number: int) -> None:
    path, saved, _ = seen.session.kept[0]
    cold = seen.checker.load(name, path, saved, cold=True)
    if not number:
        seen.first = cold
        return
    seen.cold.append(cold)
    seen.warm.append(seen.checker.load(name, path, saved))


def _speed(line: Line, seconds: Sequence[float]) -> Spread:
    nbytes = line.median("state_bytes") or 0.0
    return Spread.of(nbytes / each for each in seconds)


def _line(case: str, name: str, seen: _Seen, floors: Sequence[float]) -> Line:
    numbers: dict[str, Any] = {
        "state_bytes": seen.session.setup["nbytes"],
        "tensors": seen.session.setup["tensors"],
    }
    line = Line(case, name, _LABELS.get(name, seen.session.label), numbers)
    numbers |= {
        "cold_seconds": Spread.of(seen.cold),
        "cold_bytes_per_second": _speed(line, seen.cold),
        "cold_over_read": Spread.ratio(seen.cold, floors),
        "warm_seconds": Spread.of(seen.warm),
        "warm_bytes_per_second": _speed(line, seen.warm),
        "first_cold_seconds": seen.first,
        "loads": len(seen.cold),
    }
    return line


def plot(result: Result, path: str) -> None:
    cold = plots.Panel(
        "cold_bytes_per_second",
        "cold",
        "files not in the page cache",
        "floor.read",
        kind="per_second",
        longer_is_better=True,
    )
    warm = plots.Panel(
        "warm_bytes_per_second",
        "warm",
        "files may be in the page cache",
        kind="per_second",
        longer_is_better=True,
    )
    plots.bars(result, (cold, warm), path)

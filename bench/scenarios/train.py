"""Scenario 3: what a save costs a training loop.

Three numbers, since each alone can be made to look good at the cost of the others.

* *stall*: seconds the training thread loses per save. The call itself, plus the wait until the
  optimizer may change the state, asked for where it is needed: after forward and backward, right
  before ``optimizer.step()``.
* *drag*: seconds training loses while the save streams: the steps beside it minus as many steps
  without one. The steps without are taken right before and right after each save in the same loop,
  so that a machine that changes its pace does not pass for drag.
* *durable*: seconds from the call until the checkpoint is complete and fsynced. ``ckpt`` fsyncs
  itself; what the others leave to the kernel is fsynced by the bench before the clock stops, in a
  thread beside the training loop, so that it never counts as their stall.

When all saves in training are done come saves with nothing else running (*idle*). Each follows
right after another one, which is not counted: pages of the file cache that the previous save has
freed are warm then, which favours contenders that write through it. After seconds of training they
may not be (a virtual machine may have to get them from its host again): in training a buffered
writer can take several times as long as idle.

**Memory** is the highest anonymous plus shared memory of the contender's process and its children
while it saves in training, over the highest while it trained before any contender was prepared.
*idle: memory* is that of all saves: where nothing overlaps, a contender may need more. Pages of
the kernel's file cache, which buffered writers fill, are not in it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from bench import plots
from bench.contenders import ALL
from bench.heat import Checker, Heat, Session
from bench.measure import Spread, Step, TrainedSave
from bench.result import Column, Line, Result
from bench.runner import Bench, Shape, label, size_label
from bench.scenarios import option

_COLUMNS = (
    Column("stall_seconds", "stall", "seconds"),
    Column("drag_seconds", "drag", "seconds"),
    Column("durable_seconds", "durable", "seconds"),
    Column("lost_seconds_per_gib", "lost per GiB", "seconds"),
    Column("beside_step_ratio", "step beside", "ratio"),
    Column("idle_durable_seconds", "idle: durable", "seconds"),
    Column("idle_durable_over_write", "durable / write", "ratio"),
    Column("added_memory_bytes", "memory added", "bytes"),
    Column("idle_safe_seconds", "idle: safe", "seconds"),
    Column("idle_memory_bytes", "idle: memory", "bytes"),
    Column("first_stall_seconds", "first: stall", "seconds"),
    Column("first_durable_seconds", "first: durable", "seconds"),
    Column("clean_step_seconds", "step alone", "seconds"),
    Column("fsync_by", "fsync by", "text"),
    Column("saves", "saves", "count"),
    Column("saves_compared_equal", "equal", "count"),
)
_NOTES = (
    "**stall**: seconds the training thread loses per save, in the call and until the optimizer "
    "may change the state. "
    "**drag**: seconds training loses beside the save, against as many steps without one, right "
    "before and after it; none if the call returns when all is durable. "
    "**durable**: from the call until complete and fsynced, in the training loop. **lost per "
    "GiB**: stall and drag together, per GiB of state. "
    "**step beside**: a step beside a save over one without. **first**: the process' first save; "
    "in no median.",
    "**idle**: nothing else runs. *safe*: until the state may change when nothing can overlap; "
    "*durable*: as above, right after another idle save, with a file cache as warm as it gets; "
    "*durable / write*: over a plain `O_DIRECT` write and fsync of as many bytes right after it. "
    "**memory added**: highest anonymous plus shared memory of the process and its children while "
    "it saves in training, over training alone; *idle: memory*: with the idle saves, which follow.",
    "`ckpt` fsyncs itself. What the others do not fsync, the bench does before the clock of "
    "*durable* stops, beside the training loop: it is not in their stall.",
    "Medians of the later saves of each kind (how many: *saves*), after the first; contenders "
    "take turns in rounds. As many saves as *equal* says were loaded back in another process and "
    "compared with the state they were made of: every one in training and the last idle one; of a "
    "state so large that no other fits beside it, the first and the last.",
    "Steps are noisy on a small machine: look at the ends (`low`, `high`) in the CSV and JSON "
    "before a difference of drag is believed.",
)


@dataclass(frozen=True, kw_only=True)
class Options:
    size_mib: tuple[int, ...] = option((1024,), "of the AdamW state, one or several")
    repeats: int = option(5, "saves of each kind after the first")
    layers: int = option(6, "of the model; sets the number of tensors")
    batch: int = option(2, "sequences per step; sets its length")
    clean_steps: int = option(2, "before and after each save")
    budget_seconds: float = option(450.0, "after which no other contender is begun")


QUICK = Options(size_mib=(8,), repeats=2, layers=2, clean_steps=1, budget_seconds=40)


@dataclass
class _Seen:
    """All that was seen of one contender."""

    session: Session
    copies: list[float] = field(default_factory=list)
    writes: list[float] = field(default_factory=list)
    trained: list[TrainedSave] = field(default_factory=list)
    idle: list[dict[str, Any]] = field(default_factory=list)
    trained_bytes: int = 0


def run(bench: Bench, options: Options) -> Result:
    lines: list[Line] = []
    for mib in options.size_mib:
        lines += _measure(
            bench, Shape("training", mib << 20, options.layers, options.batch), options
        )
    layers = (
        f"GPT of {options.layers} layers with AdamW, float32, {options.batch} sequences per step; "
        "one torch thread"
    )
    return bench.result(
        "What a save costs a training loop", _COLUMNS, _NOTES, lines, training=layers
    )


def _measure(bench: Bench, shape: Shape, options: Options) -> list[Line]:
    case = size_label(shape.size)
    seen: dict[str, _Seen] = {}
    beside = shape.check_bytes()
    if shape.need_bytes("ckpt.save_async") > bench.room(beside):
        beside = 0  # the first and the last are compared when the contenders have ended
    for lot in bench.heats(case, shape, beside_bytes=beside):
        with Heat(bench, case, shape, lot) as heat, Checker(bench, shape) as checker:
            heat_seen = {name: _Seen(session) for name, session in heat.sessions.items()}
            for number in range(options.repeats + 1):
                heat.each(number, _train, heat_seen, checker if beside else None, options)
                bench.say(
                    f"{case}: {f'round {number}/{options.repeats}' if number else 'first saves'}, "
                    f"{_figures(heat_seen)}"
                )
            for number in range(options.repeats):
                heat.each(number, _idle, heat_seen, heat, options)
            heat.finish()
            seen |= {name: heat_seen[name] for name in heat.sessions}
    lines = [_line(case, name, one) for name, one in seen.items()]
    if seen:
        copy = Spread.of(value for one in seen.values() for value in one.copies)
        write = Spread.of(value for one in seen.values() for value in one.writes)
        lines.append(
            Line(
                case,
                "floor.copy",
                "floor: warm copy",
                {"stall_seconds": copy, "idle_safe_seconds": copy},
            )
        )
        lines.append(
            Line(
                case,
                "floor.write",
                "floor: O_DIRECT write, idle",
                {"durable_seconds": write, "idle_durable_seconds": write},
            )
        )
    return lines


def _train(
    session: Session, everyone: dict[str, _Seen], checker: Checker | None, options: Options
) -> None:
    """One save in training."""
    seen = everyone[session.name]
    ends = len(seen.trained) in (0, options.repeats)
    answer = session.save("train", compare=checker is not None or ends, clean=options.clean_steps)
    beside = [Step(**step) for step in answer["beside"]]
    seen.trained.append(TrainedSave(answer["call"], answer["durable"], answer["clean"], beside))
    seen.trained_bytes = session.added_bytes
    if checker is not None:
        session.check(checker)


def _idle(session: Session, everyone: dict[str, _Seen], heat: Heat, options: Options) -> None:
    """Save twice while nothing else runs, count the second save, and measure the floors."""
    seen = everyone[session.name]
    session.save("idle", compare=False)
    last = len(seen.idle) == options.repeats - 1
    seen.idle.append(session.save("idle", compare=last))
    seen.copies.append(heat.floors.copy())
    seen.writes.append(heat.floors.write(heat.bench.folder))


def _figures(seen: dict[str, _Seen]) -> str:
    return "; ".join(
        f"{label(name)} {one.trained[-1].stall_seconds * 1e3:.1f} ms "
        f"{one.trained[-1].durable_seconds:.2f} s"
        for name, one in seen.items()
        if one.trained
    )


def _line(case: str, name: str, seen: _Seen) -> Line:
    first, *trained = seen.trained
    gib = seen.session.setup["nbytes"] / 2**30

    def spread(key: str) -> Spread:
        return Spread.of(getattr(save, key) for save in trained)

    beside = any(save.beside for save in trained)
    numbers: dict[str, Any] = {
        "stall_seconds": spread("stall_seconds"),
        "drag_seconds": spread("drag_seconds") if beside else "none",
        "durable_seconds": spread("durable_seconds"),
        "lost_seconds_per_gib": Spread.of(
            (save.stall_seconds + save.drag_seconds) / gib for save in trained
        ),
        "call_seconds": spread("call_seconds"),
        "clean_step_seconds": spread("clean_step_seconds"),
        "beside_step_seconds": spread("beside_step_seconds") if beside else "none",
        "beside_step_ratio": Spread.of(
            s.beside_step_seconds / s.clean_step_seconds for s in trained
        )
        if beside
        else "none",
        "steps_beside": Spread.of(len(save.beside) for save in trained),
        "first_stall_seconds": first.stall_seconds,
        "first_durable_seconds": first.durable_seconds,
        "idle_safe_seconds": Spread.of(one["safe"] for one in seen.idle),
        "idle_durable_seconds": Spread.of(one["durable"] for one in seen.idle),
        "idle_durable_over_write": Spread.ratio([one["durable"] for one in seen.idle], seen.writes),
        "added_memory_bytes": seen.trained_bytes,
        "idle_memory_bytes": seen.session.added_bytes,
        "disk_bytes": seen.session.disk_bytes,
        "fsync_by": ALL[name].fsync,
        "saves": len(trained),
        "saves_compared_equal": seen.session.compared,
        "state_bytes": seen.session.setup["nbytes"],
        "tensors": seen.session.setup["tensors"],
        "forward_backward_seconds": seen.session.setup["forward_backward"],
    }
    return Line(case, name, label(name), numbers)


def plot(result: Result, path: str) -> None:
    panels = (
        plots.Panel("stall_seconds", "stall", "the training thread stands still", "floor.copy"),
        plots.Panel("drag_seconds", "drag", "training lost while it streams"),
        plots.Panel("durable_seconds", "durable", "complete and fsynced", "floor.write"),
    )
    plots.bars(result, panels, path)

"""Scenario 8: a save every step.

Blocks of steps with a save each and blocks without take turns, and so do the contenders, so that a
drifting machine cancels out.

A training that asks for more than the disk can take has to wait somewhere: here a save waits, on
the clock, until the last but one before it is durable. What is still streaming at the end of a
block is waited for off the clock (*tail*): a long tail would slow the steps that follow.
"""

from __future__ import annotations

import contextlib
import secrets
from dataclasses import dataclass, field
from typing import Any

from bench import plots, style
from bench.heat import Checker, Heat, Session, clear
from bench.measure import Block, Spread
from bench.result import Column, Line, Result
from bench.runner import Bench, Shape, label, size_label
from bench.scenarios import option

_COLUMNS = (
    Column("slowdown", "slower by", "percent"),
    Column("total_slowdown", "slower by, all steps", "percent"),
    Column("stall_seconds", "stall", "seconds"),
    Column("clean_step_seconds", "step without", "seconds"),
    Column("saving_step_seconds", "step with", "seconds"),
    Column("tail_seconds", "tail", "seconds"),
    Column("steps", "steps with a save", "count"),
    Column("root", "into", "text"),
)
_NOTES = (
    "**slower by**: how much longer a block of steps with a save each took than the block without "
    "right after it; the median over the blocks, and over all steps. "
    "**stall**: seconds the training thread loses per save, waiting for earlier saves included. A "
    "save waits until the last but one before it is durable. "
    "**tail**: seconds from the last step of a block until its last save was durable, off the "
    "clock.",
    "The batch is chosen so that computing alone makes a step as long as asked for. The last "
    "checkpoint of each block was loaded back and compared; they are deleted between blocks.",
)


@dataclass(frozen=True, kw_only=True)
class Options:
    size_mib: int = option(256, "of the AdamW state")
    layers: int = option(6, "of the model")
    step_seconds: float = option(0.5, "of computing, at least")
    block: int = option(10, "steps with, then as many without")
    blocks: int = option(10, "of each contender")
    root: str = option(
        "", "folder or URL that ckpt saves below (shm://NAME: host memory); others save below --dir"
    )
    budget_seconds: float = option(240.0, "after which no other contender is begun")


QUICK = Options(size_mib=4, layers=2, step_seconds=0.02, block=2, blocks=2, budget_seconds=40)


@dataclass
class _Seen:
    session: Session
    blocks: list[Block] = field(default_factory=list)
    stalls: list[float] = field(default_factory=list)
    tails: list[float] = field(default_factory=list)


def run(bench: Bench, options: Options) -> Result:
    shape = Shape("training", options.size_mib << 20, options.layers)
    case = size_label(shape.size)
    seen: dict[str, _Seen] = {}
    batch = 0
    for lot in bench.heats(case, shape, bench.ours_and_best(), beside_bytes=shape.check_bytes()):
        roots = {
            name: _own(options.root) for name in lot if options.root and name.startswith("ckpt")
        }
        with (
            contextlib.ExitStack() as stack,
            Heat(bench, case, shape, lot, roots) as heat,
            Checker(bench, shape) as checker,
        ):
            for root in roots.values():
                stack.callback(clear, root)
            for session in heat.sessions.values():
                batch = session.process.ask("pace", batch=batch, seconds=options.step_seconds)
            seen |= {name: _Seen(session) for name, session in heat.sessions.items()}
            heat.each(0, lambda session: session.save("idle", compare=False))
            for number in range(options.blocks):
                heat.each(number, _visit, seen, checker, options)
                bench.say(
                    f"block {number + 1}/{options.blocks}: "
                    + "; ".join(_figures(name, seen[name]) for name in heat.sessions)
                )
            heat.each(0, Session.close)
            seen = {
                name: one for name, one in seen.items() if name in heat.sessions or name not in lot
            }
    lines = [_line(case, name, one, options) for name, one in seen.items()]
    return bench.result(
        "A save every step", _COLUMNS, _NOTES, lines, training=_state(options, batch)
    )


def _own(root: str) -> str:
    """Name a place of this run at ``root``, which keeps apart from what is there."""
    own = f"bench-{secrets.token_hex(4)}"
    return f"{root}-{own}" if root.startswith("shm://") else f"{root.rstrip('/')}/{own}"


def _state(options: Options, batch: int) -> str:
    return (
        f"GPT of {options.layers} layers with AdamW, float32, {batch} sequences per step; one "
        "torch thread"
    )


def _visit(
    session: Session, everyone: dict[str, _Seen], checker: Checker, options: Options
) -> None:
    seen = everyone[session.name]
    answer = session.save("block", saves=options.block, count=options.block)
    seen.blocks.append(Block(answer["saving"], answer["clean"]))
    seen.stalls += answer["stalls"]
    seen.tails.append(answer["drain"])
    session.check(checker)


def _figures(name: str, seen: _Seen) -> str:
    return f"{label(name)} {seen.blocks[-1].slowdown * 100:+.1f} %"


def _line(case: str, name: str, seen: _Seen, options: Options) -> Line:
    saving = [step for block in seen.blocks for step in block.saving]
    clean = [step for block in seen.blocks for step in block.clean]
    numbers: dict[str, Any] = {
        "slowdown": Spread.of(block.slowdown for block in seen.blocks),
        "total_slowdown": Block(saving, clean).slowdown,
        "stall_seconds": Spread.of(seen.stalls),
        "clean_step_seconds": Spread.of(clean),
        "saving_step_seconds": Spread.of(saving),
        "tail_seconds": Spread.of(seen.tails),
        "steps": len(saving),
        "block": len(seen.blocks[0].saving),
        "root": options.root if options.root and name.startswith("ckpt") else "the disk",
    }
    return Line(case, name, label(name), numbers)


def plot(result: Result, path: str) -> None:
    lines = plots.ordered(result.lines)[::-1]
    reading = (
        "Blocks of steps with a save each (filled) and without (open) take turns, and so do the "
        "contenders. Left: each block against the one after it; the bar is the median."
    )
    with style.figure(result, path, (14, 1.6 + 2.2 * len(lines)), reading) as (drawn, plt):
        grid = drawn.subplots(len(lines), 2, squeeze=False, gridspec_kw={"width_ratios": [1, 3]})
        ends = [
            value
            for line in lines
            if isinstance(v := line.numbers["slowdown"], Spread)
            for value in v.all
        ]
        steps = [
            value
            for line in lines
            for key in ("saving_step_seconds", "clean_step_seconds")
            if isinstance(v := line.numbers[key], Spread)
            for value in v.all
        ]
        for (left, right), line in zip(grid, lines, strict=True):
            _slowdown(left, line, (min(0.0, *ends), max(0.0, *ends)))
            _steps(right, line, sorted(steps)[int(len(steps) * 0.99)] * 1.25)
        del plt


def _slowdown(axis: Any, line: Line, ends: tuple[float, float]) -> None:
    value = line.numbers["slowdown"]
    assert isinstance(value, Spread)
    axis.barh(0, value.median, height=0.5, color=style.colour(line.name), alpha=0.85)
    axis.plot(value.all, [0.0] * len(value.all), "o", color=style.INK, markersize=4, alpha=0.5)
    axis.axvline(0, color=style.SOFT, linewidth=0.8)
    reach = max(ends[1] - ends[0], 0.01)
    axis.set_xlim(ends[0] - 0.1 * reach, ends[1] + 0.1 * reach)
    axis.set_ylim(-0.6, 0.6)
    axis.set_yticks([])
    axis.locator_params(axis="x", nbins=5)
    axis.xaxis.set_major_formatter(lambda x, _: style.tick(round(x, 4), "percent"))
    style.bare(axis)
    style.head(
        axis,
        line.label,
        f"slower by {style.write(value.median, 'percent')}, median of {len(value.all)} blocks",
    )


def _steps(axis: Any, line: Line, top: float) -> None:
    """Each step, as long as it is no longer than ``top``: a few that are would press all others
    flat.
    """
    saving, clean, block = (
        line.numbers["saving_step_seconds"],
        line.numbers["clean_step_seconds"],
        line.numbers["block"],
    )
    assert isinstance(saving, Spread) and isinstance(clean, Spread) and isinstance(block, int)  # noqa: PT018
    for number in range(len(saving.all) // block):
        own = slice(number * block, (number + 1) * block)
        start = 2 * number * block
        axis.axvspan(
            start - 0.5, start + block - 0.5, color=style.colour(line.name), alpha=0.1, linewidth=0
        )
        axis.plot(
            range(start, start + block),
            saving.all[own],
            "o",
            markersize=3.5,
            color=style.colour(line.name),
        )
        axis.plot(
            range(start + block, start + 2 * block),
            clean.all[own],
            "o",
            markersize=3.5,
            markerfacecolor="white",
            markeredgecolor=style.colour(line.name),
        )
    axis.set_xlim(-1, 2 * len(saving.all))
    axis.set_ylim(0, top)
    beyond = sorted(value for value in (*saving.all, *clean.all) if value > top)
    more = f"; beyond the axis: {', '.join(map(style.seconds, beyond))}" if beyond else ""
    axis.yaxis.set_major_formatter(lambda value, _: style.tick(round(value, 3), "seconds"))
    axis.set_xlabel("step", color=style.SOFT)
    style.bare(axis, grid="y")
    style.head(
        axis,
        "",
        f"seconds of each step; medians {style.seconds(saving.median)} with a save, "
        f"{style.seconds(clean.median)} without{more}",
    )

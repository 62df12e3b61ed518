"""``ckpt top``: show runs in the terminal.

A *scrub* is the verification of stored steps by the agent of this node.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from math import isnan
from typing import Annotated

import typer
from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ckpt.agent.client import known_jobs
from ckpt.agent.messages import JobStatus
from ckpt.cli.agent import scrub_progress
from ckpt.cli.options import PlacesArgument, RootsOption, places
from ckpt.cli.output import duration, moment, size
from ckpt.cli.serve import ConfigsOption, watched_runs
from ckpt.errors.sanitize import clean
from ckpt.observe.job_life import LIFE_MEANING, JobLife
from ckpt.observe.run_looks import RunLooks
from ckpt.observe.run_view import RunView, StepView, TierView

_MOST_ROWS = 12  # The most steps that are shown for each run
_PATIENCE_SECONDS = 2.0


def top(
    arguments: PlacesArgument = None,
    root: RootsOption = None,
    config: ConfigsOption = None,
    single: Annotated[bool, typer.Option("--once", help="Print once, and end.")] = False,
    interval: Annotated[
        float,
        typer.Option(
            "--interval",
            metavar="SECONDS",
            min=0.2,
            help="The time between two looks at the stores.",
        ),
    ] = 2.0,
) -> None:
    r"""Show runs in the terminal, live: tiers, the newest steps on each, and what the agent of this
    node verifies.

    The places are those of `ckpt serve`, which shows more. Ctrl-C ends it.

    \b
    Examples:
      ckpt top runs/gpt
      ckpt top /nvme/ckpt /lustre/run42 --once
      ckpt top --config ckpt.toml
    """
    looks = RunLooks(watched_runs(places(arguments, root), config))

    def look() -> Group:
        views, jobs = looks.look(_PATIENCE_SECONDS), known_jobs()
        parts: list[Table | Text] = []
        for view in views:
            parts += [*_tables(view), *_scrub_lines(view, jobs)]
        return Group(*parts)

    console = Console(markup=False, emoji=False, highlight=False)
    if single or not sys.stdout.isatty():
        console.print(look())
        return
    with suppress(KeyboardInterrupt), Live(look(), console=console, screen=True) as live:
        while True:
            time.sleep(interval)
            live.update(look())


def _tables(run: RunView) -> Iterator[Table | Text]:
    """Yield whether the job of a run lives, the table of its tiers, and that of its last steps."""
    if run.life is not None:
        yield _life_line(run.life)
    tiers = Table(title=Text(clean(run.name), style="bold"), title_justify="left", box=box.SIMPLE)
    tiers.add_column("tier", overflow="fold")
    for name in ("steps", "newest", "used", "free", "under way"):
        tiers.add_column(name, justify="right", no_wrap=name != "under way")
    for number, tier in enumerate(run.tiers, 1):
        free = "-" if isnan(tier.free) else size(tier.free)
        newest = str(tier.newest) if tier.newest >= 0 else "-"
        used_size = size(tier.used_bytes) if tier.is_listed else "-"
        cells = (f"{number} {tier.url}", str(tier.steps), newest, used_size, free, _under_way(tier))
        tiers.add_row(*(Text(clean(cell)) for cell in cells))
    yield tiers
    steps = Table(box=box.SIMPLE)
    for name in ("step", "size", "stall", *(f"tier {n + 1}" for n in range(len(run.tiers)))):
        steps.add_column(name, justify="right" if name in ("step", "size", "stall") else "left")
    for row in run.steps[:_MOST_ROWS]:
        steps.add_row(str(row.step), size(row.nbytes), *_stall_and_states(row))
    yield steps


def _life_line(life: JobLife) -> Text:
    text = f"{LIFE_MEANING[life.state]} ({life.host}, process {life.pid}), {moment(life.time)}"
    reason = f": {life.reason}" if life.reason else ""
    return Text(clean(f"{text}{reason}"), style="green" if life.is_alive else "yellow")


def _scrub_lines(run: RunView, jobs: Sequence[JobStatus]) -> Iterator[Text]:
    """Yield lines that show which steps of a run the agent of this node has verified.

    The lines are about each of ``jobs`` that has a tier of the run.
    """
    urls = {tier.url for tier in run.tiers}
    for job in jobs:
        if urls.intersection(job.tiers) and (text := scrub_progress(job.scrub)) != "-":
            yield Text(clean(f"verified by the agent: {text}"))
        for damage in job.scrub.damaged if urls.intersection(job.tiers) else ():
            yield Text(clean(f"step {damage}"), style="red")


def _under_way(tier: TierView) -> str:
    if tier.error:
        return tier.error
    return f"{tier.waiting}" if tier.waiting else "-"


def _stall_and_states(row: StepView) -> Iterator[str]:
    """Yield the last cells of a row: the stall of the step, and its state on each tier."""
    yield duration(row.save.stall_seconds) if row.save and row.save.stall_seconds else "-"
    for cell in row.cells:
        state = "-" if cell.state == "absent" else cell.state
        yield f"{state}, abandoned" if row.is_abandoned and state != "-" else state

"""``ckpt advise``: show how often to save, and what training time is lost per day."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import typer

from ckpt.cli import output
from ckpt.cli.options import (
    ConfigFileOption,
    JsonOption,
    PlaceArgument,
    RootOption,
    one_place,
    seconds,
)
from ckpt.errors import ConfigError, NoCheckpoint
from ckpt.observe.history import history_of
from ckpt.observe.journal_reader import JournalReader
from ckpt.observe.save_interval import Advice, Assumptions, Measurements, measurements_of
from ckpt.observe.save_interval import advise as advice_of
from ckpt.storage.registry import open_backend
from ckpt.storage.tiers import resolve_tier
from ckpt.storage.urls import local_path

_NEAR_LEAST_FACTOR = 1.1
"""A loss of less than this many times the least loss is near the least."""


def advise(
    argument: PlaceArgument = None,
    failures: Annotated[
        float | None,
        typer.Option(
            "--failures-per-day",
            metavar="N",
            help="How often the whole job fails. Default: how often it has begun again, by the "
            "journal.",
        ),
    ] = None,
    restart: Annotated[
        str, typer.Option(metavar="TIME", help="The time from a failure until training runs again.")
    ] = "5m",
    drag: Annotated[
        str,
        typer.Option(
            metavar="TIME",
            help="The training time that a save costs while it streams; `python -m bench train` "
            "measures it.",
        ),
    ] = "",
    root: RootOption = None,
    config: ConfigFileOption = None,
    json: JsonOption = False,
) -> None:
    r"""Show how often to save, and what training time is lost per day.

    The journal of the run has the stall of each save, and the time until it is durable on each
    tier. For each tier the table shows the interval with the least loss, if a restart takes the
    newest step of that tier. No interval is proposed that is shorter than the time until a step is
    durable on the tier. The last line says it in one sentence.

    \b
    Examples:
      ckpt advise runs/gpt --failures-per-day 2 --restart 3m
      ckpt advise runs/gpt --drag 0.1s --json
    """
    place = one_place([argument] if argument else None, root)
    url = resolve_tier(place, config).url
    records = JournalReader(url).read()
    if not records:
        if not os.path.exists(local_path(url)):
            raise NoCheckpoint(url, "it does not exist")
        open_backend(url).close()  # Raises if it is a file, or the folder of a step
        raise ConfigError(
            f"{url} has no journal: the job that wrote it had journal=False, or another tier has "
            "it: a journal is beside the nearest folder of a job"
        )
    measurements = measurements_of(records, history_of(records))
    if failures is None and not measurements.failures_per_day > 0:
        raise ConfigError(
            "the journal shows no failure, or covers less than an hour: give --failures-per-day"
        )
    assumptions = Assumptions(
        failures_per_day=measurements.failures_per_day if failures is None else failures,
        restart_seconds=seconds("--restart", restart),
        drag_seconds=seconds("--drag", drag) if drag else 0.0,
    )
    advice = advice_of(measurements, assumptions)
    if json:
        output.show_json(
            {
                "root": url,
                "measured": asdict(measurements),
                "assumed": asdict(assumptions),
                "tiers": [asdict(entry) for entry in advice],
            }
        )
    else:
        _show(
            measurements,
            assumptions,
            advice,
            is_drag_known=bool(drag),
            are_failures_measured=failures is None,
        )


def _show(
    measurements: Measurements,
    assumptions: Assumptions,
    advice: Sequence[Advice],
    *,
    is_drag_known: bool,
    are_failures_measured: bool,
) -> None:
    """Print the advice for each tier, and the numbers that it follows from.

    The mark "(durable)" says that a shorter interval would be best, but that the tier takes longer
    to make a step durable (``Advice.is_bound``).

    Args:
        measurements: What the journal has measured.
        assumptions: The numbers that the options give.
        advice: The advice for each tier.
        is_drag_known: Whether ``--drag`` was given. The drag is the training time that a save costs
            while it streams.
        are_failures_measured: Whether the rate of failures is from the journal.
    """
    rows = [
        (
            entry.tier,
            output.duration(entry.durable_seconds),
            _duration_text(entry.interval_seconds) + (" (durable)" if entry.is_bound else ""),
            f"{entry.lost_minutes:.1f} min",
            f"{entry.lost_minutes_now:.1f} min" if math.isfinite(entry.lost_minutes_now) else "-",
        )
        for entry in advice
    ]
    columns = ("tier", "durable after", "save every", "lost per day", "lost per day now")
    output.show_table(columns, rows, right=columns[1:])
    output.show_facts(
        {
            "stall": f"{output.duration(measurements.stall_seconds)} per save (median)",
            "drag": f"{output.duration(assumptions.drag_seconds)} per save"
            if is_drag_known
            else "not in the journal, taken as 0: give --drag",
            "interval now": _duration_text(measurements.interval_seconds),
            "failures": f"{assumptions.failures_per_day:.2g} per day"
            + (", as the journal shows" if are_failures_measured else ""),
            "restart": _duration_text(assumptions.restart_seconds),
            "host memory": f"{output.size(measurements.nbytes)} to "
            f"{output.size(2 * measurements.nbytes)} per rank: one image, or two where they pay",
        }
    )
    if advice:
        output.show_line()
        output.show_line(sentence(measurements, advice))


def sentence(measurements: Measurements, advice: Sequence[Advice]) -> str:
    """Return the advice in one sentence, for the nearest tier that outlives the machine, or else
    for the nearest tier.
    """
    entry = next((entry for entry in advice if not entry.tier.startswith("shm://")), advice[0])
    interval, least_loss = _duration_text(entry.interval_seconds), _loss_text(entry.lost_minutes)
    if not math.isfinite(entry.lost_minutes_now):
        return f"save every {interval}: you would lose {least_loss} a day"
    current_text = (
        f"you save every {_duration_text(measurements.interval_seconds)} and lose "
        f"{_loss_text(entry.lost_minutes_now)} a day"
    )
    if entry.lost_minutes_now < _NEAR_LEAST_FACTOR * entry.lost_minutes:
        return f"{current_text}, which is near the least"
    return f"{current_text}; every {interval} you would lose {least_loss}"


def _loss_text(minutes: float) -> str:
    return f"{minutes / 60:,.1f} h" if minutes >= 120 else f"{minutes:.3g} min"


def _duration_text(number: float) -> str:
    """Return a time as text, such as '45 s', '12 min' or '3.5 h'; '-' if it is not finite."""
    if not math.isfinite(number):
        return "-"
    if number < 120:
        return f"{number:.3g} s"
    return f"{number / 60:.3g} min" if number < 7200 else f"{number / 3600:.3g} h"

"""``ckpt pin`` and ``ckpt unpin``: keep a step from being removed for some time."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from ckpt.catalog.index import find
from ckpt.catalog.pins import Pin, all_pins, note_of, put_pin
from ckpt.cli import output
from ckpt.cli.options import (
    LATEST,
    TIMEOUT_SECONDS,
    ConfigFileOption,
    JsonOption,
    PlaceAndStepArgument,
    RootOption,
    StepOption,
    TimeoutOption,
    open_root,
    place_and_step,
    seconds,
)
from ckpt.errors import ConfigError
from ckpt.storage.api import StorageBackend


def pin(
    arguments: PlaceAndStepArgument = None,
    hold: Annotated[
        str, typer.Option("--for", metavar="TIME", help="How long: 90s, 30m, 2h, 1d.")
    ] = "1h",
    reason: Annotated[
        str, typer.Option(metavar="TEXT", help="Shown by `ckpt unpin` and to other users.")
    ] = "",
    step: StepOption = None,
    root: RootOption = None,
    config: ConfigFileOption = None,
    timeout: TimeoutOption = TIMEOUT_SECONDS,
    json: JsonOption = False,
) -> None:
    r"""Keep a step from being removed for some time.

    No retention, quota or `ckpt prune` of any job or user removes the step from this tier before
    the pin ends. It ends by itself; `ckpt unpin` ends it earlier. A step may have several pins.

    Clocks of machines differ, so a pin holds for an hour beyond its end.

    \b
    Examples:
      ckpt pin runs/gpt 1200 --for 2h --reason "evaluation of the paper"
      ckpt pin runs/gpt latest --for 1d
    """
    place, step = place_and_step(arguments, root, step)
    duration = seconds("--for", hold, unit=True)
    backend = open_root(place, config, timeout=timeout)
    ref = backend.ask(partial(find, backend, step))[0]
    put = backend.ask(partial(put_pin, backend, ref, duration, reason))
    if json:
        output.show_json({"root": backend.url, "pin": _as_json(backend, put)})
    else:
        output.show_line(f"step {ref.step} is pinned until {output.moment(put.until)}")


def unpin(
    arguments: PlaceAndStepArgument = None,
    step: StepOption = None,
    root: RootOption = None,
    config: ConfigFileOption = None,
    timeout: TimeoutOption = TIMEOUT_SECONDS,
    json: JsonOption = False,
) -> None:
    r"""End the pins of a step, or of all steps without STEP.

    Pins of `ckpt watch` end too. A watcher at work puts its pin again after some minutes.

    \b
    Examples:
      ckpt unpin runs/gpt 1200
      ckpt unpin runs/gpt
    """
    if LATEST in (arguments or ()):
        raise ConfigError("STEP is a number here: without one, all pins end")
    place, step = place_and_step(arguments, root, step)
    backend = open_root(place, config, timeout=timeout)
    pins = [pin for pin in backend.ask(partial(all_pins, backend)) if step in (None, pin.ref.step)]
    if not pins:
        backend.ask(partial(find, backend, step))  # Raises if there is no such step
    records = [_as_json(backend, pin) for pin in pins]
    for pin in pins:
        backend.delete(pin.key)
    if json:
        output.show_json({"root": backend.url, "ended": records})
        return
    rows = [
        (str(pin.ref.step), pin.ref.attempt, output.moment(pin.until), *map(str, note))
        for pin, note in zip(
            pins, ((record["by"], record["reason"]) for record in records), strict=True
        )
    ]
    if rows:
        columns = ("step", "attempt", "until", "by", "reason")
        output.show_table(columns, rows, right=("step",), flexible=("reason",))
    output.show_line(f"{output.count(len(pins), 'pin')} ended")


def _as_json(backend: StorageBackend, pin: Pin) -> dict[str, object]:
    note = note_of(backend, pin)
    return {
        "step": pin.ref.step,
        "attempt": pin.ref.attempt,
        "until": output.moment_utc(pin.until) or "?",
        "by": note.by,
        "reason": note.reason,
    }

"""``ckpt pin`` and ``ckpt unpin``: keep a step from being removed for some time.

The note of a pin says who has put it, and why. Two kinds of pins do not end by themselves. A pin
with the end ``ENDLESS`` stands for a named branch. A pin with the end ``BASE_END`` belongs to
another run, whose steps need this step as a base.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Final

import typer

from ckpt.catalog.step_listing import find
from ckpt.cli import output, record_tables
from ckpt.cli.options import (
    TIMEOUT_SECONDS,
    ConfigFileOption,
    JsonOption,
    PlaceAndStepArgument,
    RootOption,
    StepOption,
    TimeoutOption,
    find_steps,
    open_root,
    place_and_number,
    place_and_step,
    seconds,
)
from ckpt.cli.record_tables import Field
from ckpt.root.pins import BASE_END, ENDLESS, Pin, PinNote, all_pins, note_of, put_pin

_FIELDS: Final[Sequence[Field[tuple[Pin, PinNote]]]] = (
    Field("", lambda pair: pair[0].ref, kind="step"),
    Field("until", lambda pair: pair[0].until, kind="moment"),
    Field("by", lambda pair: pair[1].by),
    Field("reason", lambda pair: pair[1].reason),
)


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
      ckpt pin runs/gpt best:accuracy:max --for 7d
    """
    place, selector = place_and_step(arguments, root, step)
    pin_seconds = seconds("--for", hold, needs_unit=True)
    backend = open_root(place, config, timeout=timeout)
    ref = find_steps(backend, selector, config)[0]
    new_pin = backend.call_in_time(partial(put_pin, backend, ref, pin_seconds, reason))
    if json:
        output.show_json(
            {
                "root": backend.url,
                "pin": record_tables.entry(_FIELDS, (new_pin, note_of(backend, new_pin))),
            }
        )
    else:
        output.show_line(f"step {ref.step} is pinned until {output.moment(new_pin.until)}")


def unpin(
    arguments: PlaceAndStepArgument = None,
    step: StepOption = None,
    root: RootOption = None,
    config: ConfigFileOption = None,
    timeout: TimeoutOption = TIMEOUT_SECONDS,
    json: JsonOption = False,
) -> None:
    r"""End the pins of a step, or of all steps without STEP.

    Pins of `ckpt watch` end too. A watcher at work puts its pin again after some minutes. Named
    branches stay (`ckpt branch NAME --delete`). The pin of another run that needs the step as its
    base ends only if STEP is given: end it if that run is gone.

    \b
    Examples:
      ckpt unpin runs/gpt 1200
      ckpt unpin runs/gpt
    """
    place, number = place_and_number(arguments, root, step, "all pins end")
    backend = open_root(place, config, timeout=timeout)
    pins_of_all_kinds = [
        pin
        for pin in backend.call_in_time(partial(all_pins, backend))
        if number in (None, pin.ref.step)
    ]
    kept_ends = {ENDLESS, BASE_END} if number is None else {ENDLESS}
    pins = [pin for pin in pins_of_all_kinds if pin.until not in kept_ends]
    if not pins:
        backend.call_in_time(partial(find, backend, number))  # Raises if there is no such step
    pins_with_notes = [(pin, note_of(backend, pin)) for pin in pins]
    for pin in pins:
        backend.delete(pin.key)
    if json:
        output.show_json(
            {"root": backend.url, "ended": record_tables.entries(_FIELDS, pins_with_notes)}
        )
        return
    record_tables.show(_FIELDS, pins_with_notes, flexible=("reason",))
    output.show_line(f"{output.count(len(pins), 'pin')} ended")
    if name_count := sum(pin.until == ENDLESS for pin in pins_of_all_kinds):
        output.note(
            f"{output.count(name_count, 'name')} still kept: `ckpt branch NAME --delete` ends a "
            "named branch"
        )
    if number is None and any(pin.until == BASE_END for pin in pins_of_all_kinds):
        output.note("other runs need some steps as their bases: give STEP to end such a pin")

"""Pins, which keep a step from being removed until a given time.

A pin is a small object below ``pins/``. Its name contains the step and the time, so one listing
shows all pins of a tier, and no pin has to be read.

A reader first puts its pin, and then checks for the claim marker of a removal and for the manifest.
A process that removes a step first puts its claim marker, and then checks for pins. So at least one
of the two finds the object of the other and gives up. A removal that finds a pin leaves its marker
in place, since another process may be removing the same step.

A pin that does not end by itself is a named branch (`ENDLESS`), or belongs to another run, whose
increments refer to the step (`BASE_END`).
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final

import msgspec

from ckpt.coordination.tombstone import has_manifest
from ckpt.errors import (
    CkptError,
    ConfigError,
    IntegrityError,
    LinkRefused,
    NoCheckpoint,
    ObjectNotFound,
    StorageError,
    errors_of,
)
from ckpt.model.keys import PINS, StepRef, parse_folder
from ckpt.model.manifest import FORMAT
from ckpt.model.record_encoding import pack, unpack
from ckpt.pipeline.retry import RetryPolicy, ask
from ckpt.processes import user_at_host
from ckpt.root.claim_marker import is_being_removed
from ckpt.storage.api import StorageBackend, read_record

CLOCK_SKEW_SECONDS: Final = 3600.0
"""A pin keeps its step for this long after its end, since the clocks of machines may differ."""
LONGEST_SECONDS: Final = 366 * 24 * 3600.0
ENDLESS: Final = 250_000_000_000
"""The end of a pin that does not end by itself: the year 9892."""
BASE_END: Final = ENDLESS + 1
"""The end of a pin of another run, whose increments refer to the step. It does not end by itself
either.
"""

ANY_ATTEMPT: Final = "anyattempt"
"""The attempt that a pin names if it keeps every attempt at its step, those to come too."""
_RETRY: Final = RetryPolicy()
_MOST_NOTE_BYTES: Final = 1 << 12
_MOST_REASON_CHARACTERS: Final = 200
_PIN_NAME: Final = re.compile(r"(step-[^.]+\.[^.]+)\.([0-9]{1,12})\.([0-9a-f]{16})")


@dataclass(frozen=True, slots=True, order=True)
class Pin:
    """A pin on one step.

    Attributes:
        until: The end of the pin, in seconds since 1970 by the clock of the process that put it.
        token: Distinguishes pins on one step.
    """

    ref: StepRef
    until: int
    token: str

    @property
    def key(self) -> str:
        return f"{PINS}/{self.ref.folder}.{self.until}.{self.token}"

    @property
    def is_live(self) -> bool:
        """Return True if the pin still keeps its step, by the clock of this machine."""
        return time.time() <= self.until + CLOCK_SKEW_SECONDS


class PinNote(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a pin, for people: the reason, and the user and machine that put the pin. A
    pin that is a named branch has its name.
    """

    format: int = FORMAT
    reason: str = ""
    by: str = ""
    branch: str = ""


def put_pin(backend: StorageBackend, ref: StepRef, seconds: float, reason: str = "") -> Pin:
    """Pin ``ref``, so that its tier keeps it for ``seconds``.

    Returns:
        The pin. It is durable, and no process removes the step before the pin ends.

    Raises:
        ConfigError: ``seconds`` or ``reason`` is out of bounds. Nothing was written.
        NoCheckpoint: The step is not committed on the tier, or its folder has the claim marker of a
            removal.
        StorageError: The store has failed.
    """
    return _put_and_check(backend, ref, seconds, reason, look_for_removal=True)


def reserve_step(backend: StorageBackend, step: int, seconds: float, reason: str = "") -> Pin:
    """Put a pin on each attempt at ``step`` that is committed from now on, or was before, and
    return it. So no process removes such an attempt before the pin ends, however soon it would.

    Raises ``ConfigError`` and ``StorageError`` as ``put_pin`` does.
    """
    return _put_unchecked(backend, _new_pin(StepRef(step, ANY_ATTEMPT), seconds), reason)


def put_endless_pin(backend: StorageBackend, pin: Pin, reason: str, *, branch: str = "") -> None:
    """Put ``pin``, which keeps its step until the pin is removed. Raises the errors of ``put_pin``.

    Args:
        backend: The store.
        pin: The pin.
        reason: The reason, for people.
        branch: The name of the branch that the pin stands for; empty if it stands for none.
    """
    _put_unchecked(backend, pin, reason, branch)
    _check_presence(backend, pin, look_for_removal=True)


def put_shared_pin(backend: StorageBackend, pin: Pin, reason: str) -> None:
    """Put ``pin``, which does not end by itself, unless it is there already. Other processes may
    rely on the same pin, so an error leaves it where it is, unless its step is gone. Raises the
    errors of ``put_pin``.
    """
    if pin not in all_pins(backend):
        _put_unchecked(backend, pin, reason)
    _require_presence(backend, pin, look_for_removal=True)


def renew_pin(backend: StorageBackend, pin: Pin, seconds: float, reason: str = "") -> Pin:
    """Replace ``pin`` by a pin that ends ``seconds`` from now, and return the new pin.

    A removal that has found ``pin`` leaves its claim marker in the step's folder. If ``pin`` has
    not ended, this function ignores such a marker, since every removal finds the old pin or the new
    pin. Raises the errors of ``put_pin``.
    """
    new_pin = _put_and_check(backend, pin.ref, seconds, reason, look_for_removal=not pin.is_live)
    remove_pin(backend, pin)
    return new_pin


def _put_and_check(
    backend: StorageBackend, ref: StepRef, seconds: float, reason: str, *, look_for_removal: bool
) -> Pin:
    """Put a pin on ``ref``. With ``look_for_removal``, the claim marker of a removal prevents the
    pin. Raises the errors of ``put_pin``.
    """
    pin = _put_unchecked(backend, _new_pin(ref, seconds), reason)
    _check_presence(backend, pin, look_for_removal=look_for_removal)
    return pin


def _check_presence(backend: StorageBackend, pin: Pin, *, look_for_removal: bool) -> None:
    """Remove ``pin``, which was just put, and raise ``NoCheckpoint`` if its step is not there."""
    try:
        _require_presence(backend, pin, look_for_removal=look_for_removal)
    except CkptError:
        remove_pin(backend, pin)
        raise


def _require_presence(backend: StorageBackend, pin: Pin, *, look_for_removal: bool) -> None:
    """Raise ``NoCheckpoint`` if the step of ``pin`` is being removed, or is gone. In the latter
    case the pin goes too, since it keeps nothing.
    """
    ref = pin.ref
    with errors_of(backend.url):
        # The marker of a finisher keeps the step from being removed. One whose process was
        # killed stays for a day.
        is_marked = look_for_removal and _RETRY.call(partial(is_being_removed, backend, ref))
        is_present = _RETRY.call(partial(has_manifest, backend, ref))
    if not is_present:
        remove_pin(backend, pin)
    if is_marked:
        raise NoCheckpoint(
            backend.url,
            f"step {ref.step} is being removed: if that was cut short, 'ckpt prune "
            f"{backend.url} --keep-last N' ends it",
        )
    if not is_present:
        raise NoCheckpoint(backend.url, f"step {ref.step} is not there")


def _new_pin(ref: StepRef, seconds: float) -> Pin:
    if not 0 < seconds <= LONGEST_SECONDS:
        raise ConfigError(f"a pin of {seconds:g} s: give more than 0 s and at most 366 days")
    return Pin(ref, int(time.time() + seconds) + 1, secrets.token_hex(8))


def _put_unchecked(backend: StorageBackend, pin: Pin, reason: str, branch: str = "") -> Pin:
    """Put ``pin``, whether or not its step is there."""
    if len(reason) > _MOST_REASON_CHARACTERS:
        raise ConfigError(
            f"the reason has {len(reason)} characters: at most {_MOST_REASON_CHARACTERS}"
        )
    data = pack(PinNote(reason=reason, by=user_at_host()[:_MOST_REASON_CHARACTERS], branch=branch))
    with errors_of(backend.url):
        _RETRY.call(lambda: backend.put(pin.key, [data]))
    return pin


def remove_pin(backend: StorageBackend, pin: Pin) -> None:
    """Remove a pin. An error of the store is ignored, since a pin also ends by itself."""
    with suppress(StorageError):
        _RETRY.call(lambda: backend.delete(pin.key))


def all_pins(backend: StorageBackend) -> list[Pin]:
    """Return all pins of a tier, including those that have ended."""
    keys = ask(backend, lambda: [info.key for info in backend.list(f"{PINS}/")])
    return sorted(pin for key in keys if (pin := _parse(key)) is not None)


def live_pins_by_ref(
    pins: Iterable[Pin], refs: Iterable[StepRef]
) -> dict[StepRef, tuple[Pin, ...]]:
    """Return the entries of ``pins`` that have not ended, grouped by those of ``refs`` that they
    keep.
    """
    live_pins: dict[StepRef, tuple[Pin, ...]] = {}
    for pin in pins:
        if pin.is_live:
            live_pins[pin.ref] = (*live_pins.get(pin.ref, ()), pin)
    if live_pins:
        pins_by_ref = ((ref, _pins_on(live_pins, ref)) for ref in refs)
        return {ref: pins for ref, pins in pins_by_ref if pins}
    return {}


def _pins_on(live_pins: Mapping[StepRef, tuple[Pin, ...]], ref: StepRef) -> tuple[Pin, ...]:
    return live_pins.get(ref, ()) + live_pins.get(StepRef(ref.step, ANY_ATTEMPT), ())


def remove_ended(backend: StorageBackend, pins: Iterable[Pin]) -> None:
    """Remove the entries of ``pins`` that have ended."""
    for pin in pins:
        if not pin.is_live:
            remove_pin(backend, pin)


def note_of(backend: StorageBackend, pin: Pin) -> PinNote:
    """Return the note in a pin. The note is empty if the pin is gone or damaged."""
    try:
        decode = partial(unpack, kind=PinNote, key=pin.key)
        return _RETRY.call(partial(read_record, backend, pin.key, decode, limit=_MOST_NOTE_BYTES))
    except (IntegrityError, LinkRefused, ObjectNotFound):
        return PinNote()


def is_pinned(backend: StorageBackend, ref: StepRef) -> bool:
    """Return True if a pin on ``ref`` has not ended."""
    return bool(live_pins_by_ref(all_pins(backend), [ref]))


def _parse(key: str) -> Pin | None:
    match = _PIN_NAME.fullmatch(key.removeprefix(f"{PINS}/"))
    ref = parse_folder(match[1]) if match else None
    return Pin(ref, int(match[2]), match[3]) if match and ref else None

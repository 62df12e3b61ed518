"""Named branches: pins without an end, whose notes have a name.

A *pin* is an object that keeps a step from being removed until a given time. It names the step and
the time, and has a token. A note beside it tells people the reason. An *attempt* is one try of a
job at a step.

The name of a branch stands for one attempt at a step, also after a rollback has abandoned the
attempt. The pin keeps the step, and with it the way back to the branch. The token of the pin
follows from the name, so one listing of the pins shows which step a name stands for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckpt.errors import ConfigError, NoCheckpoint, StorageError
from ckpt.errors.base import few
from ckpt.model.checksum import checksum
from ckpt.model.keys import StepRef
from ckpt.model.selector import BranchStep
from ckpt.root.pins import ENDLESS, Pin, all_pins, note_of, put_endless_pin, remove_pin
from ckpt.storage.api import StorageBackend


@dataclass(frozen=True, slots=True)
class Branch:
    """A named branch on one tier.

    Attributes:
        name: The name.
        pin: The pin that keeps its step.
        reason, author: The reason, and the user and machine, for people.
    """

    name: str
    pin: Pin
    reason: str
    author: str

    @property
    def ref(self) -> StepRef:
        return self.pin.ref


def all_branches(backend: StorageBackend) -> list[Branch]:
    """Return the named branches of a tier, by name. One whose note is damaged is left out."""
    branches = [
        Branch(note.branch, pin, note.reason, note.by)
        for pin in all_pins(backend)
        if pin.until == ENDLESS and (note := note_of(backend, pin)).branch
    ]
    return sorted(branches, key=lambda branch: branch.name)


def may_name(backend: StorageBackend, branch: BranchStep, ref: StepRef) -> bool:
    """Return True if no step of a tier has the name of ``branch``, and False if ``ref`` has it.

    Raises:
        ConfigError: Another step has the name.
        StorageError: The store has failed.
    """
    pin = _pin_of(backend, branch.name)
    if pin is not None and pin.ref != ref:
        raise ConfigError(
            f"the branch {branch.name!r} on {backend.url} is step {pin.ref.step} already: choose "
            "another name, or end that one with --delete first"
        )
    return pin is None


def put_branch(backend: StorageBackend, branch: BranchStep, ref: StepRef, reason: str = "") -> None:
    """Give ``ref`` the name of ``branch`` on a tier, unless it has the name already.

    Raises:
        ConfigError: Another step has the name. Nothing was written.
        NoCheckpoint: The step is not committed on the tier, or is being removed.
        StorageError: The store has failed.
    """
    if may_name(backend, branch, ref):
        pin = Pin(ref, ENDLESS, _token(branch.name))
        put_endless_pin(backend, pin, reason, branch=branch.name)


def find_branch(stores: Sequence[StorageBackend], branch: BranchStep) -> StepRef:
    """Return the attempt that ``branch`` names on the stores of a run.

    Raises:
        NoCheckpoint: None of them has the name. The error says which names there are.
        StorageError: A store denies access or does not answer.
    """
    pins = (_pin_of(store, branch.name) for store in stores)
    if pin := next(filter(None, pins), None):
        return pin.ref
    names = sorted({item.name for store in stores for item in all_branches(store)})
    text = f"there is {few(names, 20)}" if names else "`ckpt branch NAME STEP` gives a name"
    urls = ", ".join(store.url for store in stores)
    raise NoCheckpoint(urls, f"no branch has the name {branch.name!r}: {text}")


def remove_branch(backend: StorageBackend, branch: BranchStep) -> Pin | None:
    """Remove a branch from a tier, and return its pin; None if there was none. Its step stays until
    retention removes it. Raises ``StorageError`` if the store fails.
    """
    pin = _pin_of(backend, branch.name)
    if pin is not None:
        remove_pin(backend, pin)
        if _pin_of(backend, branch.name) is not None:
            raise StorageError(pin.key, "it could not be deleted")
    return pin


def _pin_of(backend: StorageBackend, name: str) -> Pin | None:
    token = _token(name)
    pins = (pin for pin in all_pins(backend) if (pin.until, pin.token) == (ENDLESS, token))
    return next(pins, None)


def _token(name: str) -> str:
    return checksum(name.encode())[-16:]

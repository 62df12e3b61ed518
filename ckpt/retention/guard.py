"""What the removal of steps from one tier must respect."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from ckpt.model.keys import StepRef


class StepGuard(Protocol):
    """The steps of one tier that somebody still needs.

    The answers change while a job runs, so a caller asks again after each listing of the tier.

    Thread safety: all methods may be called from any thread.
    """

    def waiting(self) -> frozenset[StepRef]:
        """Return the steps that a farther tier still reads from this tier."""
        ...

    def protected(self) -> frozenset[StepRef]:
        """Return the steps that no retention rule may remove. They include those of ``waiting``,
        and are no others by default.
        """
        return self.waiting()

    def is_elsewhere(self, ref: StepRef) -> bool:
        """Return whether another durable tier has ``ref``. This may send a request to that tier."""
        ...


class FixedGuard(StepGuard):
    """The guard that keeps the same steps all the time, and knows of no copies elsewhere.

    Thread safety: any thread may call it.
    """

    def __init__(self, refs: Iterable[StepRef] = ()) -> None:
        self._refs = frozenset(refs)

    def waiting(self) -> frozenset[StepRef]:
        return self._refs

    def is_elsewhere(self, ref: StepRef) -> bool:  # noqa: ARG002 - part of the protocol
        return False

"""What the removal of steps from one tier must respect."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from ckpt.catalog.index import is_committed
from ckpt.model.keys import StepRef
from ckpt.storage.api import StorageBackend


class StepGuard(Protocol):
    """The steps of one tier that are still needed.

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
    """The guard that keeps the same steps all the time.

    Args:
        refs: The steps that stay.
        elsewhere: The stores of the other durable tiers.

    Thread safety: any thread may call it.
    """

    def __init__(
        self, refs: Iterable[StepRef] = (), elsewhere: Iterable[StorageBackend] = ()
    ) -> None:
        self._refs, self._elsewhere = frozenset(refs), tuple(elsewhere)

    def waiting(self) -> frozenset[StepRef]:
        return self._refs

    def is_elsewhere(self, ref: StepRef) -> bool:
        return any(is_committed(store, ref) for store in self._elsewhere)

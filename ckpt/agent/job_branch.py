"""The branch of a job on the tiers where the agent finishes it.

A *rollback* is the record that the run went on from an older step. The later steps are *abandoned*:
they are not on the branch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from ckpt.catalog.inventory import StoredStep
from ckpt.catalog.rollbacks import put_rollback
from ckpt.catalog.step_listing import list_root
from ckpt.errors import CkptError, ObjectExists
from ckpt.model.keys import StepRef
from ckpt.model.rollback import Rollback, last_rollback, on_branch
from ckpt.storage.api import StorageBackend


class JobBranch:
    """The steps of the current branch, as the rollbacks on all durable tiers say. A tier in memory
    has none.

    Args:
        stores: The durable tiers. One that cannot be listed is left out: the tasks meet the same
            error, and report it.

    Attributes:
        rollback: The rollback that counts; None if there is none.
        outdated_stores: The tiers that lack it. They were away when the job went back.

    Thread safety: one thread.
    """

    def __init__(self, stores: Iterable[StorageBackend] = ()) -> None:
        rollbacks: list[tuple[StorageBackend, Rollback | None]] = []
        for store in stores:
            with suppress(CkptError):
                rollbacks.append((store, list_root(store).rollback))
        self.rollback = last_rollback(rollback for _, rollback in rollbacks)
        self.outdated_stores = [store for store, rollback in rollbacks if rollback != self.rollback]

    def update(self, store: StorageBackend, confirm: Callable[[], object]) -> None:
        """Put the rollback that counts on a tier that lacks it. Then retention there does not take
        abandoned steps for the newest. ``confirm`` is called before.

        Raises:
            StorageError: The store has failed.
            CkptError: ``confirm`` has raised it.
        """
        confirm()
        if self.rollback is not None:
            with suppress(ObjectExists):  # Two rollbacks have one number, and this one is younger
                put_rollback(store, self.rollback)

    def refs(self, refs: Iterable[StepRef]) -> list[StepRef]:
        """Return those of ``refs`` that no rollback has abandoned."""
        return on_branch(self.rollback, refs)

    def steps(self, steps: Sequence[StoredStep]) -> list[StoredStep]:
        """Return those of ``steps`` that no rollback has abandoned, also since this object was
        made.
        """
        return [step for step in steps if not step.is_abandoned and self.refs([step.ref])]

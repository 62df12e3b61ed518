"""Decide from which restored step the state of a job comes.

A job may restore a step into other tensors than those that it saves, for example to evaluate the
best model so far. Such a restore does not move the point from which the job continues. States are
compared by the memory of their tensors. A state whose tensors are gone, or that has none, cannot be
compared. A mark is a record by which a state is recognized later. The leader, rank 0, decides for
all ranks.
"""

from __future__ import annotations

import weakref
from itertools import chain, islice
from typing import Final

import torch
from torch import nn

from ckpt.coordination.coordinator import Coordinator
from ckpt.coordination.exchanges import Wait, leader_decides
from ckpt.model.keys import StepRef
from ckpt.state.tensors.layout import to_local
from ckpt.state.walk.state_objects import walk_objects, walk_tensors, without_plain

_SAMPLE_TENSORS: Final = 4
"""How many tensors of a saved state are remembered. Looking at all of them would cost each save."""
_PATIENCE_SECONDS: Final = 300.0
"""How long a rank waits for the leader's decision after a restore."""


class StateMark:
    """Weak references to the modules and tensors of a state, by which the state can be recognized
    later.

    A module stands for its tensors: ``Module.to()`` cannot swap a parameter that has a weak
    reference.

    Args:
        state: The state.
        limit: The most tensors to remember of each module, and beside the modules; None for all.

    Thread safety: only the training thread uses it.
    """

    def __init__(self, state: object, limit: int | None = None) -> None:
        state = without_plain(state)
        modules = [value for _, value in walk_objects(state) if isinstance(value, nn.Module)]
        tensors = (tensor for _, tensor in walk_tensors(state))
        self._modules = tuple(map(weakref.ref, modules))
        self._tensors = tuple(map(weakref.ref, islice(tensors, limit)))
        self._limit = limit

    def shares_memory_with(self, mark: StateMark) -> bool:
        """Return True if the two states are known to share memory."""
        return not self.memory().isdisjoint(mark.memory())

    def shares_no_memory_with(self, mark: StateMark) -> bool:
        """Return True if the tensors of both states still exist and share no memory."""
        own_addresses, other_addresses = self.memory(), mark.memory()
        return bool(own_addresses and other_addresses) and own_addresses.isdisjoint(other_addresses)

    def memory(self) -> frozenset[int]:
        """Return the addresses of the memory of those tensors that still exist."""
        modules = [module for ref in self._modules if (module := ref()) is not None]
        module_tensors = (islice(chain(m.parameters(), m.buffers()), self._limit) for m in modules)
        tensors = [tensor for ref in self._tensors if (tensor := ref()) is not None]
        return frozenset(map(_address, chain(*module_tensors, tensors))) - {0}


class Origin:
    """The restores of one manager since its last save, and the state of that save.

    Args:
        coordinator: The connection to the other ranks.

    Attributes:
        is_certain: Whether the last whole step was restored into the state of the job, as far as
            this rank can tell. If the job has saved nothing yet, and has restored several states
            that share no memory, it is not known which of them is the state of the job.

    ``_last_mark`` is the mark of the state of the last save; None if there was none. ``_restores``
    are the restored steps since then, each with the mark of the state that it filled.
    ``_restored_ref`` is the step that the job continues from, by these restores.

    Thread safety: only the training thread uses it. All ranks make the same calls.
    """

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self.is_certain = False
        self._last_mark: StateMark | None = None
        self._restores: list[tuple[StepRef, StateMark]] = []
        self._restored_ref: StepRef | None = None
        self._decision_count = 0

    def restore(self, ref: StepRef, state: object, *, is_part: bool, is_first: bool) -> bool:
        """Note that ``state`` was filled with the step ``ref``. Return True if the job continues
        from ``ref``. The result is the same on all ranks.

        The restore of a part is only a look at a step, except for the newest step at the start of
        a job, since the other parts may follow. The restore of a whole step is only a look if the
        tensors of the last save still exist, and ``state`` has others.

        Args:
            ref: The step.
            state: The state, or a part of it.
            is_part: Whether only a part of the step was restored.
            is_first: Whether ``ref`` is the newest step, and the job has continued from no other
                step and saved none.

        Raises:
            CommitTimeout: The leader has not decided in time.
        """
        if is_part:
            return is_first
        mark = StateMark(state)
        other_marks = (
            [self._last_mark]
            if self._last_mark
            else [restored_mark for _, restored_mark in self._restores]
        )
        self.is_certain = not any(
            other_mark.shares_no_memory_with(mark) for other_mark in other_marks
        )
        self._restores.append((ref, mark))
        is_of_job = self._last_mark is None or not self._last_mark.shares_no_memory_with(mark)
        if self._last_mark is not None and self._coordinator.world_size > 1:
            is_of_job = self._ask_leader(is_of_job)
        if is_of_job:
            self._restored_ref = ref
        return is_of_job

    def _ask_leader(self, is_of_job: bool) -> bool:
        """Return ``is_of_job`` as the leader has it, since all ranks need the same answer."""
        self._decision_count += 1
        wait = Wait(_PATIENCE_SECONDS, "whether the job continues from the restored step")
        subject = f"origin/{self._decision_count}"
        return leader_decides(self._coordinator, subject, lambda: is_of_job, wait, bool)

    def save(self, state: object) -> StepRef | None:
        """Note that ``state`` is saved. Return the step that ``state`` was restored from since the
        save before, if a later restore of another state has moved the point from which the job
        continues; else None.
        """
        restores, self._restores = self._restores, []
        restored_ref, self._restored_ref = self._restored_ref, None
        self._last_mark = StateMark(state, _SAMPLE_TENSORS)
        mark = StateMark(state) if restores else self._last_mark
        origin = next(
            (
                ref
                for ref, restored_mark in reversed(restores)
                if restored_mark.shares_memory_with(mark)
            ),
            restored_ref,
        )
        return origin if origin != restored_ref else None


def _address(tensor: torch.Tensor) -> int:
    """Return the address of the memory that ``tensor`` is a view of; 0 if it has none."""
    try:
        return to_local(tensor).untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # Some tensor subclasses have no storage
        return 0

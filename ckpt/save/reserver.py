"""Reserves host memory for the saves of a state before the first one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ckpt.config import SaveConfig
from ckpt.save.saver import Saver
from ckpt.state.walk.collect import WalkResult
from ckpt.state.walk.last_walk import LastWalk
from ckpt.state.walk.plan_cache import PlanCache, first_step_growth
from ckpt.state.walk.state_objects import has_optimizer

_log = logging.getLogger("ckpt")


class Reserver:
    """Reserves slots for a state, and lays the plan of the state over them.

    A preparation has the save plan of a state, the leaves that describe its tensors, and their
    devices. To *warm* slots is to look up the places of the tensors in them ahead of time. The
    image may grow when the optimizers make their first step.

    Args:
        saver: The owner of the slots.
        plans: Gets the plan, which the first save then uses.
        last_walk: The results of the last walk over the state.
        collect: Finds the tensors of a state.
        config: The settings of saves.

    Thread safety: only the training thread uses it.
    """

    def __init__(
        self,
        saver: Saver,
        plans: PlanCache,
        last_walk: LastWalk,
        collect: Callable[[Mapping[str, Any]], WalkResult],
        config: SaveConfig,
    ) -> None:
        self._saver, self._plans, self._last_walk = saver, plans, last_walk
        self._collect, self._config = collect, config

    def reserve(self, state: Mapping[str, Any]) -> None:
        """Begin to reserve the memory in the background. See ``CheckpointManager.prepare``."""
        collection = self._collect(state)
        preparation = self._plans.prepare(collection)
        growth = first_step_growth(collection, preparation.leaves)
        nbytes = preparation.plan.size + growth
        if self._config.deltas is not None:
            self._saver.expect_deltas(preparation.plan)
        self._saver.slots.plan(nbytes)
        overlap, check = self._config.overlap == "auto", self._config.check
        warm = partial(
            preparation.warm, parts=tuple(collection.parts), overlap=overlap, check=check
        )
        self._saver.reserve(nbytes, None if growth else warm, devices=preparation.devices)

    def reserve_quietly(self, state: Mapping[str, Any]) -> None:
        """Reserve the memory after a restore, if the state has an optimizer. Otherwise the job may
        only evaluate, and nothing is kept of the state.

        Errors are only logged: the first save raises them.
        """
        if not has_optimizer(state):
            self._last_walk.forget()
            self._plans.forget()
            return
        try:
            self.reserve(state)
        except Exception as error:  # noqa: BLE001 - also what a state_dict() of the user's raises
            _log.warning("ckpt: no host memory was reserved for saves: %s", error)

"""verl: the weights go from the trainer to the rollouts by the steps of a root.

    actor_rollout_ref.rollout.checkpoint_engine:
      backend: ckpt
      custom_backend_module: ckpt.integrations.verl
      engine_kwargs: {ckpt: {root: "s3://bucket/rollout"}}

In verl, the workers of the *actor* train, and the *rollouts* generate with the trained weights.
They need no common process group: they need the store. Each update is a committed step. A rollout
follows the steps, and reads only the values that have changed since its last one (``deltas``). A
*version* is the weights of one step. Importing this module imports verl and registers the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Final

import torch
from verl.checkpoint_engine import (  # pyright: ignore[reportMissingImports]
    CheckpointEngine,
    CheckpointEngineRegistry,
)
from verl.workers.rollout.utils import (  # pyright: ignore[reportMissingImports]
    ensure_async_iterator,
)

from ckpt.config import Tier
from ckpt.coordination.single import SingleCoordinator
from ckpt.exchange.weights.follow import Follower, Version, follow
from ckpt.integrations.shared.once_warnings import warn_of_untested
from ckpt.manager import CheckpointManager

NAME: Final = "ckpt"
"""The value of ``checkpoint_engine.backend``."""
TESTED_RANGE: Final = ("0.9", "0.9")
_PART: Final = "model"
_METRIC: Final = "global_steps"

Topology = dict[str, list[Any]]


@CheckpointEngineRegistry.register(NAME)  # pyright: ignore[reportUntypedClassDecorator]
class CkptCheckpointEngine(CheckpointEngine):  # type: ignore[misc, unused-ignore]
    """The checkpoint engine of verl that saves each update as a step, and follows these steps.

    verl makes one in every worker of the actor and of the rollouts. The first worker of the actor
    saves. Its steps are numbered from the newest one of the root on, so a trainer that goes back
    publishes a newer step too; the metric ``global_steps`` of a step is the number that verl has.

    Args:
        bucket_size: Not used: verl gives it to every engine.
        root: The folder or URL of the root, which all workers reach. No other job may write to it.
        is_master: Whether this is the first worker of the actor.
        keep_last: How many steps stay.
        timeout_seconds: How long a rollout waits for a step.
        options: The options of the store.

    Raises:
        ConfigError: An argument is invalid.
        StorageError: The root cannot be opened.
    """

    def __init__(
        self,
        bucket_size: int = 0,  # noqa: ARG002
        *,
        root: str,
        is_master: bool = False,
        keep_last: int = 2,
        timeout_seconds: float = 600.0,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        warn_of_untested("verl", TESTED_RANGE, advice="compare one update of a rollout")
        self._tier = Tier(root, keep_last=keep_last, options=options or {})
        self._timeout_seconds = timeout_seconds
        self._manager: CheckpointManager | None = None
        self._follower: Follower | None = None
        self._step = 0
        if is_master:  # The other workers of the actor take no part in its saves
            coordinator = SingleCoordinator()
            self._manager = CheckpointManager(self._tier, deltas=_PART, coordinator=coordinator)

    def prepare(self) -> dict[str, Any]:
        """Return the number of the next step, if this worker saves it."""
        if self._manager is None:
            return {}
        last_step = self._manager.latest_step()
        return {"step": 0 if last_step is None else last_step + 1}

    @classmethod
    def build_topology(
        cls,
        actor_wg_world_size: int,
        rollout_world_size: int,
        metadata: Sequence[Mapping[str, Any]],
    ) -> tuple[Topology, Topology]:
        """Tell all workers the number of the step. ``metadata`` begins with that of the actor."""
        step = metadata[0]["step"]
        return {"step": [step] * actor_wg_world_size}, {"step": [step] * rollout_world_size}

    def init_process_group(self, step: int) -> None:
        """Note which step the next update is. There is no process group."""
        self._step = step

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> None:
        """Save the weights. All workers of the actor call this, since they make them together.

        The whole model is in the host memory of the first worker meanwhile.

        Raises:
            CkptError: As for `CheckpointManager.save`.
        """
        state: dict[str, torch.Tensor] = {}
        async for name, tensor in ensure_async_iterator(weights):
            if self._manager is not None:
                state[name] = tensor.detach().to("cpu", copy=True)
        if self._manager is not None:
            metrics = {} if global_steps is None else {_METRIC: global_steps}
            # The loop of a worker has other requests to answer meanwhile.
            await asyncio.to_thread(self._manager.save, {_PART: state}, self._step, metrics=metrics)

    async def receive_weights(
        self, global_steps: int | None = None
    ) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Wait for the step, and yield its tensors, in host memory. All of them are verified before
        the first one comes.

        Raises:
            CkptError: As for ``Follower.version_of``.
        """
        del global_steps  # The number that verl has may come again
        version = await asyncio.to_thread(self._fetch)
        for name, tensor in version.weights.items():
            yield name, tensor

    def _fetch(self) -> Version:
        """Wait for the step, and return its weights."""
        if self._follower is None:
            self._follower = follow(self._tier, _PART, timeout_seconds=self._timeout_seconds)
        return self._follower.version_of(self._step)

    def finalize(self) -> None:
        """Do nothing: the next update finds the root open."""

"""Whether and how a manager listens for a planned stop."""

from __future__ import annotations

import math
from datetime import datetime

from ckpt.coordination.coordinator import Coordinator
from ckpt.elastic.planned_stop import STOP_SIGNALS, StopSignals, as_deadline
from ckpt.errors import ConfigError


class StopListener:
    """Listens for nothing until ``on_signals`` or ``on_stop_request``, once.

    Args:
        coordinator: The connection to the other ranks, which all listen alike.

    Attributes:
        signals: What tells whether the ranks stop after a step; None if they do not listen.

    Thread safety: the training thread calls all methods but ``request``, which any thread may call.
    """

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self.signals: StopSignals | None = None

    def on_signals(
        self, signals: tuple[int, ...], grace_seconds: float, *, reraise: bool, owner: object
    ) -> StopSignals:
        """Listen for ``signals`` and requests. See ``CheckpointManager.on_signals``."""
        if self.signals is not None:
            raise ConfigError(
                "this manager already listens for a stop: call on_signals() or on_stop_request(), "
                "once"
            )
        self.signals = StopSignals(
            self._coordinator, signals or STOP_SIGNALS, grace_seconds, reraise=reraise, owner=owner
        )
        return self.signals

    def on_stop_request(self, owner: object) -> StopSignals:
        """Listen for requests. See ``CheckpointManager.on_stop_request``."""
        if self.signals is None:
            self.signals = StopSignals(self._coordinator, (), math.inf, reraise=False, owner=owner)
        return self.signals

    def request(self, deadline: float | datetime | None) -> None:
        """Ask all ranks to stop. See ``CheckpointManager.request_stop``."""
        end_time = as_deadline(deadline)
        if self.signals is None:
            raise ConfigError(
                "request_stop: the ranks do not listen: call manager.on_signals() or "
                "manager.on_stop_request() on all ranks before the loop, and ask its "
                "requested(step) after each step"
            )
        self.signals.request(end_time)

    def close(self, error: BaseException | None) -> None:
        """Restore the earlier handlers. See ``StopSignals.close``."""
        if self.signals is not None:
            self.signals.close(error)

"""The steps that wait for each tier, computed from the events of their saves.

A save is *staged* when its state is copied to host memory. From then on it waits for its tiers:
each commits it, or misses it. ``_pending_saves`` has the steps that wait, by the URL of the tier.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from ckpt.events import Event, SaveCommitted, SaveFailed, SaveStaged, TierMissed


@dataclass(frozen=True, slots=True)
class PendingSave:
    """A step that waits for a tier.

    Attributes:
        nbytes: The size of this rank's image of the step, in bytes.
        start_time: The value of ``time.monotonic()`` when the step was staged.
    """

    nbytes: int
    start_time: float


class Backlog:
    """An observer that keeps the steps that wait for a tier. Such a step was staged in host memory,
    and the tier does not have it yet.

    A step stops waiting when the tier has it or has missed it, or when the save has failed.

    Thread safety: all methods may be called from any thread. ``_lock`` guards ``_pending_saves``.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending_saves: dict[str, dict[int, PendingSave]] = {}

    def __call__(self, event: Event) -> None:
        """Add or remove steps according to ``event``."""
        with self._lock:
            match event:
                case SaveStaged():
                    for tier in event.tiers:
                        save = PendingSave(event.nbytes, time.monotonic())
                        self._pending_saves.setdefault(tier, {})[event.step] = save
                case SaveCommitted() | TierMissed():
                    self._pending_saves.get(event.tier, {}).pop(event.step, None)
                case SaveFailed():
                    for steps in self._pending_saves.values():
                        steps.pop(event.step, None)
                case _:
                    pass

    def steps(self, tier: str) -> int:
        """Return how many steps wait for ``tier``."""
        with self._lock:
            return len(self._pending_saves.get(tier, ()))

    def nbytes(self, tier: str) -> int:
        """Return the size of this rank's images of all steps that wait for ``tier``, in bytes."""
        with self._lock:
            return sum(save.nbytes for save in self._pending_saves.get(tier, {}).values())

    def age_seconds(self, tier: str) -> float:
        """Return for how many seconds the oldest step has waited for ``tier``; 0 if none waits."""
        with self._lock:
            start_times = [save.start_time for save in self._pending_saves.get(tier, {}).values()]
        return time.monotonic() - min(start_times) if start_times else 0.0

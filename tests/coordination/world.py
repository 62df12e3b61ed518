"""A world of ranks in one process, whose messages are in a dict."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ckpt.coordination.coordinator import Coordinator


class World:
    """What a store keeps for ``size`` ranks.

    ``patience`` shortens every wait, so that no rank waits long for the dead.
    """

    def __init__(self, size: int, *, patience: float = 6) -> None:
        self.size, self.patience = size, patience
        self.messages: dict[tuple[str, int], bytes] = {}
        self.verdicts: dict[str, bytes] = {}
        self.changed = threading.Condition()

    def coordinator(self, rank: int) -> WorldCoordinator:
        return WorldCoordinator(self, rank)

    def run(
        self, work: Callable[[Coordinator], Any], ranks: Iterable[int] | None = None
    ) -> dict[int, Any]:
        """Do ``work`` on every rank at once, and return its result or its error, by rank."""
        chosen = list(range(self.size)) if ranks is None else list(ranks)

        def guarded(rank: int) -> Any:
            try:
                return work(self.coordinator(rank))
            except Exception as error:
                return error

        with ThreadPoolExecutor(len(chosen)) as threads:
            return dict(zip(chosen, threads.map(guarded, chosen), strict=True))


class WorldCoordinator:
    attempt = "abcxyz"

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank, self.world_size = world, rank, world.size

    def post(self, subject: str, message: bytes) -> None:
        with self.world.changed:
            self.world.messages[subject, self.rank] = message
            self.world.changed.notify_all()

    def collect(self, subject: str, ranks: set[int], *, timeout: float) -> dict[int, bytes]:
        def come() -> dict[int, bytes]:
            return {
                rank: self.world.messages[subject, rank]
                for rank in ranks
                if (subject, rank) in self.world.messages
            }

        return self._wait(come, timeout)

    def set_once(self, subject: str, verdict: bytes) -> bytes:
        with self.world.changed:
            standing = self.world.verdicts.setdefault(subject, verdict)
            self.world.changed.notify_all()
            return standing

    def verdict(self, subject: str, *, timeout: float) -> bytes | None:
        return self._wait(
            lambda: self.world.verdicts.get(subject), min(timeout, 10 * self.world.patience)
        )

    def forget(self, subject: str) -> None:
        with self.world.changed:
            self.world.messages.pop((subject, self.rank), None)

    def clone(self) -> WorldCoordinator:
        return self

    def close(self) -> None:
        pass

    def _wait(self, look: Callable[[], Any], timeout: float) -> Any:
        end = time.monotonic() + timeout
        with self.world.changed:
            while not (found := look()) and (left := end - time.monotonic()) > 0:
                self.world.changed.wait(left)
            return found

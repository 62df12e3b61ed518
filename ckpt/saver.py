"""An image that is landing -> a checkpoint on every tier. The background half of a save.

Writing follows the copying as it goes. Tiers up to the nearest durable one are served in turn, from the image itself; then its memory is free. Farther tiers drain from that tier's files, each
at its own pace on a thread of its own, so that none holds up a nearer one, nor training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final, Protocol

from ckpt.config import SaveConfig
from ckpt.coordination.api import Coordinator
from ckpt.drain import Drain, Waiting
from ckpt.errors import CkptError, TensorChanged
from ckpt.lane import Lane, SaveJob
from ckpt.model.layout import StepRef
from ckpt.pipeline.workers import Workers
from ckpt.storage.tiers import OpenTier

SKIPPED: Final = "skipped: no slot was free"
"""The reason a rank gives for a save it had no slot for."""
UNHEARD: Final = "an earlier save had failed there"
"""The reason a rank gives for a save that it did not begin, because the call raised the error of an earlier one."""


class Listener(Protocol):
    """Who is told how a save goes. Called from background threads."""

    def written(self, nbytes: int) -> None:
        """So much more is on some tier."""
        ...

    def committed(self, url: str) -> None:
        """It is a checkpoint there."""
        ...

    def failed(self, url: str, error: BaseException, *, required: bool) -> None:
        """It did not become one there, and never will."""
        ...


class Saver:
    """Threads: ``run`` and ``give_up`` from one background thread; ``evict`` from the training thread; ``close`` from the owner, when that thread has stopped."""

    def __init__(self, tiers: Sequence[OpenTier], coordinator: Coordinator, config: SaveConfig) -> None:
        # farther tiers wait at their own pace, each with a connection of its own to the other ranks
        self._lanes = [
            Lane(tier, coordinator.clone() if tier.index else coordinator, config) for tier in tiers
        ]
        self._drains = {
            lane.url: Drain(
                lane.tier.index,
                coordinator.clone(),
                backlog=config.backlog,
                timeout=config.commit_timeout_seconds,
                nice=config.nice,
                cpus=config.cpus,
            )
            for lane in self._lanes[1:]
        }
        self._pruner = Workers("prune", 1, nice=config.nice, cpus=config.cpus)
        self._durable_step = -1

    def lanes_of(self, step: int) -> tuple[list[Lane], list[Lane]]:
        """The tiers that ``step`` goes to: those served from the image, and the farther ones."""
        lanes = [lane for lane in self._lanes if lane.tier.takes(step)]
        near = next((i + 1 for i, lane in enumerate(lanes) if not lane.in_memory), len(lanes))
        return lanes[:near], lanes[near:]

    def urls_of(self, step: int) -> list[str]:
        """Where ``step`` goes, nearest first."""
        return [lane.url for lanes in self.lanes_of(step) for lane in lanes]

    def set_restored(self, step: int) -> None:
        """The job goes on from ``step``."""
        for lane in self._lanes:
            lane.restored_step = step

    def run(self, job: SaveJob, listener: Listener, *, intact: Callable[[], None]) -> None:
        """Commit ``job`` to the near tiers, and leave it to the farther ones. On return its image is not needed any more. Every tier's end is told to ``listener``.

        Args:
            intact: Asked last on each near tier; raises if the image is not what it should be.
        """
        near, far = self.lanes_of(job.ref.step)
        for position, lane in enumerate(near):
            try:
                job = replace(job, known=lane.commit(job, on_bytes=listener.written, intact=intact))
            except BaseException as error:  # noqa: BLE001 - it must reach the caller, whatever it is
                last = position + 1 == len(near)
                required = lane.tier.required or last or isinstance(error, TensorChanged)
                listener.failed(lane.url, error, required=required)
                if required:
                    for later in (*near[position + 1 :], *far):  # as on every rank: the verdict is the same
                        listener.failed(later.url, error, required=True)
                    for later in near[position + 1 :]:
                        later.refuse(job.ref, job.trial, f"tier {lane.url}: {error}")
                    return
            else:
                self._on_commit(lane, job.ref)
                listener.committed(lane.url)
        job = replace(job, image=near[-1].stored(job))
        for lane in far:
            self._leave_to(lane, job, listener)

    def give_up(self, ref: StepRef, trial: int, reason: str) -> None:
        """Tell the others that this rank has no part in a save, so that they need not wait."""
        for lane in self.lanes_of(ref.step)[0]:
            lane.refuse(ref, trial, reason)

    def evict(self, path: str) -> None:
        """The slot that is this file will be overwritten."""
        for lane in self._lanes:
            lane.evict(path)

    def close(self) -> None:
        """Finish what is left to the farther tiers, stop the threads, give the roots back."""
        for drain in self._drains.values():
            drain.close()
        self._pruner.close()
        for lane in self._lanes:
            lane.close(self._durable_step)

    def _leave_to(self, lane: Lane, job: SaveJob, listener: Listener) -> None:
        def work() -> None:
            lane.commit(job, on_bytes=listener.written, intact=lambda: None)
            self._on_commit(lane, job.ref)
            listener.committed(lane.url)

        def failed(error: CkptError) -> None:
            listener.failed(lane.url, error, required=lane.tier.required)

        self._drains[lane.url].push(Waiting(job.ref, work, failed))

    def _on_commit(self, lane: Lane, ref: StepRef) -> None:
        if not lane.in_memory:
            self._durable_step = max(self._durable_step, ref.step)
        waiting = frozenset(ref for drain in self._drains.values() for ref in drain.waiting)
        self._pruner.submit(lane.prune, waiting | {ref})

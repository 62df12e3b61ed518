"""What the job before had committed on a near tier, and not yet on farther ones when it died: the next job takes it there.

It begins with the next job's first commit, for then the roots are its own, and only if it has restored a step of that job: the steps up to that one are its own history, later ones were given up. The leader copies
the files of all ranks as they lie near, newest step first, no more than ``backlog`` of them, and only what the farther tier would keep; steps of the running job go first.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from ckpt.catalog.index import attempts, is_committed
from ckpt.catalog.transfer import fetch_step
from ckpt.config import SaveConfig
from ckpt.errors import CkptError
from ckpt.model.keys import StepRef
from ckpt.model.units import size
from ckpt.pipeline.retry import RetryPolicy
from ckpt.pipeline.workers import Workers
from ckpt.retention.claim import Claim, job_of
from ckpt.retention.evictor import Evictor
from ckpt.retention.inventory import Inventory, StoredStep
from ckpt.retention.policy import Retention, reasons
from ckpt.storage.tiers import OpenTier

_log = logging.getLogger("ckpt")
_PAUSE_SECONDS: Final = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class BackfillRoute:
    """To one farther tier.

    Attributes:
        take: Makes the root ours; raises if it is another's.
        claim: The job's hold on the root.
        is_busy: Whether steps of the running job wait for it.
        committed: Told after each step.
    """

    tier: OpenTier
    take: Callable[[], None]
    claim: Claim
    is_busy: Callable[[], bool]
    committed: Callable[[], None]


class Backfill:
    """Threads: ``begin`` from any, once is enough; ``needed`` from any; ``close`` from the owner, once.

    Args:
        near: The nearest durable tier.
        ways: Farther ones, nearest first.
        own: The running attempt.
        at_end: Told when nothing more is needed from the near tier, which kept it until now.
    """

    def __init__(
        self,
        near: OpenTier,
        routes: Sequence[BackfillRoute],
        own: str,
        config: SaveConfig,
        *,
        at_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._near, self._routes, self._own, self._config = near, tuple(routes), own, config
        self._at_end = at_end
        self._restored: StepRef | None = None
        self._left: frozenset[StepRef] = frozenset()
        self._begun, self._listed = False, threading.Event()
        self._hurry = threading.Event()
        patience = config.commit_timeout_seconds
        self._retry = RetryPolicy(patience_seconds=patience, hurry=self._hurry)
        self._watcher = Workers("catchup", 1, nice=config.nice, cpus=config.cpus)

    def restored(self, ref: StepRef) -> None:
        """The job goes on from ``ref``."""
        self._restored = ref

    def begin(self) -> None:
        """A first step was committed. Returns at once."""
        if not self._begun:
            self._begun = True
            if self._restored is not None and self._routes:
                self._watcher.submit(self._run, self._restored)
            else:
                self._listed.set()

    def needed(self) -> frozenset[StepRef]:
        """Steps that are still to be read from the near tier. Before ``begin``: all that may be."""
        if not self._begun and self._restored is not None:
            return frozenset(ref for ref in attempts(self._near.backend) if job_of(ref) != self._own)
        if self._begun:
            self._listed.wait(self._config.commit_timeout_seconds)
        return self._left

    def close(self) -> None:
        """Finish what was found missing, with no more patience than any request has."""
        self._hurry.set()
        self._watcher.close()

    def _run(self, restored: StepRef) -> None:
        try:
            found = [
                ref
                for ref in attempts(self._near.backend)
                if ref <= restored and job_of(ref) == job_of(restored) != self._own
            ]
            self._left = frozenset(found)
            self._listed.set()
            if found:
                held = {one.ref: one for one in Inventory(self._near.backend).look() if one.state == "whole"}
                line = [held[ref] for ref in found if ref in held]
                for way in self._routes:
                    self._go(way, line)
        except Exception as error:  # noqa: BLE001 - of no consequence for the running job
            _log.warning("ckpt: what the job before left on %s was not taken farther: %s", self._near.url, error)  # fmt: skip
        finally:
            self._left = frozenset()
            self._listed.set()
            self._at_end()

    def _go(self, way: BackfillRoute, line: Sequence[StoredStep]) -> None:
        try:
            going = self._retry.call(partial(self._missing, way.tier, line))
            if going:
                steps = ", ".join(str(held.ref.step) for held in going)
                _log.info("ckpt: of the job before, %s lacks steps %s: they follow from %s", way.tier.url, steps, self._near.url)  # fmt: skip
                way.take()
        except CkptError as error:
            _log.warning("ckpt: what the job before left on %s is not taken to %s: %s", self._near.url, way.tier.url, error)  # fmt: skip
            return
        for held in going:
            while way.is_busy() and not self._hurry.is_set():
                time.sleep(_PAUSE_SECONDS)
            self._take(way, held)

    def _missing(self, far: OpenTier, line: Sequence[StoredStep]) -> list[StoredStep]:
        """What goes there, newest first."""
        rule = Retention.of(far.tier)
        lacking = [
            held for held in line if far.takes(held.ref.step) and not is_committed(far.backend, held.ref)
        ]
        if not rule.keeps_all and lacking:
            metrics = {
                held.ref: held.metrics for held in Inventory(far.backend).look() if held.state == "whole"
            }
            metrics |= {held.ref: held.metrics for held in lacking}
            why = reasons(metrics, rule, metrics)
            lacking = [held for held in lacking if why[held.ref]]
        return sorted(lacking, key=lambda held: held.ref, reverse=True)[: self._config.backlog]

    def _take(self, way: BackfillRoute, held: StoredStep) -> None:
        far, began = way.tier, time.perf_counter()
        try:
            way.claim.bring(held.ref)
            if far.tier.capacity is not None:
                evictor = Evictor(
                    far,
                    way.claim,
                    waiting=partial(_newer, far, held.ref),
                    elsewhere=partial(is_committed, self._near.backend),
                )
                evictor.make_room(held.ref, held.nbytes, restored=None, stored=True)
            others = [other.tier.backend for other in self._routes if other is not way]
            with Workers("catchup", self._config.threads, nice=self._config.nice, cpus=self._config.cpus) as workers:  # fmt: skip
                report = fetch_step(
                    self._near.backend,
                    held.ref,
                    far.backend,
                    workers=workers,
                    retry=self._retry,
                    others=others,
                    codec=far.tier.codec,
                )
        except CkptError as error:
            _log.warning("ckpt: step %d of the job before is not taken to %s: %s", held.ref.step, far.url, error)  # fmt: skip
            return
        _log.info(
            "ckpt: step %d of the job before is on %s now: %s in %.2f s",
            held.ref.step, far.url, size(report.copied_bytes), time.perf_counter() - began,
        )  # fmt: skip
        way.committed()


def _newer(tier: OpenTier, ref: StepRef) -> frozenset[StepRef]:
    """Which do not go for one that is older."""
    return frozenset(other for other in attempts(tier.backend) if other > ref)

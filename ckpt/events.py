"""The events of saves and restores. Observers get them as frozen values and must not block.

Events of a save come in background threads. Those of a restore come in the training thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_log = logging.getLogger("ckpt")


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveStaged:
    """The state is in host memory, ``nbytes`` of this rank.

    ``stall_seconds`` is what it has cost the training thread: the call, and the wait at the fence
    if there was one.

    Attributes:
        tiers: The URLs of the tiers that the step goes to, nearest first. For each of them there is
            a `SaveCommitted` or a `TierMissed` later.
        slot_bytes: The size of all slots of this rank.
    """

    step: int
    nbytes: int
    stall_seconds: float
    tiers: tuple[str, ...] = ()
    slot_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveCommitted:
    """The checkpoint exists on the tier.

    Attributes:
        nbytes: The size of this rank's image.
        durable_seconds: The seconds since the call.
    """

    step: int
    tier: str
    nbytes: int
    durable_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReplicated:
    """This node has copies of other nodes' files of the step (``Tier(replicas=...)``).

    Only the lowest rank of each node gets this event.

    Attributes:
        nbytes: The size of these files.
        seconds: The seconds that the copying took.
    """

    step: int
    tier: str
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TierMissed:
    """The step did not become a checkpoint on the tier, and never will.

    The save may succeed on other tiers all the same.
    """

    step: int
    tier: str
    error: BaseException


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveFailed:
    """The save is lost, was skipped (`SaveSkipped`), or was given up on a tier that is behind
    (`TierBehind`); older checkpoints are whole.
    """

    step: int
    error: BaseException


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveSuspicious:
    """The step is committed, and its trained tensors show that training is dead: see
    `SuspiciousState`.
    """

    step: int
    error: BaseException


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDamaged:
    """A restore found a step that is whole on no tier and goes on with the one before.

    ``tier`` is the nearest that lists it.
    """

    step: int
    tier: str
    error: BaseException


@dataclass(frozen=True, slots=True, kw_only=True)
class Repaired:
    """A restore took from a farther tier what ``tier`` should have had intact: ``nbytes`` of the
    file ``key`` (empty: the tier did not answer at all). ``mended``: it is whole there again.
    """

    step: int
    tier: str
    key: str
    reason: str
    nbytes: int
    mended: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitFinished:
    """A restore has completed a save whose leader had died before it put the manifest.

    Every rank gets this event.
    """

    step: int
    tier: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """A restore has landed.

    ``nbytes`` in this rank's state; seconds of the whole call; ``tier`` is the URL that most of it
    came from.
    """

    step: int
    tier: str
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepVerified:
    """The agent has compared a step with its checksums.

    Only the leader gets this event, and only while its manager is open.

    Attributes:
        nbytes: The bytes that were right in the end.
        seconds: What it took, at the rate of ``scrub_mb_per_s``.
        mended: The files that were written again, with the bytes of another tier.
        damage: What stays damaged, because it is intact on no tier; empty if the step is intact.
    """

    step: int
    tier: str
    nbytes: int
    seconds: float
    mended: tuple[str, ...] = ()
    damage: str = ""


Event = (
    SaveStaged
    | SaveCommitted
    | NodeReplicated
    | TierMissed
    | SaveFailed
    | SaveSuspicious
    | StepDamaged
    | Repaired
    | CommitFinished
    | Restored
    | StepVerified
)
Observer = Callable[[Event], None]


class Observers:
    """The observers of one manager.

    Thread safety: ``notify`` may be called from any thread. The observers never change.
    """

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = tuple(observers)

    def notify(self, event: Event) -> None:
        """Call every observer with ``event``. An observer that raises costs one log entry."""
        for observer in self._observers:
            try:
                observer(event)
            except BaseException:  # noqa: BLE001 - an observer's mistake must not cost a checkpoint
                _log.exception("ckpt: an observer failed on %s", type(event).__name__)

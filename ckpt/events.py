"""The events of saves and restores. Observers get them as frozen values and must not block.

Background threads report the events of a save, with two exceptions. The training thread reports a
save that this rank skips or does not begin. It also reports `SaveStaged` if it copies the state
itself (see ``Snapshot.foreground`` in ``ckpt.staging.snapshot``). The training thread reports the
events of a restore, too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

_log = logging.getLogger("ckpt")


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveStaged:
    """The state of a save is in host memory.

    Attributes:
        nbytes: The size of this rank's image.
        stall_seconds: Seconds that the save has cost the training thread so far (see
            ``PendingSave.stall_seconds``).
        tiers: The URLs of the tiers that the step goes to, nearest first. A `SaveCommitted` or a
            `TierMissed` follows for each of them, unless the step is left to the agent, or
            ``close`` gives the save up.
        slot_bytes: The size of all slots of this rank together.
        metrics: The metrics of the step that rank 0 gave; empty on other ranks.
    """

    step: int
    nbytes: int
    stall_seconds: float
    tiers: tuple[str, ...] = ()
    slot_bytes: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveCommitted:
    """The step is a checkpoint on the tier now.

    Attributes:
        nbytes: The size of this rank's image.
        durable_seconds: The seconds from the call of the save to this commit.
    """

    step: int
    tier: str
    nbytes: int
    durable_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReplicated:
    """This node now has copies of other nodes' files of the step (``Tier(replicas=...)``).

    Only the lowest rank of each node gets this event.

    Attributes:
        nbytes: The size of the copied files.
        seconds: The seconds that the copying took.
    """

    step: int
    tier: str
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TierMissed:
    """The step has not become a checkpoint on the tier, and its save does not try again.

    The save may still succeed on other tiers.
    """

    step: int
    tier: str
    error: BaseException


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveFailed:
    """The save has failed, was skipped (`SaveSkipped`), or was given up on a tier that is too slow
    (`TierBehind`). Older checkpoints are intact.
    """

    step: int
    error: BaseException


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveSuspicious:
    """The step is committed, but no trained tensor has changed since the last save, or a trained
    tensor holds NaN or Inf. See `SuspiciousState`.
    """

    step: int
    error: BaseException


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsAdded:
    """``add_metrics`` was called. Each rank that has called it gets this event."""

    step: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDamaged:
    """A restore has found a step that is intact on no tier, and goes on with the previous step.

    Attributes:
        tier: The nearest tier that lists the step.
        error: The damage that the restore has found.
    """

    step: int
    tier: str
    error: BaseException


@dataclass(frozen=True, slots=True, kw_only=True)
class Repaired:
    """A restore has read data from a farther tier, because ``tier`` did not have it intact.

    Attributes:
        tier: The tier that should have had the data intact.
        key: The file; empty if the tier did not answer at all.
        reason: The fault of the file or the tier, as text.
        nbytes: How many bytes of the file were read from a farther tier.
        mended: Whether the file on ``tier`` is intact again.
    """

    step: int
    tier: str
    key: str
    reason: str
    nbytes: int
    mended: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitFinished:
    """A restore has completed the commit of a save whose leader died before it put the manifest.

    Every rank gets this event.
    """

    step: int
    tier: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """A restore has ended, and the state is complete.

    Attributes:
        tier: The URL of the tier from which most of the bytes were read.
        nbytes: The bytes that were restored into this rank's state.
        seconds: The seconds that the whole call took.
        evaluates: Whether the job does not go on from the step (``rollback=False``).
    """

    step: int
    tier: str
    nbytes: int
    seconds: float
    evaluates: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RolledBack:
    """The history of the run goes on from ``step``, and the later steps are abandoned.

    Attributes:
        number: The number of the rollback, counted from 1.
    """

    step: int
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepVerified:
    """The agent has compared a step with its checksums.

    The leader gets this event. If nodes have local tiers, the lowest rank of each node gets it
    instead. A rank gets the event only while its manager is open. If a step stays damaged, a later
    comparison makes an event only if it has written a file again.

    Attributes:
        nbytes: The bytes that were intact at the end.
        seconds: The seconds from the first comparison to the end, at the rate of
            ``scrub_mb_per_s``. They include the time for files that were written again.
        mended: The files that were written again, with the bytes of another tier.
        damage: The damage that stays, because no tier has the data intact; empty if the step is
            intact.
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
    | MetricsAdded
    | StepDamaged
    | Repaired
    | CommitFinished
    | Restored
    | RolledBack
    | StepVerified
)
Observer = Callable[[Event], None]


class Observers:
    """The observers of one manager.

    Thread safety: ``notify`` may be called from any thread. The tuple of observers never changes.
    """

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = tuple(observers)

    def notify(self, event: Event) -> None:
        """Call every observer with ``event``. An error that an observer raises is only logged."""
        for observer in self._observers:
            try:
                observer(event)
            except BaseException:  # noqa: BLE001 - an observer's mistake must not cost a checkpoint
                _log.exception("ckpt: an observer failed on %s", type(event).__name__)

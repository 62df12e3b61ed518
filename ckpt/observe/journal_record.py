"""The records of a journal: the events of a run, and the begin and the end of each job."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from ckpt.config import Mode

OPEN_EVENT: Final = "Opened"
"""The ``event`` of the first record of each job."""
CLOSE_EVENT: Final = "Closed"
"""The ``event`` of the last record of a job that has closed its manager."""
VERIFY_EVENT: Final = "Verified"
"""The ``event`` of the record of a step that was compared with its checksums."""
PLANNED_STOP: Final = "planned stop"
"""The ``reason`` of a ``CLOSE_EVENT`` after ``StopSignals.requested``."""


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line of a journal. A field that an event does not have keeps its default.

    Attributes:
        at: When the record was written, in seconds since 1970.
        event: The name of the class of the event, or ``OPEN_EVENT`` or ``VERIFY_EVENT``.
        step: The number of the step; -1 if the record is not about a step.
        tier: The URL of the tier that the event is about.
        tiers: For a save that was staged: the URLs of the tiers that the step goes to, nearest
            first.
        nbytes: The bytes that the event is about, as in the class of the event.
        seconds: For a save that was staged: how long it stopped the training thread. For a commit:
            the time since the call of the save. Otherwise: how long the restore, the copying or the
            verification took.
        error: The name of the class of the error.
        reason: The message of the error, or why ``tier`` could not give the file ``key``, or the
            damage that a verification found (empty if there is none).
        key: The file that a restore took from a farther tier.
        mended: Whether the file ``key`` is intact on ``tier`` again.
        job: The id of the job, which all its records have.
        metrics: The metrics of the step; NaN and infinite values are None.
        evaluates: For a restore: whether the job does not go on from the step.
        modes: For ``OPEN_EVENT``: which values of a metric are the best, by its name.
        counts: For ``OPEN_EVENT``: how many of the best steps by a metric the job keeps, by its
            name. A metric that is not there counts as 1.
        root: For ``OPEN_EVENT``: the path of the root, without symbolic links.
        named_root: For ``OPEN_EVENT``: this path as the job was given it, if there are links in it.
        host, machine, pid, start_time: For ``OPEN_EVENT``: the process of rank 0, as in
            ``ckpt.root.owner.Owner``.
    """

    at: float
    event: str
    step: int = -1
    tier: str = ""
    tiers: tuple[str, ...] = ()
    nbytes: int = 0
    seconds: float = 0.0
    error: str = ""
    reason: str = ""
    key: str = ""
    mended: bool = False
    job: str = ""
    metrics: dict[str, float | None] = {}
    evaluates: bool = False
    modes: dict[str, Mode] = {}
    counts: dict[str, Annotated[int, msgspec.Meta(ge=1)]] = {}
    root: str = ""
    named_root: str = ""
    host: str = ""
    machine: str = ""
    pid: int = 0
    start_time: int = 0

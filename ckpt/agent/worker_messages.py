"""The order that the agent writes to the standard input of a worker, and the reports that the
worker writes as frames to its standard output.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from ckpt.agent.messages import Job

if TYPE_CHECKING:  # The agent needs no more of it, and importing it takes 15 MB of memory
    from ckpt.catalog.verify import OnProgress

Task = Literal["finish", "free", "scrub", "copy"]
OnReport = Callable[[msgspec.Struct], None]
REPORT_SECONDS: Final = 0.2
"""The shortest time between two reports of a worker about its progress."""
Outcome = Literal["done", "freed", "superseded", "failed"]


class Order(msgspec.Struct, frozen=True):
    """The task of a worker.

    Attributes:
        job: The job.
        task: "finish": finish the steps of the job. "free": free the memory of the steps that
            durable tiers have. "scrub": verify the steps of the job. "copy": copy files for the
            job's trainer, which lives.
        verified: For "scrub", the steps that need no verification now, as "URL FOLDER".
        frees: For "finish", whether to free the memory too once the steps are finished.
        connection: For "copy", the descriptor of the connection to the trainer; otherwise -1.
    """

    job: Job
    task: Task
    verified: tuple[str, ...] = ()
    frees: bool = False
    connection: int = -1


class Copying(msgspec.Struct, frozen=True, tag="copying"):
    """Reports that ``done_bytes`` of the ``total_bytes`` of a step were copied to the tier
    ``to``.
    """

    step: int
    to: str
    done_bytes: int
    total_bytes: int


class Copied(msgspec.Struct, frozen=True, tag="copied"):
    """Reports that a step has become a checkpoint on the tier ``to``."""

    step: int
    to: str


class Verifying(msgspec.Struct, frozen=True, tag="verifying"):
    """Reports that ``done_bytes`` of the ``total_bytes`` of a step on ``tier`` were compared with
    their checksums.
    """

    step: int
    tier: str
    done_bytes: int
    total_bytes: int


class Verified(msgspec.Struct, frozen=True, tag="verified", kw_only=True):
    """Reports that a step on a tier was compared with its checksums, and mended if necessary.

    The agent passes this report on to the trainer of the job.

    Attributes:
        tier: The URL of the tier.
        folder: The folder of the step.
        nbytes: How many bytes match their checksums, counted after the files were mended.
        seconds: How long the verification took, mending included.
        mended: The damaged files that were written again.
        damage: What is still damaged, and why; empty if the step is intact.
    """

    step: int
    tier: str
    folder: str
    nbytes: int
    seconds: float
    mended: tuple[str, ...] = ()
    damage: str = ""


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """The last report of a worker.

    Attributes:
        outcome: "done" if the order was carried out, but memory that it names in ``frees`` may
            still have to be freed; "freed" if that is done too. "superseded" if another job has
            taken the roots, and "failed" if another try is needed.
        error: Why the outcome is "failed".
    """

    outcome: Outcome
    error: str = ""


def progress_of(step: int, to: str, report: OnReport) -> OnProgress:
    """Return a function for the progress of a copy of ``step`` to the tier ``to``. It passes a
    `Copying` to ``report`` a few times a second.
    """
    return at_intervals(
        lambda done_bytes, total_bytes: report(Copying(step, to, done_bytes, total_bytes))
    )


def at_intervals(on_progress: OnProgress) -> OnProgress:
    """Return a function that passes its arguments to ``on_progress``, but only a few times a second
    and when all bytes are done.
    """
    reported_at = 0.0

    def progress(done_bytes: int, total_bytes: int) -> None:
        nonlocal reported_at
        if done_bytes == total_bytes or time.monotonic() - reported_at > REPORT_SECONDS:
            reported_at = time.monotonic()
            on_progress(done_bytes, total_bytes)

    return progress


Report = Copying | Copied | Verifying | Verified | Ended

"""What an agent orders from a worker, on its standard input, and what the worker reports, as frames
on its standard output.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, Literal

import msgspec

from ckpt.agent.messages import Job
from ckpt.catalog.verify import OnProgress

Task = Literal["finish", "free", "scrub", "copy"]
OnReport = Callable[[msgspec.Struct], None]
REPORT_SECONDS: Final = 0.2
"""How often a worker reports its progress, at the most."""
Outcome = Literal["done", "superseded", "failed"]


class Order(msgspec.Struct, frozen=True):
    """What a worker is to do.

    Attributes:
        job: For which job.
        task: "finish": make its steps durable. "free": free the memory of steps that durable tiers
            have. "scrub": verify its steps. "copy": copy files for its trainer, which lives.
        verified: The steps that need not be verified, as "URL FOLDER".
        connection: The descriptor of the connection to the trainer, for "copy".
    """

    job: Job
    task: Task
    verified: tuple[str, ...] = ()
    connection: int = -1


class Copying(msgspec.Struct, frozen=True, tag="copying"):
    """So many bytes of a step are on the tier ``to``."""

    step: int
    to: str
    done_bytes: int
    total_bytes: int


class Copied(msgspec.Struct, frozen=True, tag="copied"):
    """A step is a checkpoint on the tier ``to`` now."""

    step: int
    to: str


class Verifying(msgspec.Struct, frozen=True, tag="verifying"):
    """So many bytes of a step on a tier were compared with their checksums."""

    step: int
    tier: str
    done_bytes: int
    total_bytes: int


class Verified(msgspec.Struct, frozen=True, tag="verified", kw_only=True):
    """A step on a tier was compared with its checksums.

    The agent passes it on to the trainer of the job.

    Attributes:
        folder: The folder of the step.
        nbytes: How many bytes were right in the end.
        mended: The files that were written again.
        damage: What stays damaged, and why; empty if the step is intact.
    """

    step: int
    tier: str
    folder: str
    nbytes: int
    seconds: float
    mended: tuple[str, ...] = ()
    damage: str = ""


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """The last report.

    ``outcome`` is "done" if nothing is left to do, "superseded" if another job has taken the roots,
    and "failed" if another try is needed.
    """

    outcome: Outcome
    error: str = ""


def progress_of(step: int, to: str, report: OnReport) -> OnProgress:
    """Return what reports how much of a step is on the tier ``to``, some times in a second."""
    return at_intervals(lambda done, total: report(Copying(step, to, done, total)))


def at_intervals(on_progress: OnProgress) -> OnProgress:
    """Return what calls ``on_progress`` some times in a second, and when all is done."""
    reported = 0.0

    def progress(done: int, total: int) -> None:
        nonlocal reported
        if done == total or time.monotonic() - reported > REPORT_SECONDS:
            reported = time.monotonic()
            on_progress(done, total)

    return progress


Report = Copying | Copied | Verifying | Verified | Ended

"""What the records of a journal say of a run. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ckpt.observe.journal import OPENED, VERIFIED, Record

Progress = Literal["saving", "committed", "missed", "cut"]


@dataclass(slots=True)
class Arrival:
    """How a step gets to a tier.

    Attributes:
        state: "saving" until it is "committed" or "missed"; "cut" if the job ended before.
        seconds: From the call to the commit.
        reason: Why the tier missed the step.
    """

    state: Progress = "saving"
    seconds: float = 0.0
    reason: str = ""


@dataclass(slots=True)
class SavedStep:
    """A save, by the records of rank 0.

    Attributes:
        at: When the state was in host memory, in seconds since 1970.
        stall_seconds: What it has cost training.
        nbytes: Of rank 0.
        tiers: Where it went, nearest first.
    """

    step: int
    at: float
    stall_seconds: float = 0.0
    nbytes: int = 0
    tiers: dict[str, Arrival] = field(default_factory=dict[str, Arrival])


@dataclass(frozen=True, slots=True)
class Restore:
    """A restore, and the records of what it repaired or passed over."""

    record: Record
    troubles: tuple[Record, ...] = ()


@dataclass(slots=True)
class History:
    """What happened in a run.

    Attributes:
        saves: Of each step the last save.
        restores: Oldest first.
        failures: The records of saves that failed or were skipped, oldest first.
        verified: (step, tier) -> the last check of that step; its ``reason`` is empty if the step
            was intact.
    """

    saves: dict[int, SavedStep] = field(default_factory=dict[int, SavedStep])
    restores: list[Restore] = field(default_factory=list[Restore])
    failures: list[Record] = field(default_factory=list[Record])
    verified: dict[tuple[int, str], Record] = field(default_factory=dict[tuple[int, str], Record])


def history_of(records: Sequence[Record]) -> History:
    """Return the history that ``records``, oldest first, describe."""
    found, troubles = History(), list[Record]()
    under_way: set[int] = set()  # Steps that the current job has staged
    for record in records:
        match record.event:
            case "SaveStaged":
                found.saves[record.step] = SavedStep(
                    record.step,
                    record.at,
                    record.seconds,
                    record.nbytes,
                    {tier: Arrival() for tier in record.tiers},
                )
                under_way.add(record.step)
            case "SaveCommitted" | "CommitFinished":
                save = found.saves.setdefault(record.step, SavedStep(record.step, record.at))
                save.tiers[record.tier] = Arrival("committed", record.seconds)
            case "TierMissed":
                save = found.saves.setdefault(record.step, SavedStep(record.step, record.at))
                save.tiers[record.tier] = Arrival("missed", 0.0, record.reason)
            case "SaveFailed":
                found.failures.append(record)
            case "Repaired" | "StepDamaged":
                troubles.append(record)
            case "Restored":
                found.restores.append(Restore(record, tuple(troubles)))
                troubles = []
            case _ if record.event == OPENED:
                _cut(found.saves[step] for step in under_way)
                under_way.clear()
            case _ if record.event == VERIFIED:
                found.verified[record.step, record.tier] = record
            case _:
                pass  # An event of a later version
    if troubles and found.restores:  # Another rank reported these after the restore
        last = found.restores.pop()
        found.restores.append(Restore(last.record, (*last.troubles, *troubles)))
    return found


def _cut(saves: Iterable[SavedStep]) -> None:
    """Mark the saves that were under way as cut, since their job has ended."""
    for save in saves:
        for arrival in save.tiers.values():
            if arrival.state == "saving":
                arrival.state = "cut"

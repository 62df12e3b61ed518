"""What may happen to the checkpoints of a run, drawn from a seed: jobs whose configuration changes
from one to the next, and what people do in between.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Literal

PLACES = ("a", "b", "c")
"""The durable folders that the tiers of all jobs are taken from."""
MEMORY = "memory"
"""The place of the tier in memory."""
IMAGE_BYTES = 12_000
"""About what a step takes on a tier, for each rank."""

Start = Literal["newest", "older", "nothing"]
End = Literal["close", "detach", "raise", "kill"]


@dataclass(frozen=True)
class TierPlan:
    """The settings of one tier of a job.

    ``capacity`` is a number of steps; None for no limit.
    """

    place: str
    every: int = 1
    keep_last: int | None = None
    keep_every: int | None = None
    keep_best: bool = False
    codec: str = "none"
    capacity: int | None = None


@dataclass(frozen=True)
class JobPlan:
    """One job.

    Attributes:
        tiers: The durable tiers, nearest first.
        memory: Whether a tier in memory is nearer than all of them.
        start: Which step it restores. "older" takes one at ``fraction`` of those that must be
            there.
        jumps: Whether it saves behind all steps there are, and not behind the one it has restored.
        saves: How many steps it saves.
        waits: Whether it waits for each save before the next.
        death: The call to a store at which it is killed, if ``end`` is "kill".
    """

    tiers: tuple[TierPlan, ...]
    memory: bool = False
    ranks: int = 1
    agent: bool = False
    backlog: int = 20
    start: Start = "newest"
    fraction: float = 0.0
    jumps: bool = False
    saves: int = 3
    waits: bool = False
    end: End = "close"
    death: int = 0


@dataclass(frozen=True)
class CopyPlan:
    """``ckpt copy`` of one step, at ``fraction`` of those of the source, or of all."""

    source: str
    target: str
    fraction: float
    all_steps: bool


@dataclass(frozen=True)
class PrunePlan:
    """``ckpt prune``."""

    place: str
    keep_last: int


@dataclass(frozen=True)
class PinPlan:
    """``ckpt pin``, or ``ckpt unpin``, of one step, at ``fraction`` of those of the place."""

    place: str
    fraction: float
    ends: bool


@dataclass(frozen=True)
class WipePlan:
    """A folder is removed."""

    place: str


Event = JobPlan | CopyPlan | PrunePlan | PinPlan | WipePlan


def events(seed: int, count: int) -> list[Event]:
    """Return ``count`` events. The first is a job."""
    chance = random.Random(seed)
    return [_job(chance), *(_event(chance) for _ in range(count - 1))]


def _event(chance: random.Random) -> Event:
    kind = chance.random()
    place = chance.choice(PLACES)
    if kind < 0.68:
        return _job(chance)
    if kind < 0.78:
        source, target = chance.sample(PLACES, 2)
        return CopyPlan(source, target, chance.random(), all_steps=chance.random() < 0.3)
    if kind < 0.84:
        return PrunePlan(place, chance.randint(1, 4))
    if kind < 0.94:
        return PinPlan(place, chance.random(), ends=chance.random() < 0.3)
    return WipePlan(place)


def _job(chance: random.Random) -> JobPlan:
    agent = chance.random() < 0.06
    starts: list[Start] = ["newest", "older", "nothing"]
    ends: list[End] = ["close", "close", "kill", "kill", "kill", "raise"]
    return JobPlan(
        # An agent tries for a day if a tier has no room that it may make.
        tiers=tuple(replace(tier, capacity=None) if agent else tier for tier in _tiers(chance)),
        memory=chance.random() < 0.4,
        ranks=2 if chance.random() < 0.2 and not agent else 1,
        agent=agent,
        backlog=chance.choice([1, 2, 4, 20, 20, 20]),
        start=chance.choices(starts, [10, 3, 1])[0],
        fraction=chance.random(),
        jumps=chance.random() < 0.3,
        saves=chance.randint(0, 5),
        waits=chance.random() < 0.4,
        end=chance.choice([*ends, "detach"] if agent else ends),
        death=chance.randint(1, chance.choice([40, 150, 400])),
    )


def _tiers(chance: random.Random) -> tuple[TierPlan, ...]:
    """Mostly the places in their order, so that jobs continue each other, but not always."""
    count = chance.choices([1, 2, 3], [2, 5, 3])[0]
    places = list(PLACES[:count])
    if chance.random() < 0.3:
        places = chance.sample(PLACES, count)
    return tuple(_tier(chance, place) for place in places)


def _tier(chance: random.Random, place: str) -> TierPlan:
    keep_last = chance.choice([None, 1, 2, 3])
    return TierPlan(
        place,
        every=chance.choice([1, 1, 1, 2, 3]),
        keep_last=keep_last,
        keep_every=chance.choice([None, 4]) if keep_last is not None else None,
        keep_best=keep_last is not None and chance.random() < 0.2,
        codec=chance.choice(["none", "none", "zstd"]),
        capacity=chance.choice([None] * 5 + [2, 4]),
    )

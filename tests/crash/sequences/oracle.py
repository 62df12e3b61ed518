"""What must be where after an event. It knows the promises of the documentation, and none of the
mechanisms that keep them.

The oracle is cautious: where a promise leaves room, as with a step that two policies treat
differently, it demands nothing. What it demands must hold whatever the timing of threads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from ckpt.model.keys import StepRef
from tests.crash.sequences.plans import MEMORY, JobPlan, PrunePlan, TierPlan

Listing = Mapping[str, frozenset[StepRef]]
"""The checkpoints of each durable place."""


@dataclass(frozen=True, order=True)
class Record:
    """A rollback as docs/format.md describes it, in the order in which rollbacks count."""

    number: int
    created_at: float
    step: int = field(compare=False)
    jobs: Mapping[str, list[tuple[int, int | None]]] = field(compare=False)

    def has(self, ref: StepRef) -> bool:
        """Return whether the step is on the branch."""
        if ref.job not in self.jobs:
            return True
        *_, (_, last) = [(-1, -1), *(pair for pair in self.jobs[ref.job] if pair[0] <= ref.trial)]
        return last is None or ref.step <= last


Records = Mapping[str, list[Record]]
"""The rollbacks on each durable place."""


def on_branch(records: Records, places: Iterable[str], refs: Iterable[StepRef]) -> list[StepRef]:
    """Return the steps that count for a reader of ``places``: those of its branch, if any."""
    present = list(refs)
    last = max((record for place in places for record in records.get(place, ())), default=None)
    return [ref for ref in present if last is None or last.has(ref)] or present


@dataclass
class Facts:
    """What one job has noted about itself, and what the places had around it.

    Attributes:
        restored: The step that it has restored.
        committed: The steps that it was told are checkpoints, by place.
        missed: The steps that it was told did not become checkpoints, by place.
        begun: The tiers that each step goes to whose save has begun.
        records: The rollbacks on each place after the job.
        cut_short: The steps whose removal an earlier job has begun and not ended, by place.
    """

    attempt: str
    before: Listing
    cut_short: Listing = field(default_factory=dict[str, frozenset[StepRef]])
    after: Listing = field(default_factory=dict[str, frozenset[StepRef]])
    restored: StepRef | None = None
    committed: dict[str, set[StepRef]] = field(default_factory=dict[str, set[StepRef]])
    missed: dict[str, set[StepRef]] = field(default_factory=dict[str, set[StepRef]])
    begun: dict[StepRef, list[str]] = field(default_factory=dict[StepRef, list[str]])
    records: Records = field(default_factory=dict[str, list[Record]])


class Oracle:
    """Remembers what all jobs have saved.

    Attributes:
        contents: What was saved as each step.
        parents: The step that each job has continued from.
        pins: The pinned steps of each place.
    """

    def __init__(self) -> None:
        self.contents: dict[StepRef, int] = {}
        self.parents: dict[str, StepRef | None] = {}
        self.pins: dict[str, set[StepRef]] = {}

    def metric(self, ref: StepRef) -> float:
        """Return the metric of a step, which says nothing about its number."""
        return float(self.contents[ref] * 7919 % 1009)

    # -- removal -----------------------------------------------------------------------------------

    def missing_after_job(self, job: JobPlan, facts: Facts) -> list[str]:
        """Return a sentence for each checkpoint that is gone and should be there."""
        wrong: list[str] = []
        used = {tier.place for tier in job.tiers}
        for place, before in facts.before.items():
            if place not in used and facts.after[place] != before:
                wrong.append(f"{place} is not used, and has changed")
        for tier in job.tiers:
            place = tier.place
            there = facts.after[place]
            expected = facts.before[place] | facts.committed.get(place, set())
            for ref in sorted(expected - there):
                if reason := self._reason_to_keep(ref, tier, job, facts):
                    wrong.append(f"step {ref} is gone from {place}: {reason}")
        return wrong

    def missing_after_prune(
        self, event: PrunePlan, before: Listing, after: Listing, records: Records
    ) -> list[str]:
        """Return a sentence for each checkpoint that ``ckpt prune`` should have left."""
        wrong: list[str] = []
        rule = TierPlan(event.place, keep_last=event.keep_last)
        for place, refs in before.items():
            for ref in sorted(refs - after[place]):
                branch = on_branch(records, [place], refs)
                if place != event.place or self._surely_kept(ref, rule, branch):
                    wrong.append(f"step {ref} is gone from {place} after {event}")
        return wrong

    def _reason_to_keep(self, ref: StepRef, tier: TierPlan, job: JobPlan, facts: Facts) -> str:
        place = tier.place
        ever = facts.before[place] | facts.after[place] | facts.committed.get(place, set())
        if ref in self.pins.get(place, set()):
            return "it is pinned"
        if tier.capacity is not None:
            return self._reason_on_a_full_tier(ref, tier, job, facts)
        if self._surely_kept(ref, tier, on_branch(facts.records, [place], ever)):
            return "the policy keeps it"
        farther = job.tiers[job.tiers.index(tier) + 1 :]
        for other in farther:
            if ref in self.owed(other, tier, job, facts):
                return f"{other.place} wants and lacks it"
        return ""

    def _reason_on_a_full_tier(
        self, ref: StepRef, tier: TierPlan, job: JobPlan, facts: Facts
    ) -> str:
        """A full tier may remove all but what is nowhere else."""
        own = facts.committed.get(tier.place, set())
        newest = max(own, default=facts.restored)
        others = (other.place for other in job.tiers if other is not tier)
        # A later step of its job, or of this job, on another tier stands for this one.
        jobs = {ref.job, *(other.job for refs in facts.committed.values() for other in refs)}
        later = (
            other
            for place in others
            for other in {*facts.after[place], *facts.committed.get(place, set())}
            if other == ref or (other.job in jobs and other > ref)
        )
        return "it is the newest, and nowhere else" if ref == newest and not any(later) else ""

    def _surely_kept(self, ref: StepRef, tier: TierPlan, ever: Collection[StepRef]) -> bool:
        """Return whether the policy keeps a step, whichever of the steps ``ever``, those of the
        branch, are there.
        """
        if tier.keep_last is None:
            return tier.capacity is None
        if ref not in ever:
            return False  # Abandoned steps are the first to go
        numbers = sorted({other.step for other in ever}, reverse=True)
        best = max((self.metric(other), other.step) for other in ever)[1]
        return (
            ref.step in numbers[: tier.keep_last]
            or (tier.keep_every is not None and ref.step % tier.keep_every == 0)
            or (tier.keep_best and ref.step == best)
        )

    # -- what a farther tier gets ------------------------------------------------------------------

    def owed(self, far: TierPlan, near: TierPlan, job: JobPlan, facts: Facts) -> frozenset[StepRef]:
        """Return the steps of a nearer tier that a farther one surely wants, and lacks.

        The backlog bounds the steps of all nearer tiers together, whichever of them the policy
        still wants when its turn comes.
        """
        if far.capacity is not None:
            return frozenset()
        there = facts.after[far.place]
        nearer = job.tiers[: job.tiers.index(far)]
        source, *sources = (
            facts.before[tier.place] | facts.committed.get(tier.place, set())
            for tier in (near, *nearer)
        )
        line = self._line(source.union(*sources), facts)
        wanted = [ref for ref in line if ref.step % far.every == 0]
        ever = on_branch(facts.records, [far.place], {*there, *facts.before[far.place], *wanted})
        missed = facts.missed.get(far.place, set())
        own = [ref for ref in wanted if ref.job == facts.attempt]
        earlier = [ref for ref in wanted if ref.job != facts.attempt]
        # An agent counts the steps of the job and of earlier ones together
        queues = [wanted] if job.agent else [own, earlier]
        numbers = [ref.step for ref in line]
        due = {
            ref
            for queue in queues
            for ref in queue
            if ref.step in sorted({other.step for other in queue}, reverse=True)[: job.backlog]
            and numbers.count(ref.step) == 1  # Else another attempt may be the one that is meant
            and self._surely_kept(ref, far, ever)
        }
        # No step is copied to a place where its removal was cut short.
        cut_short = facts.cut_short.get(far.place, frozenset())
        return frozenset(due & source - there - missed - cut_short)

    def _line(self, refs: Iterable[StepRef], facts: Facts) -> list[StepRef]:
        """Return the steps of a job and those that may have led to it, newest first."""
        present = [*refs]
        line = {ref for ref in present if ref.job == facts.attempt}
        head = facts.restored
        while head is not None:
            line |= {ref for ref in present if ref.job == head.job and ref.step <= head.step}
            head = self.parents.get(head.job)
        return sorted(line, reverse=True)

    def untold(self, facts: Facts) -> list[str]:
        """Return a sentence for each step and tier whose result a closed job did not get."""
        return [
            f"nothing was told of step {ref} on {place}"
            for ref, places in facts.begun.items()
            for place in places
            if ref not in facts.committed.get(place, set())
            and ref not in facts.missed.get(place, set())
        ]

    def missing_farther(self, job: JobPlan, facts: Facts) -> list[str]:
        """Return a sentence for each step that a farther tier lacks, although the job has ended in
        order or has an agent.
        """
        near, *farther = job.tiers
        # An agent learns from the job's steps on nearer tiers which earlier steps led to them.
        evidence = [near] if job.agent else job.tiers
        durable = any(facts.committed.get(tier.place) for tier in evidence)
        if not durable or near.capacity is not None:
            return []
        return [
            f"step {ref} is not on {far.place}"
            for far in farther
            for ref in sorted(self.owed(far, near, job, facts))
        ]

    # -- restores ----------------------------------------------------------------------------------

    def newest(
        self, places: Mapping[str, Collection[StepRef]], job: JobPlan, records: Records
    ) -> int:
        """Return the number of the newest step that a job can restore; -1 if there is none."""
        durable = [tier.place for tier in job.tiers]
        used = [*durable, *[MEMORY] * job.memory]
        refs = {ref for place in used for ref in places[place]}
        return max((ref.step for ref in on_branch(records, durable, refs)), default=-1)

    def no_rollback(
        self,
        job: JobPlan,
        places: Mapping[str, Collection[StepRef]],
        records: Records,
        facts: Facts,
    ) -> list[str]:
        """Return a sentence for each place without a rollback, if the job has restored an older
        step than the newest of the branch.
        """
        restored = facts.restored
        if restored is None or self.newest(places, job, records) <= restored.step:
            return []
        return [
            f"the run has gone back to {restored}, and {tier.place} does not say so"
            for tier in job.tiers
            if not any(record.step == restored.step for record in facts.records[tier.place])
        ]

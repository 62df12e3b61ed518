"""A farther tier gets what it takes, lacks and would keep, and nothing else."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt import Tier
from ckpt.catalog.inventory import StoredStep
from ckpt.model.keys import StepRef
from ckpt.retention.policy import Metrics, Retention, reasons
from ckpt.upkeep.plan import missing_steps
from tests.kit.worlds import ROOT

PAGE = ROOT / "docs/decisions/0032-what-a-farther-tier-gets-is-decided-once.md"


def stored(step: int, job: str = "abcxyz", loss: float | None = None) -> StoredStep:
    metrics = {} if loss is None else {"loss": loss}
    return StoredStep(ref=StepRef(step, job), objects=(), state="committed", metrics=metrics)


def numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def settings(text: str) -> Tier:
    fields = {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", text)}
    best = ("loss", "min") if "keep_best" in text else None
    return Tier("far", keep_best=best, **fields)  # type: ignore[arg-type]


CASES = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.read_text().splitlines()
    if re.match(r"\| `|\| \(none\)", line)
]


def test_the_page_has_a_table_of_cases() -> None:
    assert len(CASES) > 8


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[-1])
def test_a_case_of_the_page(case: list[str]) -> None:
    tier, present, nearer, most, copies, _ = case
    # In the table, the step with the lowest number has the lowest loss.
    there: Metrics = {StepRef(step, "abcxyz"): {"loss": float(step)} for step in numbers(present)}
    line = [stored(step, loss=float(step)) for step in numbers(nearer)]
    planned = missing_steps(settings(tier), there, line, *numbers(most))
    assert [step.ref.step for step in planned] == numbers(copies)


@st.composite
def situations(draw: st.DrawFn) -> tuple[Tier, Metrics, list[StoredStep]]:
    keep_last = draw(st.none() | st.integers(1, 4))
    tier = Tier(
        "far",
        every=draw(st.integers(1, 4)),
        keep_last=keep_last,
        keep_every=draw(st.none() | st.integers(1, 5)) if keep_last else None,
        keep_best=("loss", "min", draw(st.integers(1, 3)))
        if keep_last and draw(st.booleans())
        else None,
        best_counts=draw(st.booleans()),
    )
    jobs = st.sampled_from(["abcxyz", "defuvw"])
    steps = st.builds(stored, st.integers(0, 20), jobs, st.none() | st.floats(0, 9))
    present = draw(st.lists(steps, max_size=8))
    line = draw(st.lists(steps, max_size=8, unique_by=lambda step: step.ref))
    return tier, {step.ref: step.metrics for step in present}, line


@given(situations(), st.integers(0, 5))
def test_copies_are_lacking_steps_that_the_tier_takes_newest_first_and_bounded(
    situation: tuple[Tier, Metrics, list[StoredStep]], most: int
) -> None:
    tier, present, line = situation
    planned = [step.ref for step in missing_steps(tier, present, line, most)]
    assert planned == sorted(planned, reverse=True)
    assert len(planned) <= most
    assert not set(planned) & present.keys()
    assert all(ref.step % tier.every == 0 for ref in planned)
    assert planned == [step.ref for step in missing_steps(tier, present, line)][:most]


@given(situations())
def test_no_copy_is_removed_by_the_retention_that_follows(
    situation: tuple[Tier, Metrics, list[StoredStep]],
) -> None:
    tier, present, line = situation
    planned = {step.ref: step.metrics for step in missing_steps(tier, present, line)}
    # The best steps that count take the places of newest ones, so fewer candidates keep more.
    if not tier.best_counts:
        after = {**present, **planned}
        why = reasons(after, Retention.of(tier), after)
        assert all(why[ref] for ref in planned)
        assert missing_steps(tier, after, line) == []


@given(situations())
def test_a_step_that_the_tier_would_keep_is_planned(
    situation: tuple[Tier, Metrics, list[StoredStep]],
) -> None:
    tier, present, line = situation
    planned = {step.ref for step in missing_steps(tier, present, line)}
    for step in line:
        if step.ref.step % tier.every or step.ref in present or step.ref in planned:
            continue
        # Another step stands in its way: the tier keeps it only if it has fewer others.
        newer = {ref.step for ref in (*present, *planned) if ref.step > step.ref.step}
        assert tier.keep_last is not None
        assert len(newer) >= tier.keep_last or tier.best_counts

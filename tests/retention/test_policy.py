from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.catalog.inventory import StoredStep
from ckpt.config import Best
from ckpt.errors import ConfigError
from ckpt.model.keys import StepRef
from ckpt.retention.policy import Metrics, Retention, first_to_go, history, newest, reasons


def refs(*steps: int, attempt: str = "aa") -> list[StepRef]:
    return [StepRef(step, attempt) for step in steps]


def doomed(
    committed: list[StepRef], rule: Retention, metrics: Metrics | None = None, *, own: str = ""
) -> list[StepRef]:
    """Return the steps that the rule gives up, oldest first."""
    return sorted(
        ref for ref, why in reasons(committed, rule, metrics or {}, own=own).items() if not why
    )


def going(committed: list[StepRef], own: str = "", **rule: Any) -> list[int]:
    return [ref.step for ref in doomed(committed, Retention(**rule), own=own)]


def held(step: int, job: str, created_at: float = 0.0, *, committed: bool = True) -> StoredStep:
    return StoredStep(
        ref=StepRef(step, job),
        objects=(),
        state="committed" if committed else "incomplete",
        created_at=created_at,
    )


def led_to(head: StepRef, *steps: StoredStep) -> list[tuple[int, str]]:
    return [(one.ref.step, one.ref.attempt) for one in history(steps, head)]


def test_the_history_of_a_step_goes_through_any_number_of_jobs():
    jobs = [held(1, "ax"), held(2, "ax"), held(3, "bx"), held(4, "cx"), held(5, "cx")]
    assert led_to(StepRef(4, "cx"), *jobs) == [(4, "cx"), (3, "bx"), (2, "ax"), (1, "ax")]
    unfinished = held(3, "bx", committed=False)
    assert led_to(StepRef(4, "cx"), jobs[0], unfinished, jobs[3]) == [(4, "cx"), (1, "ax")]


def test_what_a_job_went_back_from_is_not_its_history():
    back = [held(10, "ax"), held(20, "ax"), held(30, "ax"), held(15, "bx"), held(40, "bx")]
    assert led_to(StepRef(40, "bx"), *back) == [(40, "bx"), (15, "bx"), (10, "ax")]
    again = [held(10, "ax", 1.0), held(10, "bx", 2.0), held(20, "cx", 3.0)]
    assert led_to(StepRef(20, "cx"), *again) == [(20, "cx"), (10, "bx")]


def test_without_a_rule_everything_stays():
    assert Retention().keeps_all
    assert going(refs(1, 2, 3)) == []


def test_the_newest_stay_and_the_multiples():
    assert going(refs(5, 10, 15, 20, 25), keep_last=2) == [5, 10, 15]
    assert going(refs(5, 10, 15, 20, 25), keep_last=2, keep_every=10) == [5, 15]
    assert going(refs(0, 7), keep_last=1, keep_every=1000) == []  # 0 is a multiple of everything


@pytest.mark.parametrize(
    ("last", "best", "count", "gone"),
    [
        (3, 5, 1, [1, 2]),  # the best is among the newest
        (3, 3, 1, [1, 2]),
        (3, 1, 1, [2, 3]),
        (1, 5, 1, [1, 2, 3, 4]),
        (1, 2, 1, [1, 3, 4]),  # the newest stays in any case
        (3, 1, 2, [2, 3]),
        (9, 1, 1, []),
    ],
)
def test_the_best_may_count_among_the_newest(last: int, best: int, count: int, gone: list[int]):
    rule = Retention(keep_last=last, keep_best=Best("score", "max", count), best_counts=True)
    scores = {ref: {"score": 9.0 if ref.step == best else ref.step / 9} for ref in refs(*range(6))}
    committed = refs(1, 2, 3, 4, 5)
    assert [ref.step for ref in doomed(committed, rule, scores)] == gone


def test_two_attempts_at_a_step_stay_or_go_together():
    assert doomed([*refs(1, 2), *refs(1, 2, attempt="bb")], Retention(keep_last=1)) == [
        StepRef(1, "aa"),
        StepRef(1, "bb"),
    ]


def test_after_a_rollback_the_newest_of_the_running_attempt_stays_whatever_the_numbers_given_up():
    committed = [*refs(1200, 1300), *refs(1210, attempt="bb")]
    assert going(committed, own="bb", keep_last=1) == [1200]
    assert going([*committed, *refs(1220, attempt="bbtb")], own="bb", keep_last=1) == [1200, 1210]


@given(
    st.lists(st.tuples(st.integers(0, 30), st.sampled_from(["aa", "bb"])), unique=True),
    st.integers(1, 5),
    st.integers(1, 7) | st.none(),
    st.sampled_from(["", "aa", "bb"]),
)
def test_the_newest_of_all_and_of_ones_own_never_go(found, last, every, own):
    committed = [StepRef(step, attempt) for step, attempt in found]
    gone = set(doomed(committed, Retention(keep_last=last, keep_every=every), own=own))
    left = [ref for ref in committed if ref not in gone]
    for mine in (committed, [ref for ref in committed if own and ref.attempt == own]):
        if mine:
            assert max(ref.step for ref in mine) in {ref.step for ref in left}
    assert len({ref.step for ref in left}) >= min(last, len({ref.step for ref in committed}))


@pytest.mark.parametrize(
    "rule",
    [{"keep_last": 0}, {"keep_last": True}, {"keep_every": 3}, {"keep_last": 1, "keep_every": 0}],
)
def test_a_rule_that_makes_no_sense_is_refused(rule):
    with pytest.raises(ConfigError):
        Retention(**rule)


def losses(**values: float) -> dict[StepRef, dict[str, float]]:
    return {StepRef(int(step[1:]), "aa"): {"loss": value} for step, value in values.items()}


def best(metrics: dict[StepRef, dict[str, float]], *steps: int, **rule: Any) -> list[int]:
    """Return the steps that stay, with the newest."""
    gone = doomed(refs(*steps), Retention(keep_last=1, **rule), metrics)
    return sorted({*steps} - {ref.step for ref in gone})


def test_the_best_stay_beside_the_newest():
    found = losses(s1=3.0, s2=1.0, s3=2.0, s4=9.0)
    assert best(found, 1, 2, 3, 4, keep_best=Best("loss", "min")) == [2, 4]
    assert best(found, 1, 2, 3, 4, keep_best=Best("loss", "min", 2)) == [2, 3, 4]
    # the newest stays anyway
    assert best(found, 1, 2, 3, 4, keep_best=Best("loss", "max")) == [4]
    assert best(found, 1, 2, 3, 4, keep_best=Best("accuracy", "max")) == [4]


def test_of_equal_ones_the_newest_is_the_best_and_what_is_no_number_never_is():
    found = losses(s1=1.0, s2=1.0, s3=float("nan"), s4=float("-inf"), s6=5.0)
    assert best(found, 1, 2, 3, 4, 5, 6, keep_best=Best("loss", "min")) == [2, 6]
    assert best(found, 3, 4, 5, 6, keep_best=Best("loss", "min", 9)) == [6]


def test_each_step_that_stays_has_its_reasons():
    rule = Retention(keep_last=1, keep_every=2, keep_best=Best("loss", "min"))
    why = reasons(refs(1, 2, 3, 4), rule, losses(s2=0.5, s3=1.0))
    assert {ref.step: reported for ref, reported in why.items()} == {
        1: (),
        2: ("multiple of 2", "best loss"),
        3: (),
        4: ("newest", "multiple of 2"),
    }


def test_a_full_tier_gives_up_what_the_rule_would_then_the_oldest_and_the_best_last():
    rule = Retention(keep_last=3, keep_best=Best("loss", "min"))
    order = first_to_go(refs(1, 2, 3, 4, 5), rule, losses(s1=1.0, s2=2.0, s3=0.1))
    assert [ref.step for ref in order] == [1, 2, 4, 5, 3]
    rolled_back = [*refs(10, 11), *refs(5, 6, attempt="bb")]
    assert [ref.step for ref in first_to_go(rolled_back, Retention(), own="bb")] == [10, 11, 5, 6]
    assert newest(rolled_back, own="bb") == StepRef(6, "bb")
    assert newest(rolled_back) == StepRef(11, "aa")
    assert newest([]) is None


def test_best_alone_is_refused_for_it_adds_to_the_newest():
    with pytest.raises(ConfigError, match="keep_best adds to keep_last"):
        Retention(keep_best=Best("loss", "min"))

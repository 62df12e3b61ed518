from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.errors import ConfigError
from ckpt.model.layout import StepRef
from ckpt.plan.retention import Retention, doomed


def refs(*steps: int, attempt: str = "aa") -> list[StepRef]:
    return [StepRef(step, attempt) for step in steps]


def going(committed: list[StepRef], own: str = "", **rule: int) -> list[int]:
    return [ref.step for ref in doomed(committed, Retention(**rule), own=own)]


def test_without_a_rule_everything_stays():
    assert Retention().keeps_all
    assert going(refs(1, 2, 3)) == []


def test_the_newest_stay_and_the_multiples():
    assert going(refs(5, 10, 15, 20, 25), keep_last=2) == [5, 10, 15]
    assert going(refs(5, 10, 15, 20, 25), keep_last=2, keep_every=10) == [5, 15]
    assert going(refs(0, 7), keep_last=1, keep_every=1000) == []  # 0 is a multiple of everything


def test_two_attempts_at_a_step_stay_or_go_together():
    assert doomed([*refs(1, 2), *refs(1, 2, attempt="bb")], Retention(keep_last=1)) == [
        StepRef(1, "aa"),
        StepRef(1, "bb"),
    ]


def test_after_a_rollback_the_newest_of_the_running_attempt_stays_whatever_the_numbers_given_up():
    committed = [*refs(1200, 1300), *refs(1210, attempt="bb")]
    assert going(committed, own="bb", keep_last=1) == [1200]
    assert going([*committed, *refs(1220, attempt="bbt1")], own="bb", keep_last=1) == [1200, 1210]


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
    "rule", [{"keep_last": 0}, {"keep_last": True}, {"keep_every": 3}, {"keep_last": 1, "keep_every": 0}]
)
def test_a_rule_that_makes_no_sense_is_refused(rule):
    with pytest.raises(ConfigError):
        Retention(**rule)

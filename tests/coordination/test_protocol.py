"""Three ranks, two attempts, two tiers, and whoever finishes or clears away: kills, stops, delays, lost replies and duplicates at every request. See `simulation`."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

import ckpt.coordination.committer
from ckpt.coordination.commit import Committed, Unknown
from ckpt.coordination.refusal import Refused
from tests.coordination.simulation import (
    BOUND,
    RANKS,
    TIMEOUT,
    Attempt,
    Simulation,
    check_bounds,
    check_tiers,
    check_verdicts,
    start_finisher,
    start_pruner,
)

some = st.integers(0, 30)


class Protocol(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.sim = Simulation()
        self.attempts: list[Attempt] = []
        self.seen: dict[tuple[int, str], bytes] = {}

    @initialize()
    def a_job_saves(self) -> None:
        ckpt.coordination.committer.time = SimpleNamespace(monotonic=lambda: self.sim.clock)  # type: ignore[attr-defined]
        self.attempts.append(Attempt(self.sim, "aaaaaa"))

    def let(self, number: int) -> None:
        if tasks := self.sim.runnable():
            self.sim.let(tasks[number % len(tasks)])
            self.check()

    def check(self) -> None:
        check_tiers(self.sim, self.attempts, self.seen)
        check_verdicts(self.sim)
        check_bounds(self.sim)

    @rule(numbers=st.lists(some, min_size=1, max_size=12))
    def some_go_on(self, numbers: list[int]) -> None:
        for number in numbers:
            self.let(number)

    @rule(number=some, times=st.integers(1, 40))
    def one_goes_on_alone(self, number: int, times: int) -> None:
        tasks = self.sim.runnable()
        for _ in range(times):
            if tasks and (task := tasks[number % len(tasks)]) in self.sim.runnable():
                self.sim.let(task)
                self.check()

    @rule()
    def all_go_on_in_turn(self) -> None:
        for _ in range(10):
            for task in self.sim.runnable():
                self.sim.let(task)
                self.check()

    @rule()
    def time_passes(self) -> None:
        self.sim.pass_time()
        self.check()

    @rule(number=some, arrives=st.booleans())
    def one_is_killed(self, number: int, arrives: bool) -> None:
        living = [task for task in self.sim.tasks if not task.ended]
        if living:
            task = living[number % len(living)]
            self.sim.kill(task, arrives=arrives and task.doing.startswith("put"))
            self.check()

    @rule(number=some)
    def a_store_of_a_job_is_gone(self, number: int) -> None:
        self.attempts[number % len(self.attempts)].store.gone = True

    @rule(number=some, fault=st.sampled_from(["full", "lost", "late"]))
    def a_put_will_fail(self, number: int, fault: str) -> None:
        living = [task for task in self.sim.tasks if not task.ended]
        if living:
            living[number % len(living)].fault = fault

    @rule()
    def what_was_late_arrives(self) -> None:
        if self.sim.in_flight:
            store, key, data, if_absent = self.sim.in_flight.pop(0)
            if not (if_absent and key in store.objects):
                store.place(key, data, if_absent)
            self.check()

    @precondition(lambda self: len(self.attempts) == 1)
    @rule()
    def the_next_job_saves(self) -> None:
        self.attempts.append(Attempt(self.sim, "bbbbbb"))

    @rule(number=some, index=st.integers(0, 1))
    def somebody_finishes(self, number: int, index: int) -> None:
        if sum(not task.ended for task in self.sim.tasks) < 12:
            start_finisher(self.sim, self.attempts[number % len(self.attempts)], index)

    @rule(index=st.integers(0, 1))
    def what_a_dead_job_left_is_cleared_away(self, index: int) -> None:
        dead = [attempt for attempt in self.attempts if attempt.over]
        if dead and not self.sim.in_flight:
            start_pruner(self.sim, dead[0], index)

    def teardown(self) -> None:
        """Whatever has happened: if all that live go on, all come to an end."""
        try:
            for _ in range(3000):
                if tasks := self.sim.runnable():
                    for task in tasks:
                        self.sim.let(task)
                    self.check()
                elif not self.sim.pass_time():
                    break
            assert all(task.ended for task in self.sim.tasks), [t.doing for t in self.sim.tasks if not t.ended]
        finally:
            for task in self.sim.tasks:
                if not task.ended:
                    self.sim.kill(task)
            ckpt.coordination.committer.time = __import__("time")  # type: ignore[attr-defined]


few = settings(max_examples=60, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck))
many = settings(few, max_examples=4000, stateful_step_count=60)


def test_whatever_happens_what_is_listed_is_whole_and_all_hear_the_same() -> None:
    run_state_machine_as_test(Protocol, settings=few)


@pytest.mark.torture
@pytest.mark.timeout(1800)
def test_whatever_happens_thousands_of_times() -> None:
    run_state_machine_as_test(Protocol, settings=many)

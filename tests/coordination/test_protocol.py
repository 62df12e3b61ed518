"""Three ranks, two attempts, two tiers, and tasks that finish or remove a step.

At every request there are kills, stops, delays, lost replies and duplicates. See `simulation`.
"""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

import ckpt.coordination.committer
from tests.coordination.simulation import (
    Attempt,
    Simulation,
    Task,
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
        self.checked = -1

    @initialize(begun=st.sampled_from(["now", "refused", "finished too", "late", "withdrawn"]))
    def a_job_saves(self, begun: str) -> None:
        """Begin a save, or go on to just before two tasks may want different outcomes."""
        committer: Any = ckpt.coordination.committer
        committer.time = SimpleNamespace(monotonic=lambda: self.sim.clock)
        self.attempts.append(Attempt(self.sim, "aaaaaa"))
        first, second, last = self.attempts[0].tasks
        match begun:
            case "refused" | "finished too":  # all parts are there, and the step is refused
                self.come_to("tell", last)
                self.come_to("/claim", first, second)
                if begun == "finished too":
                    self.come_to("/claim", start_finisher(self.sim, self.attempts[0], 0))
            case "late":
                # the leader is about to refuse; the message that it waited for has arrived, and
                # another rank wants to commit
                self.come_to("tell", last)
                self.come_to("claim", second)
                self.come_to("/intent", first)
                self.sim.let(last)
                self.come_to("decide", second)
            case "withdrawn":  # the leader will fail to put, another task is about to take its turn
                self.come_to("manifest.json", first, second, last)
                first.fault = "full"
                self.come_to("/turn manifest.json", second)
            case _:
                pass

    def come_to(self, what: str, *tasks: Task) -> None:
        """Let these tasks go on until each is about to do ``what``. A task that is there waits."""
        while going := [
            task for task in tasks if not any(word in task.doing for word in what.split())
        ]:
            able = [task for task in going if task in self.sim.runnable()]
            for task in able:
                self.sim.let(task)
            if not able and (len(going) < len(tasks) or not self.sim.pass_time()):
                break

    def check(self) -> None:
        if self.checked == self.sim.changes:
            return
        self.checked = self.sim.changes
        check_tiers(self.sim, self.attempts, self.seen)
        check_verdicts(self.sim)
        check_bounds(self.sim)

    @rule(seed=st.integers(0, 2**32), times=st.integers(1, 40))
    def some_go_on(self, seed: int, times: int) -> None:
        chance = Random(seed)
        for _ in range(times):
            if tasks := self.sim.runnable():
                self.sim.let(chance.choice(tasks))
                self.check()

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

    @rule(number=some, rounds=st.integers(1, 60))
    def all_but_one_go_on(self, number: int, rounds: int) -> None:
        """One task is stopped, and time passes where the others wait for it."""
        tasks = [task for task in self.sim.tasks if not task.ended]
        stopped = tasks[number % len(tasks)] if tasks else None
        for _ in range(rounds):
            going = [task for task in self.sim.runnable() if task is not stopped]
            if not going:
                self.sim.pass_time()
            for task in going:
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
        """All tasks that live go on, and all come to an end."""
        try:
            for _ in range(3000):
                if tasks := self.sim.runnable():
                    for task in tasks:
                        self.sim.let(task)
                    self.check()
                elif not self.sim.pass_time():
                    break
            assert all(task.ended for task in self.sim.tasks), [
                t.doing for t in self.sim.tasks if not t.ended
            ]
        finally:
            for task in self.sim.tasks:
                if not task.ended:
                    self.sim.kill(task)
            ckpt.coordination.committer.time = __import__("time")  # type: ignore[attr-defined]


few = settings(max_examples=60, stateful_step_count=20, suppress_health_check=list(HealthCheck))
many = settings(few, max_examples=3000, stateful_step_count=30)


def test_whatever_happens_what_is_listed_is_whole_and_all_hear_the_same() -> None:
    run_state_machine_as_test(Protocol, settings=few)


@pytest.mark.torture
@pytest.mark.timeout(1800)
def test_whatever_happens_thousands_of_times() -> None:
    run_state_machine_as_test(Protocol, settings=many)

"""A trainer gets a signal: it saves once more, and ends as the signal would have ended it.

Each case of tests/stopping.py is a process of its own.
"""

from __future__ import annotations

import json
import signal

import pytest

from tests.kit.worlds import ROOT, run_script

GRACE = 0.7

Told = dict[str, tuple[int, list[int], float, str]]


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """The exit status, committed steps, seconds and output of each case."""
    said = run_script(ROOT / "tests" / "stopping.py", tmp_path_factory.mktemp("stop"), timeout=200)
    return json.loads(said.splitlines()[-1])


@pytest.mark.parametrize(
    ("case", "status", "steps", "words"),
    [
        ("terminated", -signal.SIGTERM, [3, 4], "stops after 4"),
        ("user_signal", -signal.SIGUSR1, [3, 4], "stops after 4"),
        ("nothing_happens", -signal.SIGTERM, [3, 6], "returned"),
        ("at_a_step_that_is_saved_anyway", -signal.SIGTERM, [3, 6], "stops after 6"),
        ("the_user_decides_how_it_ends", 0, [3, 4], "returned"),
        ("an_earlier_handler_has_the_last_word", 70 + signal.SIGTERM, [3, 4], "stops after 4"),
        ("what_was_ignored_is_ignored", 0, [3, 4], "returned"),
        ("many_signals", -signal.SIGTERM, [3, 4], "stops after 4"),
        ("interrupted_once", 0, [3, 4], "stops after 4"),
        ("interrupted_twice", 9, [3], ""),
        ("signals_to_a_fork_are_its_own", 0, [3, 6], "returned"),
        ("an_error_ends_it_as_ever", 5, [3], ""),
        ("tiers_that_would_not_take_the_step_take_the_last", -signal.SIGTERM, [4], "stops after 4"),
        ("a_save_that_would_be_skipped_waits", -signal.SIGTERM, [3, 4], "stops after 4"),
        ("an_earlier_error_does_not_come_before_it", -signal.SIGTERM, [4], "no space left"),
        ("the_manager_is_not_closed", 0, [4], ""),
        ("wrong_calls", 0, [], ""),
        ("requested", 0, [3, 4], "stops after 4"),
        ("requested_and_then_signalled", -signal.SIGUSR1, [4], "all ranks stop"),
        ("requested_and_not_in_time", -signal.SIGTERM, [3], "the deadline of the request is over"),
    ],
)
def test_a_signal_stops_it_after_a_last_save(
    reported: Told, case: str, status: int, steps: list[int], words: str
) -> None:
    assert reported[case][:2] == [status, steps], reported[case]
    assert words in reported[case][3]
    assert "Traceback" not in reported[case][3]


@pytest.mark.parametrize(
    "case",
    [
        "the_grace_time_runs_out_while_the_last_save_streams",
        "the_training_thread_is_stuck_where_python_hears_nothing",
        "the_store_of_the_job_does_not_answer",
    ],
)
def test_when_the_grace_time_is_over_it_ends_all_the_same_and_older_steps_are_whole(
    reported: Told, case: str
) -> None:
    status, steps, seconds, output = reported[case]
    assert (status, steps) == (-signal.SIGTERM, [3])
    assert GRACE < seconds < GRACE + 25  # the store would take 30 s
    assert "the grace time of 0.7 s is over" in output

"""``ckpt top`` shows runs in 80 columns."""

from __future__ import annotations

import pytest

from ckpt.config import Tier
from ckpt.events import SaveCommitted, SaveStaged
from ckpt.observe.journal import Journal, note_verified
from ckpt.observe.run_view import watch_runs
from ckpt.storage.api import StorageBackend
from ckpt.storage.registry import open_backend
from tests.checkpoints import write_checkpoint
from tests.cli.conftest import ARRAYS, Cli, Written


def test_it_shows_tiers_and_steps_in_80_columns(cli: Cli, steps: dict[int, Written]) -> None:
    journal = Journal("runs", rank=0)
    place = journal_root()
    for step in (50, 300, 400):
        journal(SaveStaged(step=step, nbytes=7, stall_seconds=0.0123, tiers=(place,)))
    journal(SaveCommitted(step=50, tier=place, nbytes=7, durable_seconds=1))
    journal.close()
    ran = cli("top", "--once")
    assert (ran.code, ran.err) == (0, "")
    rows = [line.split() for line in ran.out.splitlines() if line.strip()]
    assert ["400", "7", "B", "12.3", "ms", "saving"] in rows
    assert ["50", "7", "B", "12.3", "ms", "removed"] in rows
    assert any(row[0] == "300" and row[-1] == "committed" for row in rows)
    assert max(map(len, ran.out.splitlines())) <= 80


@pytest.mark.parametrize("is_over", [False, True])
def test_it_says_whether_the_job_lives(cli: Cli, steps: dict[int, Written], is_over: bool) -> None:
    journal = Journal("runs", rank=0)
    journal(SaveStaged(step=400, nbytes=7, stall_seconds=0, tiers=(journal_root(),)))
    if is_over:
        journal.end()
    [line] = [line for line in cli("top", "--once").out.splitlines() if "the job" in line]
    assert line.startswith("the job has ended" if is_over else "the job lives")
    journal.close()


def journal_root() -> str:
    return open_backend("runs").url


def test_a_hostile_name_moves_no_cursor(cli: Cli, steps: dict[int, Written]) -> None:
    journal = Journal("runs", rank=0)
    journal(SaveStaged(step=400, nbytes=7, stall_seconds=1, tiers=("\x1b[2J[red]x",)))
    journal.close()
    ran = cli("top", "--once")
    assert "\x1b" not in ran.out
    assert "[red]x" in ran.out


def test_abandoned_steps_are_marked(cli: Cli, steps: dict[int, Written]) -> None:
    first, *others = sorted(steps)
    assert cli("rollback", "runs", first).code == 0
    rows = [line.split() for line in cli("top", "--once").out.splitlines() if line.strip()]
    states = {row[0]: row[-2:] for row in rows if row[0].isdecimal() and int(row[0]) in steps}
    assert states[str(first)][-1] == "committed"
    assert all(states[str(step)] == ["committed,", "abandoned"] for step in others)


@pytest.mark.parametrize("words", [("--interval", "0"), ("--config", "none.toml")])
def test_a_wrong_call_is_refused(cli: Cli, words: tuple[str, ...]) -> None:
    assert cli("top", "--once", *words).code == 2


def test_an_empty_place_has_no_steps(cli: Cli) -> None:
    ran = cli("top", "nothing", "--once")
    assert ran.code == 0
    assert "nothing" in ran.out
    assert "nothing does not exist" in ran.err
    [tier] = watch_runs([Tier("nothing")], {})[0].look(60).tiers
    assert tier.error == "this folder does not exist"


def test_a_folder_that_was_removed_still_has_its_history(cli: Cli) -> None:
    journal, place = Journal("gone", rank=0), open_backend("gone").url
    journal(SaveStaged(step=1, nbytes=7, stall_seconds=1, tiers=(place,)))
    journal(SaveCommitted(step=1, tier=place, nbytes=7, durable_seconds=1))
    journal.close()
    ran = cli("top", "gone", "--once")
    assert "removed" in ran.out
    assert "this folder" not in ran.out


def test_a_step_that_the_tier_lists_does_not_wait(cli: Cli, steps: dict[int, Written]) -> None:
    journal = Journal("runs", rank=0)
    for step in (300, 500):  # The agent has committed 300, which its trainer had left to it
        journal(SaveStaged(step=step, nbytes=7, stall_seconds=1, tiers=(journal_root(),)))
    journal.close()
    [tier] = watch_runs([Tier("runs")], {})[0].look(60).tiers
    assert tier.waiting == 1


def test_a_verification_counts_for_the_youngest_attempt_alone(
    cli: Cli, backend: StorageBackend
) -> None:
    for number, attempt in enumerate(("bbbyyy", "aaaxxx")):
        write_checkpoint(backend, 1, ARRAYS, attempt=attempt, created_at=number + 1.0)
    journal = Journal("runs", rank=0)
    journal(SaveStaged(step=1, nbytes=7, stall_seconds=1, tiers=(backend.url,)))
    journal.close()
    note_verified(backend.url, 1, "1 fault found")
    view = watch_runs([Tier("runs")], {})[0].look(60)
    assert {step.attempt: [cell.state for cell in step.cells] for step in view.steps} == {
        "aaaxxx": ["damaged"],
        "bbbyyy": ["committed"],
    }

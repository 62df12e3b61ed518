"""A rank dies while its job goes back. The ranks of the next job agree on the branch and on the
step, and no step mixes histories.
"""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import pytest

import ckpt
from tests.crash.rollbacks import NEW, OLD, what_should_be_there
from tests.distributed.survivors import reported, run_world
from tests.distributed.workers.going_back import LATER, TIERS
from tests.distributed.workers.going_back import NEW as NEW_STEP
from tests.distributed.workers.going_back import OLD as OLD_STEP

pytestmark = pytest.mark.distributed
RANKS = 4


def value(step: int, branch: int) -> int:
    """Return the values of a step, as its history makes them."""
    return step * OLD_STEP if branch == OLD else OLD_STEP + (step - 1) * NEW_STEP


def run(root: Path, *args: object) -> tuple[bool, str]:
    """Return whether no rank died, and what the ranks have noted."""
    (root / "log").write_text("")
    printed = run_world(RANKS, "going_back.py", root, *args, store_here=True, end_together=True)
    return all("ALL WELL" in text for text in printed), (root / "log").read_text()


def check_listed_steps(root: Path) -> None:
    """Check each checkpoint of each tier, on every branch."""
    for manifest in itertools.chain(*(root.glob(f"{tier}/*/manifest.json") for tier in TIERS)):
        alone = root / "alone"
        shutil.copytree(manifest.parent, alone / manifest.parent.name)
        step = int(manifest.parent.name[5:14])
        (number,) = {int(x) for part in ckpt.load(alone).values() for x in part.tolist()}
        before = value(step - 1, OLD), value(step - 1, NEW)
        allowed = {value(step, OLD), value(step, NEW), *(x + LATER for x in before)}
        assert number in allowed, (manifest, number)
        shutil.rmtree(alone)


def kill(template: Path, root: Path, victim: int, number: int) -> bool:
    """Kill a rank at its call ``number``, and check what is left. Return whether it died."""
    shutil.copytree(template, root)
    has_ended, notes = run(root, "back", victim, number)
    moment = f"rank {victim}, call {number}"
    printed = run_world(RANKS, "going_back.py", root, "check", store_here=True, end_together=True)
    reported(printed, *range(RANKS))
    answers = (root / "log").read_text().removeprefix(notes).splitlines()
    restored = {tuple(map(int, line.split()[1:])) for line in answers}
    assert len(answers) == RANKS
    assert len(restored) == 1, f"{moment}: the ranks do not agree: {answers}"
    allowed = {(step, value(step, branch)) for step, branch in what_should_be_there(notes)}
    assert restored <= allowed, f"{moment}: {restored} after {notes!r}"
    check_listed_steps(root)
    shutil.rmtree(root)
    return not has_ended


@pytest.fixture
def template(tmp_path: Path) -> Path:
    root = tmp_path / "template"
    root.mkdir()
    has_ended, _ = run(root, "first")
    assert has_ended
    return root


def test_the_leader_dies_in_the_first_save_of_the_branch(template: Path, tmp_path: Path) -> None:
    assert kill(template, tmp_path / "run", 0, 60)


@pytest.mark.torture
@pytest.mark.timeout(3700)
@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_may_die_at_each_of_its_calls_to_a_store(
    template: Path, tmp_path: Path, victim: int
) -> None:
    deaths = 0
    for number in itertools.count(1):
        if not kill(template, tmp_path / "run", victim, number):
            break
        deaths = number
    assert deaths > 10

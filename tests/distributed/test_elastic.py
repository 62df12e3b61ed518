"""A job loses ranks, gets signals, and changes its size.

torchrun restarts it, and it goes on from the newest whole step.
"""

from __future__ import annotations

import json
import os
import signal
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from ckpt.catalog.step_listing import committed
from ckpt.catalog.verify import verify_step
from ckpt.pipeline.workers import Workers
from ckpt.storage.registry import open_backend
from tests.distributed.launch import TORCHRUN, WORKERS
from tests.distributed.tormentor import Job
from tests.kit.worlds import run_forks
from tests.servers import free_port

pytestmark = pytest.mark.distributed

WARM = WORKERS.parent / "warm_torchrun.py"

Note = dict[str, Any]
LIVES = {
    "0": [2, "save 4"],
    "1": [0, "restore"],  # rank 0 leads, and has the job's store
    "2": [1, "step 5"],
    "3": [2, "signal 7"],
    "4": [-1, "stop"],
}
WORLDS = [3, 2, 3]
STEPS = [10, 13, 16]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run torchrun three times on one root. In the first run ranks die."""
    made = tmp_path_factory.mktemp("elastic")
    runs: list[str] = []
    for world, steps in zip(WORLDS, STEPS, strict=True):
        (made / str(steps)).mkdir()
        (made / str(steps) / "run").symlink_to(made / "run")
        runs += [*(["--"] if runs else []), "--standalone", f"--nproc-per-node={world}"]
        plan = ["--max-restarts=5", json.dumps(LIVES), "reference"] if steps == STEPS[0] else []
        runs += [
            *plan[:1],
            str(WORKERS / "elastic.py"),
            str(made / str(steps)),
            str(steps),
            *plan[1:],
        ]
    (made / "run").mkdir()
    ended = run_forks([WARM, made / "log", *runs], [TORCHRUN], timeout=240)
    assert ended.said[0].splitlines() == [f"ended {n} 0" for n in range(len(WORLDS))], (
        made / "log"
    ).read_text()[-8000:]
    return made


def notes(folder: Path, rank: int, steps: int = STEPS[0]) -> list[Note]:
    return [
        json.loads(line)
        for line in (folder / str(steps) / f"notes-{rank}.jsonl").read_text().splitlines()
    ]


def test_a_rank_killed_in_the_midst_of_a_save_a_restore_or_a_step_costs_the_steps_since_the_last_save(  # noqa: E501
    folder: Path,
) -> None:
    for rank in range(WORLDS[0]):
        restored = {
            note["life"]: note["restored"] for note in notes(folder, rank) if "restored" in note
        }
        assert {0: 0, 2: 2, 3: 4}.items() <= restored.items(), restored
        assert restored.get(1, 2) == 2
        assert all(note.get("skipped", []) == [] for note in notes(folder, rank))


def test_a_signal_to_one_rank_stops_all_after_the_same_step_and_loses_nothing(folder: Path) -> None:
    stops = [
        [note["stops"] for note in notes(folder, rank) if "stops" in note]
        for rank in range(WORLDS[0])
    ]
    assert stops == [stops[0]] * WORLDS[0]
    (step,) = stops[0]
    assert step >= 7
    assert [
        note["restored"] for note in notes(folder, 2) if note["life"] == 4 and "restored" in note
    ] == [step]


def test_a_stopped_rank_fails_one_save_by_its_name_and_holds_up_nobody(folder: Path) -> None:
    reported = [
        note["stopped"]
        for rank in range(WORLDS[0])
        for note in notes(folder, rank)
        if "stopped" in note
    ]
    assert len(reported) == WORLDS[0], (folder / "log").read_text()[-8000:]
    assert all("rank(s) 2" in words for words in reported), reported


def test_the_losses_are_those_of_an_uninterrupted_run_bit_for_bit(folder: Path) -> None:
    seen = notes(folder, 0)
    reference = {note["reference"]: note["losses"] for note in seen if "reference" in note}
    steps = [note["step"] for note in seen if "step" in note]
    assert set(steps) == set(reference) == set(range(1, STEPS[0] + 1))
    assert len(steps) > STEPS[0]  # some steps were trained twice
    assert all(note["losses"] == reference[note["step"]] for note in seen if "step" in note)


def test_three_ranks_then_two_and_three_again_go_on_from_each_other(folder: Path) -> None:
    saved = {
        note["saving"]: note["digest"]
        for steps in STEPS
        for note in notes(folder, 0, steps)
        if "saving" in note
    }
    for before, steps, world in zip(STEPS, STEPS[1:], WORLDS[1:], strict=False):
        for rank in range(world):
            (found,) = (note for note in notes(folder, rank, steps) if "restored" in note)
            assert found["restored"] == before - before % 2
            assert found["digest"] == saved[found["restored"]]
            trained = [note["step"] for note in notes(folder, rank, steps) if "step" in note]
            assert trained == list(range(found["restored"] + 1, steps + 1))


@pytest.mark.torture
def test_a_node_that_joins_costs_no_step_and_one_that_is_lost_those_since_the_last_commit(
    tmp_path: Path,
) -> None:
    """Run torchrun --nnodes=1:2 with both nodes on this machine: two ranks, then four, then two."""
    port = free_port()
    nodes = [
        Job(
            tmp_path,
            (
                "--nnodes=1:2",
                "--nproc-per-node=2",
                "--rdzv-backend=c10d",
                f"--rdzv-endpoint=localhost:{port}",
                "--rdzv-id=elastic",
                "--rdzv-conf=last_call_timeout=1",
                "--local-addr=localhost",
                "--max-restarts=10",
            ),
        )
        for _ in range(2)
    ]
    first, second = nodes
    groups: list[list[Note]] = []

    def committed_by_group(number: int, world: int) -> bool:
        """Return whether the n-th group of workers has this many ranks, and has committed two
        steps.
        """
        groups.clear()
        for note in first.notes:
            if note["rank"] == 0:
                if "up" in note:
                    groups.append([])
                groups[-1].append(note)
        return (
            len(groups) > number
            and groups[number][0]["world"] == world
            and sum("committed" in note for note in groups[number]) > 1
        )

    with ExitStack() as running:
        for node in nodes:
            running.callback(node.end)
        first.start()
        first.wait(lambda: committed_by_group(0, 2), 90, "two ranks")
        second.start()
        first.wait(lambda: committed_by_group(1, 4), 90, "four ranks")
        known = max(note["committed"] for note in first.notes if "committed" in note)
        second.kill_agent()
        for note in first.notes:
            if note.get("agent") == second.agent:
                with suppress(ProcessLookupError):
                    os.kill(note["up"], signal.SIGKILL)
        first.wait(lambda: committed_by_group(2, 2), 90, "two ranks again")
    restored = [next(note["restored"] for note in group if "restored" in note) for group in groups]
    (stopped,) = (note["stops"] for note in groups[0] if "stops" in note)
    assert restored[:2] == [0, stopped]
    assert restored[2] >= known


def test_every_step_that_is_listed_is_whole(folder: Path) -> None:
    backend = open_backend(str(folder / "run"))
    refs = committed(backend)
    with Workers("check", 2) as workers:
        assert all(verify_step(backend, ref, workers=workers).intact for ref in refs)
    assert sorted(ref.step for ref in refs if ref.step % 2 == 0) == [2, 4, 6, 8, 10, 12, 14, 16]

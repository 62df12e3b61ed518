"""The clock jumps under the agent, which tries, keeps and verifies as without the jump."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckpt import Tier
from ckpt.agent.client import status
from ckpt.agent.folder import AgentFolder
from tests.agent.conftest import await_state, job_of, memory_folder
from tests.kit.damage import data_of, flip, look
from tests.kit.marks import torture
from tests.kit.stores import whole
from tests.kit.waiting import until
from tests.kit.worlds import run_code
from tests.processes import ended

HOUR, DAY = 3600.0, 86400.0
AGENT = """
import sys, time
from pathlib import Path
now = time.time
time.time = lambda: now() + float(Path(sys.argv[1]).read_text())
from ckpt.agent.__main__ import main
sys.exit(main(["run"]))
"""
TRAINER = """
import os, sys, torch
from ckpt import CheckpointManager, Tier
manager = CheckpointManager([Tier(url) for url in sys.argv[1:]], agent="required")
manager.save_async({"w": torch.ones(200_000)}, 1).result(60, tier=manager._tiers[0].url)
os.kill(os.getpid(), 9)
"""
Jump = Callable[[float], None]


@pytest.fixture
def jump(place: AgentFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Jump]:
    """Set the clock of a running agent off by this many seconds."""
    monkeypatch.setenv("CKPT_AGENT_MEMORY_SECONDS", "600")
    monkeypatch.setenv("CKPT_AGENT_SCRUB_SECONDS", "2")
    clock, new = tmp_path / "clock", tmp_path / "new"
    clock.write_text("0")

    def set_clock(seconds: float) -> None:
        new.write_text(str(seconds))
        os.replace(new, clock)

    with (
        open(place.log, "wb") as log,
        ended(subprocess.Popen([sys.executable, "-c", AGENT, str(clock)], stderr=log)),
    ):
        assert until(lambda: status(place))
        yield set_clock


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [2 * DAY, *torture(-HOUR)])
def test_a_try_that_has_failed_is_followed_by_others(
    place: AgentFolder, tmp_path: Path, jump: Jump, seconds: float
) -> None:
    """The failed try is far in the future of the clock, or a day after the first one."""
    (tmp_path / "far").write_text("no folder")
    run_code(TRAINER, tmp_path / "near", tmp_path / "far" / "run", status=-signal.SIGKILL)
    assert until(lambda: (job := job_of(place)) and job.state == "waiting" and job.error)
    first = await_state(place, "waiting")
    jump(seconds)
    job = await_state(place, "waiting", "given up")
    assert job.state == "waiting"
    assert abs(job.next_at - (time.time() + seconds)) <= 20
    assert until(lambda: (job := job_of(place)) and abs(job.since - first.since) > HOUR / 2)
    assert await_state(place, "waiting", "given up").state == "waiting"
    (tmp_path / "far").unlink()
    (tmp_path / "far" / "run").mkdir(parents=True)  # An agent makes no root
    await_state(place, "done")
    assert whole(tmp_path / "far" / "run") == [1]


def test_memory_is_kept_as_long_and_an_idle_agent_stays(
    place: AgentFolder, tmp_path: Path, jump: Jump
) -> None:
    before = status(place)
    jump(3 * HOUR)
    status(place)
    again = status(place)  # it has read the clock since
    assert before is not None
    assert again is not None
    assert again.pid == before.pid
    memory = memory_folder(Tier("memory"), Tier(str(tmp_path / "near")))
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, memory, ignore_errors=True)
        run_code(TRAINER, "memory", tmp_path / "near", status=-signal.SIGKILL)
        await_state(place, "kept")
        jump(6 * HOUR)
        for _ in range(2):
            job = job_of(place)
            assert job is not None
            assert job.state == "kept"
            assert 500 < job.next_at - (time.time() + 6 * HOUR) <= 600
        assert memory.exists()


def test_a_clock_that_goes_back_delays_no_verification(
    place: AgentFolder, tmp_path: Path, jump: Jump
) -> None:
    tiers = [Tier(str(tmp_path / "near")), Tier(str(tmp_path / "far"))]
    run_code(TRAINER, *(tier.url for tier in tiers), status=-signal.SIGKILL)
    await_state(place, "done")
    assert until(lambda: (job := job_of(place)) and job.scrub.verified == 2)
    jump(-HOUR)
    flip(data_of(tiers[1]))
    assert until(lambda: (job := job_of(place)) and job.scrub.mended == 1)
    assert look(tiers[1]).intact

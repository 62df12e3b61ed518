"""In idle time the agent verifies all kept steps, and mends what another tier has intact."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import ckpt.agent.job_tiers
from ckpt import CheckpointManager, Tier
from ckpt.agent.client import status
from ckpt.agent.folder import AgentFolder
from ckpt.agent.messages import Job, ScrubStatus, fields_of
from ckpt.agent.scrub_worker import Scrub
from ckpt.agent.worker_messages import Ended, Order, Verified
from ckpt.config import SaveConfig
from ckpt.errors import ConfigError, TransientStorageError
from ckpt.events import Event, Observer, StepVerified
from ckpt.model.keys import OWNER
from ckpt.observe import Journal
from ckpt.observe.journal_reader import JournalReader
from ckpt.pipeline.workers import Workers
from ckpt.root.owner import NO_PROCESS, Owner
from ckpt.storage.api import StorageBackend
from ckpt.storage.registry import open_backend
from ckpt.storage.testing import FaultyBackend, Raise, Rule
from tests.agent.conftest import await_state, holders, job_of
from tests.cli.conftest import Cli, cli
from tests.kit.damage import cut, data_of, flip, folder_of, look, sealed
from tests.kit.waiting import until
from tests.kit.worlds import run_code

__all__ = ["cli"]
DAMAGE: dict[str, Callable[[Path], None]] = {"flip": flip, "cut": cut, "remove": Path.unlink}


@pytest.fixture
def often(place: AgentFolder, monkeypatch: pytest.MonkeyPatch) -> AgentFolder:
    """An agent that verifies each step again and again."""
    monkeypatch.setenv("CKPT_AGENT_SCRUB_SECONDS", "1")
    return place


@pytest.fixture
def tiers(tmp_path: Path) -> list[Tier]:
    return [Tier(str(tmp_path / "near")), Tier(str(tmp_path / "far"), codec="zstd")]


def scrub() -> ScrubStatus:
    """Return what the agent shows of its last job."""
    job = job_of(AgentFolder.of_this_user())
    return job.scrub if job is not None else ScrubStatus()


def log(place: AgentFolder) -> str:
    return Path(place.log).read_text()


def state(step: int) -> dict[str, torch.Tensor]:
    return {"w": torch.arange(300_000, dtype=torch.float32) * step}


def dead_job(tiers: list[Tier], *, rate: float = 1000.0) -> Job:
    """A job that has saved step 1 on all ``tiers``, and has ended."""
    with CheckpointManager(tiers) as manager:
        manager.save(state(1), 1)
    owner = msgspec.structs.replace(Owner.of_this_process("feedbeefzzzz"), pid=NO_PROCESS)
    return Job(
        owner=owner,
        processes=(),
        tiers=tuple(fields_of(tier, tier.url) for tier in tiers),
        ranks=1,
        backlog=4,
        environment={},
        scrub_mb_per_s=rate,
    )


def one_round(job: Job, verified: tuple[str, ...] = ()) -> tuple[Ended, list[Verified]]:
    reported: list[Verified] = []

    def report(one: msgspec.Struct) -> None:
        if isinstance(one, Verified):
            reported.append(one)

    with Workers("test", 1) as workers, Scrub(Order(job, "scrub", verified), workers, report) as it:
        return it.run(), reported


@pytest.mark.parametrize("place_of_damage", ["near", "far"])
@pytest.mark.parametrize("what", DAMAGE)
def test_a_round_mends_what_the_other_tier_has(tiers, place_of_damage: str, what: str) -> None:
    job = dead_job(tiers)
    damaged = tiers[["near", "far"].index(place_of_damage)]
    DAMAGE[what](data_of(damaged))
    ended, reported = one_round(job)
    assert ended == Ended("done")
    assert [Path(one.tier).name for one in reported] == ["near", "far"]
    assert [bool(one.mended) for one in reported] == [one.tier == damaged.url for one in reported]
    assert not any(one.damage for one in reported)
    assert all(look(tier).intact for tier in tiers)
    assert not any(one.mended for one in one_round(job)[1])


def test_what_was_verified_is_not_read_again(tiers) -> None:
    job = dead_job(tiers)
    _, reported = one_round(job)
    known = tuple(f"{one.tier} {one.folder}" for one in reported)
    assert one_round(job, known) == (Ended("done"), [])
    assert [one.tier for one in one_round(job, known[:1])[1]] == [reported[1].tier]


def test_damage_that_no_tier_can_mend_is_reported_and_left(tiers) -> None:
    job = dead_job(tiers)
    for tier in tiers:
        flip(data_of(tier))
    before = [data_of(tier).read_bytes() for tier in tiers]
    ended, reported = one_round(job)
    assert ended == Ended("done")
    assert all(
        "its bytes were changed, and no tier could mend it" in one.damage for one in reported
    )
    assert [data_of(tier).read_bytes() for tier in tiers] == before


def test_a_store_that_is_away_costs_no_other(tiers, monkeypatch) -> None:
    job = dead_job(tiers)
    flip(data_of(tiers[0]))
    shutil.move(tiers[1].url, tiers[1].url + ".kept")

    def opened(url: str, options: Any) -> StorageBackend:
        found = open_backend(url, options)
        if url == tiers[1].url:
            return FaultyBackend(
                found,
                [Rule(verb="folders", fault=Raise(partial(TransientStorageError, detail="down")))],
            )
        return found

    monkeypatch.setattr(ckpt.agent.job_tiers, "open_backend", opened)
    ended, reported = one_round(job)
    assert ended.outcome == "failed"
    assert [Path(one.tier).name for one in reported] == ["near"]
    assert "no tier could mend it" in reported[0].damage
    monkeypatch.undo()
    shutil.move(tiers[1].url + ".kept", tiers[1].url)
    ended, reported = one_round(job)
    assert ended == Ended("done")
    assert look(tiers[0]).intact


def test_a_step_in_a_later_format_keeps_no_older_step_from_being_verified(tiers) -> None:
    job = dead_job(tiers[:1])
    with CheckpointManager(tiers[:1]) as manager:
        manager.save(state(2), 2)
    [manifest] = Path(tiers[0].url).glob("step-000000002.*/manifest.json")
    manifest.write_bytes(sealed({"format": 9}))
    ended, reported = one_round(job)
    assert ended.outcome == "failed"
    assert "upgrade with pip" in ended.error
    assert [(one.step, one.damage) for one in reported] == [(1, "")]


def test_a_root_of_another_job_is_left_alone(tiers) -> None:
    job = dead_job(tiers)
    other = Owner(attempt="feedbeefzzzy", host="far", machine="elsewhere", pid=1, started=1)
    (Path(tiers[0].url) / OWNER).write_bytes(msgspec.json.encode(other))
    flip(data_of(tiers[0]))
    ended, reported = one_round(job)
    assert ended == Ended("done")
    assert [Path(one.tier).name for one in reported] == ["far"]
    assert not look(tiers[0]).intact


def test_the_rate_is_bounded(tiers) -> None:
    job = dead_job(tiers, rate=2.0)
    began = time.monotonic()
    _, reported = one_round(job)
    nbytes = sum(one.nbytes for one in reported)
    assert nbytes > 1e6
    assert time.monotonic() - began >= nbytes / 2e6


@pytest.mark.parametrize("rate", [-1, float("inf"), float("nan"), "10", None])
def test_a_wrong_rate_is_refused(rate) -> None:
    with pytest.raises(ConfigError, match="scrub_mb_per_s"):
        SaveConfig(scrub_mb_per_s=rate)


def test_the_agent_mends_beside_a_trainer_that_saves(
    often: AgentFolder, tiers, tmp_path: Path
) -> None:
    events: list[Event] = []
    urls = {tier.url for tier in tiers}
    observers: list[Observer] = [events.append, Journal(tiers[0].url)]
    with CheckpointManager(tiers, agent="required", observers=observers) as manager:
        manager.save(state(1), 1)
        flip(data_of(tiers[0]))
        step = 1
        while not any(isinstance(event, StepVerified) and event.mended for event in events):
            step += 1
            assert step < 1000
            manager.save(state(step), step)
        assert until(lambda: {e.tier for e in events if isinstance(e, StepVerified)} == urls)
        assert until(lambda: scrub().mended == 1)
        assert until(lambda: not scrub().damaged)
        restored = state(0)
        assert manager.restore(restored, step=1) is not None
        assert torch.equal(restored["w"], state(1)["w"])
    [mended] = [event for event in events if isinstance(event, StepVerified) and event.mended]
    assert (mended.step, mended.tier, mended.damage) == (1, tiers[0].url, "")
    assert "was damaged, and is mended" in log(often)
    records = JournalReader(tiers[0].url).read()
    assert {record.tier for record in records if record.event == "Verified"} == urls


TRAINER = """
import os, sys, json, torch
from ckpt import CheckpointManager, Tier
tiers = [Tier(**fields) for fields in json.loads(sys.argv[1])]
manager = CheckpointManager(tiers, agent="required", scrub_mb_per_s=float(sys.argv[2]))
manager.save({"w": torch.arange(int(sys.argv[3]), dtype=torch.float32)}, 1)
os.kill(os.getpid(), 9)
"""


def leave(tiers: list[Tier], rate: float, numbers: int) -> None:
    """Let a trainer save step 1, and die."""
    fields = [{"url": tier.url, "codec": tier.codec} for tier in tiers]
    words = (msgspec.json.encode(fields).decode(), rate, numbers)
    run_code(TRAINER, *words, status=-signal.SIGKILL)


def test_the_agent_mends_after_the_death_of_the_trainer(
    often: AgentFolder, tiers, cli: Cli
) -> None:
    leave(tiers, 1000, 300_000)
    await_state(often, "done")
    flip(data_of(tiers[1]))
    assert until(lambda: scrub().mended == 1)
    assert look(tiers[1]).intact
    assert until(lambda: scrub().verified == 2)
    reported = cli("agent", "status").out
    assert "2 steps, 1 file mended" in reported
    assert "verified by the agent: 2 steps" in cli("top", tiers[0].url, "--once").out


def test_damage_that_stays_is_said_once(often: AgentFolder, tiers, cli: Cli) -> None:
    leave(tiers[:1], 10, 1_000_000)
    await_state(often, "done")
    flip(data_of(tiers[0]))
    assert until(lambda: scrub().damaged)
    [pid] = holders(often, "listen")
    for _ in range(3):  # rounds
        assert until(lambda: scrub().step == 1)
        assert until(lambda: scrub().step == -1)
    assert holders(often, "listen") == [pid]
    assert log(often).count("no tier could mend it") == 1
    assert "no tier could mend it" in cli("agent", "status").out
    assert cli("agent", "status", "--json").json["jobs"][0]["scrub"]["verified"] == 0


def test_without_a_rate_nothing_is_verified(often: AgentFolder, tiers) -> None:
    leave(tiers, 0, 1000)
    await_state(often, "done")
    flip(data_of(tiers[1]), 100)
    leave([Tier(tiers[0].url + "2")], 1000, 1000)  # the agent verifies the steps of this one
    assert until(lambda: scrub().verified == 1)
    found = status(often)
    assert found is not None
    assert [job.scrub.verified for job in found.jobs] == [0, 1]


def test_a_job_that_registers_ends_the_verification_at_once(
    often: AgentFolder, tiers, tmp_path
) -> None:
    leave(tiers[:1], 0.2, 1_000_000)  # 20 s
    assert until(lambda: scrub().step == 1)
    workers = {*holders(often, "work")} - {*holders(often, "listen")}
    assert workers
    with CheckpointManager(tmp_path / "other", agent="required"):
        found = status(often)
        assert found is not None
        assert [job.scrub.step for job in found.jobs] == [-1, -1]
        assert not workers & {*holders(often, "work")}


def test_an_agent_that_is_killed_while_it_mends_tears_nothing(often: AgentFolder, tiers) -> None:
    near = Tier(tiers[0].url)
    far = Tier(tiers[1].url)
    leave([near, far], 4.0, 3_000_000)  # 3 s for each file
    await_state(often, "done")
    good = data_of(far).read_bytes()
    flip(data_of(near))
    bad = data_of(near).read_bytes()
    folder = folder_of(near)
    assert until(lambda: any(path.name.endswith(".tmp") for path in folder.iterdir()))
    for pid in holders(often, "listen"):
        os.kill(pid, signal.SIGKILL)
    assert until(lambda: not holders(often, "work"))
    assert data_of(near).read_bytes() in (bad, good)
    with CheckpointManager([near, far], agent="required", scrub_mb_per_s=1000) as manager:
        assert manager.restore({"w": torch.zeros(3_000_000)}) is not None
        assert until(lambda: data_of(near).read_bytes() == good)

"""``ckpt restore`` asks the agent where else on this machine a job has its steps."""

from __future__ import annotations

import re
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ckpt import CheckpointManager, Tier
from ckpt.agent.folder import AgentFolder
from ckpt.agent.messages import JobStatus
from ckpt.cli.nearer_tiers import nearer_tiers
from ckpt.cli.watched_store import watch
from ckpt.storage.registry import open_backend
from tests.agent.conftest import await_state, memory_folder, new_place
from tests.checkpoints import write_checkpoint
from tests.cli.conftest import ARRAYS, Cli, flip
from tests.kit.waiting import until

TIERS = [Tier("memory"), Tier("near", keep_last=1), Tier("far", every=2)]


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[AgentFolder]:
    with new_place() as found:
        monkeypatch.setenv("CKPT_AGENT_FOLDER", found.path)
        yield found


@pytest.fixture
def manager(cli: Cli, place: AgentFolder) -> Iterator[CheckpointManager]:
    """A job that has step 3 on its near tiers only."""
    memory = memory_folder(*TIERS)
    with CheckpointManager(TIERS, agent="required") as found:
        for step in (1, 2, 3):
            found.save({"values": torch.full((1000,), float(step)), "step": step})
        assert until(lambda: list(Path("far").glob("step-000000002.*/manifest.json")))
        yield found
    shutil.rmtree(memory, ignore_errors=True)


def test_the_newest_step_comes_from_the_tier_that_has_it(
    cli: Cli, manager: CheckpointManager
) -> None:
    ran = cli("restore", "--latest", "--root", "far", "--to", "there", "--json")
    assert (ran.code, ran.json["step"]) == (0, 3), ran.err
    memory = memory_folder(*TIERS)
    assert re.search(
        f"nearer tiers of this job: shm://{memory.name[-16:]}, {Path('near').resolve()}", ran.err
    )
    assert cli("verify", "--all", "--root", "there").code == 0


def test_a_root_is_a_tier_of_the_job_also_if_the_job_has_named_its_server(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, near = open_backend(f"memory://{uuid.uuid4().hex}"), open_backend("near")
    for store in (root, near):
        write_checkpoint(store, 1, ARRAYS)
    monkeypatch.setattr(root, "url", "s3://bucket/run")
    tiers = (str(Path("near").resolve()), "s3://bucket/run?endpoint_url=http://store:9000")
    job = JobStatus(attempt="abcxyz", state="closed", tiers=tiers, processes=(), since=0.0)
    monkeypatch.setattr("ckpt.cli.nearer_tiers.known_jobs", lambda: [job])
    found = nearer_tiers(watch(root, 10.0), watch(open_backend("there"), 10.0), 10.0)
    assert [store.url for store in found] == [tiers[0]]


def test_a_step_that_is_named_is_read_from_the_nearest_tier(
    cli: Cli, manager: CheckpointManager
) -> None:
    """The far tier has it, too, but its bytes are not needed."""
    for path in Path("far").glob("step-000000002.*/*.safetensors"):
        flip(path, 5000)
    ran = cli("restore", "2", "--root", "far", "--to", "there", "--json")
    assert (ran.code, ran.json["repaired"]) == (0, []), ran.err


def test_the_root_of_another_job_gets_nothing_from_there(
    cli: Cli, manager: CheckpointManager
) -> None:
    """It has the same place and other steps, as two object stores may have one URL."""
    manager.save({"values": torch.ones(3), "step": 4})
    shutil.rmtree("far")
    Path("far").mkdir()
    ran = cli("restore", "--root", "far", "--to", "there")
    assert ran.code == 7, ran.err
    assert "nearer" not in ran.err


def test_after_the_end_of_the_job_its_near_folder_is_read(
    cli: Cli, manager: CheckpointManager, place: AgentFolder
) -> None:
    manager.close()
    await_state(place, "closed", "done")
    for path in Path("far").glob("step-000000003.*/*.safetensors"):
        flip(path, 5000)
    ran = cli("restore", "--root", "far", "--to", "other", "--json")
    assert (ran.code, ran.json["step"]) == (0, 3), ran.err


def test_a_folder_in_its_place_is_verified_alone(cli: Cli, manager: CheckpointManager) -> None:
    ran = cli("restore", "--root", "near", "--json")
    assert (ran.code, ran.json["step"], ran.json["copied"]) == (0, 3, False)
    assert "nearer" not in ran.err


def test_a_tier_of_the_job_that_is_the_destination_is_no_source(
    cli: Cli, manager: CheckpointManager
) -> None:
    assert until(lambda: not list(Path("near").glob("step-000000002.*")))  # The job keeps one
    ran = cli("restore", "2", "--root", "far", "--to", "near", "--json")
    assert (ran.code, ran.json["copied"]) == (0, True), ran.err
    assert str(Path("near").resolve()) not in ran.err


def test_without_an_agent_the_root_alone_is_read(
    cli: Cli, manager: CheckpointManager, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CKPT_AGENT_FOLDER", str(tmp_path / "none"))
    ran = cli("restore", "--latest", "--root", "far", "--to", "there", "--json")
    assert (ran.code, ran.json["step"]) == (0, 2)


def test_a_near_folder_that_another_job_has_taken_is_not_read(
    cli: Cli, manager: CheckpointManager, place: AgentFolder
) -> None:
    """The user emptied the near folder for the next experiment, and kept the store of this one."""
    manager.close()
    await_state(place, "closed", "done")
    for each in ("near", memory_folder(*TIERS)):
        shutil.rmtree(each, ignore_errors=True)
    with CheckpointManager(["near", "other"]) as other:
        other.save({"values": torch.zeros(1000), "step": 50})
        for _ in range(2):  # While that job runs, and afterwards
            ran = cli("restore", "--root", "far", "--to", "there", "--json")
            assert (ran.code, ran.json["step"]) == (0, 2), ran.err
            assert "nearer" not in ran.err
            shutil.rmtree("there")
            other.close()

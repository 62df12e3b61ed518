from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest

from ckpt import CheckpointManager
from ckpt.agent.client import connect, reach_and_ask
from ckpt.agent.folder import AgentFolder
from ckpt.agent.messages import Job, Stop, roots_of, urls_of
from ckpt.agent.watched_job import share_a_root
from ckpt.errors import AgentError
from tests.kit.waiting import until


def test_the_trainer_resolves_the_links_in_the_paths_of_its_tiers(
    place: AgentFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent then compares jobs without their file systems, and still shows the given paths."""
    real, link = tmp_path / "real", tmp_path / "link"
    real.mkdir()
    link.symlink_to(real)
    sent: list[Job] = []

    def record(job: Job) -> Any:
        sent.append(job)
        return reach_and_ask(job)

    monkeypatch.setattr("ckpt.agent.registration.reach_and_ask", record)
    with CheckpointManager(link, agent="required"):
        [job] = sent
    assert urls_of(job) == (str(link),)
    assert share_a_root(roots_of(job), (f"{real}{os.sep}",))


def test_each_reason_for_which_no_agent_is_reached_is_a_warning_once(
    place: AgentFolder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The agent of a newer version that replaces ours may not listen yet at the first try."""
    tries = 0

    def refuse(job: Job) -> Any:
        nonlocal tries
        tries += 1
        raise AgentError("no answer" if tries in (1, 3) else "another version")

    monkeypatch.setattr("ckpt.agent.registration._RETRY_SECONDS", 0.01)
    with CheckpointManager(tmp_path, agent="required"):
        monkeypatch.setattr("ckpt.agent.registration.reach_and_ask", refuse)
        connection = connect(place)
        assert connection is not None
        with contextlib.closing(connection):
            connection.ask(Stop())
        assert until(lambda: tries > 4)
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == [
        "ckpt: this job has no agent for now: no answer",
        "ckpt: this job has no agent for now: another version",
    ]

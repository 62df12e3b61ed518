from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from ckpt import CheckpointManager
from ckpt.agent.client import reach_and_ask
from ckpt.agent.folder import AgentFolder
from ckpt.agent.messages import Job, roots_of, urls_of
from ckpt.agent.watched_job import share_a_root


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

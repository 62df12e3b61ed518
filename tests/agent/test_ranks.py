"""A job of several ranks has one registration, and all ranks learn whether there is an agent."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from ckpt import CheckpointManager, Tier
from ckpt.agent.client import status
from ckpt.agent.folder import AgentFolder
from ckpt.coordination.coordinator import Coordinator
from ckpt.errors import AgentError
from tests.agent.conftest import await_state
from tests.coordination.world import World
from tests.kit.stores import whole


def test_all_ranks_detach_and_the_agent_takes_the_files_of_all(
    place: AgentFolder, tmp_path: Path
) -> None:
    tiers = [tmp_path / "near", tmp_path / "far"]

    def train(coordinator: Coordinator) -> int:
        manager = CheckpointManager(tiers, coordinator=coordinator, agent="required")
        found = status(place)
        assert found is not None
        for step in (1, 2, 3):
            mine = {f"x{coordinator.rank}": torch.full((50_000,), step)}
            manager.save_async(mine, step).result(60, tier=str(tmp_path / "near"))
        manager.close(detach=True)
        return len(found.jobs)

    assert World(2, patience=120).run(train) == {0: 1, 1: 1}
    assert await_state(place, "done").processes == (os.getpid(),) * 2
    assert whole(tmp_path / "near") == [1, 2, 3]
    assert whole(tmp_path / "far") == [1, 2, 3]


def test_all_ranks_learn_that_there_is_none(place: AgentFolder, tmp_path: Path) -> None:
    os.chmod(place.path, 0o755)

    def build(coordinator: Coordinator) -> str:
        with pytest.raises(AgentError, match="is open to other users") as reported:
            CheckpointManager(tmp_path, coordinator=coordinator, agent="required")
        return str(reported.value)

    reported = World(2, patience=120).run(build)
    assert reported[0] == reported[1]
    os.chmod(place.path, 0o700)


ALONE = "have the same agent"
CAPACITY = "has a capacity, which the agents of several nodes cannot keep"
NONE_SHARED = "brings steps to a tier that all nodes share"


@pytest.mark.parametrize("mode", ["auto", "required"])
@pytest.mark.parametrize(
    ("far", "why"),
    [({}, ALONE), ({"capacity": "1GB"}, CAPACITY), ({"local": True}, NONE_SHARED)],
)
def test_a_job_whose_nodes_have_tiers_of_their_own_says_why_it_has_no_agent(
    place: AgentFolder, tmp_path: Path, caplog, mode, far, why
) -> None:
    """The ranks stand for nodes, and would have one agent."""

    def train(coordinator: Coordinator) -> int:
        rank = coordinator.rank
        near = Tier(str(tmp_path / f"node{rank}"), local=True)
        last = Tier(str(tmp_path / (f"far{rank}" if "local" in far else "far")), **far)
        with CheckpointManager([near, last], coordinator=coordinator, agent=mode) as it:
            it.save({f"x{rank}": torch.ones(1000)}, 1)
            with pytest.raises(AgentError, match="this job has no agent"):
                it.close(detach=True)
        return 1

    done = World(2, patience=120).run(train)
    if mode == "required":
        assert all(why in str(error) for error in done.values()), done
    else:
        assert done == {0: 1, 1: 1}
        assert caplog.text.count("this job has no agent: ") == 1
        assert why in caplog.text
    found = status(place)
    assert found is None or {job.state for job in found.jobs} == {"closed"}

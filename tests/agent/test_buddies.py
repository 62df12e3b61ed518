"""The agents bring the files of a node that is lost from the copies that its buddy has."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.agent.conftest import await_state, holders
from tests.agent.two_nodes import Cluster, cluster, holds, listed
from tests.kit.stores import whole
from tests.kit.waiting import until
from tests.processes import run

__all__ = ["cluster"]

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _with_copies(cluster: Cluster) -> None:
    """Give each node a copy of the files of the other one."""
    cluster.tiers[0]["buddies"] = 1


def end_agent(cluster: Cluster, node: int) -> None:
    """Kill the agent of a node, which may be stopped, and its workers."""
    for name in ("listen", "work"):
        for pid in holders(cluster.places[node], name):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def marked(cluster: Cluster) -> list[str]:
    """Return the markers on the shared tier of agents that have brought the files of
    other nodes.
    """
    return [name for name in listed(cluster.shared) if name.endswith(".claim")]


def names_of(cluster: Cluster, step: int) -> list[str]:
    """Return the names of the files of a step on the shared tier."""
    return [path.name for path in cluster.shared.glob(f"step-{step:09}.*/*")]


def log_of(cluster: Cluster, node: int) -> str:
    return Path(cluster.places[node].log).read_text()


def test_a_step_becomes_whole_without_the_node_that_is_lost(cluster: Cluster) -> None:
    cluster.train(1, 3, "kill copied lost")
    end_agent(cluster, 1)
    assert await_state(cluster.places[0], "done").error == ""
    assert whole(cluster.shared) == [3]
    assert holds(cluster.shared, 3)
    done = run([Path(sys.executable).with_name("ckpt"), "verify", cluster.shared], timeout=60)
    assert done.returncode == 0, done.stdout
    assert marked(cluster) == ["rank-00002.claim", "rank-00003.claim"]
    assert not any(cluster.memory(node).exists() for node in (0, 1))


@pytest.mark.torture
def test_a_step_that_the_ranks_were_writing_to_the_shared_tier_becomes_whole_too(
    cluster: Cluster,
) -> None:
    cluster.tiers[1] |= {"every": 1, "codec": "zstd:12"}
    cluster.train(1, 3, "kill copied lost", numbers=4_000_000)
    end_agent(cluster, 1)
    assert await_state(cluster.places[0], "done").error == ""
    assert whole(cluster.shared)[-1] == 3
    assert holds(cluster.shared, 3, numbers=4_000_000)
    assert not cluster.memory(0).exists()


@pytest.mark.torture
def test_a_node_that_is_lost_after_its_agent_has_begun_costs_no_step(cluster: Cluster) -> None:
    """Its ranks are noted, and their files do not come."""
    numbers = 2_000_000
    with cluster.training(3, "kill copied", numbers):
        assert until(lambda: "rank-00002.ended" in listed(cluster.shared))
        end_agent(cluster, 1)
        shutil.rmtree(cluster.memory(1))
    assert await_state(cluster.places[0], "done").error == ""
    assert whole(cluster.shared) == [3]
    assert holds(cluster.shared, 3, numbers)
    assert marked(cluster) == []
    assert not cluster.memory(0).exists()


def test_a_damaged_copy_makes_no_checkpoint_and_the_reason_is_logged(cluster: Cluster) -> None:
    cluster.train(1, 3, "kill copied damaged lost")
    end_agent(cluster, 1)
    assert until(lambda: cluster.waits(0, "rank-00003.safetensors"))
    assert whole(cluster.shared) == []
    assert "rank-00003.json" not in listed(cluster.shared)
    assert "rank-00003.safetensors" in log_of(cluster, 0)
    assert "000000003" in cluster.steps_in_memory(0)


@pytest.mark.torture
def test_an_older_step_becomes_whole_if_the_last_one_has_no_copies(cluster: Cluster) -> None:
    cluster.train(1, 3, "kill copied older lost")
    end_agent(cluster, 1)
    assert until(lambda: whole(cluster.shared) == [2])
    assert holds(cluster.shared, 2)
    assert until(lambda: cluster.waits(0, "step 3 is not brought"))
    assert whole(cluster.shared) == [2]
    assert not any(name.endswith(".json") for name in names_of(cluster, 3))
    assert "000000003" in cluster.steps_in_memory(0)


def test_copies_are_not_used_if_both_agents_do_their_part(cluster: Cluster) -> None:
    cluster.train(1, 3, "kill copied")
    assert [job.error for job in cluster.await_end()] == ["", ""]
    assert whole(cluster.shared) == [3]
    assert marked(cluster) == []
    assert not any("is silent" in log_of(cluster, node) for node in (0, 1))
    assert not any(cluster.memory(node).exists() for node in (0, 1))


def test_a_copy_is_used_while_the_ranks_of_the_other_node_live(cluster: Cluster) -> None:
    """They may hang until a collective fails. What they do later removes nothing."""
    with cluster.training(3, "kill copied live"):
        assert until(lambda: whole(cluster.shared) == [3])
        assert marked(cluster) == ["rank-00002.claim", "rank-00003.claim"]
    assert [job.error for job in cluster.await_end()] == ["", ""]
    assert holds(cluster.shared, 3)
    assert not any(cluster.memory(node).exists() for node in (0, 1))

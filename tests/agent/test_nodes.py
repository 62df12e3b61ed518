"""Jobs on two nodes with tiers of their own."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from ckpt.root.attempts import step_refs
from ckpt.storage.registry import open_backend
from tests.agent.conftest import await_state, holders
from tests.agent.two_nodes import Cluster, cluster, holds, listed
from tests.kit.damage import flip
from tests.kit.stores import whole
from tests.kit.waiting import until
from tests.servers import Server

__all__ = ["cluster"]

pytestmark = pytest.mark.slow


def steps_of(root: Path) -> list[int]:
    """Return the steps that a node lists in its folder."""
    return sorted(int(path.parent.name[5:14]) for path in root.glob("step-*/manifest.json"))


@pytest.mark.parametrize("codec", ["none", pytest.param("zstd", marks=pytest.mark.torture)])
def test_a_step_that_only_the_memory_of_two_nodes_has_becomes_whole_without_a_restart(
    cluster: Cluster, codec
) -> None:
    cluster.tiers[1]["codec"] = codec
    cluster.train(1, 3, "kill")
    assert [job.error for job in cluster.await_end()] == ["", ""]
    assert whole(cluster.shared) == [3]
    assert holds(cluster.shared, 3)
    assert not any(cluster.memory(node).exists() for node in (0, 1))


@pytest.mark.torture  # tests/agent/test_finish_worker.py does it with one node
@pytest.mark.server
def test_a_step_in_memory_alone_reaches_an_object_store(
    cluster: Cluster, moto_server: Server
) -> None:
    options: dict[str, object] = {
        "endpoint_url": moto_server.url,
        "key": "AKIDTEST",
        "secret": "secret",
    }
    url = f"s3://bucket/nodes-{os.getpid()}"
    cluster.tiers[1:] = [{"url": url, "options": options, "every": 100}]
    cluster.train(1, 2, "kill")
    cluster.await_end()
    assert holds(url, 2, options=options)


def test_folders_of_nodes_are_brought_to_the_shared_tier_as_it_takes_them(
    cluster: Cluster,
) -> None:
    """The last step comes in any case, and older ones if the shared tier takes them."""
    near = {"url": str(cluster.folder / "node-NODE"), "local": True, "codec": "zstd"}
    cluster.tiers[:] = [near, {"url": str(cluster.shared), "every": 2}]
    cluster.train(1, 5, "kill")
    cluster.await_end()
    assert whole(cluster.shared) == [2, 4, 5]
    assert holds(cluster.shared, 5)
    assert holds(cluster.shared, 2)


def test_the_agent_of_each_node_applies_retention_to_the_folder_of_its_node(
    cluster: Cluster,
) -> None:
    near = {"url": str(cluster.folder / "node-NODE"), "local": True, "keep_last": 2}
    cluster.tiers[:] = [near, {"url": str(cluster.shared), "every": 100}]
    cluster.train(1, 4, "kill unpruned")
    cluster.await_end()
    assert whole(cluster.shared) == [4]
    for node in (0, 1):
        assert steps_of(cluster.folder / f"node-{node}") == [3, 4]


def test_the_newest_step_in_memory_comes_to_the_folder_of_each_node(cluster: Cluster) -> None:
    """So the next job on these nodes reads it there when the memory is freed."""
    near = {"url": str(cluster.folder / "node-NODE"), "local": True, "every": 2, "keep_last": 1}
    cluster.tiers.insert(1, near)
    cluster.train(1, 3, "kill")
    assert [job.error for job in cluster.await_end()] == ["", ""]
    for node in (0, 1):
        assert steps_of(cluster.folder / f"node-{node}") == [3]
        assert not cluster.memory(node).exists()
    shutil.rmtree(cluster.shared)
    assert "from 3 [32]" in cluster.train(4, 4, "restore close").said[2]


@pytest.mark.torture
def test_each_agent_verifies_the_folder_of_its_node(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes what is damaged there from the shared tier."""
    monkeypatch.setenv("CKPT_AGENT_SCRUB_SECONDS", "1")
    near = {"url": str(cluster.folder / "node-NODE"), "local": True, "codec": "zstd"}
    cluster.tiers[:] = [near, {"url": str(cluster.shared), "every": 2}]
    cluster.train(1, 3, "kill")
    cluster.await_end()
    ours = [cluster.folder / f"node-{node}" for node in (0, 1)]
    damaged = next(ours[1].glob("step-000000002.*/rank-00003.encoded"))
    missing = next(ours[1].glob("step-000000003.*/rank-00002.encoded"))
    whole_before = damaged.read_bytes(), missing.read_bytes()
    flip(damaged)
    missing.unlink()
    assert until(lambda: (job := cluster.job(1)) is not None and job.scrub.mended == 2)
    assert (damaged.read_bytes(), missing.read_bytes()) == whole_before
    alone = next(ours[0].glob("step-000000001.*/rank-00000.encoded"))
    flip(alone)  # The shared tier does not take this step
    log = Path(cluster.places[0].log)
    assert until(lambda: "no tier could mend it" in log.read_text())
    assert "rank-00000.encoded its bytes were changed" in log.read_text()
    assert "damaged" not in Path(cluster.places[1].log).read_text().replace("was damaged", "")
    assert {path.name for path in ours[1].glob("step-*/rank-*")} == {
        f"rank-0000{rank}.{kind}" for rank in (2, 3) for kind in ("encoded", "json")
    }


@pytest.mark.torture
def test_a_folder_of_a_node_that_takes_no_files_holds_up_nothing(cluster: Cluster) -> None:
    near = {"url": str(cluster.folder / "node-NODE"), "local": True, "every": 100}
    cluster.tiers.insert(1, near)
    with cluster.training(3, "kill live"):
        assert until(lambda: cluster.waits(0, "rank(s) 2, 3 have not ended"))
        [blocked] = {path.parent.name for path in cluster.memory(0).glob("step-000000003.*/*")}
        for node in (0, 1):  # a file is at the place of the step's folder
            (cluster.folder / f"node-{node}").mkdir(exist_ok=True)
            (cluster.folder / f"node-{node}" / blocked).touch()
    assert [job.error for job in cluster.await_end()] == ["", ""]
    assert whole(cluster.shared) == [3]
    assert not any(cluster.memory(node).exists() for node in (0, 1))
    assert "was not copied to" in Path(cluster.places[0].log).read_text()


def test_a_node_removes_nothing_that_the_shared_tier_lacks(cluster: Cluster) -> None:
    near = {"url": str(cluster.folder / "node-NODE"), "local": True, "keep_last": 2}
    cluster.tiers[:] = [near, {"url": str(cluster.shared), "every": 100}]
    with cluster.training(4, "kill live unpruned"):
        assert until(lambda: cluster.waits(0, "rank(s) 2, 3 have not ended"))
        assert {1, 3, 4} <= set(steps_of(cluster.folder / "node-0"))
    cluster.await_end()
    assert steps_of(cluster.folder / "node-0") == [3, 4]


@pytest.mark.torture
def test_farther_shared_tiers_and_their_retention_are_left_to_the_agent_of_the_leader(
    cluster: Cluster,
) -> None:
    far = cluster.folder / "far"
    cluster.tiers.append({"url": str(far), "keep_last": 1})
    cluster.train(1, 3, "kill")
    cluster.await_end()
    assert whole(far) == [3]
    assert holds(far, 3)


def test_farther_tiers_get_what_the_shared_tier_had_before_the_ranks_were_killed(
    cluster: Cluster,
) -> None:
    far = cluster.folder / "far"
    cluster.tiers[1]["every"] = 1
    cluster.tiers.append({"url": str(far), "codec": "zstd:12"})  # It is far behind
    cluster.train(1, 3, "kill shared", numbers=1_000_000)
    assert until(lambda: whole(far)[-1:] == [3]), [cluster.job(node) for node in (0, 1)]
    assert holds(far, 3, numbers=1_000_000)
    assert [job.error for job in cluster.await_end()] == ["", ""]


@pytest.mark.torture
def test_a_step_that_one_node_has_lost_keeps_no_older_step_from_farther_tiers(
    cluster: Cluster,
) -> None:
    far = cluster.folder / "far"
    cluster.tiers[1]["every"] = 2
    cluster.tiers.append({"url": str(far), "every": 2, "codec": "zstd:12"})  # It is far behind
    cluster.train(1, 3, "kill shared without step-000000003.*", numbers=1_000_000)
    assert until(lambda: whole(far)[-1:] == [2]), [cluster.job(node) for node in (0, 1)]
    assert holds(far, 2, numbers=1_000_000)


def test_what_no_node_has_committed_does_not_stay_in_memory(cluster: Cluster) -> None:
    """One node has its part of the last step, and the other has nothing of it."""
    cluster.train(1, 3, "kill unmade")
    cluster.await_end()
    assert whole(cluster.shared) == [2]
    assert until(lambda: not any(cluster.memory(node).exists() for node in (0, 1)))


def test_a_manifest_that_one_node_had_not_yet_put_is_no_obstacle(cluster: Cluster) -> None:
    """All ranks were killed when only the node of the leader had the manifest of the last step."""
    cluster.train(1, 3, "kill without step-000000003.*/manifest.json")
    assert until(lambda: whole(cluster.shared)[-1:] == [3])
    assert holds(cluster.shared, 3)
    cluster.await_end()


def test_a_step_that_one_node_has_lost_is_not_listed_and_stays_in_the_memory_of_the_other(
    cluster: Cluster,
) -> None:
    cluster.train(1, 3, "kill without *")
    assert until(lambda: cluster.waits(0, "rank(s) 2, 3 have not ended, or their nodes do not"))
    assert {name.partition(".")[2] for name in listed(cluster.shared)} == {"ended"}
    assert "000000003" in cluster.steps_in_memory(0)


@pytest.mark.torture
def test_a_step_that_one_node_has_lost_costs_no_other_step(cluster: Cluster) -> None:
    cluster.train(1, 3, "kill without step-000000003.*")
    assert until(lambda: whole(cluster.shared) == [2])
    assert holds(cluster.shared, 2)
    assert until(lambda: cluster.waits(0, "step 3 is not brought"))
    assert "000000003" in cluster.steps_in_memory(0)
    assert "from 2 " in cluster.train(4, 4, "restore close").said[0]


def test_nothing_is_copied_while_the_ranks_of_another_node_live(cluster: Cluster) -> None:
    with cluster.training(3, "kill live"):
        assert until(lambda: cluster.waits(0, "rank(s) 2, 3 have not ended"))
        assert {name.partition(".")[2] for name in listed(cluster.shared)} == {"ended"}
    cluster.await_end()
    assert whole(cluster.shared) == [3]
    assert holds(cluster.shared, 3)


@pytest.mark.torture
@pytest.mark.parametrize(
    "moment", ["rank-00002.safetensors", "rank-00002.ended", "rank-00002.json"]
)
def test_an_agent_that_is_killed_in_the_middle_costs_no_step(cluster: Cluster, moment) -> None:
    """The step is whole on the shared tier, or not listed there and in memory."""
    numbers = 2_000_000
    with cluster.training(3, "kill", numbers):
        assert until(lambda: moment in listed(cluster.shared))
        for pid in holders(cluster.places[1], "listen"):
            os.kill(pid, signal.SIGKILL)
    assert until(lambda: not holders(cluster.places[1], "work"))
    assert whole(cluster.shared) in ([], [3])
    assert "from 3 [32]" in cluster.train(4, 4, "restore close", numbers).said[2]
    assert set(whole(cluster.shared)) <= {3}


def test_a_job_that_detaches_is_finished_when_its_processes_have_ended(cluster: Cluster) -> None:
    cluster.train(1, 3, "detach close")
    cluster.await_end()
    assert whole(cluster.shared) == [3]
    assert not any(cluster.memory(node).exists() for node in (0, 1))


def test_a_job_that_closes_in_order_leaves_nothing_to_do(cluster: Cluster) -> None:
    cluster.tiers[1]["every"] = 1
    cluster.train(1, 2, "close")
    assert [job.copied for job in cluster.await_end("closed")] == [(), ()]
    assert not any("ended" in name for name in listed(cluster.shared))


@pytest.mark.torture
def test_the_next_job_is_not_held_up_and_finds_the_step_in_memory(cluster: Cluster) -> None:
    numbers = 2_000_000
    cluster.train(1, 3, "kill", numbers)
    assert "from 3 [30]" in cluster.train(4, 5, "restore kill", numbers).said[0]
    for place in cluster.places:
        await_state(place, "done")
    assert whole(cluster.shared)[-1] == 5
    assert holds(cluster.shared, 5, numbers)
    for ref in step_refs(open_backend(str(cluster.shared))):
        if ref.step in whole(cluster.shared):
            assert holds(cluster.shared, ref.step, numbers)

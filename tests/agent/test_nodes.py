"""Jobs on two nodes with tiers of their own. A store in memory, a folder and an agent stand for a
machine.
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import torch

from ckpt import CheckpointManager, Tier
from ckpt.agent.client import status
from ckpt.agent.messages import AgentStatus, JobStatus
from ckpt.agent.place import Place
from ckpt.catalog.index import attempts
from ckpt.storage.registry import open_backend
from tests.agent.conftest import await_state, holders, new_place
from tests.kit.stores import whole
from tests.kit.waiting import until
from tests.kit.worlds import Ended, environment_of, run_forks
from tests.servers import Server, free_port

NODES = (0, 0, 1, 1)
NUMBERS = 50_000
KILLED = -signal.SIGKILL
TRAINER = """
import json, os, shutil, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
from ckpt import CheckpointManager, Tier
first, last, end = int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
node, numbers, shm = os.environ["NODE"], int(sys.argv[5]), Path(sys.argv[6])
def here(fields):
    return {**fields, "url": fields["url"].replace("NODE", node)}
tiers = [Tier(**here(fields)) for fields in json.loads(sys.argv[1])]
dist.init_process_group("gloo")
rank = dist.get_rank()
manager = CheckpointManager(tiers, agent="required")
state = {f"x{rank}": torch.zeros(numbers, dtype=torch.int64)}
if "restore" in end:
    report = manager.restore(state)
    print("from", report and report.step, state[f"x{rank}"].unique().tolist(), flush=True)
for step in range(first, last + 1):
    state[f"x{rank}"].fill_(10 * step + rank)
    save = manager.save_async(state, step)
    shared = "shared" in end and manager._tiers[1].takes(step)
    save.result(60, tier=manager._tiers[1 if shared else 0].url)
dist.barrier()
if "without" in end:
    for path in shm.glob(end.partition("without ")[2]) if rank == 2 else ():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    dist.barrier()
if "unmade" in end:
    for path in shm.glob(f"step-{last:09}.*") if rank == 2 else ():
        shutil.rmtree(path)
    other = Path(str(shm)[:-1] + "0")
    for path in other.glob(f"step-{last:09}.*/manifest.json") if rank == 0 else ():
        path.unlink()
    dist.barrier()
if "live" in end and node == "1":
    print("lives", flush=True)
    while not Path(os.environ["GO"]).exists():
        time.sleep(0.05)
if "close" in end:
    manager.close(detach="detach" in end)
    dist.destroy_process_group()
else:
    os.kill(os.getpid(), 9)
"""


@dataclass
class Cluster:
    """Two nodes, and the tiers of a job on them.

    Attributes:
        places: The agent of each node.
        tiers: The tiers; ``NODE`` in a URL becomes the number of the node.
        folder: Of this test.
    """

    places: tuple[Place, Place]
    tiers: list[dict[str, object]]
    folder: Path

    @property
    def shared(self) -> Path:
        return self.folder / "shared"

    def memory(self, node: int) -> Path:
        name = f"test-{os.getpid()}-{node}"
        return Path(f"/dev/shm/ckpt-memory-{os.getuid()}-{name}")

    def steps_in_memory(self, node: int) -> list[str]:
        return sorted(path.parent.name[5:14] for path in self.memory(node).glob("step-*/rank-*"))

    def train(self, first: int, last: int, end: str, numbers: int = NUMBERS) -> Ended:
        """Run four ranks that save the steps, and then end in the way ``end`` names."""
        script = self.folder / "trainer.py"
        script.write_text(TRAINER)
        port = free_port()
        environments = [
            {
                **environment_of(rank, 4, port),
                "NODE": str(node),
                "CKPT_AGENT_FOLDER": self.places[node].folder,
                "GO": str(self.folder / "go"),
            }
            for rank, node in enumerate(NODES)
        ]
        words = [script, msgspec.json.encode(self.tiers).decode(), first, last, end, numbers]
        words.append(self.memory(1))
        ended = run_forks(words, environments, timeout=150, end_together=False)
        status = 0 if "close" in end else KILLED
        assert set(ended.statuses) == {status}, ended
        return ended

    @contextmanager
    def training(self, last: int, end: str, numbers: int = NUMBERS) -> Iterator[None]:
        """As ``train``, beside the block. At its end, the ranks that live may end."""
        runner = threading.Thread(target=self.train, args=(1, last, end, numbers))
        runner.start()
        try:
            yield
        finally:
            (self.folder / "go").touch()
            runner.join()

    def await_end(self, *states: str) -> list[JobStatus]:
        return [await_state(place, *(states or ("done",))) for place in self.places]

    def job(self, node: int) -> JobStatus | None:
        found = status(self.places[node])
        return found.jobs[-1] if isinstance(found, AgentStatus) and found.jobs else None

    def waits(self, node: int, why: str) -> bool:
        """Whether the agent of a node has tried, and waits because of ``why``."""
        found = self.job(node)
        return found is not None and why in found.error


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Each node has a tier in memory. The shared folder takes each 100th step."""
    monkeypatch.setenv("CKPT_AGENT_MEMORY_SECONDS", "0")
    with new_place() as one, new_place() as two:
        tiers: list[dict[str, object]] = [
            {"url": f"shm://test-{os.getpid()}-NODE"},
            {"url": str(tmp_path / "shared"), "every": 100},
        ]
        found = Cluster((one, two), tiers, tmp_path)
        yield found
        for place in found.places:
            log = Path(place.log)
            print(log.read_text() if log.exists() else "no agent")
    for node in (0, 1):
        shutil.rmtree(found.memory(node), ignore_errors=True)


def holds(
    root: Path | str, step: int, numbers: int = NUMBERS, options: Mapping[str, object] | None = None
) -> bool:
    """Whether ``step`` restores from ``root`` alone, with the content of all ranks."""
    state = {f"x{rank}": torch.zeros(numbers, dtype=torch.int64) for rank in range(4)}
    with CheckpointManager(Tier(str(root), options or {})) as manager:
        report = manager.restore(dict(state), step)
    return report is not None and all(
        state[f"x{rank}"].unique().tolist() == [10 * step + rank] for rank in range(4)
    )


def listed(root: Path) -> list[str]:
    """The names of all files of steps."""
    return sorted(path.name for path in root.glob("step-*/*"))


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_a_step_that_only_the_memory_of_two_nodes_has_becomes_whole_without_a_restart(
    cluster: Cluster, codec
) -> None:
    cluster.tiers[1]["codec"] = codec
    cluster.train(1, 3, "kill")
    assert [job.error for job in cluster.await_end()] == ["", ""]
    assert whole(cluster.shared) == [3]
    assert holds(cluster.shared, 3)
    assert not any(cluster.memory(node).exists() for node in (0, 1))


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
    """The last step in any case, older ones if the shared tier takes them."""
    near = {"url": str(cluster.folder / "node-NODE"), "local": True, "codec": "zstd"}
    cluster.tiers[:] = [near, {"url": str(cluster.shared), "every": 2}]
    cluster.train(1, 5, "kill")
    cluster.await_end()
    assert whole(cluster.shared) == [2, 4, 5]
    assert holds(cluster.shared, 5)
    assert holds(cluster.shared, 2)


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


@pytest.mark.parametrize(
    "moment", ["rank-00002.ended", "rank-00002.safetensors", "rank-00002.json"]
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


def test_the_next_job_is_not_held_up_and_finds_the_step_in_memory(cluster: Cluster) -> None:
    numbers = 2_000_000
    cluster.train(1, 3, "kill", numbers)
    assert "from 3 [30]" in cluster.train(4, 5, "restore kill", numbers).said[0]
    for place in cluster.places:
        await_state(place, "done")
    assert whole(cluster.shared)[-1] == 5
    assert holds(cluster.shared, 5, numbers)
    for ref in attempts(open_backend(str(cluster.shared))):
        if ref.step in whole(cluster.shared):
            assert holds(cluster.shared, ref.step, numbers)

"""FOLDER [SCENE ...]: four ranks on two nodes, each node with a root of its own.

Its steps are saved, lost, swapped, and restored.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ckpt.nodes.peer_store
from bench.rank_exit import exit_rank
from ckpt import CheckpointManager, RestoreReport, Tier
from ckpt.errors import NoCheckpoint, TierNotShared
from ckpt.model.keys import OWNER
from ckpt.root.owner import Owner
from tests.distributed.workers import nets
from tests.distributed.workers.nets import assert_same, full, step

STRAIGHT, SWAPPED = (0, 0, 1, 1), (1, 1, 0, 0)
asked: list[str] = []
reached: set[str] = set()


def data_of(keys: list[str]) -> list[str]:
    """Leave out fragments. A rank reads those of other nodes to see whether a copy is
    on this node.
    """
    return [key for key in keys if not key.endswith(".json")]


def watch() -> None:
    """Record every request to another node."""
    request = ckpt.nodes.peer_store.NodeStore._request

    def recorded(self: Any, peer: Any, key: str, offset: int, out: memoryview) -> int:
        asked.append(key)
        size = request(self, peer, key, offset, out)
        reached.update(self._addresses.values())
        return size

    ckpt.nodes.peer_store.NodeStore._request = recorded  # type: ignore[method-assign]


def build(mode: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Build a state as ``nets.build`` does.

    In the mode "ddp without broadcast" DDP does not send the first rank's buffers to the others.
    """
    if mode != "ddp without broadcast":
        return nets.build(mode, seed)
    net, _ = nets.build("plain", seed)
    return (
        wrapped := DistributedDataParallel(net, forward_sync_buffers=False),
        torch.optim.AdamW(wrapped.parameters(), lr=1e-2),
    )


class Job:
    """Four ranks, and where each finds its files."""

    def __init__(
        self, folder: Path, of: Sequence[int] = STRAIGHT, *, far: bool = True, memory: str = ""
    ) -> None:
        here = of[dist.get_rank()]
        self.tiers = [Tier(str(folder / f"node{here}"), local=True, keep_last=2)]
        if memory:
            self.tiers.insert(0, Tier(f"shm://{memory}-{here}"))
        if far:
            self.tiers.append(Tier(str(folder / "shared"), every=2))

    def save(
        self, mode: str, steps: Sequence[int], *, drift: bool = False, **settings: Any
    ) -> dict[int, dict[str, Any]]:
        """Save the state at each step, and return it.

        With ``drift`` each rank has its own running statistics, as if from its own batches.
        """
        model, optimizer = build(mode, 0)
        found = {}
        with CheckpointManager(self.tiers, chunk_size=1 << 14, **settings) as manager:
            for number in steps:
                step(model, optimizer, number)
                if drift:
                    model.get_buffer("module.norm.running_mean").add_(dist.get_rank())
                manager.save({"model": model, "optimizer": optimizer, "step": number})
                found[number] = full(model, optimizer)
                dist.broadcast(found[number]["model/norm.running_mean"], 0)
        dist.barrier()
        return found

    def restore(
        self, mode: str, saved: dict[int, dict[str, Any]], want: int, **how: Any
    ) -> RestoreReport:
        """Check that what was restored is what was saved, and return the report."""
        asked.clear()
        model, optimizer = build(mode, 1)
        step(model, optimizer, 99)
        state = {"model": model, "optimizer": optimizer, "step": -1}
        with CheckpointManager(self.tiers) as manager:
            report = manager.restore(state, **how)
        assert report is not None
        assert (report.step, state["step"]) == (want, want), report
        assert_same(full(model, optimizer), saved[want])
        assert report.repaired == (), report
        dist.barrier()
        return report


def alone(work: Any) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        work()
    dist.barrier()


def copy_of(folder: Path, name: str, *, without: Sequence[str] = ()) -> Path:
    """Copy the nodes and what they share, as they would be after ``without`` was lost."""
    other = folder.parent / name

    def make() -> None:
        shutil.copytree(folder, other)
        for lost in without:
            shutil.rmtree(other / lost)

    alone(make)
    return other


def ranks_on(folder: Path, node: int, number: int) -> list[str]:
    return sorted(
        path.name for path in (folder / f"node{node}").glob(f"step-{number:09d}.*/*.safetensors")
    )


def sharded(root: Path) -> None:
    base = root / "fsdp"
    saved = Job(base).save("fsdp", (1, 2, 3))
    # each node has its ranks' files and the same manifest, and prunes for itself; the shared tier
    # has all
    assert ranks_on(base, 0, 3) == ["rank-00000.safetensors", "rank-00001.safetensors"]
    assert ranks_on(base, 1, 3) == ["rank-00002.safetensors", "rank-00003.safetensors"]
    for node in (0, 1):
        assert (
            len({path.read_bytes() for path in base.glob("node*/step-000000003.*/manifest.json")})
            == 1
        )
        assert len(list((base / f"node{node}").glob("step-*/manifest.json"))) == 2
    assert len(list(base.glob("shared/step-*/*.safetensors"))) == 4

    report = Job(base).restore("fsdp", saved, 3)
    assert report.tier.endswith(f"node{dist.get_rank() // 2}"), report
    assert (data_of(asked), report.cached_bytes) == ([], 0)

    # the ranks come back on the other nodes: everything comes from there, once, and is kept
    swapped = copy_of(base, "swapped")
    job = Job(swapped, SWAPPED, far=False)
    report = job.restore("fsdp", saved, 3)
    assert report.tier.endswith("of other nodes"), report
    assert report.cached_bytes > 0, report
    assert asked
    report = job.restore("fsdp", saved, 3)
    assert (data_of(asked), report.cached_bytes) == ([], 0)

    # one node is lost: no node has the newest step as a whole, and the previous one is on the
    # shared tier
    lost = copy_of(base, "lost", without=["node1"])
    report = Job(lost).restore("fsdp", saved, 2)
    assert [number for number, _ in report.skipped] == [3]
    assert "2, 3" in report.skipped[0][1]
    job = Job(copy_of(base, "gone", without=["node1"]), far=False)
    with pytest.raises(NoCheckpoint, match="nothing in the state was changed"):
        job.restore("fsdp", saved, 3)


def replicated(root: Path) -> None:
    # the manifest has the fragments, since a fragment is lost with its node
    for mode, node in (("ddp without broadcast", 0), ("hsdp", 1)):
        base = root / mode
        saved = Job(base, far=False).save(mode, (1, 2), copies="per_node")
        if mode == "hsdp":
            report = Job(base, far=False).restore(mode, saved, 2)
            assert asked == [], asked
            assert report.tier.endswith(f"node{dist.get_rank() // 2}"), report
        lost = copy_of(base, f"{mode}-lost", without=[f"node{node}"])
        report = Job(lost, far=False).restore(mode, saved, 2)
        assert bool(asked) == (dist.get_rank() // 2 == node), asked
        assert report.skipped == ()
    # only the first rank has the buffers that differ: they are requested, and no file is fetched
    # for them
    base = root / "ddp"
    saved = Job(base, far=False).save("ddp", (1,), drift=True, copies="per_node")
    report = Job(base, far=False).restore("ddp", saved, 1)
    assert any("rank-00000" in key for key in asked) == (dist.get_rank() >= 2), asked
    assert report.cached_bytes == 0


def undeclared(root: Path) -> None:
    here = root / f"undeclared{dist.get_rank() // 2}"
    with (
        CheckpointManager(here, commit_timeout_seconds=20) as manager,
        pytest.raises(TierNotShared, match=r"rank\(s\) 2 .*local=True"),
    ):
        manager.save({"x": 1, "step": 1})
    dist.barrier()
    assert not list(here.glob("step-*/*"))


def in_memory(root: Path) -> None:
    base = root / "memory"
    name = f"test-{root.name}"
    job = Job(base, far=False, memory=name)
    saved = job.save("fsdp", (1, 2))
    shm = list(Path("/dev/shm").glob(f"ckpt-memory-*-{name}-*"))
    assert not shm, shm  # a closed manager leaves nothing there that is durable elsewhere
    report = Job(base, SWAPPED, far=False, memory=name).restore("fsdp", saved, 2)
    assert report.tier.endswith("of other nodes")


def fewer(root: Path) -> None:
    """Restore on two ranks of the four, one on each node, and then both on one."""
    base = root / "four"
    saved = Job(base, far=False).save("fsdp", (1, 2))
    rank = dist.get_rank()
    dist.destroy_process_group()
    if rank >= 2:
        return
    dist.init_process_group("gloo", init_method=f"file://{root}/second", rank=rank, world_size=2)
    lost = copy_of(base, "four-lost", without=["node1"])
    Job(base, (1, 0), far=False).restore("fsdp", saved, 2)
    assert asked
    with pytest.raises(NoCheckpoint, match=r"rank\(s\) 2, 3"):
        Job(lost, (0, 0), far=False).restore("fsdp", saved, 2)
    # what was fetched is kept: now one node has all of it
    Job(copy_of(base, "four-kept", without=["node1"]), (0, 0), far=False).restore("fsdp", saved, 2)


def cut_off(root: Path) -> None:
    """A job ended after one node had put the manifest of step 2, and before the other.

    The next job takes the roots, and does not restore.
    """
    base = root / "cut"
    saved = Job(base, far=False).save("fsdp", (1, 2))

    def cut() -> None:
        (manifest,) = base.glob("node1/step-000000002.*/manifest.json")
        manifest.unlink()
        attempt = manifest.parent.name.partition(".")[2]
        for node in (base / "node0", base / "node1"):
            begun = node / f"step-000000009.{attempt}"
            begun.mkdir()
            (begun / "rank-00000.safetensors").write_bytes(bytes(100))
            dead = msgspec.structs.replace(Owner.of_this_process(attempt), started=1)
            (node / OWNER).write_bytes(msgspec.json.encode(dead))

    alone(cut)
    Job(base, far=False).save("fsdp", (3,))
    assert not list(base.glob("node*/step-000000009.*/*"))
    report = Job(base, far=False).restore("fsdp", saved, 2, step=2, read_through=False)
    assert report.skipped == ()


def gone_back(root: Path) -> None:
    """Each node has the rollback, and the record of any of them counts for all."""
    base = root / "back"
    saved = Job(base, far=False).save("fsdp", (1, 2, 3))
    Job(base, far=False).restore("fsdp", saved, 2, step=2)
    assert len(list(base.glob("node*/rollbacks/*.json"))) == 2
    Job(base, far=False).restore("fsdp", saved, 2)
    alone(lambda: shutil.rmtree(base / "node0" / "rollbacks"))
    Job(base, far=False).restore("fsdp", saved, 2)
    Job(base, far=False).restore("fsdp", saved, 3, step=3)
    Job(base, SWAPPED, far=False).restore("fsdp", saved, 3)


def apart(root: Path) -> None:
    """The nodes have only one interface in common, and read everything over it."""
    saved = Job(root / "apart", far=False).save("fsdp", (1, 2))
    Job(root / "apart", SWAPPED, far=False).restore("fsdp", saved, 2)
    assert asked
    assert reached <= {"10.77.0.1", "10.77.0.2"}, reached


def main() -> None:
    """Run the scenes that are named, or all but ``apart``."""
    dist.init_process_group("gloo")
    watch()
    scenes = (sharded, replicated, undeclared, in_memory, cut_off, gone_back, fewer, apart)
    names = sys.argv[2:] or [scene.__name__ for scene in scenes[:-1]]
    for scene in scenes:
        if scene.__name__ in names:
            scene(Path(sys.argv[1]))
    if dist.is_initialized():
        print("ALL WELL", flush=True)
    exit_rank()


main()

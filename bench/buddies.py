"""Measure copies on other nodes, and what the agent verifies: what they cost training, and how fast
a lost node comes back.

    python -m bench.buddies [--mib 256] [--rate 200] [--blocks 7] [--kinds bounded scrub]

Two ranks of this machine stand for two nodes, each with a tier in memory of its own, and train
under FSDP2. Blocks of steps with one save each are made in turn without copies and as ``--kinds``
says: with copies at ``--rate`` MB/s (bounded), with copies as fast as they go (unbounded), and
without copies while a worker of the agent on each node verifies a step on the disk at its default
rate (scrub). Then the memory of rank 1 is removed, all ranks start again, and rank 1 restores its
part from rank 0; a plain copy of as many bytes over a socket is made in turn.
"""

from __future__ import annotations

import argparse
import itertools
import os
import selectors
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from bench.process import BenchError
from ckpt import CheckpointManager, Tier
from ckpt.agent.folder import AgentFolder, Lock
from ckpt.agent.messages import Job
from ckpt.agent.worker_messages import Order, Report, Verifying
from ckpt.agent.worker_process import Worker, Workplace
from ckpt.config import SaveConfig
from ckpt.events import Event, NodeReplicated
from ckpt.restore.report import RestoreReport
from ckpt.root.owner import NO_PROCESS, Owner

_WIDTH: Final = 1024
_BYTES_PER_PARAMETER: Final = 12  # float32: the weight and AdamW's two moments
_PIECE_BYTES: Final = 8 << 20
_DISK_BYTES: Final = 512 << 20
_COPIED: Final = ("bounded", "unbounded")
_KINDS: Final = (*_COPIED, "scrub")
_SHM: Final = Path("/dev/shm")


def main() -> None:
    """Start the ranks twice: to train, and to restore. Rank 0 prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=256, help="the state of each rank")
    parser.add_argument("--rate", type=float, default=200.0, help="MB/s of the bounded copies")
    parser.add_argument("--blocks", type=int, default=7, help="of each kind")
    parser.add_argument("--steps", type=int, default=10, help="of each block")
    parser.add_argument(
        "--kinds", nargs="+", choices=_KINDS, default=_COPIED, help="of blocks, beside plain ones"
    )
    args = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        (_train if os.environ["BENCH_PART"] == "train" else _restore)(args)
        sys.stdout.flush()
        os._exit(0)  # as a process that is killed: its memory stays
    with tempfile.TemporaryDirectory() as name:
        with CheckpointManager(Path(name, "disk")) as manager:  # what is verified
            manager.save({"w": torch.ones(_DISK_BYTES // 4)}, 1)
        os.environ["BENCH_DISK"] = str(Path(name, "disk"))
        try:
            _start("train", Path(name).name)
            for folder in _memory(Path(name).name, "*-1"):
                shutil.rmtree(folder)
            if {*args.kinds} != {"scrub"}:
                _start("restore", Path(name).name)
        finally:
            for folder in _memory(Path(name).name):
                shutil.rmtree(folder)


def _start(part: str, name: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "bench.buddies", *sys.argv[1:]],
            env={**os.environ, **job, "RANK": str(rank), "BENCH_PART": part, "BENCH_NAME": name},
        )
        for rank in range(2)
    ]
    statuses = [rank.wait() for rank in ranks]
    if any(statuses):
        raise BenchError(f"a rank failed to {part}")


def _memory(name: str, which: str = "*") -> list[Path]:
    return list(_SHM.glob(f"ckpt-memory-{os.geteuid()}-{name}-{which}"))


def _tier(kind: str, buddies: int = 0) -> Tier:
    return Tier(f"shm://{os.environ['BENCH_NAME']}-{kind}-{dist.get_rank()}", buddies=buddies)


@contextmanager
def _verifying() -> Generator[None]:
    """Let a worker of the agent verify a step on the disk meanwhile."""
    job = Job(
        owner=msgspec.structs.replace(Owner.of_this_process("bench"), pid=NO_PROCESS),
        processes=(),
        ranks=1,
        tiers=({"url": os.environ["BENCH_DISK"]},),
        backlog=0,
        environment=dict(os.environ),
        scrub_mb_per_s=SaveConfig().scrub_mb_per_s,
    )
    reports: list[Report] = []
    with tempfile.TemporaryDirectory() as folder, selectors.DefaultSelector() as selector:
        place = AgentFolder(folder)
        where = Workplace(place, Lock(place, "work"), selector)
        worker = Worker(Order(job, "scrub"), where, reports.append, lambda _: None)
        try:
            if not _verifies(selector, reports):
                raise BenchError("the worker has verified nothing")
            yield
            if not _verifies(selector, reports):
                raise BenchError("the worker ended before the block: take fewer --steps")
        finally:
            if selector.get_map():  # It has not ended
                worker.kill()


def _verifies(selector: selectors.BaseSelector, reports: list[Report]) -> bool:
    """Wait for a report of the worker. Return whether it is at work."""
    reports.clear()
    while not reports and selector.get_map():
        for key, _ in selector.select():
            key.data()
    return any(isinstance(report, Verifying) for report in reports)


def _model(mib: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = max(1, (mib << 20) * 2 // (_BYTES_PER_PARAMETER * _WIDTH * (_WIDTH + 1)))
    model = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(layers)))
    mesh = init_device_mesh("cpu", (2,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(8, _WIDTH)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def _train(args: argparse.Namespace) -> None:
    model, optimizer = _model(args.mib)
    copied: list[NodeReplicated] = []
    arrived = threading.Semaphore(0)

    def observe(event: Event) -> None:
        if isinstance(event, NodeReplicated):
            copied.append(event)
            arrived.release()

    kinds = ["without", *args.kinds]
    managers = {
        kind: CheckpointManager(
            _tier(kind, buddies=int(kind in _COPIED)),
            observers=[observe],
            slots=1,
            replicate_mb_per_s=args.rate if kind == "bounded" else None,
        )
        for kind in kinds
        if kind != "scrub"
    }
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    copying: dict[str, list[float]] = {kind: [] for kind in kinds}
    numbers = itertools.count()
    for block in range(args.blocks + 1):
        for kind in kinds[:: 1 if block % 2 else -1]:
            manager = managers.get(kind, managers["without"])
            with _verifying() if kind == "scrub" else nullcontext():
                dist.barrier()
                began = time.perf_counter()
                state = {"model": model, "optimizer": optimizer, "step": block}
                pending = manager.save_async(state, next(numbers))
                for _ in range(args.steps):
                    _step(model, optimizer)
                took = time.perf_counter() - began
            pending.result()
            if kind in _COPIED and not arrived.acquire(timeout=600):
                raise BenchError("no copy was made in ten minutes")
            if block:  # the first makes the slots
                seconds[kind].append(took)
                copying[kind].append(copied[-1].seconds if kind in _COPIED else 0.0)
    dist.barrier()
    if dist.get_rank():
        return
    print(
        f"state of a rank: {pending.result().nbytes / 2**20:.0f} MiB, blocks of {args.steps} steps"
    )
    for kind, blocks in seconds.items():
        ratios = [one / plain for one, plain in zip(blocks, seconds["without"], strict=True)]
        print(
            f"{kind:>10}: block {statistics.median(blocks):.2f} s, {statistics.median(ratios):.3f} "
            f"times the plain one of its turn ({min(ratios):.3f} to {max(ratios):.3f}); "
            f"a copy {statistics.median(copying[kind]):.2f} s"
        )


def _restore(args: argparse.Namespace) -> None:
    model, optimizer = _model(args.mib)
    kind = next(kind for kind in args.kinds if kind in _COPIED)
    restored: list[float] = []
    copied: list[float] = []
    for _ in range(args.blocks):
        manager = CheckpointManager(_tier(kind))
        dist.barrier()
        began = time.perf_counter()
        report = manager.restore({"model": model, "optimizer": optimizer, "step": -1})
        restored.append(time.perf_counter() - began)
        if not isinstance(report, RestoreReport):
            raise BenchError("the step did not come back")
        copied.append(_plain_copy(report.nbytes))
        manager.close()
    if dist.get_rank() == 1:
        print(
            f"rank 1 comes back from its buddy in {statistics.median(restored):.2f} s; a plain "
            f"copy of as many bytes takes {statistics.median(copied):.2f} s: "
            f"{statistics.median(a / b for a, b in zip(restored, copied, strict=True)):.2f} times"
        )


def _plain_copy(nbytes: int) -> float:
    """Return the seconds in which rank 1 reads ``nbytes`` from rank 0 over one socket."""
    place: list[Any] = [None]
    data = memoryview(bytearray(nbytes))
    if dist.get_rank() == 0:
        server = socket.create_server(("127.0.0.1", 0))
        place[0] = server.getsockname()
        dist.broadcast_object_list(place)
        with server, server.accept()[0] as connection:
            connection.sendall(data)
            return 1.0
    dist.broadcast_object_list(place)
    began = time.perf_counter()
    with socket.create_connection(place[0]) as connection:
        while data:
            data = data[connection.recv_into(data[:_PIECE_BYTES]) :]
    return time.perf_counter() - began


if __name__ == "__main__":
    main()

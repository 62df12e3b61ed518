"""Measure copies on other nodes: what they cost training, and how fast a lost node comes back.

    python -m bench.buddies [--mib 256] [--rate 200] [--blocks 7]

Two ranks of this machine stand for two nodes, each with a tier in memory of its own, and train
under FSDP2. Blocks of steps with one save each are made in turn without copies, with copies at
``--rate`` MB/s, and with copies as fast as they go. Then the memory of rank 1 is removed, all ranks
start again, and rank 1 restores its part from rank 0; a plain copy of as many bytes over a socket
is made in turn.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from bench.process import BenchError
from ckpt import CheckpointManager, Tier
from ckpt.events import Event, NodeReplicated
from ckpt.restore.report import RestoreReport

_WIDTH: Final = 1024
_BYTES_PER_PARAMETER: Final = 12  # float32: the weight and AdamW's two moments
_PIECE_BYTES: Final = 8 << 20
_SHM: Final = Path("/dev/shm")


def main() -> None:
    """Start the ranks twice: to train, and to restore. Rank 0 prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=256, help="the state of each rank")
    parser.add_argument("--rate", type=float, default=200.0, help="MB/s of the bounded copies")
    parser.add_argument("--blocks", type=int, default=7, help="of each kind")
    parser.add_argument("--steps", type=int, default=10, help="of each block")
    args = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        (_train if os.environ["BENCH_PART"] == "train" else _restore)(args)
        sys.stdout.flush()
        os._exit(0)  # as a process that is killed: its memory stays
    with tempfile.TemporaryDirectory() as name:
        try:
            for part in ("train", "restore"):
                _start(part, Path(name).name)
                shutil.rmtree(_memory(Path(name).name, 1), ignore_errors=True)
        finally:
            for rank in range(2):
                shutil.rmtree(_memory(Path(name).name, rank), ignore_errors=True)


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


def _memory(name: str, rank: int) -> Path:
    return _SHM / f"ckpt-memory-{os.geteuid()}-{name}-{rank}"


def _tier(suffix: str = "", replicas: int = 0) -> Tier:
    return Tier(f"shm://{os.environ['BENCH_NAME']}{suffix}-{dist.get_rank()}", replicas=replicas)


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

    kinds: dict[str, dict[str, Any]] = {
        "without": {},
        "bounded": {"replicate_mb_per_s": args.rate},
        "unbounded": {},
    }
    managers = {
        kind: CheckpointManager(
            _tier("" if kind == "unbounded" else f"-{kind}", replicas=int(kind != "without")),
            observers=[observe],
            slots=1,
            **settings,
        )
        for kind, settings in kinds.items()
    }
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    copying: dict[str, list[float]] = {kind: [] for kind in kinds}
    for block in range(args.blocks + 1):
        for kind in list(kinds)[:: 1 if block % 2 else -1]:
            dist.barrier()
            began = time.perf_counter()
            pending = managers[kind].save_async(
                {"model": model, "optimizer": optimizer, "step": block}, block
            )
            for _ in range(args.steps):
                _step(model, optimizer)
            took = time.perf_counter() - began
            pending.result()
            if kind != "without" and not arrived.acquire(timeout=600):
                raise BenchError("no copy was made in ten minutes")
            if block:  # the first makes the slots
                seconds[kind].append(took)
                copying[kind].append(copied[-1].seconds if kind != "without" else 0.0)
    dist.barrier()
    if dist.get_rank():
        return
    plain = statistics.median(seconds["without"])
    print(f"state of a rank: {copied[-1].nbytes / 2**20:.0f} MiB, blocks of {args.steps} steps")
    for kind in kinds:
        took = statistics.median(seconds[kind])
        print(
            f"{kind:>10}: block {took:.2f} s, {took / plain:.3f} of that without copies; "
            f"a copy {statistics.median(copying[kind]):.2f} s"
        )


def _restore(args: argparse.Namespace) -> None:
    model, optimizer = _model(args.mib)
    restored: list[float] = []
    copied: list[float] = []
    for _ in range(args.blocks):
        manager = CheckpointManager(_tier())
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

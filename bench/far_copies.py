"""Measure what copies to a far tier cost training, by the trainer itself and by its agent.

    python -m bench.far_copies [--mib 64] [--blocks 7] [--steps 40] [--mb-per-s 0] [--codec zstd]

A process trains, and saves to a folder and to an S3 server of this machine behind a wire with a
bounded rate (0: none). Blocks of steps with one save each are made in turn without a far tier, with
one that the trainer writes, and with one that a worker of the agent writes. A block ends after its
last step, or when the far tier has the save, whichever is later; only the steps are timed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console
from torch import nn

from bench import clients
from bench.process import BenchError
from bench.proxy import Proxy
from bench.runner import Bench
from bench.scenarios.objects import served
from ckpt import CheckpointManager, Tier
from ckpt.agent.client import connect
from ckpt.agent.folder import AgentFolder
from ckpt.agent.messages import Stop
from ckpt.config import AgentMode

_WIDTH: Final = 512
_BYTES_PER_PARAMETER: Final = 12  # float32: the weight and AdamW's two moments
_KINDS: Final = ("no far tier", "trainer", "agent")


def main() -> None:
    """Start the server, the wire and the trainer, which prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=64, help="the state")
    parser.add_argument("--blocks", type=int, default=7, help="of each kind")
    parser.add_argument("--steps", type=int, default=40, help="of each block")
    parser.add_argument("--mb-per-s", type=float, default=0.0, help="of the wire")
    parser.add_argument("--threads", type=int, default=2, help="that train")
    parser.add_argument("--codec", default="none", help="of the far tier")
    parser.add_argument("--dir", default=tempfile.gettempdir(), help="where the folder is")
    args = parser.parse_args()
    if "BENCH_WIRE" in os.environ:
        _train(args, os.environ["BENCH_WIRE"], os.environ["BENCH_FOLDER"])
        return
    with (
        Bench("far_copies", args.dir, [], 600, Console()) as bench,
        served("rclone", bench) as (port, _),
        Proxy(port) as wire,
        tempfile.TemporaryDirectory() as agent,
    ):
        wire.bytes_per_second = args.mb_per_s * 1e6
        settings = {
            "BENCH_WIRE": wire.url,
            "BENCH_FOLDER": bench.folder,
            "CKPT_AGENT_FOLDER": agent,
        }
        command = [sys.executable, "-m", "bench.far_copies", *sys.argv[1:]]
        if subprocess.run(command, env={**os.environ, **settings}, check=False).returncode:
            raise BenchError("the trainer has failed")


def _train(args: argparse.Namespace, wire: str, folder: str) -> None:
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    layers = max(1, (args.mib << 20) // (_BYTES_PER_PARAMETER * _WIDTH * (_WIDTH + 1)))
    model = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    state = {"model": model, "optimizer": optimizer}
    managers = {kind: _manager(kind, wire, Path(folder), args.codec) for kind in _KINDS}
    seconds: dict[str, list[float]] = {kind: [] for kind in _KINDS}
    stalls: dict[str, list[float]] = {kind: [] for kind in _KINDS}
    far: dict[str, list[float]] = {kind: [] for kind in _KINDS}
    busy: dict[str, list[float]] = {kind: [] for kind in _KINDS}
    for block in range(args.blocks + 1):
        turn = block % len(_KINDS)  # No kind follows itself: its last save may still be cleaned up
        for kind in _KINDS[turn:] + _KINDS[:turn]:
            began, used = time.perf_counter(), time.process_time()
            pending = managers[kind].save_async({**state, "step": block}, block)
            stall = time.perf_counter() - began
            for _ in range(args.steps):
                model(torch.ones(64, _WIDTH)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            took = time.perf_counter() - began
            pending.result(600)
            if block:  # the first makes the slots, and starts the worker
                seconds[kind].append(took)
                stalls[kind].append(stall)
                far[kind].append(time.perf_counter() - began)
                busy[kind].append(time.process_time() - used)
    for manager in managers.values():
        manager.close()
    if (found := connect(AgentFolder.of_this_user())) is not None:
        found.ask(Stop())
        found.receive_stop()
        found.close()
    plain = seconds["no far tier"]
    for kind in _KINDS:
        drag = [1e3 * (one - without) for one, without in zip(seconds[kind], plain, strict=True)]
        figures = {
            "kind": kind,
            "block_s": _spread(seconds[kind], 3),
            "drag_ms": _spread(drag, 1),
            "stall_ms": _spread([1e3 * each for each in stalls[kind]], 2),
            "all_durable_s": _spread(far[kind], 3),
            "cpu_of_trainer_s": _spread(busy[kind], 3),
        }
        print(json.dumps(figures))


def _spread(values: list[float], digits: int) -> list[float]:
    """Return the median, the least and the most."""
    return [round(each, digits) for each in (statistics.median(values), min(values), max(values))]


def _manager(kind: str, wire: str, folder: Path, codec: str) -> CheckpointManager:
    near = Tier(str(folder / kind.replace(" ", "-")), keep_last=2)
    options: dict[str, Any] = {
        "endpoint_url": wire,
        "key": clients.KEY,
        "secret": clients.SECRET,
        "region": "us-east-1",
        "put_if_absent": False,
    }
    far = Tier(f"s3://{clients.BUCKET}/{kind}", options, keep_last=2, codec=codec)
    mode: AgentMode = "required" if kind == "agent" else "off"
    return CheckpointManager(
        [near] if kind == "no far tier" else [near, far],
        agent=mode,
        scrub_mb_per_s=0,
    )


if __name__ == "__main__":
    main()

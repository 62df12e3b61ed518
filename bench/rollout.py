"""Measure how the weights of a running job reach another process: the bytes of each version, and
the seconds from the call of the save to "ready in the memory of the other process".

    python -m bench.rollout [--mib 256] [--steps 8] [--dir FOLDER] [--s3]

A bf16 model is trained as in reinforcement learning: AdamW with a learning rate of 1e-6 on float32
master weights of a normal distribution (0.02), whose gradients are made of a fixed direction and
noise. So the share of the bf16 words that change is what it is there, and the rest of the training
costs nothing. Three ways are measured in turn, each on a folder and, with ``--s3``, on a real S3
server (rclone) on this machine:

* deltas: ``save(deltas="model")`` and ``ckpt.follow``
* chunks: the same without deltas
* whole: ``safetensors.torch.save_file`` into a new file, fsynced and renamed, which the other
  process loads (a folder only)

The other process compares a hash of what it has with that of the trainer, after the clock stops.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Final

import torch
import xxhash
from rich.console import Console
from safetensors.torch import load_file, save_file

import ckpt
from bench import clients
from bench.runner import Bench
from bench.scenarios.objects import served
from ckpt import CheckpointManager, Tier

_RATE: Final = 1e-6
_SHAPE: Final = (4096, 1024)
_WAYS: Final = ("deltas", "chunks", "whole")


class Training:
    """Float32 master weights under AdamW, and their bf16 copies."""

    def __init__(self, nbytes: int) -> None:
        torch.manual_seed(0)
        count = max(1, nbytes // (2 * _SHAPE[0] * _SHAPE[1]))
        self.masters = [torch.nn.Parameter(0.02 * torch.randn(_SHAPE)) for _ in range(count)]
        self._direction = [torch.randn(_SHAPE) for _ in range(count)]
        self._optimizer = torch.optim.AdamW(self.masters, lr=_RATE)
        self.weights = {
            f"layer{index}.weight": master.detach().to(torch.bfloat16)
            for index, master in enumerate(self.masters)
        }

    def step(self) -> float:
        """Train one step. Return the share of the bf16 words that have changed."""
        for master, direction in zip(self.masters, self._direction, strict=True):
            master.grad = direction + torch.randn(_SHAPE)
        self._optimizer.step()
        changes = 0
        for weight, master in zip(self.weights.values(), self.masters, strict=True):
            new = master.detach().to(torch.bfloat16)
            changes += int((new.view(torch.int16) != weight.view(torch.int16)).sum())
            weight.copy_(new)
        return changes / sum(weight.numel() for weight in self.weights.values())


def digest(weights: Mapping[str, torch.Tensor]) -> str:
    state = xxhash.xxh3_128()
    for name in sorted(weights):
        state.update(weights[name].contiguous().view(torch.uint8).numpy().data)
    return state.hexdigest()


def receive(pipe: Connection, way: str, tier: Tier) -> None:
    """Take each version, and report when it was ready, its bytes and its hash."""
    torch.set_num_threads(1)
    if way == "whole":
        while (path := pipe.recv()) is not None:
            while not os.path.exists(path):
                time.sleep(0.001)
            weights = load_file(path)
            pipe.send((time.monotonic(), os.path.getsize(path), digest(weights)))
        return
    with ckpt.follow(tier, poll_seconds=0.02, timeout_seconds=300) as versions:
        while pipe.recv() is not None:
            version = next(versions)
            pipe.send((time.monotonic(), version.read_bytes, digest(version.weights)))


def measure(way: str, tier: Tier, training: Training, steps: int) -> Iterator[tuple[float, ...]]:
    """Yield for each version the share of words that changed, the bytes that were read, the seconds
    to "ready", and the seconds of the call.
    """
    pipe, end = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=receive, args=(end, way, tier))
    process.start()
    deltas = {"deltas": "model"} if way == "deltas" else {}
    try:
        with CheckpointManager(tier, check="off", **deltas) as manager:  # type: ignore[arg-type]
            for step in range(steps):
                changes = training.step()
                expected = digest(training.weights)
                path = os.path.join(tier.url, f"model-{step}.safetensors")
                begin = time.monotonic()
                pipe.send(path)
                if way == "whole":
                    os.makedirs(tier.url, exist_ok=True)
                    save_file(training.weights, f"{path}.new")
                    with open(f"{path}.new", "rb") as file:
                        os.fsync(file.fileno())
                    os.rename(f"{path}.new", path)
                    call_seconds = time.monotonic() - begin
                else:
                    pending = manager.save_async({"model": training.weights}, step)
                    call_seconds = time.monotonic() - begin
                    pending.result()
                ready, nbytes, content = pipe.recv()
                assert content == expected, "another version"
                yield changes, nbytes, ready - begin, call_seconds
        pipe.send(None)
    finally:
        process.join(60)
        process.kill()


@contextmanager
def tier_of(kind: str, bench: Bench, way: str) -> Iterator[Tier]:
    if kind == "folder":
        path = os.path.join(bench.folder, way)
        yield Tier(path, keep_last=2)
        shutil.rmtree(path, ignore_errors=True)
    else:
        with served("rclone", bench) as (_, url):
            options = {"endpoint_url": url, "key": clients.KEY, "secret": clients.SECRET}
            yield Tier(f"s3://{clients.BUCKET}/{way}", options=options, keep_last=2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=256, help="the size of the bf16 weights")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument(
        "--dir", default=tempfile.gettempdir(), help="a folder on the disk to measure"
    )
    parser.add_argument("--s3", action="store_true")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    print(f"{args.mib} MiB of bf16, {args.steps} versions, load average {load:.1f}")
    print("| store | way | words changed | bytes of a version | call | ready |")
    print("|---|---|---:|---:|---:|---:|")
    for kind in ("folder", "s3") if args.s3 else ("folder",):
        for way in _WAYS if kind == "folder" else _WAYS[:2]:
            training = Training(args.mib << 20)
            size = sum(weight.nbytes for weight in training.weights.values())
            with (
                Bench("rollout", args.dir, [], 600, Console()) as bench,
                tier_of(kind, bench, way) as tier,
            ):
                # The first two versions begin files, threads and processes.
                rows = [*measure(way, tier, training, args.steps + 2)][2:]
            changes, nbytes, ready, call = map(statistics.median, zip(*rows, strict=True))
            least, most = min(row[2] for row in rows), max(row[2] for row in rows)
            print(
                f"| {kind} | {way} | {changes:.2%} | {nbytes / size:.2%} | {call * 1e3:.0f} ms "
                f"| {ready:.2f} s ({least:.2f} to {most:.2f}) |",
                flush=True,
            )


if __name__ == "__main__":
    main()

"""Compare `ckpt adopt` with `ckpt import`, and a restore of the adopted step with DCP's own load.

    python -m bench.adopt [--mib 1024] [--ranks 4] [--rounds 5] [--dir DIR]

Ranks shard a model and its AdamW by FSDP2 and write a folder with
``torch.distributed.checkpoint``. One process adopts it, and imports it. Then it loads the whole
state into plain tensors in turn, by DCP and by ckpt, each round into other tensors. The files are
in the page cache.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from bench.rank_exit import exit_rank
from ckpt import CheckpointManager, Tier
from ckpt.exchange.foreign.adoption import adopt_checkpoint
from ckpt.exchange.foreign.imports import ForeignCheckpoint, import_checkpoint

_WIDTH: Final = 1024
_BYTES_PER_PARAMETER: Final = 12  # float32: the weight and AdamW's two moments


def main() -> None:
    """Write the folder, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=1024, help="the state")
    parser.add_argument("--ranks", type=int, default=4, help="that write")
    parser.add_argument("--rounds", type=int, default=5, help="of each load")
    parser.add_argument("--dir", default=tempfile.gettempdir(), help="where the folder is")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    layers = max(1, (args.mib << 20) // (_BYTES_PER_PARAMETER * _WIDTH * (_WIDTH + 1)))
    with tempfile.TemporaryDirectory(dir=args.dir) as place:
        folder = Path(place, "dcp")
        mp.start_processes(  # type: ignore[no-untyped-call]
            _write, (args.ranks, layers, place), nprocs=args.ranks, start_method="spawn"
        )
        _compare(folder, Path(place), layers, args.rounds)


def _built(layers: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(layers)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def _write(rank: int, ranks: int, layers: int, place: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{place}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    torch.manual_seed(0)
    model, _ = _built(layers)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
    _train(model, optimizer)
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=f"{place}/dcp")
    exit_rank()


def _compare(folder: Path, place: Path, layers: int, rounds: int) -> None:
    foreign = ForeignCheckpoint(path=str(folder))
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{folder} has {size / 1e6:.0f} MB in {len(list(folder.glob('*.distcp')))} files")
    for number in range(rounds):
        root, copy = place / f"adopted-{number}", place / "imported"
        seconds = _timed(partial(adopt_checkpoint, foreign, Tier(str(root)), 1))
        import_seconds = _timed(partial(import_checkpoint, foreign, Tier(str(copy)), 1))
        shutil.rmtree(copy)
        print(f"adopt {seconds:.2f} s, import {import_seconds:.2f} s")
    written = sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
    print(f"written at the adoption: {written} bytes, {written / size:.4%} of the folder")
    times: dict[str, list[float]] = {"DCP": [], "ckpt": []}
    for _ in range(rounds):
        for name, load in (("DCP", _by_dcp), ("ckpt", _by_ckpt)):
            model, optimizer = _built(layers)
            _train(model, optimizer)
            source = folder if name == "DCP" else root
            times[name].append(_timed(partial(load, source, model, optimizer)))
    for name, seconds_of in times.items():
        text = " ".join(f"{seconds:.2f}" for seconds in seconds_of)
        print(f"{name}: median {statistics.median(seconds_of):.2f} s of {text}")


def _timed(work: Callable[[], Any]) -> float:
    os.sync()
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _by_dcp(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    weights, moments = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": weights, "optimizer": moments}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )


def _by_ckpt(root: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with CheckpointManager(str(root)) as manager:
        manager.restore({"model": model, "optimizer": optimizer})


if __name__ == "__main__":
    main()

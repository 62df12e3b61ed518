"""FOLDER: ranks restore what they share; each reads it, or one reads for all.

Other scenes are damage and failures on one rank, and fully_shard on the meta device.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import ckpt.state.match.broadcast as broadcast
import ckpt.state.match.sink as sink
from bench.rank_exit import exit_rank
from ckpt import CheckpointManager, PerRank, Tier
from ckpt.errors import CkptError, ConfigError, NoCheckpoint, RestoreError
from ckpt.state.match.sink import TensorSink
from ckpt.storage.api import aligned_memory

WIDTH = 256


class Net(nn.Module):
    """A network with odd widths, so that shards are uneven, and a buffer that no checkpoint has."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.last = nn.Linear(WIDTH, 7)
        self.register_buffer("scale", torch.full((7,), 2.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        out: torch.Tensor = self.last(x) * self.scale
        return out


def job(seed: int, kind: str, *, steps: int = 1, device: str = "cpu") -> dict[str, Any]:
    torch.manual_seed(seed)
    with torch.device(device):
        model: Any = Net()
    world = dist.get_world_size()
    if kind == "ddp":
        model = DistributedDataParallel(model)
    elif kind == "fsdp":
        mesh = init_device_mesh("cpu", (world,))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif kind == "hsdp":
        fully_shard(
            model,
            mesh=init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard")),
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * seed)
    torch.manual_seed(seed)
    state = {
        "model": model,
        "optimizer": optimizer,
        "table": torch.rand(700, 700),
        "strided": torch.rand(300, 600).t(),
        "own": PerRank(torch.full((3,), float(dist.get_rank() + seed))),
        "epoch": seed,
    }
    for _ in range(steps):
        step(state)
    return state


def step(state: dict[str, Any]) -> torch.Tensor:
    torch.manual_seed(dist.get_rank())
    state["optimizer"].zero_grad()
    loss: torch.Tensor = state["model"](torch.rand(4, WIDTH)).square().sum()
    loss.backward()
    state["optimizer"].step()
    return loss.detach()


def contents(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    found = {f"model/{name}": t for name, t in state["model"].state_dict().items()}
    for number, held in enumerate(state["optimizer"].state.values()):
        found |= {f"optimizer/{number}/{key}": t for key, t in held.items()}
    found |= {"table": state["table"], "strided": state["strided"], "own": state["own"].value}
    return {
        name: (t.to_local() if isinstance(t, DTensor) else t).detach().clone()
        for name, t in found.items()
    }


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> None:
    assert one.keys() == two.keys(), one.keys() ^ two.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, two[name]), name


def total(number: int) -> int:
    counted = torch.tensor([number])
    dist.all_reduce(counted)
    return int(counted.item())


def shared(folder: Path, kind: str, **tier: Any) -> None:
    """Both ways give the same state; with one of them everything is read once."""
    saved = job(1, kind)
    place = Tier(str(folder / f"{kind}{len(tier)}"), **tier)
    with CheckpointManager(place, chunk_size=1 << 17) as manager:
        manager.save(saved, 1)
        nbytes: dict[str, int] = {}
        for replicas in ("read", "broadcast"):
            state = job(2, kind)
            report = manager.restore(state, broadcast=replicas == "broadcast")
            assert report is not None
            same(contents(state), contents(saved))
            assert state["epoch"] == 1
            nbytes[replicas] = total(report.read_bytes)
            assert (report.received_bytes > 0) == (replicas == "broadcast"), report
            if kind == "ddp" and not tier:
                assert report.nbytes == report.read_bytes + report.received_bytes, report
        halves = {"ddp": dist.get_world_size(), "hsdp": 2, "fsdp": 1.3}[kind]
        assert nbytes["broadcast"] * halves < nbytes["read"] * 1.1, nbytes
        assert torch.equal(step(state), step(saved))
        state = job(2, kind)
        cast = state | {"table": torch.zeros(700, 700, dtype=torch.float64)}
        report = manager.restore(cast, broadcast=True, cast=True, rename={"table": "table"})
        assert torch.equal(cast["table"], saved["table"].double())
        assert report is not None
        assert report.converted == (("table", "float32", "float64"),)


def failing(folder: Path, what: str, hurt: Callable[[], Callable[[], None]]) -> None:
    """If rank 1 fails, all ranks soon get an error, and can go on."""
    saved, state = job(1, "ddp"), job(2, "ddp")
    with CheckpointManager(str(folder / what), chunk_size=1 << 17) as manager:
        manager.save(saved, 1)
        dist.barrier()
        undo = hurt() if dist.get_rank() == 1 else lambda: None
        began = time.monotonic()
        try:
            manager.restore(state, broadcast=True)
            raise AssertionError(what)
        except RestoreError as error:
            reported = str(error)
        assert what in reported, reported
        assert time.monotonic() - began < 30
        undo()
        manager.restore(state, broadcast=True)
    same(contents(state), contents(saved))


def building() -> Callable[[], None]:
    """Make an error of the device stop the sink from being built."""

    def broken(*args: Any) -> None:
        raise RuntimeError("no device")

    patch = pytest.MonkeyPatch()
    patch.setattr(sink, "copyable", broken)
    return patch.undo


def mapping() -> Callable[[], None]:
    """Make the memory for what another rank sends fail."""

    def broken(nbytes: int) -> memoryview:
        if threading.current_thread() is threading.main_thread():
            raise OSError("no memory")
        return aligned_memory(nbytes)

    patch = pytest.MonkeyPatch()
    patch.setattr(broadcast, "aligned_memory", broken)
    return patch.undo


def placing() -> Callable[[], None]:
    """Make the sink fail in the second round or so."""
    place, calls = TensorSink.place, []

    def broken(self: TensorSink, *args: Any) -> None:
        calls.append(args)
        if len(calls) > 3:
            raise MemoryError("no place")
        place(self, *args)

    patch = pytest.MonkeyPatch()
    patch.setattr(TensorSink, "place", broken)
    return patch.undo


def sending() -> Callable[[], None]:
    """Make a byte flip while it is sent."""
    send = dist.broadcast

    def broken(tensor: torch.Tensor, source: int, **how: Any) -> Any:
        if source == dist.get_rank():
            tensor[5] ^= 1
        return send(tensor, source, **how)

    patch = pytest.MonkeyPatch()
    patch.setattr(dist, "broadcast", broken)
    return patch.undo


def damaged(folder: Path) -> None:
    """A chunk that only one rank reads is damaged.

    All ranks restore the previous step, or none if there is none.
    """
    saved, newer, state = job(1, "ddp"), job(3, "ddp"), job(2, "ddp")
    with CheckpointManager(str(folder / "damaged"), chunk_size=1 << 17) as manager:
        manager.save(saved, 1)
        manager.save(newer, 3)
        for number, expected in ((3, saved), (1, None)):
            dist.barrier()
            if dist.get_rank() == 0:
                files = list((folder / "damaged").glob(f"step-*{number}.*/rank-00001.safetensors"))
                assert len(files) == 1
                with files[0].open("r+b") as file:
                    file.seek(60_000)  # in the part that only this rank has written
                    file.write(bytes(range(100)))
            dist.barrier()
            try:
                report = manager.restore(state, broadcast=True)
            except NoCheckpoint:
                report = None
            assert (report and report.step) == (expected and 1), (number, report)
            if expected and report:
                assert [step for step, _ in report.skipped] == [3]
                same(contents(state), contents(expected))


def meta(folder: Path) -> None:
    """fully_shard on the meta device, with the optimizer built before or after the model has
    memory.
    """
    saved = job(1, "fsdp")
    with CheckpointManager(str(folder / "meta")) as manager:
        manager.save(saved, 1)
        for way in ("restored", "emptied before", "emptied after"):
            whole = job(2, "fsdp", steps=0, device="meta")
            state = {name: whole[name] for name in ("model", "optimizer")}
            if way == "emptied before":
                state["model"].to_empty(device="cpu")
                state["optimizer"] = torch.optim.AdamW(state["model"].parameters(), lr=1)
            if way == "emptied after":
                state["model"].to_empty(device="cpu")
            report = manager.restore(state, strict=False, broadcast=True)
            assert report is not None
            assert report.uninitialised == (("model/scale",) if way == "restored" else ())
            state["model"].scale = torch.full((7,), 2.0)
            extra = {"table": saved["table"], "strided": saved["strided"], "own": saved["own"]}
            same(contents(state | extra), contents(saved))
            owned = {id(p) for p in state["optimizer"].param_groups[0]["params"]}
            assert owned == {id(p) for p in state["model"].parameters()}, way
        for _ in range(2):
            assert torch.equal(step(state), step(saved))
        same(contents(state | extra), contents(saved))


def of_two_minds(folder: Path) -> None:
    """Ranks that disagree about ``broadcast`` raise an error at once, and change nothing."""
    state = {"x": torch.ones(3)}
    with CheckpointManager(str(folder / "minds")) as manager:
        manager.save(state, step=1)
        state["x"].zero_()
        reason = "broadcast=True, but rank 0 has broadcast=False"
        with pytest.raises(CkptError, match=reason):
            manager.restore(state, broadcast=dist.get_rank() == 1)
        assert not state["x"].any()
        assert manager.restore(state, broadcast=True) is not None
    assert state["x"].all()


def main() -> None:
    dist.init_process_group("gloo")
    folder = Path(sys.argv[1])
    # small parcels make many rounds
    patch = pytest.MonkeyPatch()
    patch.setattr(broadcast, "PARCEL_BYTES", 1 << 19)
    patch.setattr(broadcast, "FLIGHT_BYTES", 1 << 20)
    patch.setattr(broadcast, "WORTH_BYTES", 1 << 16)
    shared(folder, "ddp")
    shared(folder, "ddp", codec="zstd")
    if dist.get_world_size() == 4:
        shared(folder, "hsdp")
    shared(folder, "fsdp")
    failing(folder, "no device", building)
    failing(folder, "no memory", mapping)
    failing(folder, "no place", placing)
    failing(folder, "not arrived as it was sent", sending)
    damaged(folder)
    meta(folder)
    of_two_minds(folder)
    with CheckpointManager(str(folder / "damaged")) as manager:
        for wrong in ("all", None, 3):
            with contextlib.suppress(ConfigError):
                manager.restore({}, broadcast=wrong)  # type: ignore[arg-type]
                raise AssertionError(wrong)
    dist.barrier()
    if dist.get_rank() == 0:
        print("ALL WELL")
    exit_rank()


main()

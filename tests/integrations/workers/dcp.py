"""Two ranks save a sharded state through DCP, and other numbers of ranks load it.

dcp.py save|load|process FOLDER, under torchrun; dcp.py full|killed FOLDER alone.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from bench.rank_exit import exit_rank
from ckpt.errors import CkptError
from ckpt.integrations.dcp import CkptReader, CkptWriter
from tests.kit.deadly import die_in_the_save_of


def say(*words: object) -> None:
    """Print by one write, since several ranks have one output."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(7, 9), nn.Linear(9, 5))  # no number of ranks divides them
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in (*model, model):
            fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 7)).sum().backward()
    optimizer.step()
    return model, optimizer


def total(model: nn.Module, optimizer: Any) -> float:
    """Return a sum that is the same for the same values, on any number of ranks."""
    tensors = [
        *model.parameters(),
        *(optimizer.state[each]["exp_avg"] for each in model.parameters()),
    ]
    whole = torch.cat(
        [
            (each.full_tensor() if isinstance(each, DTensor) else each.detach()).flatten()
            for each in tensors
        ]
    )
    return (whole.double() * torch.arange(1, whole.numel() + 1)).sum().item()


def state_of(model: nn.Module, optimizer: Any, step: int) -> dict[str, Any]:
    values, moments = get_state_dict(model, optimizer)
    lists = [torch.arange(3.0), {"names": ["a", "b"]}]
    state = {"model": values, "optimizer": moments, "step": step, "lists": lists}
    if dist.is_initialized():  # if a list has a shard in it, several ranks write its entries
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        shard = distribute_tensor(torch.full((5,), float(step)), mesh, [Shard(0)])
        state["mixed"] = [shard, torch.full((2,), step), step]
    return state


def save(root: str) -> None:
    model, optimizer = build(0)
    rank = dist.get_rank()
    state = {**state_of(model, optimizer, 7), f"of rank {rank}": rank}
    dcp.save(state, storage_writer=CkptWriter(root, step=1))
    writer = CkptWriter(root)
    for step in (2, 3):
        saving: Any = dcp.async_save(state, checkpoint_id=f"step-{step}", storage_writer=writer)
        saving.result()
    writer.close()
    say("total", total(model, optimizer))
    refuse(lambda state: dcp.save(state, storage_writer=CkptWriter(root, step=9)))


def load(root: str, steps: Sequence[int] = (1, 3)) -> None:
    for step in steps:
        model, optimizer = build(5)
        state = state_of(model, optimizer, 0)
        dcp.load(state, storage_reader=CkptReader(root, step=step))
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        assert state["step"] == 7
        assert state["lists"][1] == {"names": ["a", "b"]}
        shard, whole, number = state["mixed"]
        assert (shard.full_tensor().tolist(), whole.tolist(), number) == ([7.0] * 5, [7, 7], 7)
        say("total", total(model, optimizer))
    if dist.get_world_size() == 3:
        part_of_the_ranks(f"{root}/part")


def part_of_the_ranks(root: str) -> None:
    """Save on ranks 1 and 2 only."""
    group = dist.new_group([1, 2])
    if dist.get_rank():
        state: dict[str, Any] = {"t": torch.arange(4.0), f"of rank {dist.get_rank()}": 1}
        dcp.save(state, storage_writer=CkptWriter(root, step=1), process_group=group)
        state["t"].zero_()
        dcp.load(state, storage_reader=CkptReader(root), process_group=group)
        say("part", state["t"].tolist())


def process(root: str) -> None:
    """Do the same from the process executor's process, which gets a copy of the writer."""
    model, optimizer = build(0)
    writer = CkptWriter(root)

    def save_there(state: dict[str, Any], step: int) -> None:
        saving: Any = dcp.async_save(
            state,
            checkpoint_id=f"step-{step}",
            storage_writer=writer,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        )
        saving.result()

    for step in (4, 5):
        save_there(state_of(model, optimizer, 7), step)
    refuse(lambda state: save_there(state, 6))
    say("total", total(model, optimizer))
    load(root, (4, 5))


def refuse(save: Callable[[dict[str, Any]], Any]) -> None:
    """If one rank cannot save something, no rank saves it, and all of them raise."""
    try:
        save({f"of rank {dist.get_rank()}": object() if dist.get_rank() else 1})
    except CheckpointException as error:
        kinds = {rank: type(each[0]) for rank, each in error.failures.items()}
        assert all(issubclass(kind, CkptError) for kind in kinds.values()), kinds
        say("refused", {rank: kind.__name__ for rank, kind in sorted(kinds.items())})


def full(root: str) -> None:
    """On a disk of 4 MiB the second save does not fit, and the first one loads."""
    dcp.save({"t": torch.ones(300_000)}, storage_writer=CkptWriter(root, step=1))
    try:
        dcp.save({"t": torch.zeros(900_000)}, storage_writer=CkptWriter(root, step=2))
    except CheckpointException as error:
        kind = type(error.failures[0][0]).__name__
        target = {"t": torch.zeros(300_000)}
        dcp.load(target, storage_reader=CkptReader(root))
        say(kind, "loaded", int(target["t"].mean()))


def killed(root: str) -> None:
    """Kill a second save into the root when its file is written."""
    ones = {"a": torch.ones(100_000), "b": torch.ones(100_000)}
    dcp.save(ones, storage_writer=CkptWriter(root, step=1))

    die_in_the_save_of(2)
    twos = {name: 2 * value for name, value in ones.items()}
    dcp.save(twos, storage_writer=CkptWriter(root, step=2))


def main(what: str, root: str) -> None:
    if what in ("full", "killed"):
        {"full": full, "killed": killed}[what](root)
        return
    dist.init_process_group("gloo")
    {"save": save, "load": load, "process": process}[what](root)
    dist.barrier()
    exit_rank()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(*sys.argv[1:])

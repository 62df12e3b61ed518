"""Write a folder of Megatron-core in the format ``torch_dist`` into OUT/state, under ``torchrun``.

The layers are stacked in one tensor, as Megatron's transformer block has them. Megatron asks for a
CUDA device in two places, which have no meaning on a CPU.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist

torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]

from megatron.core import dist_checkpointing, parallel_state  # noqa: E402
from megatron.core.dist_checkpointing import ShardedTensor  # noqa: E402

from tests.exchange.folders.net import trained, write_truth  # noqa: E402


class Stacked(torch.nn.Module):
    """The weights under the names that Megatron gives them."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.first, self.norm, self.last = net.first, net.norm, net.last
        self.register_buffer("scale", net.scale)
        self.layers = torch.nn.Module()
        weights = [layer.weight.detach() for layer in net.layers]
        self.layers.register_buffer("weight", torch.stack(weights))


def main(out: str) -> None:
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    rank, world = dist.get_rank(), dist.get_world_size()
    net: Any = trained()[0]
    folder = os.path.join(out, "state")
    if rank == 0:
        os.makedirs(folder, exist_ok=True)
    dist.barrier()
    state: dict[str, object] = {"iteration": 2, "args": {"hidden_size": 8}}
    for name, value in net.state_dict().items():
        if value.shape[0] % world == 0 and "layers" not in name:
            part = value.chunk(world)[rank].clone()
            state[name] = ShardedTensor.from_rank_offsets(name, part, (0, rank, world))
    for index, weight in enumerate(layer.weight.detach() for layer in net.layers):
        parts = weight.chunk(world)[rank].clone()
        state[f"layers.{index}.weight"] = ShardedTensor.from_rank_offsets(
            "layers.weight", parts, (0, index, 2), (1, rank, world), prepend_axis_num=1
        )
    dist_checkpointing.save(state, folder)
    write_truth(out, Stacked(net), None)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])

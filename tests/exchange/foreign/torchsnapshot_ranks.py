"""Two ranks take a snapshot. The argument is the folder."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import zeros
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torchsnapshot import Snapshot, StateDict

from tests.exchange.states import trained

if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    net, optimizer = trained()
    spec = ChunkShardingSpec(dim=0, placements=["rank:0/cpu", "rank:1/cpu"])
    table = zeros(spec, 10, 6)
    for shard in table.local_shards():
        begin, count = shard.metadata.shard_offsets[0], shard.metadata.shard_sizes[0]
        shard.tensor.copy_(torch.arange(60.0).reshape(10, 6)[begin : begin + count])
    state = {
        "model": net,
        "optimizer": optimizer,
        "tables": StateDict(table=table),
        "progress": StateDict(rank=rank, step=7, **{f"of_{rank}": torch.full((3,), rank)}),
    }
    Snapshot.take(sys.argv[1], state, replicated=["model/**", "optimizer/**"])
    dist.destroy_process_group()

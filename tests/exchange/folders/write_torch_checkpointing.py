"""Write a checkpoint of torch_checkpointing into OUT/state, under ``torchrun`` or alone."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch_checkpointing import CheckpointManager
from torch_checkpointing.config import SyncCheckpointSaverConfig
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

from tests.exchange.folders.net import build, train, write_truth


def main(out: str) -> None:
    net, _ = build()
    is_sharded = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if is_sharded:
        dist.init_process_group("gloo")
        fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, foreach=False)
    train(net, optimizer)
    config = CheckpointManager.Config(
        save=SyncCheckpointSaverConfig(),
        # The default fails on ext4: findings/torch-checkpointing-direct-io.sh
        storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
    )
    manager = CheckpointManager(config)
    state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": 2}
    manager.save(os.path.join(out, "state"), state)
    manager.close()
    write_truth(out, net, optimizer, at="step", step=2)
    if is_sharded:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])

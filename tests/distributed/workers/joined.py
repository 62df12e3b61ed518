"""One process of a world without torch.distributed: it joins, saves, and restores by two managers.

    joined.py save|stay ADDRESS TIMEOUT FOLDER PROCESSES

The environment has its RANK and WORLD_SIZE. With ``stay`` it only joins, and waits until all
PROCESSES know their results. It prints its result as a line of JSON.
"""

import json
import os
import sys
from pathlib import Path

import numpy as np
import torch.distributed as dist

import ckpt
from ckpt.integrations.arrays import state_of
from tests.kit.waiting import until


def main() -> None:
    verb, address, timeout, folder, processes = sys.argv[1:]
    rank, world = int(os.environ["RANK"]), range(int(os.environ["WORLD_SIZE"]))
    try:
        coordinator = ckpt.join(rank, len(world), address, timeout=float(timeout))
    except ckpt.CkptError as error:
        say(error=type(error).__name__, text=str(error))
        (Path(folder) / str(os.getpid())).touch()
        return
    if verb == "stay":
        say(joined=coordinator.rank, of=coordinator.world_size)
        (Path(folder) / str(os.getpid())).touch()
        assert until(lambda: len(os.listdir(folder)) == int(processes))
        coordinator.close()
        return
    shared = np.arange(1e6)
    own = ckpt.PerRank(rank)
    state = {"shared": state_of(shared, replicas=world), "own": own, "step": 7}
    with ckpt.CheckpointManager(folder, coordinator=coordinator) as manager:
        manager.save(state)
    shared[:], own.value, state["step"] = 0, -1, 0
    coordinator = ckpt.join(rank, len(world), address, timeout=float(timeout))
    with ckpt.CheckpointManager(folder, coordinator=coordinator) as manager:
        report = manager.restore(state)
    assert report is not None
    assert np.array_equal(shared, np.arange(1e6))
    assert not dist.is_initialized()
    (mine,) = Path(folder).glob(f"step-*/*{rank:05d}*.safetensors")
    say(step=state["step"], own=own.value, written=mine.stat().st_size)


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main()

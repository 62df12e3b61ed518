"""One process of a world without torch.distributed: joins, saves, and restores by two managers.

    python joined.py RANK WORLD_SIZE ADDRESS TIMEOUT [ROOT]

Without ROOT it only joins, and stays until its input ends. A line of JSON says what came of it.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch.distributed as dist

import ckpt
from ckpt.integrations.arrays import state_of


def main() -> None:
    rank, world_size, address, timeout, *root = sys.argv[1:]
    world = range(int(world_size))
    try:
        coordinator = ckpt.join(int(rank), len(world), address, timeout=float(timeout))
    except ckpt.CkptError as error:
        say(error=type(error).__name__, text=str(error))
        return
    if not root:
        say(joined=coordinator.rank, of=coordinator.world_size)
        sys.stdin.read()
        coordinator.close()
        return
    shared = np.arange(1e6)
    state = {"shared": state_of(shared, replicas=world), "own": ckpt.PerRank(int(rank)), "step": 7}
    with ckpt.CheckpointManager(root[0], coordinator=coordinator) as manager:
        manager.save(state)
    shared[:], state["own"].value, state["step"] = 0, -1, 0
    coordinator = ckpt.join(int(rank), len(world), address, timeout=float(timeout))
    with ckpt.CheckpointManager(root[0], coordinator=coordinator) as manager:
        report = manager.restore(state)
    assert report is not None
    assert np.array_equal(shared, np.arange(1e6))
    assert not dist.is_initialized()
    (mine,) = Path(root[0]).glob(f"step-*/*{int(rank):05d}*.safetensors")
    say(step=state["step"], own=state["own"].value, written=mine.stat().st_size)


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main()

"""A rank of a training under Accelerate.

The first life trains without saves, and then once more with saves. Every rank is killed with
SIGKILL while the last save streams. The second life resumes. Each life leaves what it has trained
in a file.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from accelerate import FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType

from ckpt.integrations.accelerate import AcceleratorCheckpoints
from tests.integrations.accelerate_job import Job, accelerator, forget
from tests.kit.deadly import die_in_the_save_of

SAVED, KILLED = 14, 18  # both within an epoch


def job(mode: str, seed: int) -> Job:
    made = accelerator(total_limit=2)
    if mode == "fsdp2":  # on CPUs accelerate ignores its plugin, so let it prepare as on GPUs
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="size_based_wrap",
            min_num_params=10,
            cpu_ram_efficient_loading=False,
        )
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        AcceleratorState._shared_state |= {
            "distributed_type": DistributedType.FSDP,
            "fsdp_plugin": plugin,
        }
        assert made.is_fsdp2
    return Job(made, seed=seed)


def main(folder: Path, mode: str, life: str) -> None:
    if life == "first":
        reference = job(mode, 7)
        rank = reference.accelerator.process_index
        (folder / f"first-{rank}.json").write_text(json.dumps(reference.train()))
        forget()

        die_in_the_save_of(KILLED)
        killed = job(mode, 7)
        checkpoints = AcceleratorCheckpoints(killed.accelerator, folder / "run")

        def save(batch: int) -> None:
            if batch in (10, SAVED):
                checkpoints.save_state(batch).result()
            elif batch == KILLED:
                checkpoints.save_state(batch)

        killed.train(after=save)
        raise AssertionError("the job was not killed")
    resumed = job(mode, 8)
    with AcceleratorCheckpoints(resumed.accelerator, folder / "run") as checkpoints:
        report = checkpoints.load_state()
        assert report is not None
        rank = resumed.accelerator.process_index
        reported = {"step": report.step, "iteration": resumed.accelerator.save_iteration}
        reported["trained"] = resumed.train()
        reported["sum"] = resumed.seen.sum.item()
        (folder / f"second-{rank}.json").write_text(json.dumps(reported))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])

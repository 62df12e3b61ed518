"""FOLDER: two ranks load with torchtitan, and each rank finds other steps in the folder."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NoReturn

import pytest
import torch.distributed as dist

from bench.rank_exit import exit_rank
from ckpt.errors import RestoreError, TransientStorageError
from tests.integrations.titan_parts import Job


def refuse() -> NoReturn:
    raise TransientStorageError("run", "no route")


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    first = dist.get_rank() == 0
    Job(folder).run(2)
    late = Job(folder, seed=2)
    if not first:
        late.manager.manager.steps = list
    assert late.manager.load()
    assert late.progress.step == 2
    late.manager.close()
    new = Job(folder, seed=3, folder="new", initial_load_path=str(folder / "checkpoint"))
    assert new.manager.load()
    new.manager.close()
    cut_off = Job(folder, seed=4)
    if first:
        cut_off.manager.manager.steps = refuse
    with pytest.raises(TransientStorageError if first else RestoreError, match="no route"):
        cut_off.manager.load()
    cut_off.manager.close()
    print("ALL WELL", flush=True)
    exit_rank()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

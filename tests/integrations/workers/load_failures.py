"""Two ranks load through an engine whose code fails on one rank, before or after a file.

Each case prints what both ranks raised. A rank that waited for the other one would never end.
"""

import sys
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

from torch import distributed as dist

from bench.rank_exit import exit_rank
from ckpt.errors import CkptError
from ckpt.integrations.deepspeed.load_checks import check_loads, check_same_files
from ckpt.integrations.shared.all_ranks import all_results


def engine_of(case: str) -> Any:
    """Return an engine that loads two files, each with the ranks' agreement, as `CkptEngine`
    does.
    """
    checkpoints = SimpleNamespace(has_shared_error=False)

    def load(name: str) -> None:
        checkpoints.has_shared_error = True
        check_same_files(all_results(f"cannot load {name}", lambda: ("tag", name)))
        checkpoints.has_shared_error = False

    def load_checkpoint(_: str, tag: str | None = None) -> tuple[str | None, dict[str, Any]]:
        fails = dist.get_rank() == 0
        if case == "no latest" and fails:
            return None, {}
        if case == "early" and fails:
            raise ValueError("boom")
        load("model.pt")
        if case == "between" and fails:
            raise ValueError("boom")
        load("optimizer.pt")
        if case == "late" and fails:
            raise ValueError("boom")
        return tag or "latest", {}

    engine = SimpleNamespace(load_checkpoint=load_checkpoint, checkpoint_engine=checkpoints)
    check_loads(engine, "folder", checkpoints, list)
    return engine


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=600))
    for case in sys.argv[1:]:
        try:
            engine_of(case).load_checkpoint("folder")
        except (CkptError, ValueError) as error:
            outcome = type(error).__name__
        else:
            outcome = "nothing"
        outcomes: list[Any] = [None, None]
        dist.all_gather_object(outcomes, outcome)
        if dist.get_rank() == 0:
            print(f"{case}: {' '.join(outcomes)}", flush=True)
    exit_rank()


main()

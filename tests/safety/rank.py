"""A rank that measures cases in every layout.

Started as rank.py FOLDER WHICH; the first rank writes FOLDER/outcomes.json.
"""

from __future__ import annotations

import itertools
import sys
import traceback
import warnings
from pathlib import Path
from typing import get_args

import msgspec
import pytest
import torch
import torch.distributed as dist

from bench.rank_exit import exit_rank
from ckpt import CheckpointManager, Tier
from ckpt.config import CheckMode
from ckpt.coordination.single import SingleCoordinator
from tests.overlap.window import Window
from tests.safety.cases import CASES
from tests.safety.jobs import COLUMNS
from tests.safety.measure import Found, measure


def manager_of(root: str, column: str, check: CheckMode) -> CheckpointManager:
    if column == "plain":  # each rank is a job of its own
        return CheckpointManager(
            Tier(f"{root}-{dist.get_rank()}", keep_last=1),
            coordinator=SingleCoordinator(),
            check=check,
        )
    return CheckpointManager(Tier(root, keep_last=1), check=check)


def main(folder: str, which: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # the tested packages give deprecation warnings and advice
    dist.init_process_group("gloo")
    window = Window()
    window.hold_copies(pytest.MonkeyPatch())
    cases = [case for case in CASES if case.runs(which)]
    found: list[Found] = []
    failed = False
    for column, check in itertools.product(COLUMNS, get_args(CheckMode)):
        with manager_of(f"{folder}/{column}-{check}", column, check) as manager:
            chosen = (case for case in cases if column in case.columns and check in case.checks)
            for step, case in enumerate(chosen):
                try:
                    outcome = measure(case, column, manager, window, step)
                    found.append(Found(way=case.way, check=check, column=column, outcome=outcome))
                except Exception:  # it fails on all ranks, or the others wait until they are ended
                    print(f"FAILED: {case.way} | {column}\n{traceback.format_exc()}", flush=True)
                    failed = True
                window.close()
    if dist.get_rank() == 0 and not failed:
        Path(folder, "outcomes.json").write_bytes(msgspec.json.encode(found))
    if failed:
        sys.exit("some cases prove nothing")
    exit_rank()


main(*sys.argv[1:])

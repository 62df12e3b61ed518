"""A rank ends without a finalized interpreter, and an error at its end still makes it fail."""

from __future__ import annotations

import ast
import re
import signal
from pathlib import Path

import pytest

from tests.distributed.launch import ROOT
from tests.kit.worlds import run_code

BEGIN = """
import atexit, os, threading
import torch.distributed as dist
from bench.rank_exit import exit_rank

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
"""
ABORTS = """
class AbortsWhenFinalized:
    def __del__(self, abort=os.abort):
        abort()

kept = AbortsWhenFinalized()
print("begun")
"""


def ended(script: str, status: int = 0) -> str:
    return run_code(BEGIN + script, status=status, timeout=100, finalize=True)


@pytest.mark.torture
def test_what_aborts_when_the_interpreter_is_finalized_is_not_met() -> None:
    ended(ABORTS, status=-signal.SIGABRT)
    assert ended(ABORTS + "exit_rank()") == "begun\n"


def test_the_group_is_destroyed_and_threads_and_functions_of_atexit_come_to_their_end() -> None:
    said = ended("""
go = threading.Event()
threading.Thread(target=lambda: (go.wait(), print("thread ended"))).start()
threading._register_atexit(go.set)
atexit.register(lambda: print("atexit", dist.is_initialized()))
exit_rank()
""")
    assert said == "thread ended\natexit False\n"


def test_a_manager_that_is_open_is_closed(tmp_path: Path) -> None:
    ended(f"""
import torch
from ckpt import CheckpointManager

manager = CheckpointManager({str(tmp_path)!r})
manager.save_async({{"x": torch.ones(3)}}, 1)
exit_rank()
""")
    assert len(list(tmp_path.glob("step-000000001.*/manifest.json"))) == 1


def test_an_error_where_managers_are_closed_fails_the_rank() -> None:
    said = ended("threading._register_atexit(lambda: 1 / 0)\nexit_rank()", status=1)
    assert "ZeroDivisionError" in said


def test_an_error_of_atexit_is_printed() -> None:
    assert "ZeroDivisionError" in ended("atexit.register(lambda: 1 / 0)\nexit_rank()")


OTHER_ENDS = {
    "tests/distributed/workers/elastic.py": "forked by warm_torchrun.py, never finalized",
    "tests/distributed/workers/tormented.py": "forked by warm_torchrun.py, never finalized",
    "tests/distributed/workers/no_store.py": "calls os._exit, since its store is gone",
    "tests/distributed/workers/survive.py": "calls os._exit, since its leader is gone",
    "tests/distributed/workers/alarm.py": "calls os._exit, since the other rank is dead",
    "bench/buddies.py": "calls os._exit, so that its memory stays as that of a killed process",
    "tests/agent/node_deaths.py": "its ranks are killed, or end by os._exit (tests/crash)",
    "tests/agent/removed_nodes.py": "its ranks are killed, or end by os._exit (tests/crash)",
    "tests/distributed/workers/nodes_kill.py": "runs until it is killed",
    "tests/distributed/workers/raises.py": "tests the end by an exception",
    "tests/census/rows.py": "its ranks are forks that end by os._exit",
    "tests/exchange/folders/write_dcp.py": "runs other libraries in an environment without bench",
    "tests/exchange/folders/write_megatron.py": "runs in such an environment too",
    "tests/exchange/folders/write_rank_files.py": "runs in such an environment too",
    "tests/exchange/folders/write_torch_checkpointing.py": "runs in such an environment too",
}


def test_each_script_of_a_rank_ends_so() -> None:
    others = set()
    for folder in ("tests", "bench"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text()
            if not re.search("init_process_group|init_distributed", text):
                continue  # a thousand files need not be parsed
            calls = {
                node.func.attr
                if isinstance(node.func, ast.Attribute)
                else getattr(node.func, "id", "")
                for node in ast.walk(ast.parse(text))
                if isinstance(node, ast.Call)
            }
            if calls & {"init_process_group", "init_distributed"} and "main" in calls:
                name = str(path.relative_to(ROOT))
                others |= set() if "exit_rank" in calls else {name}
    assert others == set(OTHER_ENDS)

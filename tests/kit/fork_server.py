"""A process that has imported what the scripts of tests import, and forks them.

A process then costs a tenth of a second, and not the import of torch. A fork runs its script as
the interpreter does: as ``__main__``, with arguments, environment, folder and output of its own. It
shares the modules of torch, those that a request names as ``imports``, and the seed of hashes with
the other forks.

When its script ends, a fork calls `exit_rank`, unless the request sets ``finalize``. To destroy all
objects, as an interpreter does, a fork would have to copy 160 MB of memory, which takes half a
second of processor time. A script that calls ``sys.exit`` or raises an error ends as in an
interpreter.

Each line of standard input is a request of ``tests.kit.worlds`` in JSON. The answer is two lines:
the process ids, and the exit statuses.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import runpy
import signal
import sys
from contextlib import redirect_stdout, suppress
from importlib import import_module
from typing import Any

import numpy.ma  # noqa: F401 - this and the next ones for the forks
import pytest  # noqa: F401
import torch._dynamo
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.optim
import torch.distributed.tensor.parallel  # noqa: F401

import ckpt
from bench.rank_exit import exit_rank

ckpt.CheckpointManager  # noqa: B018 - imported here, once


def serve() -> None:
    """Run one request after the other, until the tests end."""
    keep()
    for line in iter(sys.stdin.readline, ""):
        request = json.loads(line)
        if not sys.modules.keys() >= {*request["imports"]}:
            with redirect_stdout(sys.stderr):  # the answers go to standard output
                for name in request["imports"]:
                    import_module(name)
            keep()
        running: dict[int, int] = {}
        for number in range(len(request["environments"])):
            if (process := os.fork()) == 0:
                run_script(request, number)
            running[process] = number
        print(json.dumps([*running]), flush=True)
        statuses = [0] * len(running)
        while running:
            process, status = os.wait()
            statuses[running.pop(process)] = os.waitstatus_to_exitcode(status)
            if status and request["end_together"]:
                for other in running:
                    with suppress(ProcessLookupError):
                        os.kill(other, signal.SIGKILL)
        print(json.dumps(statuses), flush=True)


def keep() -> None:
    """Keep all objects until the end. Otherwise each fork looks through all objects of torch as it
    ends, and copies them.
    """
    gc.collect()
    gc.freeze()


def run_script(request: dict[str, Any], number: int) -> None:
    """Run the script in this process. It does not return."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    log = os.open(request["logs"][number], os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.clear()
    os.environ.update(request["environments"][number])
    os.chdir(request["folder"])
    script = request["words"][0]
    sys.argv[:] = request["words"]
    sys.path[0] = os.path.dirname(script)
    runpy.run_path(script, run_name="__main__")
    if request["finalize"]:
        sys.exit()
    exit_rank()


if __name__ == "__main__":
    faulthandler.enable()
    serve()

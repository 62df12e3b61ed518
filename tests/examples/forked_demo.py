"""DEMO ARGUMENT ...: run a demo whose trainings, and launchers of trainings, are forks of this one.

This process is a fork of one that has imported torch (``tests.kit.fork_server``), so that its forks
need not import it. The demo starts everything else as it does for a user.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import traceback
from typing import Any, NoReturn

from torch.distributed.run import main as torchrun

from bench.rank_exit import exit_rank

TORCHRUN = ["-m", "torch.distributed.run"]


class Popen(subprocess.Popen[Any]):
    """A process that forks if its command is a training, or torchrun with a training."""

    def _execute_child(self, args: list[str], *rest: Any) -> None:
        if not any(os.path.basename(word).startswith("train_") for word in args):
            super()._execute_child(args, *rest)  # type: ignore[misc]
            return
        env, pipes = rest[5], rest[9:15]
        self.pid = os.fork()
        if self.pid == 0:
            run(args[1:], env, pipes)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def run(words: list[str], env: dict[str, str], pipes: tuple[int, ...]) -> NoReturn:
    """Run the command in the new process, and end it."""
    status = 1
    try:
        output, errors = pipes[3], pipes[5]
        for number, standard in ((output, 1), (errors, 2)):
            if number != -1:
                os.dup2(number, standard)
        os.environ.clear()
        os.environ.update(env)
        if words[: len(TORCHRUN)] == TORCHRUN:
            torchrun(["--start-method=fork", "--run-path", *words[len(TORCHRUN) :]])
        else:
            sys.argv[:] = words
            runpy.run_path(words[0], run_name="__main__")
        exit_rank()
    except SystemExit as end:
        status = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    subprocess.Popen = Popen  # type: ignore[misc]
    sys.argv[:] = sys.argv[1:]
    sys.path[0] = os.path.dirname(sys.argv[0])
    runpy.run_path(sys.argv[0], run_name="__main__")

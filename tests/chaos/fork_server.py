"""A process that has imported what a job needs, and forks one for each command of ckpt-chaos.

``python -m tests.chaos.fork_server MODULE WAY SOCKET FOLDER`` listens on a socket. A job then costs
tenths of a second, and not the import of the libraries. ckpt-chaos arms its counter of events by
environment variables when an interpreter starts (``sitecustomize``). Here a fork does the same.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from types import ModuleType

import torch
from ckpt_chaos import inject  # type: ignore[import-not-found, unused-ignore]
from ckpt_chaos.targets.common import (  # type: ignore[import-not-found, unused-ignore]
    arm_from_env,
)

from bench.rank_exit import exit_rank
from tests.chaos.events import arm
from tests.processes import fork


def serve(module: ModuleType, way: str, path: str) -> None:
    """Run one job for each connection, until this process is killed."""
    gc.collect()
    gc.freeze()  # Otherwise each fork copies the objects that it looks through
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        print("ready", flush=True)
        while True:
            connection, _ = listener.accept()
            with connection:
                fork(partial(_serve_one, connection, module, way))
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass


def _serve_one(connection: socket.socket, module: ModuleType, way: str) -> None:
    """Run one job, and answer its exit status. Kill it if the command goes away."""
    text, descriptors, _, _ = socket.recv_fds(connection, 1 << 20, 2)
    out, environment = json.loads(text)
    process = fork(partial(_run, module, way, out, environment, descriptors))
    watched = os.pidfd_open(process)
    ready, _, _ = select.select([watched, connection.fileno()], [], [])
    if watched not in ready:
        os.kill(process, signal.SIGKILL)
    _, status = os.waitpid(process, 0)
    with suppress(BrokenPipeError):
        connection.send(json.dumps(os.waitstatus_to_exitcode(status)).encode())


def _run(
    module: ModuleType, way: str, out: str, environment: dict[str, str], descriptors: list[int]
) -> None:
    """Run the job in this process. It does not return."""
    for target, descriptor in zip((1, 2), descriptors, strict=True):
        os.dup2(descriptor, target)
    # That of the server is a file with a position, which a pipe has not.
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(environment)
    try:
        _prepare(module, way, out)
        if "CKPT_CHAOS_WATCH" in environment:
            arm_from_env(0, lazy=True)
            arm(inject._event, inject._under)
        module.main(way, out)
    except Exception:
        traceback.print_exc()
        os._exit(1)
    exit_rank()


def _prepare(module: ModuleType, way: str, out: str) -> None:
    """Do what a job does before its files are watched, if it does anything."""
    if hasattr(module, "prepare"):
        module.prepare(way, out)


def _import_what(job: Callable[[], None]) -> None:
    """Import what a job imports while it runs."""
    reader, writer = os.pipe()

    def run() -> None:
        job()
        with open(writer, "w") as pipe:
            pipe.write("\n".join(sys.modules))

    fork(run)
    os.close(writer)
    with open(reader) as pipe:
        names = pipe.read().split("\n")
    os.wait()
    for name in names:
        with suppress(Exception):
            import_module(name)


def main(name: str, way: str, path: str, folder: str) -> None:
    """Import the module of a job, and serve it."""
    torch.set_num_threads(1)
    module, out = import_module(f"tests.chaos.{name}"), os.path.join(folder, "out")

    def job() -> None:
        _prepare(module, way, out)
        module.main(way, out)

    _import_what(job)
    serve(module, way, path)


if __name__ == "__main__":
    main(*sys.argv[1:])

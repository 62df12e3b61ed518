"""The processes of the agent: ``python -m ckpt.agent run | start | work PID``.

``start`` returns when the agent listens in a process of its own. ``work`` carries out an
order, which it reads from standard input.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from typing import Final

import msgspec

from ckpt.agent.copy_server import copy_files
from ckpt.agent.finish import Finish
from ckpt.agent.messages import encode
from ckpt.agent.place import Place
from ckpt.agent.reports import Ended, OnReport, Order
from ckpt.agent.scrub import Scrub
from ckpt.agent.server import Agent
from ckpt.agent.watched_job import end_with_parent
from ckpt.config import agent_idle_seconds, agent_memory_seconds, agent_scrub_seconds
from ckpt.errors import CkptError
from ckpt.pipeline.workers import Workers

_THREADS: Final = 2
_NICE: Final = 19
_COPY_NICE: Final = 10
"""Training wins the core: no thread of it waits for a worker (decision 6)."""


def run(idle_seconds: float | None = None) -> bool:
    """Be the agent of this user until it ends. Returns False if another process is."""
    agent = _agent(idle_seconds)
    if agent.listen():
        agent.run()
        return True
    return False


def start() -> int:
    """Become the agent in a process of its own. Returns when it listens, or when another does."""
    ear, mouth = os.pipe()
    if child := os.fork():  # no thread runs yet
        os.close(mouth)
        heard = os.read(ear, 1)
        return 0 if heard else os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) or 1
    os.close(ear)
    agent = _agent(None)
    listens = agent.listen()
    os.write(mouth, b"+")
    os.close(mouth)
    if listens:
        agent.run()
    return 0


def _agent(idle_seconds: float | None) -> Agent:
    idle = agent_idle_seconds() if idle_seconds is None else idle_seconds
    return Agent(
        Place.of_this_user(),
        idle_seconds=idle,
        memory_seconds=agent_memory_seconds(),
        scrub_seconds=agent_scrub_seconds(),
    )


def work(parent: int) -> int:
    """Be a worker: carry out the order on standard input, for the agent ``parent``, and end with
    it. Reports go to standard output.

    Args:
        parent: The process id of the agent. Without it, this process does not work.
    """
    end_with_parent(parent)
    order = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Order)
    reports = os.dup(1)
    os.dup2(2, 1)  # what a client of a store prints is no report
    lock = threading.Lock()

    def report(message: msgspec.Struct) -> None:
        with lock, os.fdopen(os.dup(reports), "wb") as pipe:
            pipe.write(encode(message))

    report(_carry_out(order, report))
    return 0


def _carry_out(order: Order, report: OnReport) -> Ended:
    match order.task:
        case "copy":
            os.nice(_COPY_NICE)
            return copy_files(order)
        case "scrub":
            os.nice(_NICE)
            # one thread, so that not more than one piece is read at a time
            with Workers("scrub", 1) as workers, Scrub(order, workers, report) as scrub:
                return scrub.run()
        case "finish" | "free":
            with Workers("agent", _THREADS) as workers, Finish(order.job, workers, report) as job:
                return job.clean() if order.task == "free" else job.run()


def main(words: list[str]) -> int:
    """Run one of the processes, and return its exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(process)d %(message)s")
    try:
        match words:
            case ["run"]:
                run()
                return 0
            case ["start"]:
                return start()
            case ["work", parent]:
                return work(int(parent))
            case _:
                sys.stderr.write(f"{__doc__}\n")
                return 2
    except CkptError as error:
        logging.getLogger("ckpt").error("ckpt: %s", error)  # noqa: TRY400 - a sentence is enough
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The processes of the agent: ``python -m ckpt.agent run | start | work PID``.

``run`` is the agent. ``start`` starts the agent in a process of its own, and returns when the agent
listens. ``work`` is a worker: a process that the agent with the process id ``PID`` has started. It
carries out one order, which it reads from standard input.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING, Final

import msgspec

from ckpt.agent.folder import AgentFolder
from ckpt.agent.messages import encode
from ckpt.agent.worker_messages import Ended, OnReport, Order
from ckpt.config import agent_idle_seconds, agent_memory_seconds, agent_scrub_seconds
from ckpt.errors import CkptError

if TYPE_CHECKING:
    from ckpt.agent.server import Agent
    from ckpt.pipeline.workers import Workers

_FINISH_THREADS: Final = 2
_SCRUB_NICE: Final = 19
_COPY_NICE: Final = 10
"""The number that is added to the niceness of a worker that copies files for a trainer.

A low priority does not delay the training: the worker is a process with a GIL of its own, so no
training thread waits for a lock that a suspended thread of the worker holds (see
``docs/decisions/0006-no-nice-by-default.md``).
"""


def run(idle_seconds: float | None = None) -> bool:
    """Run the agent of this user in this process, and return True when the agent has ended. Return
    False at once if another process is the agent.

    Args:
        idle_seconds: After how many seconds without a job the agent ends; None for the value of the
            environment variable ``CKPT_AGENT_IDLE_SECONDS``, which is 600 by default.
    """
    agent = _agent(idle_seconds)
    if agent.listen():
        agent.run()
        return True
    return False


def start() -> int:
    """Fork a child process that becomes the agent. The call returns in both processes.

    Returns:
        The exit code of the process that the call returns in. In the parent, it is 0 once the child
        or another agent listens. If the child ends before that, it is the exit code of the child,
        or 1 if that is 0. In the child, it is 0 when the agent has ended, or at once if another
        agent listens.
    """
    read_end, write_end = os.pipe()
    if child := os.fork():  # A fork is safe here, since no other thread runs yet
        os.close(write_end)
        if os.read(read_end, 1):
            return 0
        _, status = os.waitpid(child, 0)
        return os.waitstatus_to_exitcode(status) or 1
    os.close(read_end)
    agent = _agent(None)
    listens = agent.listen()
    os.write(write_end, b"+")  # Any byte tells the parent that an agent listens
    os.close(write_end)
    if listens:
        agent.run()
    return 0


def _agent(idle_seconds: float | None) -> Agent:
    """Return the agent of this user. It does not listen yet."""
    from ckpt.agent.server import Agent  # A worker does not need it

    idle = agent_idle_seconds() if idle_seconds is None else idle_seconds
    return Agent(
        AgentFolder.of_this_user(),
        idle_seconds=idle,
        memory_seconds=agent_memory_seconds(),
        scrub_seconds=agent_scrub_seconds(),
    )


def work(parent: int) -> int:
    """Carry out the order on standard input, write reports to standard output, and return 0.

    The kernel kills this process when the agent ends.

    Args:
        parent: The process id of the agent. If the parent of this process has another id, this
            process ends at once.
    """
    _end_with_parent(parent)
    order = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Order)
    report_descriptor = os.dup(1)
    os.dup2(2, 1)  # the client of a store may print text, which must not be read as a report
    lock = threading.Lock()

    def report(message: msgspec.Struct) -> None:
        with lock, os.fdopen(os.dup(report_descriptor), "wb") as pipe:
            pipe.write(encode(message))

    report(_carry_out(order, report))
    return 0


def _end_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent ends. Kill this process at once if
    ``parent`` is not the process id of its parent any more.
    """
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def _carry_out(order: Order, report: OnReport) -> Ended:
    """Carry out the task of ``order``, pass reports to ``report``, and return the last report.

    Only a worker imports what its task needs, so the agent, which runs all the time, takes 24 MB of
    memory and not 42.
    """
    from ckpt.pipeline.workers import Workers

    match order.task:
        case "copy":
            from ckpt.agent.copy_worker import copy_files

            os.nice(_COPY_NICE)
            return copy_files(order)
        case "scrub":
            from ckpt.agent.scrub_worker import Scrub

            os.nice(_SCRUB_NICE)
            # With one thread, at most one piece is read at a time.
            with Workers("scrub", 1) as workers, Scrub(order, workers, report) as scrub:
                return scrub.run()
        case "finish" | "free":
            with Workers("agent", _FINISH_THREADS) as workers:
                return _finish(order, workers, report)


def _finish(order: Order, workers: Workers, report: OnReport) -> Ended:
    """Finish the steps of a job, free their memory, or do both, and return the last report. If the
    memory cannot be freed now, the outcome is "done", and the next worker frees it.
    """
    from ckpt.agent.finish_worker import Finish

    with Finish(order.job, workers, report) as finish:
        outcome = finish.free_memory() if order.task == "free" else finish.run()
    if order.frees and outcome.outcome == "done":
        with Finish(order.job, workers, report) as finish:  # A new look at the tiers
            return Ended("freed") if finish.free_memory().outcome == "done" else outcome
    return outcome


def main(words: list[str]) -> int:
    """Carry out the command line ``words``, such as ``["work", PID]``, and return an exit code."""
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
    status = main(sys.argv[1:])
    gc.freeze()  # Python would look for garbage among all objects before it ends
    sys.exit(status)

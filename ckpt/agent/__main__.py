"""The processes of the agent: ``python -m ckpt.agent run | start | work PID``.

``start`` returns when the agent listens in a process of its own. ``work`` carries out an
order, which it reads from standard input.
"""

from __future__ import annotations

import logging
import os
import sys

from ckpt.agent.place import Place
from ckpt.agent.server import Agent
from ckpt.agent.work import work
from ckpt.config import agent_idle_seconds, agent_memory_seconds, agent_scrub_seconds
from ckpt.errors import CkptError


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
        return 0 if heard else _code_of(child)
    os.close(ear)
    agent = _agent(None)
    listens = agent.listen()
    os.write(mouth, b"+")
    os.close(mouth)
    if listens:
        agent.run()
    return 0


def _code_of(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) or 1


def _agent(idle_seconds: float | None) -> Agent:
    idle = agent_idle_seconds() if idle_seconds is None else idle_seconds
    return Agent(
        Place.of_this_user(),
        idle_seconds=idle,
        memory_seconds=agent_memory_seconds(),
        scrub_seconds=agent_scrub_seconds(),
    )


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

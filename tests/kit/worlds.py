"""Start the ranks of a world, or one script, on this machine.

All are forks of one process per pytest process, which has imported torch: see
``tests.kit.fork_server``. A test of what torchrun does starts torchrun.
"""

from __future__ import annotations

import atexit
import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.kit.waiting import until
from tests.processes import kill_all
from tests.servers import free_port

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "backends")]),
}


@dataclass(frozen=True)
class Ended:
    """What each process printed, and its exit status."""

    said: tuple[str, ...]
    statuses: tuple[int, ...]


def world(
    ranks: int, script: Path, *args: object, timeout: float = 150, imports: Sequence[str] = ()
) -> str:
    """Run a script as torchrun does, on this many ranks, and return what they printed.

    If one fails, the others are killed and the test fails with all that they printed. ``imports``
    are the modules that are to be imported before the forks.
    """
    port = free_port()
    environments = [environment_of(rank, ranks, port) for rank in range(ranks)]
    ended = run_forks([script, *args], environments, timeout=timeout, imports=imports)
    said = "".join(ended.said)
    assert not any(ended.statuses), f"{ended.statuses}\n{said[-8000:]}"
    return said


def environment_of(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Return the environment that torchrun gives to a rank of one node.

    The store of the job listens on ``port`` of rank 0.
    """
    return {
        "GROUP_RANK": "0",
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": f"tests-{port}",
        "WORLD_SIZE": str(ranks),
    }


def run_script(script: Path, *args: object, timeout: float = 150) -> str:
    """Run a script in one process, and return what it printed.

    If the script fails, the test fails with what it printed.
    """
    ended = run_forks([script, *args], [{}], timeout=timeout)
    assert ended.statuses == (0,), f"{ended.statuses}\n{ended.said[0][-8000:]}"
    return ended.said[0]


def run_code(
    code: str, *args: object, status: int = 0, timeout: float = 150, finalize: bool = False
) -> str:
    """Run a program in one process, and return what it printed.

    If it ends with another status than ``status``, the test fails with what it printed. With
    ``finalize``, the process destroys all objects at its end, as an interpreter does.
    """
    with tempfile.TemporaryDirectory(prefix="ckpt-tests-") as folder:
        script = Path(folder, "code.py")
        script.write_text(code)
        ended = run_forks([script, *args], [{}], timeout=timeout, finalize=finalize)
    assert ended.statuses == (status,), f"{ended.statuses}\n{ended.said[0][-8000:]}"
    return ended.said[0]


_PAUSE = """
def pause(ready, gate):
    import fcntl
    open(ready, "w").close()
    with open(gate) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
"""


@contextmanager
def paused(code: str, *args: object, folder: Path) -> Iterator[None]:
    """Run a program that calls ``pause(*sys.argv[-2:])``, and yield when it does. It goes on after
    the block, to its end. ``folder`` gets two files.
    """
    ready = folder / "ready"
    with ThreadPoolExecutor(1) as pool:
        with (folder / "gate").open("w") as gate:
            fcntl.flock(gate, fcntl.LOCK_EX)
            program = pool.submit(run_code, _PAUSE + code, *args, ready, gate.name)
            assert until(lambda: ready.exists() or program.done())
            assert ready.exists(), program.result()
            yield
        program.result()


def run_forks(
    words: Sequence[object],
    environments: Sequence[Mapping[str, str]],
    *,
    timeout: float,
    end_together: bool = True,
    finalize: bool = False,
    imports: Sequence[str] = (),
) -> Ended:
    """Run a script once in each of these environments, all at the same time.

    If ``end_together``, the first that fails ends the others. With ``finalize``, each destroys all
    objects at its end, as an interpreter does. ``imports`` are the modules that are to be imported
    before the forks. If they take longer than ``timeout`` seconds, the test fails with their output
    and their stacks.
    """
    with tempfile.TemporaryDirectory(prefix="ckpt-tests-") as folder:
        logs = [Path(folder, str(number)) for number in range(len(environments))]
        for log in logs:
            log.touch()
        statuses = _server.run(
            {
                "words": [str(word) for word in words],
                "environments": [{**os.environ, **ENVIRONMENT, **each} for each in environments],
                "logs": [str(log) for log in logs],
                "folder": os.getcwd(),
                "end_together": end_together,
                "finalize": finalize,
                "imports": [*imports],
            },
            timeout,
        )
        said = tuple(log.read_text(errors="replace") for log in logs)
    if statuses is None:
        what = "\n\n".join(f"process {number}:\n{text[-8000:]}" for number, text in enumerate(said))
        pytest.fail(f"not at its end after {timeout:.0f} s: {words}\n{what}", pytrace=False)
    return Ended(said, tuple(statuses))


def descriptors() -> set[int]:
    """Return the descriptors that lead to the process that forks, which ends with the tests."""
    return _server.descriptors()


class _ForkServer:
    """The process of ``fork_server.py``. The first request starts it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, request: Mapping[str, object], timeout: float) -> list[int] | None:
        """Return the exit statuses, or None if not all have ended in time.

        The server ends with a request that is interrupted, as by the time limit of a test.
        """
        try:
            return self._run(request, timeout)
        except BaseException:  # otherwise the next request would get the answer to this one
            self.end()
            raise

    def _run(self, request: Mapping[str, object], timeout: float) -> list[int] | None:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("fork_server.py"))],
                env=os.environ | ENVIRONMENT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,  # so that nothing waits where select() does not see it
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        running = json.loads(self._process.stdout.readline())
        if not select.select([self._process.stdout], [], [], timeout)[0]:
            for process in running:
                for number in (signal.SIGABRT, signal.SIGCONT):
                    with suppress(ProcessLookupError):
                        os.kill(process, number)
            select.select([self._process.stdout], [], [], 10)
            self.end()
            return None
        statuses: list[int] = json.loads(self._process.stdout.readline())
        return statuses

    def descriptors(self) -> set[int]:
        if self._process is None:
            return set()
        pipes = (self._process.stdin, self._process.stdout)
        return {pipe.fileno() for pipe in pipes if pipe is not None}

    def end(self) -> None:
        """Kill the process, and what it runs."""
        if self._process is not None:
            with self._process:
                kill_all(self._process)
            self._process = None


_server = _ForkServer()
atexit.register(_server.end)

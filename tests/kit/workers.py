"""Run the files of tests in several forks of the process that has collected them.

With ``--workers N``, N processes take one file after the other, in the order of the collection. The
collection takes 20 s of processor time, and each worker of pytest-xdist would repeat it.

A worker that dies fails its test, and another one takes the rest of its file.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, NoReturn

import pytest
from _pytest.runner import runtestprotocol

from tests.kit import worlds
from tests.processes import mark

Items = list[pytest.Item]


@dataclass
class Worker:
    """A process that runs tests.

    Attributes:
        pid: The process.
        connection: What leads to it.
        files: The tests that it has taken and not yet reported, file by file.
        running: Whether the first of them has begun.
    """

    pid: int
    connection: socket.socket
    files: deque[Items] = field(default_factory=deque)
    running: bool = False
    _text: bytes = b""

    def messages(self) -> Iterator[Any] | None:
        """Return what has come in, or None at the end of the process."""
        part = self.connection.recv(1 << 20)
        *lines, self._text = (self._text + part).split(b"\n")
        return map(json.loads, lines) if part else None


class Workers:
    """A plugin of pytest.

    Args:
        count: The number of processes.
        begin: A function that each of them calls first.
    """

    def __init__(self, count: int, begin: Callable[[], None]) -> None:
        self._count, self._begin = count, begin
        self._files = deque[Items]()
        self._workers: list[Worker] = []
        self._number = 0

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.testsfailed or session.config.option.collectonly:
            return None  # pytest says so
        groups = groupby(session.items, key=lambda item: item.path)
        self._files.extend(list(items) for _, items in groups)
        base = session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        try:
            for _ in range(min(self._count, len(self._files))):
                self._start(session, base)
            while self._workers:
                self._hear(session, base)
        finally:
            for worker in self._workers:
                os.kill(worker.pid, signal.SIGINT)
            for worker in self._workers:
                os.waitpid(worker.pid, 0)
        return True

    def _start(self, session: pytest.Session, base: Path) -> None:
        self._number += 1
        ours, theirs = socket.socketpair()
        if (pid := os.fork()) == 0:
            ours.close()
            for worker in self._workers:
                worker.connection.close()
            self._work(session, theirs, base / f"worker{self._number}")
        theirs.close()
        self._workers.append(Worker(pid, ours))

    def _hear(self, session: pytest.Session, base: Path) -> None:
        ready = select.select([worker.connection for worker in self._workers], [], [])[0]
        for worker in [worker for worker in self._workers if worker.connection in ready]:
            messages = worker.messages()
            if messages is None:
                self._end(session, worker, base)
                continue
            for message in messages:
                if message == "file":
                    self._give(worker)
                elif message == "begin":
                    worker.running = True
                else:
                    self._report(session, worker, message)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)

    def _give(self, worker: Worker) -> None:
        """Tell a worker the next file: its first test, and how many follow."""
        items = self._files.popleft() if self._files else []
        if items:
            worker.files.append(items)
        worker.connection.sendall(json.dumps([item.nodeid for item in items]).encode() + b"\n")

    def _report(self, session: pytest.Session, worker: Worker, message: Any) -> None:
        hook, item = session.config.hook, worker.files[0].pop(0)
        if not worker.files[0]:
            worker.files.popleft()
        worker.running = False
        for data in message:
            if isinstance(data["longrepr"], list):
                data["longrepr"] = tuple(data["longrepr"])  # where and why a test is skipped
            report = hook.pytest_report_from_serializable(config=session.config, data=data)
            hook.pytest_runtest_logreport(report=report)
        hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)

    def _end(self, session: pytest.Session, worker: Worker, base: Path) -> None:
        self._workers.remove(worker)
        worker.connection.close()
        status = os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1])
        if not worker.files:
            return
        if worker.running:
            item = worker.files[0][0]
            failure = pytest.TestReport(
                nodeid=item.nodeid,
                location=item.location,
                keywords={},
                outcome="failed",
                longrepr=f"the process of this test has ended with the status {status}",
                when="call",
            )
            ending = pytest.TestReport(
                item.nodeid, item.location, {}, outcome="passed", longrepr=None, when="teardown"
            )
            to_data = session.config.hook.pytest_report_to_serializable
            reports = [to_data(config=session.config, report=each) for each in (failure, ending)]
            self._report(session, worker, reports)
        self._files.extendleft(reversed(worker.files))
        self._start(session, base)

    # -- in a worker -------------------------------------------------------------------------------

    def _work(self, session: pytest.Session, connection: socket.socket, base: Path) -> NoReturn:
        """Run tests until there are no more. It does not return."""
        status = 1
        try:
            reports = _Reports(session.config)
            _begin(session.config, reports, base)
            self._begin()
            known = {item.nodeid: item for item in session.items}
            lines = connection.makefile("r")

            def file() -> Items:
                connection.sendall(b'"file"\n')
                return [known[name] for name in json.loads(lines.readline())]

            items = file()
            while items:
                item = items.pop(0)
                items = items or file()  # what follows decides which fixtures end
                connection.sendall(b'"begin"\n')
                session.config.hook.pytest_runtest_protocol(
                    item=item, nextitem=items[0] if items else None
                )
                connection.sendall(json.dumps(reports.data, default=str).encode() + b"\n")
            status = 0
        except KeyboardInterrupt:
            pass
        except BaseException:
            traceback.print_exc(file=sys.__stderr__)
        finally:
            worlds.close()
            os._exit(status)


class _Reports:
    """A plugin that keeps the reports of a test, and lets no other plugin of a worker have them."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self.data: list[Any] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        to_data = self._config.hook.pytest_report_to_serializable
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
        self.data = [to_data(config=self._config, report=report) for report in reports]
        return True


def _begin(config: pytest.Config, reports: _Reports, base: Path) -> None:
    """Make a fork a worker, with temporary folders and captured output of its own."""
    mark()
    capture = config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    base.mkdir()
    config._tmp_path_factory._basetemp = base  # type: ignore[attr-defined]
    config.pluginmanager.register(reports)

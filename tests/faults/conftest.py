"""Fixtures for all tests of faults.

One counts what a test tried. One checks that the test leaves memory, threads and descriptors as
they were.
"""

from __future__ import annotations

import gc
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import fsspec.asyn
import pytest

from tests.faults.ledger import Tally
from tests.kit import worlds
from tests.servers import reserved

Count = Callable[[str, int], None]
PATIENCE_SECONDS = 10.0


@pytest.fixture
def tally(request: pytest.FixtureRequest) -> Iterator[Count]:
    """Return ``tally(fault, tries)``, whose tries are counted if the test passes."""
    counted: list[tuple[str, int]] = []
    yield lambda fault, tries: counted.append((fault, tries))
    kind = "torture" if request.node.get_closest_marker("torture") else "ci"
    session: Tally | None = getattr(request.config, "tally", None)
    for fault, tries in counted:
        if session is not None:
            session.add(fault, tries, kind=kind)


@pytest.fixture(autouse=True)
def all_is_given_back(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Check that no descriptor, thread or slot exists that did not exist before the test.

    A kept error keeps the frames of its traceback, so pytest's log is cleared first.
    """
    before = held()
    yield
    caplog.get_records("call").clear()
    caplog.clear()
    deadline = time.monotonic() + PATIENCE_SECONDS
    while excess := {name for name in held() - before if lasting(name)}:
        if time.monotonic() > deadline:
            raise AssertionError(f"still held: {sorted(excess)}")
        gc.collect()
        time.sleep(0.05)


def held() -> set[str]:
    """Count this process's descriptors (by what they are open on), slots and threads, by name."""
    found = {f"thread {thread.ident} {thread.name}" for thread in threading.enumerate()}
    found |= {
        name for name in os.listdir("/dev/shm") if name.startswith(f"ckpt-slot-{os.getpid()}-")
    }
    of_forks = worlds.descriptors()
    for number in os.listdir("/proc/self/fd"):
        if int(number) in of_forks:
            continue
        try:
            name = os.readlink(f"/proc/self/fd/{number}")
            found.add(
                f"descriptor {number} "
                f"{ends_of(int(number)) if name.startswith('socket:') else name}"
            )
        except OSError:  # the descriptor of the listing itself
            continue
    return found


def ends_of(number: int) -> str:
    """Return what a socket connects: "tcp 127.0.0.1:4000 to 127.0.0.1:9000".

    The sockets that wake the thread of fsspec's event loop are named after it.
    """
    if number in _wakers():
        return "socket of fsspecIO"
    if number in reserved():
        return "reserved port"
    with socket.socket(fileno=os.dup(number)) as found:
        if found.family not in (socket.AF_INET, socket.AF_INET6):
            return f"socket {found.family.name} {found.getsockname()!r}"
        here = "{}:{}".format(*found.getsockname()[:2])
        try:
            return "tcp {} to {}:{}".format(here, *found.getpeername()[:2])
        except OSError:
            return f"tcp {here}"


def _wakers() -> set[int]:
    loop: Any = fsspec.asyn.loop[0]
    return set() if loop is None else {loop._ssock.fileno(), loop._csock.fileno()}


def lasting(name: str) -> bool:
    """Return whether the name belongs to nothing that a process keeps.

    A process has one event loop of fsspec: its thread, its pollers, the sockets that wake it, and
    the thread that closes files for gcsfs. It also keeps ports that the tests have reserved.
    Connections of ckpt are closed.
    """
    return not any(
        word in name for word in ("fsspecIO", "anon_inode:[event", "asyncio", "reserved port")
    )

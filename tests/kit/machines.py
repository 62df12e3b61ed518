"""Machines made of namespaces: each has an address, processes, and a ``/dev/shm`` of its own.

A script that runs by ``ALONE`` may make them. They all end with it. It needs the right to make a
namespace of users, and `ip`.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Final

import psutil
import pytest

from tests.kit.waiting import until
from tests.processes import fork

_OWN: Final = ("--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
ALONE: Final = ("unshare", "--user", "--map-root-user", *_OWN)
"""Words before a command. What it does to processes, mounts and links ends with it."""
_PROBE: Final = (
    "ip link add ckpt type bridge && ip link add one type veth peer name two "
    "&& mount -t tmpfs none /dev/shm"
)
_MACHINE: Final = (
    "trap '' CHLD && mount -t tmpfs -o size=64m none /dev/shm && ip link set lo up "
    "&& echo ready && exec sleep infinity"
)
"""The first process of a machine. Orphans that it adopts leave no zombies. (Other shells than bash
ignore this trap.)
"""
_libc: Final = ctypes.CDLL(None, use_errno=True)


def skip_unless_there_may_be_machines() -> None:
    """Skip the test where namespaces cannot be made."""
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        pytest.skip("needs the commands unshare and ip")
    done = subprocess.run([*ALONE, "sh", "-c", _PROBE], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"needs the right to make namespaces: {done.stderr.strip()}")


@dataclass(frozen=True)
class Machine:
    """A machine that runs.

    Attributes:
        number: No other machine of the network has had it.
        process: The command that has made the machine. It ends with it.
        first: The first process of the machine.
        children: The children of this process in the machine that have not been waited for.
    """

    number: int
    process: subprocess.Popen[str]
    first: int
    children: set[int] = field(default_factory=set[int])

    @property
    def address(self) -> str:
        return f"10.77.{self.number >> 8}.{self.number & 255}"

    @property
    def link(self) -> str:
        """The name of the cable's end outside of the machine."""
        return f"node{self.number}"

    def fork(self, work: Callable[[], None]) -> int:
        """Do ``work`` in a child of this process that is a process of the machine."""
        _enter("pid", self.first)  # only the children enter it
        try:
            self.children.add(child := fork(lambda: self._do(work)))
        finally:
            _enter("pid", os.getpid())
        return child

    def wait(self, child: int) -> int:
        """Wait until a child has ended, and return its exit code."""
        _, status = os.waitpid(child, 0)
        self.children.discard(child)
        return os.waitstatus_to_exitcode(status)

    def do(self, work: Callable[[], None]) -> None:
        """Do ``work`` in a process of the machine, and wait for it."""
        assert self.wait(self.fork(work)) == 0, self

    def _do(self, work: Callable[[], None]) -> None:
        for kind in ("net", "uts", "ipc", "mnt"):
            _enter(kind, self.first)
        work()

    def processes(self) -> list[int]:
        """Return the processes of the machine without its first one, by their ids outside of it."""
        own = _identity("pid", self.first)
        return [
            pid
            for pid in psutil.pids()
            if pid != self.first and own is not None and _identity("pid", pid) == own
        ]


@contextmanager
def network() -> Iterator[Network]:
    """Yield a network without machines. At its end all that it has is removed."""
    _ip("link", "add", "switch", "type", "bridge")
    _ip("link", "set", "switch", "up")
    made = Network()
    try:
        yield made
    finally:
        for machine in list(made.machines):
            made.remove(machine)


@dataclass
class Network:
    """A switch, and the machines that are connected with it."""

    machines: list[Machine] = field(default_factory=list[Machine])
    _made: int = 0

    def add(self) -> Machine:
        """Start another machine."""
        self._made += 1
        words = ["unshare", "--uts", "--ipc", *_OWN, "bash", "-c"]
        name = f"hostname node{self._made} && {_MACHINE}"
        process = subprocess.Popen([*words, name], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        (first,) = psutil.Process(process.pid).children()
        machine = Machine(self._made, process, first.pid)
        other = ("peer", "name", "eth0", "netns", str(machine.first))
        _ip("link", "add", machine.link, "type", "veth", *other)
        _ip("link", "set", machine.link, "master", "switch", "up")
        machine.do(lambda: _ip("addr", "add", f"{machine.address}/16", "dev", "eth0"))
        machine.do(lambda: _ip("link", "set", "eth0", "up"))
        self.machines.append(machine)
        return machine

    def remove(self, machine: Machine) -> None:
        """Pull the cable of a machine, then end it with all its processes and its memory."""
        self.machines.remove(machine)
        own = _identity("net", machine.first)
        # so the other machines do not notice that the processes end
        _ip("link", "del", machine.link)
        os.kill(machine.first, signal.SIGKILL)
        for child in list(machine.children):  # The first process ends after all others
            machine.wait(child)
        with machine.process:
            machine.process.wait()
        assert until(lambda: not _users(own)), _users(own)

    def links(self) -> list[str]:
        """Return the cables."""
        reported = subprocess.run(
            ["ip", "-o", "link", "show", "master", "switch"],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
        return sorted(line.split()[1].partition("@")[0] for line in reported.stdout.splitlines())


def _users(network: int | None) -> list[int]:
    return [pid for pid in psutil.pids() if network and _identity("net", pid) == network]


def _identity(kind: str, pid: int) -> int | None:
    """Return the namespace of a process, or None if it has ended."""
    with suppress(OSError):
        return os.stat(f"/proc/{pid}/ns/{kind}").st_ino
    return None


def _enter(kind: str, pid: int) -> None:
    descriptor = os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if _libc.setns(descriptor, 0):
            raise OSError(ctypes.get_errno(), f"setns {kind} of {pid}")
    finally:
        os.close(descriptor)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)

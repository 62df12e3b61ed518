"""Where the agent is found, and how a place that belongs to another user too is refused."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import ExitStack

import pytest

from ckpt.agent.client import connect
from ckpt.agent.folder import AgentFolder, Lock
from ckpt.errors import AgentError
from tests.agent.conftest import holders
from tests.kit.waiting import until
from tests.processes import ended
from tests.users import ATTACKER, begin_as, only_root


def test_the_folder_is_made_for_this_user_alone(place: AgentFolder) -> None:
    os.rmdir(place.path)
    assert AgentFolder.of_this_user() == place
    assert os.stat(place.path).st_mode & 0o777 == 0o700


def test_a_folder_that_is_open_to_others_is_refused(place: AgentFolder) -> None:
    os.chmod(place.path, 0o755)
    with pytest.raises(AgentError, match="is open to other users: chmod 700"):
        AgentFolder.of_this_user()
    os.chmod(place.path, 0o700)


@pytest.mark.parametrize("kind", ["link", "file"])
def test_what_is_no_folder_is_refused(tmp_path, monkeypatch, kind) -> None:
    there = tmp_path / "there"
    there.symlink_to(tmp_path) if kind == "link" else there.write_text("")
    monkeypatch.setenv("CKPT_AGENT_FOLDER", str(there))
    with pytest.raises(AgentError, match="is not a folder of this user"):
        AgentFolder.of_this_user()


def test_a_folder_that_cannot_be_made_is_named(monkeypatch) -> None:
    monkeypatch.setenv("CKPT_AGENT_FOLDER", "/proc/none/agent")
    with pytest.raises(AgentError, match=r"cannot be used .*: set CKPT_AGENT_FOLDER"):
        AgentFolder.of_this_user()


def test_a_path_that_is_too_long_is_named_with_the_way_out(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("CKPT_AGENT_FOLDER", str(tmp_path / ("x" * 120)))
    with pytest.raises(AgentError, match="107 are allowed: set CKPT_AGENT_FOLDER to a shorter"):
        AgentFolder.of_this_user()
    assert list(tmp_path.iterdir()) == []


@only_root
def test_another_users_folder_is_refused(place: AgentFolder) -> None:
    os.chown(place.path, ATTACKER, -1)
    with pytest.raises(AgentError, match="is not a folder of this user"):
        AgentFolder.of_this_user()
    os.chown(place.path, os.getuid(), -1)


@only_root
def test_another_users_socket_is_refused(place: AgentFolder) -> None:
    """The folder was open to the other user before it belonged to this one."""
    os.chmod(place.path, 0o777)

    def listen() -> None:
        with socket.socket(socket.AF_UNIX) as theirs:
            theirs.settimeout(30)
            theirs.bind(place.socket)
            theirs.listen()
            theirs.accept()

    finish = begin_as(ATTACKER, listen)
    assert until(lambda: os.path.exists(place.socket))
    os.chmod(place.path, 0o700)
    with pytest.raises(AgentError, match=f"belongs to user {ATTACKER}"):
        until(lambda: connect(place))  # it may not listen yet
    finish()


def test_a_lock_has_one_holder_and_ends_with_the_last_descriptor(place: AgentFolder) -> None:
    first, second = Lock(place, "work"), Lock(place, "work")
    assert first.take()
    assert not second.take()
    inherited = os.dup(first.descriptor)
    first.close()
    assert not second.take()
    os.close(inherited)
    assert second.take()
    second.close()


AGENT = """
import os, sys
from ckpt.agent.folder import AgentFolder, Lock
lock = Lock(AgentFolder(sys.argv[1]), "listen")
print(lock.take(), flush=True)
os.fork()
sys.stdin.read()
"""


def test_one_process_has_a_lock_although_others_have_its_file_open(place: AgentFolder) -> None:
    """A worker has it until it runs its own program, and so has an agent that finds it taken."""
    with ExitStack() as stack:
        command = [sys.executable, "-c", AGENT, place.path, "agent"]
        agents = []
        for _ in range(2):
            agent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            agents.append(stack.enter_context(ended(agent)))
            assert agent.stdout is not None
            assert agent.stdout.readline() == (b"True\n" if len(agents) == 1 else b"False\n")
        assert holders(place, "listen") == [agents[0].pid]
        for agent in agents:  # The forks end too
            assert agent.stdin is not None
            agent.stdin.close()

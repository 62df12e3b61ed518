"""The agent as a process: each user has one, in its own session, and another version
replaces it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import psutil
import pytest
import torch

from ckpt import CheckpointManager
from ckpt.agent.client import connect, reach, start, status
from ckpt.agent.folder import AgentFolder
from ckpt.agent.messages import (
    VERSION,
    AskStatus,
    Detach,
    Stop,
    Welcome,
    encode,
    is_newer,
)
from ckpt.agent.server import Agent
from ckpt.errors import AgentError
from ckpt.processes import Process
from tests.agent.conftest import holders, job, job_of
from tests.cli.conftest import Cli, cli
from tests.kit.waiting import until
from tests.kit.worlds import run_code
from tests.processes import ended
from tests.users import ATTACKER, act_as, only_root

__all__ = ["cli"]
MOST_RSS_BYTES = 100 << 20


def test_it_is_started_once_in_a_session_of_its_own_and_is_small(place: AgentFolder) -> None:
    first, second = reach(place), reach(place)
    assert first.welcome == second.welcome
    assert first.welcome.version == VERSION
    agent = psutil.Process(first.welcome.pid)
    assert os.getsid(agent.pid) != os.getsid(0)
    assert agent.cwd() == "/"
    assert agent.memory_info().rss < MOST_RSS_BYTES
    assert {file.path for file in agent.open_files()} <= {
        place.log, f"{place.path}/listen.lock", f"{place.path}/work.lock"
    }  # fmt: skip
    assert os.stat(place.socket).st_mode & 0o077 == 0
    first.close()
    second.close()


def test_a_variable_that_is_not_utf8_is_left_out(
    place: AgentFolder, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setenv("ODD", "\udcff")
    with CheckpointManager(tmp_path, agent="required"):
        found = status(place)
    assert found is not None
    assert [one.state for one in found.jobs] == ["running"]


def test_a_log_that_cannot_be_opened_is_an_error_with_the_way_out(place: AgentFolder) -> None:
    os.mkdir(place.log)
    with pytest.raises(AgentError, match="set CKPT_AGENT_FOLDER"):
        start(place, 20)


def test_a_worker_that_cannot_start_is_a_failed_try(place: AgentFolder, tmp_path: Path) -> None:
    """Its environment is longer than the kernel takes."""
    connection = reach(place)
    script = """
import os, sys
from ckpt import CheckpointManager
os.environ["LONG"] = "x" * (1 << 18)
manager = CheckpointManager(sys.argv[1], agent="required")
os.kill(os.getpid(), 9)
"""
    run_code(script, tmp_path, status=-signal.SIGKILL)
    assert until(lambda: (one := job_of(place)) and one.state == "waiting" and one.error)
    found = status(place)
    assert found is not None
    assert "Argument list too long" in found.jobs[-1].error
    assert found.pid == connection.welcome.pid
    connection.close()


@pytest.mark.parametrize(
    "broken",
    [
        {"tiers": ({},)},
        {"tiers": ({"url": 5},)},
        {"tiers": ({"url": "/nowhere", "odd": 1},)},
        {"processes": (Process(1 << 40, 1),)},
        {"processes": (Process(-1, 1),)},
    ],
    ids=str,
)
def test_a_job_that_makes_no_sense_is_refused_and_ends_no_agent(place: AgentFolder, broken) -> None:
    odd = msgspec.structs.replace(job("odd"), **broken)
    with contextlib.closing(reach(place)) as connection:
        connection.ask(job("good"))
        with pytest.raises(AgentError):
            connection.ask(odd)
    found = status(place)
    assert found is not None
    assert [one.attempt for one in found.jobs] == ["good"]


def test_more_jobs_than_the_soft_limit_of_descriptors_are_registered(place: AgentFolder) -> None:
    script = """
import resource
from ckpt.agent.client import reach
from ckpt.agent.folder import AgentFolder
from tests.agent.conftest import job
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (64, most))
connection = reach(AgentFolder.of_this_user())
for number in range(200):
    connection.ask(job(f"many{number}"))
print("registered")
"""
    assert "registered" in run_code(script)


def test_callers_beyond_the_last_descriptor_wait_and_cost_no_processor_time(
    place: AgentFolder,
) -> None:
    script = """
import resource
from ckpt.agent.client import start
from ckpt.agent.folder import AgentFolder
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
start(AgentFolder.of_this_user(), 20)
"""
    run_code(script)
    registered = reach(place)
    registered.ask(job())
    agent = psutil.Process(registered.welcome.pid)
    with contextlib.ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(socket.socket(socket.AF_UNIX)).connect(place.socket)
        assert until(lambda: "no more callers" in Path(place.log).read_text(), 20)
        assert agent.cpu_percent(interval=2.0) < 10
        registered.ask(AskStatus())  # those that are registered are served
    found = status(place)
    assert found is not None
    assert [one.attempt for one in found.jobs] == ["abc"]
    assert Path(place.log).read_text().count("no more callers") == 1
    registered.close()


def test_jobs_that_end_together_are_finished_a_few_at_a_time(
    place: AgentFolder, tmp_path: Path
) -> None:
    """Each worker takes memory. All of the jobs are finished."""
    jobs = 12
    script = """
import os, sys
from ckpt import CheckpointManager
roots = [f"{sys.argv[1]}/{number}" for number in range(int(sys.argv[2]))]
managers = [CheckpointManager(root, agent="required") for root in roots]
for manager in managers:
    manager.save({"step": 1}, 1)
os.kill(os.getpid(), 9)
"""
    run_code(script, tmp_path, jobs, status=-signal.SIGKILL)
    most = 0

    def over() -> bool:
        nonlocal most
        found = status(place)
        assert found is not None
        states = [one.state for one in found.jobs]
        most = max(most, states.count("finishing"))
        return set(states) == {"done"}

    assert until(over)
    assert 1 < most <= 8


def test_an_agent_that_cannot_make_its_socket_again_keeps_its_jobs(place: AgentFolder) -> None:
    connection = reach(place)
    connection.ask(job())
    os.unlink(place.socket)
    os.mkdir(place.socket)
    assert until(lambda: "is not made" in Path(place.log).read_text())
    os.rmdir(place.socket)
    assert until(lambda: os.path.exists(place.socket))
    found = status(place)
    assert found is not None
    assert [one.attempt for one in found.jobs] == ["abc"]
    assert found.pid == connection.welcome.pid
    connection.close()


def test_two_that_start_at_once_become_one(place: AgentFolder) -> None:
    start(place, 20)
    found = status(place)
    assert found is not None
    start(place, 20)
    again = status(place)
    assert again is not None
    assert again.pid == found.pid
    assert until(lambda: holders(place, "listen") == [found.pid])  # the second has ended


def test_it_ends_by_itself_and_leaves_no_socket(place: AgentFolder, monkeypatch) -> None:
    monkeypatch.setenv("CKPT_AGENT_IDLE_SECONDS", "0.2")
    start(place, 20)
    assert until(lambda: not holders(place, "listen"))
    assert not os.path.exists(place.socket)
    assert status(place) is None


def test_a_socket_that_was_removed_is_made_again(place: AgentFolder) -> None:
    connection = reach(place)
    os.unlink(place.socket)
    assert until(lambda: connect_version(place) == VERSION)
    found = status(place)
    assert found is not None
    assert found.pid == connection.welcome.pid
    connection.close()


def test_an_agent_whose_folder_was_removed_ends(place: AgentFolder) -> None:
    """Another agent may take its locks then."""
    connection = reach(place)
    for name in ("socket", "listen.lock", "work.lock"):
        os.unlink(f"{place.path}/{name}")
    second = reach(place)
    assert second.welcome.pid != connection.welcome.pid
    assert connection.next_news() is None
    assert connect_version(place) == VERSION  # the first has removed no socket but its own
    connection.close()
    second.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_in_order(place: AgentFolder, number) -> None:
    connection = reach(place)
    os.kill(connection.welcome.pid, number)
    assert connection.next_news() is None
    assert until(lambda: not os.path.exists(place.socket))
    connection.close()


def agent_of(version: str) -> subprocess.Popen[bytes]:
    """The same code, which says another version."""
    script = (
        "import sys, ckpt.agent.connections as connections, ckpt.agent.server as server\n"
        f"connections.VERSION = server.VERSION = {version!r}\n"
        "from ckpt.agent.__main__ import main\n"
        "sys.exit(main(['run']))"
    )
    return subprocess.Popen([sys.executable, "-c", script])


def test_of_two_versions_that_differ_one_is_newer() -> None:
    rising = ["", "other", "0.1.0-1", "0.1.0rc1-1", "0.1.0-2", "0.1.1-1", "0.10.0-1", "1.0-1"]
    for place, one in enumerate(rising):
        assert [is_newer(other, one) for other in rising] == [
            at > place for at in range(len(rising))
        ]


def test_one_of_a_newer_version_stays_and_the_older_trainer_goes_on_without(
    place: AgentFolder, tmp_path: Path, caplog
) -> None:
    with ended(agent_of("999.0.0-1")) as newer:
        assert until(lambda: connect_version(place) == "999.0.0-1")
        with pytest.raises(AgentError, match=r"has version 999\.0\.0-1.*CKPT_AGENT_FOLDER"):
            reach(place)
        with CheckpointManager(tmp_path, agent="auto") as manager:
            manager.save({"x": torch.ones(1)}, 1)
        assert caplog.text.count("999.0.0-1") == 1
        assert newer.poll() is None
        assert connect_version(place) == "999.0.0-1"


def test_a_trainer_whose_agent_a_newer_one_has_replaced_says_so_once(
    place: AgentFolder, tmp_path: Path, caplog
) -> None:
    with CheckpointManager(tmp_path, agent="required"):
        ours = status(place)
        assert ours is not None
        with contextlib.ExitStack() as newer:
            assert until(lambda: replaced_by(place, "999.0.0-1", newer))
            assert until(lambda: "has no agent for now" in caplog.text)
            assert connect_version(place) == "999.0.0-1"
            assert until(lambda: caplog.text.count("999.0.0-1") == 1)
        assert until(lambda: (job := job_of(place)) and job.state == "running")


def replaced_by(place: AgentFolder, version: str, agents: contextlib.ExitStack) -> bool:
    """Do as a trainer of ``version`` does, until its agent runs. The older trainer may be first."""
    found = connect(place)
    if found is None:
        agents.enter_context(ended(agent_of(version)))
        return until(lambda: connect_version(place)) and connect_version(place) == version
    with contextlib.closing(found):
        if found.welcome.version == version:
            return True
        with contextlib.suppress(AgentError):  # it may be ending already
            found.ask(Stop())
        return False


def test_one_of_another_version_is_asked_to_finish_and_replaced(place: AgentFolder) -> None:
    with ended(agent_of("other")) as other:
        assert until(lambda: connect_version(place) == "other")
        with pytest.raises(AgentError, match="has version other"):
            status(place)
        connection = reach(place)
        assert connection.welcome.version == VERSION
        assert connection.welcome.pid != other.pid
        connection.close()
        assert other.wait(30) == 0
        found = status(place)
        assert found is not None


def connect_version(place: AgentFolder) -> str:
    found = connect(place)
    if found is None:
        return ""
    found.close()
    return found.welcome.version


def test_one_that_was_killed_is_replaced(place: AgentFolder) -> None:
    first = reach(place)
    os.kill(first.welcome.pid, signal.SIGKILL)
    assert first.next_news() is None
    second = reach(place)
    assert second.welcome.pid != first.welcome.pid
    first.close()
    second.close()


def test_a_job_is_known_until_its_process_ends(place: AgentFolder) -> None:
    connection = reach(place)
    connection.ask(job())
    found = status(place)
    assert found is not None
    assert [(one.attempt, one.state) for one in found.jobs] == [("abc", "running")]
    with pytest.raises(AgentError, match="does not know the job other"):
        connection.ask(Detach("other"))
    with pytest.raises(AgentError, match="different process namespaces"):
        connection.ask(job("abc", os.getppid()))
    connection.close()


@pytest.mark.parametrize(
    "sent",
    [
        struct.pack(">I", 1 << 31),
        struct.pack(">I", 3) + b"abc",
        encode(Welcome("x", 1)),
        b"GET / HTTP/1.0\r\n\r\n",
    ],
)
def test_what_is_no_request_costs_its_sender_the_connection_alone(place: AgentFolder, sent) -> None:
    connection = reach(place)
    connection.ask(job())
    with socket.socket(socket.AF_UNIX) as odd:
        odd.settimeout(30)
        odd.connect(place.socket)
        odd.sendall(sent)
        while odd.recv(1 << 16):
            pass
    found = status(place)
    assert found is not None
    assert len(found.jobs) == 1
    connection.close()


def test_a_socket_that_another_program_serves_is_refused(place: AgentFolder) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(place.socket)
        listening.listen()

        def answer() -> None:  # answer while this thread asks
            theirs, _ = listening.accept()
            with theirs:
                theirs.sendall(struct.pack(">I", 5) + b"hello")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(AgentError, match="served by another program"):
            connect(place)
        thread.join()


@only_root
def test_another_user_is_not_heard(place: AgentFolder) -> None:
    """This also holds if the folder and the socket were opened to all by mistake."""
    connection = reach(place)
    os.chmod(place.path, 0o777)
    os.chmod(place.socket, 0o777)

    def knock() -> int:
        with socket.socket(socket.AF_UNIX) as ours:
            ours.settimeout(30)
            ours.connect(place.socket)
            return len(ours.recv(100))

    assert act_as(ATTACKER, knock) == 0
    os.chmod(place.path, 0o700)
    connection.close()


def test_the_command_line_asks_and_stops_it(place: AgentFolder, cli: Cli) -> None:
    assert cli("agent", "status").code == AgentError.exit_code
    assert cli("agent", "stop").out == "no agent of this user runs on this node\n"
    connection = reach(place)
    connection.ask(job("feed"))
    reported = cli("agent", "status", "--json").json
    assert reported["pid"] == connection.welcome.pid
    assert [one["attempt"] for one in reported["jobs"]] == ["feed"]
    assert "feed" in cli("agent", "status").out
    assert cli("agent", "run").code == AgentError.exit_code
    assert cli("agent", "status", "--now").code == 2
    assert cli("agent", "stop", "--idle-seconds", "3").code == 2
    reported = cli("agent", "stop", "--json")
    assert (reported.code, reported.json) == (
        0,
        {"stopped": connection.welcome.pid, "given_up": []},
    )
    assert status(place) is None
    connection.close()


def test_an_agent_that_finishes_for_another_lets_it_listen_but_not_work(place: AgentFolder) -> None:
    connection = reach(place)
    connection.ask(Stop())
    assert msgspec.structs.asdict(connection.welcome)["version"] == VERSION
    assert connection.receive_stop().given_up == ()
    assert connection.next_news() is None
    connection.close()


@pytest.mark.parametrize("before", [None, False, True])
def test_the_second_signal_ends_the_agent_at_once(
    place: AgentFolder, monkeypatch: pytest.MonkeyPatch, before: bool | None
) -> None:
    """The first one does not, also after a request to stop and without a time for memory."""
    agent = Agent(place, idle_seconds=60, memory_seconds=0, scrub_seconds=60)
    ear, mouth = socket.socketpair()
    with contextlib.ExitStack() as ends:
        for each in (ear.close, mouth.close, agent._close):
            ends.callback(each)
        if before is not None:
            agent._stop(keep_memory=before)
        asked: list[bool] = []
        monkeypatch.setattr(agent, "_stop", lambda *, at_once: asked.append(at_once))
        for _ in range(2):
            mouth.send(b"x")
            agent._on_signal(ear)
    assert asked == [False, True]


def test_a_command_starts_the_agent_once(place: AgentFolder, cli: Cli) -> None:
    first = cli("agent", "start", "--json")
    assert (first.code, first.json) == (0, {"version": VERSION, "pid": holders(place, "listen")[0]})
    assert cli("agent", "start").out == f"agent {VERSION}, process {first.json['pid']}\n"
    Path(place.path).chmod(0o755)
    refused = cli("agent", "start")
    Path(place.path).chmod(0o700)
    assert refused.code == 10
    assert "chmod 700" in refused.err

"""``deploy/slurm/prolog.sh`` starts the agent of a job's user, and never fails a job."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from ckpt.agent.folder import AgentFolder
from ckpt.storage.tiers import urls_of
from tests.agent.conftest import holders, new_place
from tests.kit.stores import whole
from tests.launch import one_step, slurm
from tests.launch.training import ENVIRONMENT, ROOT, wait_until
from tests.users import ATTACKER, fresh_user, only_root

PROLOG = ROOT / "deploy" / "slurm" / "prolog.sh"
USER = fresh_user()
_AS = "mount --bind {passwd} /etc/passwd && exec {prolog}"


def python_of(user: int) -> list[str]:
    """Return the environment, and an interpreter in it that ``user`` may run, with our packages."""
    packages = next(path for path in sys.path if path.endswith("site-packages"))
    paths = os.pathsep.join([ENVIRONMENT["PYTHONPATH"], packages])
    for python in (sys.executable, "/usr/bin/python3"):
        words = ["env", f"PYTHONPATH={paths}", "PYTHONDONTWRITEBYTECODE=1", python]
        became = ["setpriv", "--reuid", str(user), "--clear-groups", *words]
        if not subprocess.run([*became, "-c", "import ckpt"], capture_output=True).returncode:
            return words
    pytest.skip(f"user {user} may run no Python that has the packages")


@dataclass(frozen=True)
class Home:
    """The home of a user, and what the agent of the user has."""

    user: int
    folder: Path
    place: AgentFolder

    def write_command(self, path: Path, first: str = "", name: str = "") -> None:
        """Write an executable that is this user's ckpt, after it has done ``first``."""
        lines = ["#!/bin/sh", f"export CKPT_AGENT_FOLDER={self.place.path}"]
        lines += ["export CKPT_AGENT_MEMORY_SECONDS=0", first]
        words = [*python_of(self.user), "-m", "ckpt.cli.main"]
        lines.append(name or f'exec {shlex.join(words)} "$@"')
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines) + "\n")
        path.chmod(0o755)

    @property
    def command(self) -> Path:
        return self.folder / ".config" / "ckpt" / "command"

    def agents(self) -> list[int]:
        return holders(self.place, "listen")


@contextmanager
def home_of(user: int) -> Iterator[Home]:
    folder = Path(tempfile.mkdtemp(prefix="ckpt-test-", dir="/tmp"))
    folder.chmod(0o755)
    os.chown(folder, user, user)
    with new_place() as place:
        os.chown(place.path, user, user)
        yield Home(user, folder, place)
    shutil.rmtree(folder)


@pytest.fixture
def home() -> Iterator[Home]:
    with home_of(USER) as found:
        yield found


Prolog = Callable[..., None]


@pytest.fixture
def prolog(home: Home, tmp_path: Path) -> Prolog:
    """Run the script as slurmd does, on a machine with one more user."""
    probe = ["unshare", "-m", "mount", "--bind", "/etc/hostname", "/etc/passwd"]
    if subprocess.run(probe, capture_output=True).returncode:
        pytest.skip("needs the right to mount in a namespace of its own (unshare -m)")
    passwd = tmp_path / "passwd"
    entry = f"trainer:x:{USER}:{USER}::{home.folder}:/bin/sh\n"
    passwd.write_text(Path("/etc/passwd").read_text() + entry)

    def run(**env: str) -> None:
        job = {"SLURM_JOB_ID": "7", "SLURM_JOB_UID": str(USER), "SLURM_JOB_USER": "trainer"}
        done = subprocess.run(
            ["unshare", "-m", "bash", "-c", _AS.format(passwd=passwd, prolog=PROLOG)],
            env=job | env,
            capture_output=True,
            text=True,
            timeout=60,
            process_group=0,
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

    return run


def processes_of(user: int) -> list[psutil.Process]:
    found = []
    for each in psutil.process_iter():
        with suppress(psutil.NoSuchProcess):
            if each.uids().effective == user:
                found.append(each)
    return found


def test_bash_accepts_the_script() -> None:
    subprocess.run(["bash", "-n", PROLOG], check=True)
    if shutil.which("shellcheck") is not None:
        subprocess.run(["shellcheck", PROLOG], check=True)


@only_root
@pytest.mark.slow
def test_the_agent_is_the_users_process_and_outlives_the_prolog(home: Home, prolog: Prolog) -> None:
    home.write_command(home.command)
    # it uses the user's own settings
    prolog(CKPT_PROLOG_COMMAND="/bin/false", LD_LIBRARY_PATH="/of/root")
    (agent,) = map(psutil.Process, home.agents())
    assert set(agent.uids()) == set(agent.gids()) == {USER}
    assert os.getsid(agent.pid) not in {os.getsid(0), 0}
    assert Path(f"/proc/{agent.pid}/oom_score_adj").read_text() == "0\n"
    env = agent.environ()
    assert (env["HOME"], env["USER"]) == (str(home.folder), "trainer")
    assert env["CKPT_AGENT_IDLE_SECONDS"] == "3600"
    assert "LD_LIBRARY_PATH" not in env

    prolog()  # the prolog of the next job
    assert home.agents() == [agent.pid]


@only_root
@pytest.mark.parametrize(
    "line",
    ["echo no such module; exit 3", "sleep 1000", "sleep 1000 & kill -9 $$", "exec yes"],
    ids=["fails", "hangs", "leaves a process", "floods"],
)
def test_a_job_starts_whatever_the_users_command_does(
    home: Home, prolog: Prolog, line: str
) -> None:
    home.write_command(home.command, name=line)
    try:
        prolog(CKPT_PROLOG_SECONDS="1")
        assert home.agents() == []
    finally:
        for each in processes_of(USER):
            with suppress(psutil.NoSuchProcess):
                each.kill()


@only_root
@pytest.mark.parametrize(
    "env", [{}, {"SLURM_JOB_UID": "4000000000"}, {"SLURM_JOB_UID": ""}], ids=str
)
def test_a_user_without_a_ckpt_or_an_account_has_no_agent(
    home: Home, prolog: Prolog, env: dict[str, str]
) -> None:
    prolog(**env)
    assert home.agents() == []


# -- under Slurm -----------------------------------------------------------------------------------


@only_root
@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.skipif(
    bool(slurm.missing()),
    reason=f"Slurm is not installed: {', '.join(slurm.missing())} (apt install slurm-wlm)",
)
@pytest.mark.parametrize("user", [0, ATTACKER], ids=["root", "nobody"])
def test_slurm_starts_the_agent_which_finishes_what_a_killed_job_leaves(user: int) -> None:
    with home_of(user) as home, home_of(0) as cluster_home:
        site, wrapper = home.folder / "ckpt", home.folder / "prolog.sh"
        home.write_command(site)
        wrapper.write_text(f"#!/bin/sh\nCKPT_PROLOG_COMMAND={site} exec {PROLOG}\n")
        wrapper.chmod(0o755)
        lines = [f"Prolog={wrapper}", "PrologFlags=Alloc"]
        with slurm.started(cluster_home.folder, *lines) as cluster:
            jobs = [run_job(cluster, home) for _ in range(2)]
            assert jobs[0] == jobs[1]  # one agent for both
            assert psutil.Process(jobs[0]).uids().effective == user
            assert "drain" not in cluster.call("sinfo", "-h")


def run_job(cluster: slurm.Cluster, home: Home) -> int:
    """Let a job leave a step in memory, and return the agent that has brought it to the disk."""
    folder = Path(tempfile.mkdtemp(dir=home.folder))
    os.chown(folder, home.user, home.user)
    output = folder / "output"
    words = [*python_of(home.user), ROOT / "tests" / "launch" / "one_step.py", folder]
    script = shlex.join(["exec", "env", f"CKPT_AGENT_FOLDER={home.place.path}", *map(str, words)])
    options = ["--parsable", f"--output={output}", f"--uid={home.user}", f"--gid={home.user}"]
    options += [f"--chdir={folder}", "--time=10", "--no-requeue"]
    job = cluster.call("sbatch", *options, f"--wrap={script}", PYTHONWARNINGS="ignore")
    wait_until((folder / "saved").exists, output)
    (agent,) = home.agents()
    # An agent that the trainer has started has no such variable.
    assert psutil.Process(agent).environ()["CKPT_AGENT_IDLE_SECONDS"] == "3600"
    cluster.call("scancel", f"--signal={signal.SIGKILL.name}", "--full", job)
    wait_until(lambda: whole(folder / "disk") == [1], Path(home.place.log))
    memory = urls_of(one_step.tiers(folder))[0].removeprefix("shm://")
    held = Path(f"/dev/shm/ckpt-memory-{home.user}-{memory}")
    wait_until(lambda: not held.exists(), Path(home.place.log))
    wait_until(lambda: cluster.facts(job)["JobState"] in {"FAILED", "CANCELLED"}, output)
    assert home.agents() == [agent]
    return agent

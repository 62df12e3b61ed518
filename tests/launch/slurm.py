"""A Slurm cluster of one node in a folder: its own munged, slurmctld and slurmd on free ports."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.launch.training import wait_until
from tests.processes import ended
from tests.servers import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "squeue")
PATH = os.pathsep.join([os.environ["PATH"], "/usr/sbin"])
_START_SECONDS = 30.0
_CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
SlurmctldPort={controller}
SlurmdPort={node}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
NodeName=localhost NodeHostname={host} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=main Nodes=localhost Default=YES State=UP
"""
"""A requeued job waits until its credential has expired: 5 s is the least that Slurm accepts."""


class Cluster:
    """A cluster in ``folder``, with functions that run Slurm's commands."""

    def __init__(self, folder: Path) -> None:
        self.env = {**os.environ, "PATH": PATH, "SLURM_CONF": str(folder / "slurm.conf")}

    def call(self, *words: object, **env: str) -> str:
        # Not processes.run: at its end it also kills orphans, and each step of a job is one.
        done = subprocess.run(
            [str(word) for word in words],
            env=self.env | env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=20,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout.strip()

    def facts(self, job: str) -> dict[str, str]:
        """Return what ``scontrol show job`` says, by name."""
        words = self.call("scontrol", "--oneliner", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)


def missing() -> list[str]:
    """Return the programs that this machine lacks."""
    return [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]


@contextmanager
def started(folder: Path, *more: str) -> Iterator[Cluster]:
    """Start the three daemons, which end with the block, and their jobs with them.

    Args:
        folder: Where the cluster has its files.
        more: Further lines of its configuration.
    """
    cluster, host = Cluster(folder), socket.gethostname()
    for name in ("state", "spool"):
        (folder / name).mkdir()
    (folder / "key").write_bytes(os.urandom(1024))
    (folder / "key").chmod(0o600)
    (folder / "slurm.conf").write_text(
        _CONFIGURATION.format(
            host=host,
            user=getpass.getuser(),
            folder=folder,
            controller=free_port(),
            node=free_port(),
        )
        + "".join(f"{line}\n" for line in more)
    )
    munged = ["munged", "--foreground", "--force", f"--key-file={folder}/key"]
    munged += [f"--socket={folder}/munge.socket", f"--pid-file={folder}/munged.pid"]
    munged += [f"--log-file={folder}/munged.log", f"--seed-file={folder}/munged.seed"]
    with ExitStack() as stack, (folder / "daemons.log").open("wb") as log:
        for command in (munged, ["slurmctld", "-D"], ["slurmd", "-D", "-N", "localhost"]):
            stack.enter_context(
                ended(
                    subprocess.Popen(
                        command,
                        env=cluster.env,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                    )
                )
            )
            if command is munged:
                wait_until((folder / "munge.socket").exists, folder / "daemons.log", _START_SECONDS)
        wait_until(
            lambda: "idle" in cluster.call("sinfo", "-h"), folder / "daemons.log", _START_SECONDS
        )
        yield cluster

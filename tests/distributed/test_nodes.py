"""Two nodes of two ranks, each with a tier of its own, under torchrun.

Separate roots stand for separate disks, and network namespaces for separate machines.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.distributed.launch import TORCHRUN, WORKERS
from tests.kit.waiting import until
from tests.kit.worlds import world
from tests.processes import ended, run

pytestmark = pytest.mark.distributed

ENVIRONMENT = os.environ | TORCHRUN


@pytest.mark.torture
@pytest.mark.parametrize(
    "scenes",
    [
        ("sharded", "undeclared", "gone_back"),
        pytest.param(("replicated", "in_memory", "cut_off", "fewer"), marks=pytest.mark.torture),
    ],
    ids="-".join,
)
def test_steps_outlive_nodes_as_far_as_their_bytes_do(
    tmp_path: Path, scenes: tuple[str, ...]
) -> None:
    assert "ALL WELL" in world(4, WORKERS / "nodes.py", tmp_path, *scenes)


@pytest.mark.torture
def test_two_machines_that_share_one_wire(tmp_path: Path) -> None:
    own = ["unshare", "--user", "--map-root-user", "--net"]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*own, "ip", "link"], capture_output=True, check=False).returncode
    ):
        pytest.skip("no network namespaces here (unshare --user --net, ip)")
    script = Path(__file__).with_name("two_namespaces.sh")
    done = run(
        [*own, "bash", script, tmp_path, sys.executable, WORKERS / "nodes.py"],
        env=ENVIRONMENT,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    assert done.stdout.count("ALL WELL") == 4


def run_and_kill(
    folder: Path, mapping: str, far: int, log: Path, seconds: float, buddies: int = 0
) -> tuple[int, int]:
    """Return the step that all ranks restored, and the last one that was committed before all were
    killed at once.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    command += [str(WORKERS / "nodes_kill.py"), str(folder), mapping, str(far), str(buddies)]
    with (
        log.open("w") as out,
        ended(
            subprocess.Popen(command, env=ENVIRONMENT, stdout=out, stderr=subprocess.STDOUT)
        ) as job,
    ):
        begun = until(lambda: "COMMITTED" in log.read_text() or job.poll() is not None)
        assert begun, log.read_text()[-5000:]
        time.sleep(seconds)
        assert job.poll() is None, log.read_text()[-5000:]
    reported = log.read_text()
    (restored,) = set(re.findall(r"RESTORED \d (\d+)", reported))
    assert reported.count("RESTORED") == 4
    return int(restored), max(int(step) for step in re.findall(r"COMMITTED (\d+)", reported))


@pytest.mark.torture
@pytest.mark.parametrize("seed", [1, 2])
def test_killed_again_and_again_while_nodes_are_swapped_and_lost(tmp_path: Path, seed: int) -> None:
    """If the nodes that are left have all bytes, the newest committed step is restored.

    If a node is lost, it is the newest step on the shared tier or a later one that was fetched
    before. The worker checks that it is never a mixture.
    """
    rng = random.Random(seed)
    folder, committed, shared = tmp_path / "tiers", 0, 0
    for turn in range(5):
        lost = turn > 0 and rng.random() < 0.4
        if lost:
            steps = [
                int(path.parent.name[5:14])
                for path in (folder / "shared").glob("step-*/manifest.json")
            ]
            shared = max(steps, default=0)
            shutil.rmtree(folder / f"node{rng.randrange(2)}")
        mapping = rng.choice(["0011", "1100", "0101"])
        restored, newest = run_and_kill(
            folder, mapping, 3, tmp_path / f"{turn}.log", rng.uniform(0.2, 2.0)
        )
        assert restored >= (shared if lost else committed), (turn, mapping, lost)
        committed = newest


@pytest.mark.torture
@pytest.mark.parametrize("seed", [1, 2])
def test_killed_while_nodes_are_lost_whose_files_a_buddy_has(tmp_path: Path, seed: int) -> None:
    """The newest step that the remaining node has as a whole is restored, or a newer one."""
    rng = random.Random(seed)
    folder, whole, wholes = tmp_path / "tiers", 0, 0
    for turn in range(8):
        mapping = rng.choice(["0011", "1100", "0101"])
        restored, _ = run_and_kill(
            folder, mapping, 0, tmp_path / f"{turn}.log", rng.uniform(0.2, 2.0), buddies=1
        )
        assert restored >= whole, (turn, mapping)
        lost = rng.randrange(2)
        shutil.rmtree(folder / f"node{lost}")
        whole = max(
            (
                int(path.parent.name[5:14])
                for path in (folder / f"node{1 - lost}").glob("step-*/manifest.json")
                if len(list(path.parent.glob("rank-*.safetensors"))) == 4
                and len(list(path.parent.glob("rank-*.json"))) == 4
            ),
            default=0,
        )
        wholes += whole > 0
    assert wholes > 4

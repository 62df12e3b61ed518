"""A /dev/shm of 64 MB, the default of a container.

It is used for what fits, and anonymous memory for the rest. No process dies when it fills up
meanwhile.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.overlap.small_shm import SCENES

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the output of the scenes, which run in a mount namespace of their own."""
    probe = ["unshare", "-m", "sh", "-c", "mount -t tmpfs -o size=64m none /dev/shm"]
    try:
        able = subprocess.run(probe, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        able = False
    if not able:
        pytest.skip("needs the right to mount in a namespace of its own (unshare -m)")
    command = [
        sys.executable,
        "-m",
        "tests.overlap.small_shm",
        str(tmp_path_factory.mktemp("small")),
    ]
    done = subprocess.run(
        [*probe[:4], f"{probe[4]} && exec {shlex.join(command)}"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "backends")])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
        check=False,
    )
    return f"{done.stdout}\nended with {done.returncode}"


@pytest.mark.slow
@pytest.mark.parametrize("scene", [scene.__name__ for scene in SCENES])
def test_in_a_container_with_little_shared_memory(scene: str, reported: str) -> None:
    assert f"well: {scene}\n" in reported, reported[-6000:]
    assert "ended with 0" in reported

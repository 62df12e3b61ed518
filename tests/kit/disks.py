"""Small disks, which need the right to mount."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.kit.worlds import ENVIRONMENT, ROOT, run_script


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Return ``mount(options)``, which mounts a tmpfs with these options."""
    places: list[Path] = []

    def mounted(options: str) -> Path:
        place = tmp_path / f"mount{len(places)}"
        place.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "none", str(place)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            pytest.skip(f"cannot mount here: {done.stderr.strip()}")
        places.append(place)
        return place

    yield mounted
    for place in places:
        subprocess.run(["umount", "-l", place], check=True)


def run_mounted(
    mount: str, command: str, *, timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    """Run a shell's ``command`` after its ``mount``, in a mount namespace of its own."""
    _skip_unless_it_may_mount(mount)
    return subprocess.run(
        ["unshare", "-m", "sh", "-c", f"{mount} && {command}"],
        cwd=ROOT,
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def run_script_mounted(mount: str, script: Path, *args: object, timeout: float = 150) -> str:
    """Run a script after a shell's ``mount``, in a mount namespace of its own, and return what it
    printed. If the script fails, the test fails with what it printed.
    """
    _skip_unless_it_may_mount(mount)
    program = Path(__file__).with_name("in_mounts.py")
    return run_script(program, mount, script, *args, timeout=timeout)


def _skip_unless_it_may_mount(mount: str) -> None:
    words = ["unshare", "-m", "sh", "-c", mount]
    if (
        shutil.which("unshare") is None
        or subprocess.run(words, capture_output=True, check=False).returncode
    ):
        pytest.skip("needs the right to mount in a namespace of its own (unshare -m)")

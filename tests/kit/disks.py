"""Small disks, which need the right to mount."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.kit.worlds import ENVIRONMENT, ROOT


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
    words = ["unshare", "-m", "sh", "-c", mount]
    if (
        shutil.which("unshare") is None
        or subprocess.run(words, capture_output=True, check=False).returncode
    ):
        pytest.skip("needs the right to mount in a namespace of its own (unshare -m)")
    return subprocess.run(
        [*words[:-1], f"{mount} && {command}"],
        cwd=ROOT,
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )

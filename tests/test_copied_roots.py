"""A root that is copied while its job trains, to branch off an experiment."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt import CheckpointManager, Tier
from ckpt.errors import RootInUse
from ckpt.storage.api import read_object
from ckpt.storage.registry import open_backend
from tests.kit.stores import whole
from tests.servers import Server

_TRAINER = """
import json, sys
import torch
from ckpt import CheckpointManager, Tier
url, options = json.loads(sys.argv[1])
with CheckpointManager(Tier(url, options=options)) as manager:
    for step in (1, 2):
        manager.save({"x": torch.ones(10)}, step)
    print("ready", flush=True)
    sys.stdin.readline()
    manager.save({"x": torch.ones(10)}, 3)
"""


@contextmanager
def training(url: str, options: dict[str, Any]) -> Iterator[None]:
    """Run a job that has saved two steps. It saves a third one at the end of the block."""
    process = subprocess.Popen(
        [sys.executable, "-c", _TRAINER, json.dumps([url, options])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield
        process.communicate("\n", timeout=60)
        assert process.returncode == 0
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(params=["folder", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, dict[str, Any]]:
    if request.param == "folder":
        return str(tmp_path), {}
    server: Server = request.getfixturevalue("moto_server")
    keys = {"key": "any", "secret": "any"}
    return f"s3://bucket/{tmp_path.name}", {"endpoint_url": server.url, **keys}


@pytest.mark.slow
def test_a_copy_of_a_root_whose_job_trains_is_trained_in_at_once(
    store: tuple[str, dict[str, Any]],
) -> None:
    url, options = store
    original, copy = f"{url}/original", f"{url}/copy"
    with training(original, options):
        source, target = (open_backend(place, options) for place in (original, copy))
        for info in list(source.list("")):
            target.put(info.key, [read_object(source, info.key, limit=1 << 20)])
        state = {"x": torch.zeros(10)}
        with CheckpointManager(Tier(original, options=options)) as manager:
            manager.restore(state)
            with pytest.raises(RootInUse):
                manager.save(state, 4)
        with CheckpointManager(Tier(copy, options=options)) as manager:
            report = manager.restore(state)
            assert report is not None
            assert report.step == 2
            manager.save(state, 4)
    assert whole(copy, options) == [1, 2, 4]
    assert whole(original, options) == [1, 2, 3]

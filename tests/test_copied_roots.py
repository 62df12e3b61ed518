"""A root that is copied while its job trains, to branch off an experiment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt import CheckpointManager, Tier
from ckpt.errors import RootInUse
from ckpt.storage.api import read_object
from ckpt.storage.registry import open_backend
from tests.kit.marks import torture
from tests.kit.stores import whole
from tests.kit.worlds import paused
from tests.servers import Server

_TRAINER = """
import json, sys
import torch
from ckpt import CheckpointManager, Tier
url, options = json.loads(sys.argv[1])
with CheckpointManager(Tier(url, options=options)) as manager:
    for step in (1, 2):
        manager.save({"x": torch.ones(10)}, step)
    pause(*sys.argv[-2:])
    manager.save({"x": torch.ones(10)}, 3)
"""


@pytest.fixture(params=["folder", *torture("s3")])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, dict[str, Any]]:
    if request.param == "folder":
        return str(tmp_path), {}
    server: Server = request.getfixturevalue("moto_server")
    keys = {"key": "any", "secret": "any"}
    return f"s3://bucket/{tmp_path.name}", {"endpoint_url": server.url, **keys}


@pytest.mark.slow
def test_a_copy_of_a_root_whose_job_trains_is_trained_in_at_once(
    store: tuple[str, dict[str, Any]], tmp_path: Path
) -> None:
    url, options = store
    original, copy = f"{url}/original", f"{url}/copy"
    with paused(_TRAINER, json.dumps([original, options]), folder=tmp_path):
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

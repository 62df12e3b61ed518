"""What a user sees of a store that refuses the job."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import ckpt
from ckpt import CheckpointManager, Tier
from ckpt.errors import AccessDenied
from tests.servers import KEY, Server


@pytest.mark.server
@pytest.mark.parametrize(
    "call",
    [
        lambda manager, _: manager.restore({"x": torch.zeros(2)}),
        lambda manager, _: manager.steps(),
        lambda manager, _: manager.latest_step(),
        lambda manager, _: manager.add_metrics(1, {"loss": 1.0}),
        lambda manager, _: manager.save({"x": torch.zeros(2)}, step=1),
        lambda _, tier: ckpt.open(tier),
    ],
    ids=["restore", "steps", "latest_step", "add_metrics", "save", "open"],
)
def test_a_wrong_key_is_one_sentence_with_the_way_out_and_no_frames_of_clients(
    rclone_s3: Server,
    caplog: pytest.LogCaptureFixture,
    call: Callable[[CheckpointManager, Tier], object],
) -> None:
    options = {"endpoint_url": rclone_s3.url, "key": KEY, "secret": "wrong"}
    tier = Tier("s3://bucket/wrong-key", options=options)
    with (
        caplog.at_level(logging.INFO, "ckpt"),
        CheckpointManager(tier) as manager,
        pytest.raises(AccessDenied) as caught,
    ):
        call(manager, tier)
    message = str(caught.value)
    assert "in s3://bucket/wrong-key" in message or "'s3://bucket/wrong-key'" in message
    assert "the secret key is not that of the access key" in message
    assert "correct the options key and secret of the tier" in message
    assert "\n" not in message
    frames = traceback.extract_tb(caught.value.__traceback__)
    files = [Path(frame.filename).name for frame in frames]
    assert set(files) <= {"test_storage.py", "storage.py", "pending.py", "manager.py"}
    assert len(files) <= 6
    assert len([line for line in caplog.messages if "denied" in line]) <= 1

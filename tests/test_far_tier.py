"""A far tier that is down, hangs or is slow, on a real S3 server behind a connection that can be
cut.
"""

from __future__ import annotations

import statistics
import time

import pytest
import torch

from bench.proxy import Proxy
from ckpt import CheckpointManager, PendingSave, Tier
from ckpt.errors import StepsMissing
from tests.kit.parts import parts_of
from tests.kit.stores import whole
from tests.servers import KEY, SECRET

pytestmark = pytest.mark.server
part_bytes = parts_of("ckpt_backends.s3.backend.PART_BYTES")


@pytest.fixture
def wire(rclone_s3, part_bytes):
    with Proxy(rclone_s3.port) as proxy:
        yield proxy


def far(proxy: Proxy, name: str) -> Tier:
    options = {
        "key": KEY,
        "secret": SECRET,
        "region": "us-east-1",
        "endpoint_url": proxy.url,
        "put_if_absent": False,
    }
    hasty = {"retries": {"max_attempts": 1}, "connect_timeout": 1, "read_timeout": 2}
    return Tier(f"s3://bucket/{name}", options={**options, "config_kwargs": hasty})


def state(step: int, part: int) -> dict[str, torch.Tensor]:
    """Return a state of several parts."""
    return {"x": torch.full((5 * part // 8,), step, dtype=torch.int32)}


@pytest.mark.parametrize(
    "trouble", ["down", "slow", pytest.param("held", marks=pytest.mark.torture)]
)
def test_a_far_tier_in_trouble_changes_nothing_nearer_and_has_everything_in_the_end(
    tmp_path, wire, trouble, part_bytes
):
    near, bucket = str(tmp_path / "near"), far(wire, f"far-{trouble}")
    calls: dict[bool, list[float]] = {False: [], True: []}
    durable: dict[bool, list[float]] = {False: [], True: []}
    with CheckpointManager([near, bucket], slots=1, backlog=20) as manager:
        saves: list[PendingSave] = []
        for step in range(1, 7):
            troubled = step > 3
            if step == 4:
                saves[-1].result(60)
                if trouble == "slow":
                    wire.bytes_per_second = part_bytes / 8
                else:
                    setattr(wire, trouble, True)
            began = time.perf_counter()
            saves.append(manager.save_async(state(step, part_bytes), step))
            calls[troubled].append(time.perf_counter() - began)
            saves[-1].result(20, tier=near)
            durable[troubled].append(time.perf_counter() - began)
            assert not troubled or not saves[3].done()  # no save has waited for it
        time.sleep(2.5)  # longer than the time limit of one request
        assert not saves[-1].done()
        wire.down = wire.held = False
        wire.bytes_per_second = 0.0
        for save in saves:
            save.result(60)
    assert whole(tmp_path / "near") == list(range(1, 7))
    with CheckpointManager(bucket) as manager:
        for step in range(1, 7):
            found = state(0, part_bytes)
            manager.restore(found, step)
            assert found["x"].unique().tolist() == [step]
    # generous, since the machine is shared; a wait for the store would take many seconds
    assert statistics.median(durable[True]) < 5 * statistics.median(durable[False]) + 2
    assert statistics.median(calls[True]) < 5 * statistics.median(calls[False]) + 2


@pytest.mark.torture
def test_closing_does_not_wait_long_for_a_store_that_is_gone(tmp_path, wire, part_bytes):
    bucket = far(wire, "gone")
    wire.down = True
    manager = CheckpointManager([str(tmp_path / "near"), bucket])
    save = manager.save_async(state(1, part_bytes), 1)
    save.result(20, tier=str(tmp_path / "near"))
    began = time.monotonic()
    with pytest.raises(StepsMissing, match="gone lacks step 1 "):
        manager.close()
    assert time.monotonic() - began < 40
    assert whole(tmp_path / "near") == [1]
    assert save.exception(0) is not None

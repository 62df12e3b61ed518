"""A network harms requests.

A save through it is committed, or fails with our error in time, and no listed checkpoint is torn.
"""

from __future__ import annotations

import itertools
import random
import time
import uuid

import pytest
import torch

from ckpt import CheckpointManager, Tier
from ckpt.catalog.step_listing import committed
from ckpt.catalog.verify import verify_step
from ckpt.errors import CkptError, TransientStorageError
from ckpt.pipeline.workers import Workers
from ckpt.storage.registry import open_backend
from tests.faults.conftest import Count
from tests.faults.proxy import Choice, Harm, Proxy
from tests.servers import KEY, SECRET, Server

pytestmark = pytest.mark.server

NUMBERS = (18 << 20) // 8
READ_SECONDS = 2
LIMIT_SECONDS = 60.0
"""In which a save or a restore of 18 MiB must end, whatever is harmed once; with a read time-out
of two seconds.
"""

HARMS = {
    "reset": Harm("reset"),
    "reset in mid-body": Harm("reset body"),
    "reply lost": Harm("lose reply"),
    "reply cut": Harm("cut"),
    "500": Harm("status", status=500, code="InternalError"),
    "503": Harm("status", status=503, code="ServiceUnavailable"),
    "SlowDown": Harm("status", status=503, code="SlowDown"),
    "delayed": Harm("delay", seconds=0.5),
    "throttled": Harm("throttle"),
}


def state(step: int) -> dict[str, object]:
    return {"x": torch.arange(NUMBERS, dtype=torch.int64) * 31 + step, "step": step}


def options(url: str) -> dict[str, object]:
    config = {
        "connect_timeout": READ_SECONDS,
        "read_timeout": READ_SECONDS,
        "retries": {"max_attempts": 2},
    }
    return {
        "endpoint_url": url,
        "key": KEY,
        "secret": SECRET,
        "region": "us-east-1",
        "config_kwargs": config,
    }


def every(nth: int, harm: Harm) -> Choice:
    """Harm each ``nth`` request."""
    counter = itertools.count(1)
    return lambda method, target: harm if next(counter) % nth == 0 else None


def at_random(seed: int, harms: list[Harm], share: float) -> Choice:
    chance = random.Random(seed)
    return lambda method, target: chance.choice(harms) if chance.random() < share else None


def ordeal(server: Server, choice: Choice, saves: int) -> tuple[int, int]:
    """Save and restore while requests are harmed.

    Return how many requests were harmed, and how many saves were committed.
    """
    bucket = f"s3://bucket/{uuid.uuid4().hex}"
    reported: set[int] = set()
    with Proxy(server.port, choice) as proxy:
        tier = Tier(bucket, options=options(proxy.url))
        with CheckpointManager(tier) as manager:
            for step in range(saves):
                began = time.monotonic()
                error = manager.save_async(state(step), step).exception(LIMIT_SECONDS)
                assert time.monotonic() - began < LIMIT_SECONDS
                assert error is None or isinstance(error, CkptError)
                if error is None:
                    reported.add(step)
        target = state(-1)
        began = time.monotonic()
        try:
            with CheckpointManager(tier) as manager:
                report = manager.restore(target)
        except CkptError:
            report = None
        assert time.monotonic() - began < LIMIT_SECONDS
        if report is not None:
            assert torch.equal(target["x"], state(report.step)["x"])  # type: ignore[arg-type]
    backend = open_backend(bucket, options(server.url))
    with Workers("check", 2) as workers:
        listed = committed(backend)
        assert all(verify_step(backend, ref, workers=workers).intact for ref in listed)
    backend.close()
    assert reported <= {ref.step for ref in listed}
    return proxy.harmed, len(reported)


def in_turn(nth: int) -> Choice:
    """Harm each ``nth`` request, with the next harm of the list each time."""
    counter, harms = itertools.count(1), itertools.cycle(HARMS.values())
    return lambda method, target: next(harms) if next(counter) % nth == 0 else None


def test_a_harmed_request_now_and_then_costs_no_save(moto_server: Server, tally: Count) -> None:
    harmed, saved = ordeal(moto_server, in_turn(5), 2)
    assert saved == 2
    assert harmed >= 5
    tally("network", harmed)


def test_a_server_that_accepts_and_says_nothing_is_given_up_in_time(rclone_s3: Server) -> None:
    """This includes requests with a body, where the client first asks whether it may send it."""
    with Proxy(
        rclone_s3.port, lambda method, target: Harm("stall") if method == "PUT" else None
    ) as proxy:
        store = open_backend(f"s3://bucket/{uuid.uuid4().hex}", options(proxy.url))
        began = time.monotonic()
        with pytest.raises(TransientStorageError):
            store.put("k", [b"x"])
        assert time.monotonic() - began < LIMIT_SECONDS / 2


@pytest.mark.torture
def test_a_server_that_does_not_answer_is_asked_again_in_time(
    moto_server: Server, tally: Count
) -> None:
    harmed, saved = ordeal(moto_server, every(4, Harm("stall")), 1)
    assert saved == 1
    assert harmed
    tally("network-stall", harmed)


@pytest.mark.torture
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("harm", HARMS)
def test_harmed_requests_of_one_kind_cost_no_save(
    moto_server: Server, tally: Count, harm: str
) -> None:
    harmed, saved = ordeal(moto_server, every(5, HARMS[harm]), 3)
    assert saved == 3
    tally("network", harmed)


@pytest.mark.torture
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(20))
def test_a_network_that_harms_a_tenth_of_all_requests(
    moto_server: Server, tally: Count, seed: int
) -> None:
    harmed, saved = ordeal(moto_server, at_random(seed, list(HARMS.values()), 0.1), 4)
    assert saved >= 3
    tally("network", harmed)


@pytest.mark.torture
@pytest.mark.timeout(1800)
def test_a_network_that_harms_most_requests(moto_server: Server, tally: Count) -> None:
    harmed, _ = ordeal(
        moto_server, at_random(7, [Harm("reset"), Harm("lose reply"), Harm("status")], 0.7), 3
    )
    tally("network", harmed)

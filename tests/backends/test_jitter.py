"""The retries of each client leave Python's global generator alone, since the training uses it."""

from __future__ import annotations

import random
from functools import partial

import pytest

from ckpt.errors import TransientStorageError
from ckpt.pipeline.retry import RetryPolicy
from ckpt.storage.registry import open_backend
from tests.servers import KEY, SECRET, free_port

PAUSES: list[float] = []


@pytest.mark.parametrize("client", ["s3", "gs", "policy"])
def test_a_store_that_is_away_draws_nothing(client: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncio.sleep", _no_pause)
    PAUSES.clear()
    url = f"http://127.0.0.1:{free_port()}"
    options = {
        "s3": {"endpoint_url": url, "key": KEY, "secret": SECRET, "region": "us-east-1"},
        "gs": {"endpoint_url": url, "token": "anon"},
    }
    if client == "policy":
        work = partial(RetryPolicy(attempts=3, first_seconds=0.001).call, _stumble)
    else:
        work = partial(open_backend(f"{client}://bucket/x", options[client]).head, "y")
    before = random.getstate()
    with pytest.raises(TransientStorageError):
        work()
    assert random.getstate() == before
    assert client == "policy" or len(PAUSES) >= 2  # the request was retried


def _stumble() -> None:
    raise TransientStorageError("x")


async def _no_pause(seconds: float, result: object = None) -> object:
    PAUSES.append(seconds)
    return result

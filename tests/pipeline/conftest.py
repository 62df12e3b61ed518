from __future__ import annotations

import uuid

import pytest

from ckpt.pipeline.retry import RetryPolicy
from ckpt.pipeline.workers import Workers
from ckpt.storage.registry import open_backend
from ckpt_backends.memory import forget_memory


@pytest.fixture
def memory():
    name = uuid.uuid4().hex
    yield open_backend(f"memory://{name}")
    forget_memory(name)


@pytest.fixture
def workers():
    with Workers("test", 3) as group:
        yield group


@pytest.fixture
def retry():
    return RetryPolicy(attempts=3, first_seconds=0.001, most_seconds=0.002)

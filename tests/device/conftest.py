from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest
import torch

from tests.device import accelerator


@pytest.fixture(autouse=True)
def place() -> Iterator[torch.device]:
    """The first device. No work runs on any device before and after a test."""
    if reason := accelerator.why_not():
        pytest.skip(reason)
    for index in range(torch.accelerator.device_count()):
        torch.accelerator.synchronize(index)
    yield accelerator.device()
    for index in range(torch.accelerator.device_count()):
        torch.accelerator.synchronize(index)


@pytest.fixture
def root() -> str:
    return f"memory://{uuid.uuid4().hex}"

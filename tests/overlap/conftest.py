from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest
import torch

from tests.overlap.window import Window


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread: small tensors are no faster with more, and a fork loses torch's threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def root() -> str:
    return f"memory://{uuid.uuid4().hex}"


@pytest.fixture
def window(monkeypatch: pytest.MonkeyPatch) -> Iterator[Window]:
    made = Window()
    made.hold_copies(monkeypatch)
    yield made
    made.close()

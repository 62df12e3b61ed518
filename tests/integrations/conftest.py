"""The small trainings that several test modules share."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(scope="module")
def nets() -> Any:
    from tests.integrations.workers import lightning_nets

    return lightning_nets


def after(losses: dict[int, float], step: int) -> dict[int, float]:
    return {each: loss for each, loss in losses.items() if each > step}

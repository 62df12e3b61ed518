"""The small trainings that several test modules share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

WORKER = Path(__file__).parent / "workers" / "lightning_nets.py"


@pytest.fixture(scope="module")
def nets() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(WORKER.parent))
        import lightning_nets

        yield lightning_nets
    sys.modules.pop("lightning_nets")


def after(losses: dict[int, float], step: int) -> dict[int, float]:
    return {each: loss for each, loss in losses.items() if each > step}

"""What the fuzz tests change, and how they check it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from ckpt import PerRank
from ckpt.errors import CkptError
from ckpt.model.keys import fragment_name
from ckpt.model.manifest import FragmentRef, Manifest, Packed
from tests.model.records import records

MANIFEST, FRAGMENT = records(metadata={"run": "x"})
BODIES = {
    kind: json.loads(msgspec.json.encode(record))
    for kind, record in ((Manifest, MANIFEST), (Packed, FRAGMENT))
}
FEW, MANY = 100, 5_000
SCALE = pytest.mark.parametrize(
    "examples",
    [FEW, pytest.param(MANY, marks=[pytest.mark.torture, pytest.mark.timeout(1800)])],
    ids=["few", "many"],
)


def reported(error: CkptError) -> None:
    assert len(str(error)) > 10


def fuzz(examples: int, strategy: st.SearchStrategy[Any], check: Callable[[Any], None]) -> int:
    """Run ``check`` on this many examples, and return how many there were."""
    count = 0

    @settings(max_examples=examples, database=None, suppress_health_check=list(HealthCheck))
    @given(strategy)
    def run(value: Any) -> None:
        nonlocal count
        count += 1
        check(value)

    run()
    return count


def target() -> dict[str, Any]:
    """Return a state with values of all kinds that has stepped once."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return {
        "model": model,
        "optimizer": optimizer,
        "schedule": schedule,
        "step": 3,
        "rng": PerRank(torch.get_rng_state()),
        "seen": {1: "a", (2,): b"b"},
        "array": np.arange(3),
        "list": [torch.ones(2), 1.5, None],
        "complex": 1j,
        "set": {1, 2},
        "scalar": np.float32(2),
        "big": 2**80,
    }


def record_ref(fragment: Packed) -> FragmentRef:
    return FragmentRef(fragment_name(max(0, fragment.rank) % 10**5), fragment.rank, 10, "0" * 32)

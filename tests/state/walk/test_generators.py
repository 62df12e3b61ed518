from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from ckpt import CheckpointManager, PerRank
from ckpt.errors import RestoreError, UnsupportedValue
from tests.state.saving import new_root, restored, saved

DRAWS: list[tuple[Callable[[], Any], Callable[[Any], object]]] = [
    (torch.Generator, lambda one: torch.rand((), generator=one).item()),
    (np.random.default_rng, lambda one: one.random()),
    (lambda: np.random.Generator(np.random.MT19937(1)), lambda one: one.random()),
    (np.random.RandomState, lambda one: one.rand()),
    (random.Random, lambda one: one.gauss(0, 1)),
]
NAMES = ["torch", "PCG64", "MT19937", "RandomState", "random"]


@pytest.mark.parametrize("where", ["state", "dict", "list", "rank"])
@pytest.mark.parametrize(("make", "draw"), DRAWS, ids=NAMES)
def test_a_generator_goes_on_where_it_was_at_the_save(
    make: Callable[[], Any], draw: Callable[[Any], object], where: str
) -> None:
    def state_of(one: Any) -> dict[str, Any]:
        return {
            "noise": {"state": one, "dict": {"a": one}, "list": [one], "rank": PerRank(one)}[where]
        }

    one = make()
    draw(one)
    root = saved(state_of(one))
    expected = [draw(one) for _ in range(3)]
    other = make()
    restored(root, state_of(other))
    assert [draw(other) for _ in range(3)] == expected


def test_each_save_has_the_present_state() -> None:
    one, root = torch.Generator(), new_root()
    with CheckpointManager(root) as manager:
        for step in (1, 2):
            expected = torch.rand((), generator=one)
            manager.save_async({"noise": one}, step)
        expected = torch.rand((), generator=one)
    other = torch.Generator()
    restored(root, {"noise": other})
    assert torch.equal(torch.rand((), generator=other), expected)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (np.random.default_rng(), np.random.Generator(np.random.MT19937(1))),
        (random.Random(), torch.Generator()),
        (torch.Generator(), random.Random()),
        (np.random.RandomState(), np.random.default_rng()),
    ],
    ids=["bits", "to torch", "to Python", "to NumPy"],
)
def test_a_generator_of_another_kind_is_refused_before_anything_changes(
    one: object, other: object
) -> None:
    root, target = saved({"a": torch.ones(2), "noise": one}), torch.zeros(2)
    with pytest.raises(RestoreError, match="make the same kind of generator"):
        restored(root, {"a": target, "noise": other})
    assert not target.any()


def test_a_generator_inside_of_a_state_dict_is_refused() -> None:
    """A restore would pass a dict to ``load_state_dict`` in its place."""

    class Holder:
        def state_dict(self) -> dict[str, Any]:
            return {"noise": torch.Generator()}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    refused = pytest.raises(UnsupportedValue, match=r"give its present state as a plain value")
    with CheckpointManager(new_root()) as manager, refused:
        manager.save_async({"holder": Holder()}, 1)

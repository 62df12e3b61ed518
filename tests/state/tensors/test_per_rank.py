from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ckpt import CheckpointManager, PerRank, RngState
from ckpt.errors import ConfigError, UnsupportedValue
from tests.state.saving import (
    assert_same,
    manifest_of,
    new_root,
    restored,
    round_trip,
    saved,
    tree_of,
)


def test_a_plain_value_is_replaced_and_kept_out_of_the_common_tree() -> None:
    root = saved({"seed": PerRank({"a": [1, (2.5, None)]})})
    assert tree_of(root) == {"seed": {"$": "per_rank"}}
    assert (
        bytes(manifest_of(root).per_rank["0"]) == b'{"seed":{"a":[1,{"$":"tuple","v":[2.5,null]}]}}'
    )
    target = PerRank(None)
    restored(root, {"seed": target})
    assert target.value == {"a": [1, (2.5, None)]}


def test_tensors_in_it_are_stored_under_the_ranks_name_and_filled_in_place() -> None:
    one, shared = torch.randn(4), torch.randn(3)
    root = saved({"shared": shared, "p": PerRank({"t": one, "s": shared})})
    held = torch.zeros(4)
    target: dict[str, Any] = {
        "shared": torch.zeros(3),
        "p": PerRank({"t": held, "s": torch.zeros(3)}),
    }
    assert "p/t@0" in {tensor.name for tensor in manifest_of(root).tensors}
    restored(root, target)
    assert torch.equal(held, one)
    assert torch.equal(target["p"].value["s"], shared)


def test_an_object_in_it_is_loaded() -> None:
    class Loader:
        def __init__(self) -> None:
            self.position, self.order = 0, torch.zeros(5, dtype=torch.int64)

        def state_dict(self) -> dict[str, Any]:
            return {
                "position": self.position,
                "buffers": [{"order": self.order}],
                "key": {("a", 1): np.arange(3)},
            }

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.position, self.order = state["position"], state["buffers"][0]["order"]
            assert np.array_equal(state["key"][("a", 1)], np.arange(3))

    loader, other = Loader(), Loader()
    loader.position, loader.order = 17, torch.randperm(5)
    round_trip({"data": PerRank(loader)}, {"data": PerRank(other)})
    assert other.position == 17
    assert torch.equal(other.order, loader.order)
    round_trip({"data": loader}, {"data": other})  # and without a PerRank


@pytest.mark.parametrize("rng", [RngState(), PerRank(RngState())], ids=["common", "per rank"])
def test_the_random_numbers_go_on_where_they_were(rng: Any) -> None:
    def draw() -> list[Any]:
        return [
            random.random(),
            random.gauss(0, 1),
            np.random.rand(),
            np.random.randn(),
            torch.rand(2).tolist(),
        ]

    draw()
    root = saved({"rng": rng})
    expected = draw()
    draw()
    restored(root, {"rng": rng})
    assert_same(draw(), expected)


@pytest.mark.parametrize(
    "value", [nn.Linear(1, 1), torch.optim.SGD([torch.zeros(1)], 0.1)], ids=["module", "optimizer"]
)
def test_a_module_or_optimizer_in_it_is_refused_with_the_way_out(value: Any) -> None:
    with (
        CheckpointManager(new_root()) as manager,
        pytest.raises(UnsupportedValue, match="name of its own"),
    ):
        manager.save_async({"x": PerRank(value)}, 0)


@pytest.mark.parametrize("wrong", ["some", None, 1])
def test_a_rule_that_is_none_is_refused_at_once(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="on_resize"):
        PerRank(1, on_resize=wrong)

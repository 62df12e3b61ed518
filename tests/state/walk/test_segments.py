"""Which tensors of a state share a buffer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ckpt import CheckpointManager
from ckpt.model.views import View
from tests.state.saving import manifest_of, new_root, saved


def views_of(state: dict[str, Any]) -> dict[str, View]:
    return manifest_of(saved(state)).views


def test_tensors_that_are_all_of_their_memory_have_no_views() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    both = torch.ones(3)
    assert views_of({"m": model, "o": optimizer, "a": both, "b": [both, torch.ones(9)[2:]]}) == {}


def test_views_have_their_places_in_the_buffer() -> None:
    buffer = torch.arange(40.0)
    state = {"a": buffer[8:], "b": buffer[12:28].view(4, 4).t(), "c": buffer[9:].view(torch.uint8)}
    assert views_of(state) == {
        "a": View("a", 0, (1,)),
        "b": View("a", 16, (1, 4)),
        "c": View("a", 4, (1,)),
    }


def test_parameters_in_one_buffer_are_no_views() -> None:
    buffer = torch.zeros(12)
    model = nn.ParameterDict({"a": nn.Parameter(buffer[:6]), "b": nn.Parameter(buffer[6:])})
    assert views_of({"model": model}) == {}


def test_values_that_show_other_elements_than_their_memory_are_no_views() -> None:
    buffer = torch.zeros(8, dtype=torch.complex64)
    state = {"a": buffer, "b": buffer[:4].conj(), "c": buffer[:4].imag, "d": buffer[:1].expand(4)}
    assert set(views_of(state)) == {"a", "c"}


def test_the_next_save_sees_that_memory_is_shared_no_longer() -> None:
    buffer = torch.zeros(8)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for index, parameter in enumerate(model.parameters()):
        optimizer.state[parameter]["m"] = buffer[index * 4 :][:4]
    state, root = {"model": model, "optimizer": optimizer}, new_root()
    with CheckpointManager(root) as manager:
        manager.save(state, 1)
        assert len(manifest_of(root).views) == 2
        manager.save(state, 2)
        assert len(manifest_of(root).views) == 2
        optimizer.state[model.weight]["m"] = torch.ones(4)
        manager.save(state, 3)
    assert manifest_of(root).views == {}

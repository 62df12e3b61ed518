"""A step waits for parts of tensors in an optimizer's flat memory, as for any parameter."""

from __future__ import annotations

import torch

from ckpt import CheckpointManager, LocalShards
from tests.overlap.window import Window


def test_the_owner_s_step_waits_for_its_parts(root: str, window: Window) -> None:
    flat = torch.nn.Parameter(torch.arange(35.0))
    optimizer = torch.optim.AdamW([flat], lr=0.1)
    flat.grad = torch.ones(35)
    optimizer.step()

    def parts() -> dict[str, LocalShards]:
        held = {"w": flat, "m": optimizer.state[flat]["exp_avg"]}
        return {
            name: LocalShards.of_range((5, 7), 0, memory, owner=optimizer)
            for name, memory in held.items()
        }

    state = parts()
    expected = {name: part.tensors[0].clone() for name, part in state.items()}
    with CheckpointManager(root) as manager:
        pending = window.save(manager, state)
        window.must_wait(optimizer.step)
        pending.result(30)
        assert not torch.equal(flat.detach().view(5, 7), expected["w"])
        manager.restore(parts())
    assert torch.equal(flat.detach().view(5, 7), expected["w"])
    assert torch.equal(optimizer.state[flat]["exp_avg"].view(5, 7), expected["m"])

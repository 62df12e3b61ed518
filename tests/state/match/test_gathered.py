"""After a restore torch does not use the copies of parameters that it computes with.

See also tests/distributed/workers/in_layouts.py.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from tests.state.saving import restored, saved


class Scaled(nn.Module):
    """Inductor folds the product of its parameter into one constant when it freezes."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4, 4), value))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ torch.cat([self.weight, self.weight * 1.5], 1)


@pytest.fixture
def freezing() -> Iterator[None]:
    import torch._inductor.config as inductor

    torch._dynamo.reset()
    with inductor.patch(freezing=True):
        yield
    torch._dynamo.reset()
    sys.modules.pop("torch._inductor.freezing", None)


@pytest.mark.usefixtures("freezing")
def test_a_graph_with_frozen_parameters_computes_with_what_was_restored(
    caplog: pytest.LogCaptureFixture,
) -> None:
    root = saved({"model": Scaled(2.0)})
    net = Scaled(3.0).eval()
    run = torch.compile(net)
    with torch.no_grad():
        assert run(torch.ones(3, 4))[0, 0] == 12.0
        net.weight.fill_(1.0)
        assert run(torch.ones(3, 4))[0, 0] == 12.0, "torch froze nothing: the test shows nothing"
        restored(root, {"model": net})
        assert run(torch.ones(3, 4))[0, 0] == 8.0
    assert "has frozen parameters" in caplog.text


def test_what_autocast_has_converted_is_not_used_any_more() -> None:
    root = saved({"model": Scaled(2.0)})
    net = nn.Linear(4, 4, bias=False)
    with torch.no_grad():
        net.weight.fill_(3.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert net(torch.ones(1, 4))[0, 0] == 12.0
        restored(root, {"model": net})
        assert net(torch.ones(1, 4))[0, 0] == 8.0


def test_without_frozen_graphs_nothing_is_compiled_again(caplog: pytest.LogCaptureFixture) -> None:
    compiled = torch.compile(Scaled(3.0), backend="eager")
    compiled(torch.ones(3, 4))
    before = torch._dynamo.utils.counters["frames"]["total"]
    restored(saved({"model": Scaled(2.0)}), {"model": compiled})
    assert compiled(torch.ones(3, 4))[0, 0] == 8.0
    assert torch._dynamo.utils.counters["frames"]["total"] == before
    assert "frozen" not in caplog.text

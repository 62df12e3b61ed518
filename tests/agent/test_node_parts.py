from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ckpt.agent.node_parts import NodeParts
from ckpt.errors import CommitError, RootInUse
from ckpt.model.keys import StepRef


@pytest.mark.parametrize("error", [RootInUse("/far", "another job"), CommitError("a part lacks")])
def test_no_further_step_is_tried_on_a_root_that_another_job_has_taken(
    monkeypatch: pytest.MonkeyPatch, error: CommitError
) -> None:
    """Of other errors, each concerns one step only."""
    parts: Any = [
        SimpleNamespace(stored=SimpleNamespace(ref=StepRef(step, "a" * 12))) for step in (3, 2)
    ]
    tried: list[int] = []

    def bring(_: NodeParts, part: Any) -> None:
        tried.append(part.stored.ref.step)
        raise error

    monkeypatch.setattr(NodeParts, "_bring", bring)
    own = object.__new__(NodeParts)
    if isinstance(error, RootInUse):
        with pytest.raises(RootInUse):
            own._try(parts)
        assert tried == [3]
    else:
        assert own._try(parts) == {part.stored.ref: error for part in parts}

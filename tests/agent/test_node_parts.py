from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ckpt.agent.node_parts import NodeParts
from ckpt.errors import (
    AccessDenied,
    ChecksumMismatch,
    CkptError,
    CommitError,
    LinkRefused,
    ObjectNotFound,
    OutOfSpace,
    RootInUse,
    RootLost,
    StorageError,
    TransientStorageError,
)
from ckpt.model.keys import StepRef

OF_THE_STORE = [
    RootInUse("/far", "another job"),
    RootLost(""),
    AccessDenied("step", "no credentials"),
    OutOfSpace("step"),
    TransientStorageError("step", "no answer"),
]
OF_ONE_STEP = [
    CommitError("a part lacks"),
    ChecksumMismatch("step", 0, 1),
    StorageError("step", "it is being cleared away"),
    ObjectNotFound("step"),
    LinkRefused("step"),
]


@pytest.mark.parametrize("error", [*OF_THE_STORE, *OF_ONE_STEP])
def test_an_error_of_one_step_keeps_no_further_step_from_being_tried(
    monkeypatch: pytest.MonkeyPatch, error: CkptError
) -> None:
    """An error of the whole store, or of a root that another job has taken, ends the work."""
    parts: Any = [
        SimpleNamespace(stored=SimpleNamespace(ref=StepRef(step, "a" * 12))) for step in (3, 2)
    ]
    tried: list[int] = []

    def bring(_: NodeParts, part: Any) -> None:
        tried.append(part.stored.ref.step)
        raise error

    monkeypatch.setattr(NodeParts, "_bring", bring)
    own = object.__new__(NodeParts)
    if error in OF_THE_STORE:
        with pytest.raises(type(error)):
            own._try(parts)
        assert tried == [3]
    else:
        assert own._try(parts) == {part.stored.ref: error for part in parts}

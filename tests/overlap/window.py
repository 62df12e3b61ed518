"""The window between a call of ``save_async`` and its late copy.

A test can hold it open. The module also keeps the state as it was at the call.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ckpt import CheckpointManager, PendingSave, PerRank
from ckpt.pipeline.workers import Workers
from tests.state.saving import assert_same, bits

COPIER = "copy"
PATIENCE = 0.06
"""Seconds a call is given to prove that it does not wait.

It has done so before the window, so that nothing about it is slow the first time.
"""


def content(value: Any) -> Any:
    """Return all that a checkpoint of ``value`` must hold, in memory of its own."""
    if isinstance(value, torch.Tensor):
        if isinstance(value, DTensor):
            value = value.to_local()
        if hasattr(value, "__tensor_flatten__"):  # some wrappers cannot be cloned
            return {name: content(getattr(value, name)) for name in value.__tensor_flatten__()[0]}
        return value.detach().clone()
    if isinstance(value, PerRank):
        return content(value.value)
    if isinstance(value, ZeroRedundancyOptimizer):  # this rank's part of it
        return content(value.optim)
    if isinstance(value, Mapping):
        return {key: content(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(content(item) for item in value)
    if isinstance(value, Optimizer | nn.Module) or hasattr(value, "load_state_dict"):
        return content(dict(value.state_dict()))
    return copy.deepcopy(value)


def owned(value: Any) -> Iterator[torch.Tensor]:
    """Return the tensors that the optimizers of a state own, which may be copied late."""
    if isinstance(value, ZeroRedundancyOptimizer):
        yield from owned(value.optim)
    elif isinstance(value, Optimizer):
        for group in value.param_groups:
            for parameter in group["params"]:
                yield parameter
                yield from (
                    held
                    for held in value.state.get(parameter, {}).values()
                    if torch.is_tensor(held)
                )
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from owned(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from owned(item)


_submit = Workers.submit


class Window:
    """A gate at which late copies wait.

    ``save`` leaves it closed; ``overtake``, ``close`` or the end of the test opens it.

    Attributes:
        reference: The content of the state at the last ``save``.
        overtaken: Whether what ``overtake`` called was over before the copy had begun.
        changed: Whether an owned tensor had changed by then.
    """

    def __init__(self) -> None:
        self.reference: Any = None
        self.overtaken = self.changed = False
        self._gate, self._entered = threading.Event(), threading.Event()
        self._gate.set()
        self._owned: list[tuple[torch.Tensor, bytes]] = []

    def hold_copies(self, patch: pytest.MonkeyPatch) -> None:
        """Let each late copy of this process wait at the gate."""

        def submit(workers: Workers, work: Any, /, *args: Any, **kwargs: Any) -> Any:
            def held(*args: Any, **kwargs: Any) -> Any:
                self._entered.set()
                self._gate.wait(20)  # a test that failed with the window open must not hang
                return work(*args, **kwargs)

            return _submit(workers, held if workers.name == COPIER else work, *args, **kwargs)

        patch.setattr(Workers, "submit", submit)

    def save(
        self,
        manager: CheckpointManager,
        state: Mapping[str, Any],
        step: int = 1,
        *,
        of: Sequence[torch.Tensor] | None = None,
    ) -> PendingSave:
        """Save with the window open: when it returns, nothing late has been copied.

        ``of`` is what is owned, if the state itself does not show it.
        """
        self.reference = content(state) if of is None else None
        self._owned = [(tensor, _now(tensor)) for tensor in (owned(state) if of is None else of)]
        self._gate.clear()
        self._entered.clear()
        pending = manager.save_async(state, step)
        assert self._entered.wait(30), "nothing is copied late: the window would prove nothing"
        return pending

    def hold(self) -> None:
        """Let late copies wait from now on."""
        self._gate.clear()

    def overtake(self, act: Callable[[], object], *, patience: float = PATIENCE) -> None:
        """Call ``act``, which changes owned tensors, with the window open.

        Close the window when ``act`` has shown whether it waits.
        """
        over = threading.Event()

        def close() -> None:
            self.overtaken = over.wait(patience)
            self.changed = any(_now(tensor) != before for tensor, before in self._owned)
            self._gate.set()

        closer = threading.Thread(target=close)
        closer.start()
        try:
            act()
        finally:
            over.set()
            closer.join()

    def must_wait(self, act: Callable[[], object], *, patience: float = PATIENCE) -> None:
        """Call ``overtake``, and check that the act has waited for the copy."""
        self.overtake(act, patience=patience)
        assert not self.overtaken, "it did not wait for the copy"
        assert not self.changed, "an owned tensor changed before it was copied"

    def close(self) -> None:
        """Let the copy be made."""
        self._gate.set()


def _now(tensor: torch.Tensor) -> bytes:
    # a tensor that NumPy has seen cannot be resized any more: NumPy gets a copy
    found = content(tensor)
    return b"".join(map(bits, found.values())) if isinstance(found, dict) else bits(found)


def assert_restores(
    root: Any, expected: Any, target: dict[str, Any], step: int | None = None
) -> None:
    """Check that the checkpoint, read into ``target``, is ``expected`` to the bit."""
    with CheckpointManager(root) as manager:
        report = manager.restore(target, step)
    assert report is not None
    assert report.skipped == ()
    assert_same(content(target), expected)

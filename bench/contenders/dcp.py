"""``torch.distributed.checkpoint``, as it comes: no option is changed."""

from __future__ import annotations

import os
import warnings
from concurrent.futures import Future
from typing import Any, cast

from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from bench.contenders import Handle, fsync_tree
from bench.state import Training

warnings.filterwarnings("ignore", module="torch.distributed")


class DcpSave:
    """``dcp.save``; returns when the files are written, the bench fsyncs them."""

    def prepare(self, state: Training, folder: str) -> None:
        self._state, self._folder = state, folder

    def save(self, step: int) -> Handle:
        path = os.path.join(self._folder, f"step-{step}")
        save(_state_dict(self._state), checkpoint_id=path)
        return Handle(step, path)

    def wait_safe(self, handle: Handle) -> None:
        """It was safe on return: the state has been written."""

    def wait_durable(self, handle: Handle) -> None:
        fsync_tree(handle.path)

    def load_back(self, path: str, into: Training) -> None:
        state = _state_dict(into)
        load(state, checkpoint_id=path)
        set_state_dict(
            into.model,
            into.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        into.step = state["step"]

    def close(self) -> None:
        """Nothing is held."""


class DcpAsyncSave(DcpSave):
    """``dcp.async_save``; it copies the state before it returns, then writes in a thread of the trainer. The bench fsyncs."""

    def save(self, step: int) -> Handle:
        path = os.path.join(self._folder, f"step-{step}")
        future = async_save(_state_dict(self._state), checkpoint_id=path)
        return Handle(step, path, future)

    def wait_durable(self, handle: Handle) -> None:
        cast("Future[Any]", handle.payload).result()
        super().wait_durable(handle)


def _state_dict(state: Training) -> dict[str, Any]:
    model, optimizer = get_state_dict(state.model, state.optimizer)
    return {"model": model, "optimizer": optimizer, "step": state.step}

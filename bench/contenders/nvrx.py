"""``nvidia-resiliency-ext`` 0.4.1: ``torch.save`` in a fork of the trainer.

Its authors mean it for GPUs: without CUDA it stops at ``torch.cuda.synchronize()``, for which there
is nothing to do here, so that call, and nothing else, is made to do nothing while it saves. Of its
two ways only the fork is measured: the state is then frozen by the kernel, which copies each page
that training changes meanwhile. The other way, a persistent process, does not copy data that is in
host memory already: it would save what the next step has made of it.

It is in no extra, as it brings ``pynvml``, with which every import of torch warns. Nothing that is
used here needs that: ``pip install --no-deps nvidia-resiliency-ext==0.4.1``.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from importlib import import_module
from unittest.mock import patch

import torch

from bench.contenders import Handle
from bench.contenders.setting import process_group
from bench.contenders.torch_save import TorchSave, file_of
from bench.contenders.trees import own_state
from bench.state import Subject

# Not by an import statement: it is untyped where it is installed, and not found where it is not.
_LIBRARY = import_module("nvidia_resiliency_ext.checkpointing.async_ckpt.torch_ckpt")


class Nvrx(TorchSave):
    """Forked before it returns; a file per rank, loaded like that of ``torch.save``.

    The bench fsyncs.
    """

    def prepare(self, subject: Subject, folder: str) -> None:
        super().prepare(subject, folder)
        self._setting = ExitStack()
        self._setting.enter_context(process_group())  # it asks for its rank
        self._checkpointer = _LIBRARY.TorchAsyncCheckpoint(persistent_queue=False)

    def save(self, step: int) -> Handle:
        path = os.path.join(self._folder, f"step-{step}")
        os.makedirs(path, exist_ok=True)
        with patch.object(torch.cuda, "synchronize", _nothing):
            self._checkpointer.async_save(own_state(self._subject), f"{file_of(path)}.tmp")
        return Handle(step, path)

    def wait_durable(self, handle: Handle) -> None:
        self._checkpointer.finalize_async_save(blocking=True)
        file = file_of(handle.path)
        os.rename(f"{file}.tmp", file)
        super().wait_durable(handle)

    def close(self) -> None:
        self._checkpointer.finalize_async_save(blocking=True)
        self._setting.close()


def _nothing(device: object = None) -> None:
    """Nothing is queued on a device that is not there."""

"""Contenders as they are best used on an accelerator: memory is page-locked where CUDA is there
to do it.
"""

from __future__ import annotations

from typing import Final

import torch
from torch.distributed.checkpoint.staging import StagingOptions

from bench.contenders import Handle
from bench.contenders.dcp_best import DcpBest
from bench.contenders.ours import CkptSaveAsync

_PINS: Final = torch.cuda.is_available()


class CkptOnDevice(CkptSaveAsync):
    """The hook on the optimizer makes the *stream* wait: nothing waits on the CPU, as in a
    training that is not measured.
    """

    def wait_safe(self, handle: Handle) -> None:
        """The optimizer's own step does it."""


class DcpPinned(DcpBest):
    """``DcpBest`` with page-locked staging memory and copies that do not block."""

    staging = StagingOptions(
        use_pinned_memory=_PINS,
        use_shared_memory=True,
        use_async_staging=True,
        use_non_blocking_copy=_PINS,
    )

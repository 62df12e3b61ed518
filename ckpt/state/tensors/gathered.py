"""Remove the copies of parameters that torch keeps, since a restore does not fill these copies.

FSDP keeps the gathered parameters of some modules after a forward pass, and its next forward pass
uses them again. ``torch.autocast`` keeps parameters that it has converted to the lower precision
until its outermost block ends. A graph that inductor has frozen holds parameters as constants.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import torch
from torch import nn

from ckpt.torch_private import (
    fsdp1_handle,
    fsdp1_reshard,
    fsdp1_wrappers,
    fsdp2_groups,
    has_frozen_graphs,
    may_be_gathering,
)

_log = logging.getLogger("ckpt")


def release(module: nn.Module) -> None:
    """Free the parameters that FSDP has gathered in ``module``, so that the next forward pass
    gathers the restored parameters.

    All ranks call this function in the same order, since it waits for the end of an all-gather that
    is under way. Parameters of FSDP1 inside ``summon_full_params()`` stay gathered.
    """
    for _, wrapper in fsdp1_wrappers(module):
        if (handle := fsdp1_handle(wrapper)) is not None:
            fsdp1_reshard(handle)
    for child in _fsdp2_modules(module):
        if any(map(may_be_gathering, fsdp2_groups(child))):
            # A call of ``unshard(async_op=True)`` may be under way, and this call waits for it.
            child.unshard()
        child.reshard()


def forget_copies() -> None:
    """Drop the converted parameters that ``torch.autocast`` keeps, and all compiled graphs of this
    process if inductor may have frozen one. Torch makes both again when it needs them.
    """
    torch.clear_autocast_cache()
    if has_frozen_graphs():
        _log.warning(
            "ckpt: torch.compile has frozen parameters into a graph of this process: all graphs "
            "are compiled again after this restore"
        )
        torch.compiler.reset()


def _fsdp2_modules(module: nn.Module) -> list[Any]:
    """Return the modules in ``module`` that ``fully_shard`` has wrapped."""
    api: Any = sys.modules.get("torch.distributed.fsdp")
    return (
        []
        if api is None
        else [child for child in module.modules() if isinstance(child, api.FSDPModule)]
    )

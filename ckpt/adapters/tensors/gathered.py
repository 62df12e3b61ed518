"""Copies of parameters that torch computes with, and that a restore does not fill.

FSDP keeps the gathered parameters of some modules after a forward, and its next forward uses them
again. ``torch.autocast`` keeps parameters in the lower precision until its outermost block ends. A
graph that inductor has frozen holds them as constants.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import torch
from torch import nn

from ckpt.adapters.tensors.sharded import handles

_log = logging.getLogger("ckpt")


def release(module: nn.Module) -> None:
    """Free what FSDP has gathered of ``module``.

    Its next forward gathers the parameters as they are then.

    All ranks call this alike, since an all-gather that is under way has to end first. A handle
    inside ``summon_full_params()`` stays as it is.
    """
    for handle in handles(module):
        _reshard(handle)
    for each in _fsdp2_modules(module):
        if any(
            group._all_gather_result is not None
            for group in each._get_fsdp_state()._fsdp_param_groups
        ):
            each.unshard()  # unshard(async_op=True) has begun: this waits for it
        each.reshard()


def forget_copies() -> None:
    """Drop what ``torch.autocast`` has converted, and the compiled graphs of this process if
    inductor has frozen any. Both are made again when they are needed.
    """
    torch.clear_autocast_cache()
    # torch imports it when it freezes the first graph
    if "torch._inductor.freezing" in sys.modules:
        _log.warning(
            "ckpt: torch.compile has frozen parameters into a graph of this process: all graphs "
            "are compiled again after this restore"
        )
        torch._dynamo.reset()


def _reshard(handle: Any) -> None:
    state = type(handle._training_state)
    if not handle.uses_sharded_strategy or handle._training_state == state.SUMMON_FULL_PARAMS:
        return
    # SHARD_GRAD_OP after a forward that a backward could follow
    if handle._skipped_use_sharded_views:
        handle._use_sharded_views()
    handle._prefetched = False
    for name in ("_full_param_padded", "_full_prec_full_param_padded"):
        memory: torch.Tensor | None = getattr(handle.flat_param, name, None)
        if memory is not None and memory.untyped_storage().size():
            if memory.device.type != "cpu":  # what is queued may still read it
                memory.record_stream(handle._device_handle.current_stream())
            memory.untyped_storage().resize_(0)


def _fsdp2_modules(module: nn.Module) -> list[Any]:
    api: Any = sys.modules.get("torch.distributed.fsdp")
    return (
        []
        if api is None
        else [each for each in module.modules() if isinstance(each, api.FSDPModule)]
    )

"""What the last walk over a state found."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ckpt.adapters.modules import ModuleItems, items_of, raw_state
from ckpt.adapters.segments import Segment, Table
from ckpt.adapters.stand_in import ModuleStandIn


class Memory:
    """What the last walk found, so that the next need not look at it twice.

    Threads: the training thread.
    """

    def __init__(self) -> None:
        self.segments: dict[str, Segment] = {}
        self.told: set[type] = set()
        self.tables: dict[str, Table] = {}
        self.modules: dict[str, tuple[nn.Module, tuple[str, ...], tuple[Any, ...], ModuleItems]] = {}

    def items(self, path: str, module: nn.Module) -> ModuleItems:
        """``items_of``, remembered while the module has the same values under the same keys. Other values than tensors are never the same."""
        if isinstance(module, ModuleStandIn):
            return module.items(path)
        raw = raw_state(path, module)
        keys, values = tuple(raw), tuple(raw.values())
        known = self.modules.get(path)
        if known is None or known[0] is not module or known[1] != keys or not _same_tensors(known[2], values):
            known = self.modules[path] = (module, keys, values, items_of(path, module))
        return known[3]

    def forget(self) -> None:
        """Let go of all tensors."""
        self.segments.clear()
        self.tables.clear()
        self.modules.clear()


def _same_tensors(known: tuple[Any, ...], now: tuple[Any, ...]) -> bool:
    return all(one is two and isinstance(one, torch.Tensor) for one, two in zip(known, now, strict=True))

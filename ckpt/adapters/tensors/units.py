"""The ranks that hold a module's plain tensors alike.

No rank knows the names of other ranks: an expert of a ``ModuleList`` may be on this rank alone. So
a rank concludes what is on other ranks from the unit of a tensor, which is what one wrapper (DDP,
FSDP1, ``fully_shard``) holds, and never from another unit.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ckpt.adapters.tensors.sharded import groups_of, ranks_of
from ckpt.adapters.torch_private import fsdp1_ignored, fsdp2_groups


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """A part of a module.

    Attributes:
        ranks: Ranks that the wrapper keeps alike. Where it is empty, they are those of the DTensors
            in the unit.
        is_first: Whether the buffers of this rank are the ones that count; None if all ranks must
            have the same. No wrapper keeps buffers alike while they change (DDP overwrites them
            before a forward), so a BatchNorm's differ from rank to rank.
        ignored: Identity of the parameters and buffers that the wrapper leaves alone. Nothing keeps
            them alike if they change.
    """

    ranks: tuple[int, ...] = ()
    is_first: bool | None = None
    ignored: frozenset[int] = frozenset()


def units_of(module: nn.Module) -> Callable[[str], Unit]:
    """Return the unit of each key of the module's state dict."""
    units = dict(_walk(module, "", Unit(), {}))

    def unit(key: str) -> Unit:
        while key and (key := key.rpartition(".")[0]) not in units:
            pass
        return units[key]

    return unit


def _walk(
    module: nn.Module, path: str, around: Unit, known: dict[int, Unit]
) -> Iterator[tuple[str, Unit]]:
    """Return the paths of all modules, each with its unit."""
    unit = _own_unit(module, known) or around
    yield path, unit
    children: Mapping[str, nn.Module | None] = module._modules
    # The modules that a list leaves out may be on other ranks, and those that it has may be on this
    # rank alone.
    sparse = isinstance(module, nn.ModuleList | nn.ModuleDict) and None in children.values()
    for name, child in children.items():
        if child is not None:
            inner = f"{path}.{name}" if path else name
            yield from _walk(child, inner, Unit() if sparse else unit, known)


def _own_unit(module: nn.Module, known: dict[int, Unit]) -> Unit | None:
    """Return the unit that begins at ``module``, if one does.

    ``known`` holds those of ``fully_shard``, which may begin at several modules.
    """
    if isinstance(module, DistributedDataParallel):
        ranks = ranks_of(module.process_group)
        named = (*module.module.named_parameters(), *module.module.named_buffers())
        ignored = [tensor for name, tensor in named if name in module.parameters_to_ignore]
        return Unit(ranks, torch.distributed.get_rank() == ranks[0], frozenset(map(id, ignored)))
    api: Any = sys.modules.get("torch.distributed.fsdp")
    if api is None:
        return None
    wrapper: Any = module
    if isinstance(module, api.FullyShardedDataParallel):
        ranks, first = groups_of(wrapper)
        return Unit(ranks, first, frozenset(map(id, fsdp1_ignored(wrapper))))
    if not isinstance(module, api.FSDPModule):
        return None
    if not (groups := fsdp2_groups(module)):
        return None
    if id(groups[0]) not in known:
        places = [
            getattr(group.mesh_info, f"{kind}_mesh_rank", 0)
            for group in groups
            for kind in ("shard", "replicate")
        ]
        ignored = [
            parameter for parameter in module.parameters() if not isinstance(parameter, DTensor)
        ]
        known[id(groups[0])] = Unit((), not any(places), frozenset(map(id, ignored)))
    return known[id(groups[0])]

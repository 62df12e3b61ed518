"""Divide a module into units, from which a rank concludes which ranks hold the same plain tensors.

A unit is the part of a module that one wrapper (DDP, FSDP1, ``fully_shard``) holds. A rank draws
conclusions about a tensor on other ranks only from the unit of this tensor. It does not know the
names of tensors on other ranks. An expert of a ``ModuleList`` may be on one rank alone, for
example.
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

from ckpt.state.tensors.sharded import ranks_of, wrapper_ranks
from ckpt.torch_private import fsdp1_ignored, fsdp2_groups


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """The part of a module that one wrapper holds, or a part outside of all wrappers.

    Attributes:
        ranks: The ranks on which the wrapper keeps parameters equal; empty if the wrapper does not
            show them. If the mesh of a DTensor in the unit has more ranks, the ranks of the mesh
            count instead.
        is_first: True if the buffers of this rank are saved, False if those of another rank are,
            and None outside of all wrappers, where the buffers of all ranks must be equal. No
            wrapper keeps changing buffers, such as those of a BatchNorm, equal on all ranks. (DDP
            overwrites them before a forward pass.)
        ignored: The identities (``id``) of the parameters and buffers that the wrapper ignores.
            They need not be equal on all ranks.
    """

    ranks: tuple[int, ...] = ()
    is_first: bool | None = None
    ignored: frozenset[int] = frozenset()


def units_of(module: nn.Module) -> Callable[[str], Unit]:
    """Return a function that takes a key of the module's state dict, and returns the unit that the
    value under this key is in.
    """
    units = dict(_walk(module, "", Unit(), {}))

    def unit(key: str) -> Unit:
        # Go outwards to the innermost module in ``units``. The outermost one has the key "".
        while key and (key := key.rpartition(".")[0]) not in units:
            pass
        return units[key]

    return unit


def _walk(
    module: nn.Module, path: str, outer_unit: Unit, units: dict[int, Unit]
) -> Iterator[tuple[str, Unit]]:
    """Yield the path and the unit of ``module``, and of all modules inside of it.

    ``outer_unit`` is the unit that ``module`` is in, unless a unit begins at ``module`` itself.
    ``units`` is as for ``_own_unit``.
    """
    unit = _own_unit(module, units) or outer_unit
    yield path, unit
    children: Mapping[str, nn.Module | None] = module._modules
    # A list with None in some places may hold modules that are on this rank alone. Other ranks may
    # have the modules for these places.
    is_sparse = isinstance(module, nn.ModuleList | nn.ModuleDict) and None in children.values()
    for name, child in children.items():
        if child is not None:
            inner_path = f"{path}.{name}" if path else name
            yield from _walk(child, inner_path, Unit() if is_sparse else unit, units)


def _own_unit(module: nn.Module, units: dict[int, Unit]) -> Unit | None:
    """Return the unit that begins at ``module``. Return None if ``module`` is no wrapper, or is a
    module of ``fully_shard`` without parameters of its own.

    One call of ``fully_shard`` may have wrapped several modules, which have the same unit. So the
    function adds the units of ``fully_shard`` to ``units``, by the identity (``id``) of the first
    FSDP2 group of the call, and looks them up there.
    """
    if isinstance(module, DistributedDataParallel):
        ranks = ranks_of(module.process_group)
        tensors = (*module.module.named_parameters(), *module.module.named_buffers())
        ignored_tensors = [
            tensor for name, tensor in tensors if name in module.parameters_to_ignore
        ]
        return Unit(
            ranks, torch.distributed.get_rank() == ranks[0], frozenset(map(id, ignored_tensors))
        )
    api: Any = sys.modules.get("torch.distributed.fsdp")
    if api is None:
        return None
    wrapper: Any = module
    if isinstance(module, api.FullyShardedDataParallel):
        ranks, is_first = wrapper_ranks(wrapper)
        return Unit(ranks, is_first, frozenset(map(id, fsdp1_ignored(wrapper))))
    if not isinstance(module, api.FSDPModule):
        return None
    if not (groups := fsdp2_groups(module)):
        return None
    if id(groups[0]) not in units:
        mesh_coordinates = [
            getattr(group.mesh_info, f"{kind}_mesh_rank", 0)
            for group in groups
            for kind in ("shard", "replicate")
        ]
        ignored_tensors = [
            parameter for parameter in module.parameters() if not isinstance(parameter, DTensor)
        ]
        units[id(groups[0])] = Unit(
            (), not any(mesh_coordinates), frozenset(map(id, ignored_tensors))
        )
    return units[id(groups[0])]

"""Modules and optimizers: one name for a parameter, whatever wraps the module it lives in.

DDP, ``torch.compile``, FSDP1 and activation checkpointing put a segment of their own into names; it is taken out here. An optimizer's state is named by its
parameters, not by their position, so groups and ids may differ between save and restore.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from ckpt.adapters.layout import mesh_ranks
from ckpt.model.values import join

_WRAPPERS: Final = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One item of a module's state dict. ``key`` is the module's own name for it, ``fqn`` the canonical one."""

    key: str
    fqn: str
    value: Any


def unwrapped(optimizer: Any) -> Optimizer:
    """The optimizer whose ``step`` does the work: Accelerate and others hold it as ``.optimizer``."""
    found: Optimizer = optimizer
    while isinstance(inner := found.__dict__.get("optimizer"), Optimizer):
        found = inner
    return found


def entries(module: nn.Module) -> Iterator[Entry]:
    """The module's state dict with canonical names, tensors not detached. Order is the module's own."""
    prefixes = _wrapper_prefixes(module)
    for key, value in module.state_dict(keep_vars=True).items():
        yield Entry(key=key, fqn=_clean(key, prefixes), value=value)


def _wrapper_prefixes(module: nn.Module) -> list[str]:
    """Prefixes that end in a wrapper's own segment, longest first."""
    found: list[str] = []
    for name, child in module.named_modules():
        lead = f"{name}." if name else ""
        if isinstance(child, DistributedDataParallel | DataParallel):
            found.append(f"{lead}module.")
        found += [f"{lead}{segment}." for segment in _WRAPPERS if segment in child._modules]
    return sorted(found, key=len, reverse=True)


def _clean(key: str, prefixes: list[str]) -> str:
    for prefix in prefixes:
        if key.startswith(prefix):
            lead = prefix[:-1].rpartition(".")[0]
            key = (f"{lead}." if lead else "") + key[len(prefix) :]
    return key


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleItems:
    """A module's state. ``replicas``: ranks known to hold the same *plain* tensors, a DDP group's or the widest mesh of its DTensors."""

    entries: tuple[Entry, ...]
    replicas: tuple[int, ...]


def items_of(module: nn.Module) -> ModuleItems:
    """What the module saves, and who holds the same."""
    found = tuple(entries(module))
    if isinstance(module, DistributedDataParallel):
        return ModuleItems(
            entries=found,
            replicas=tuple(sorted(torch.distributed.get_process_group_ranks(module.process_group))),
        )
    meshes = {id(entry.value.device_mesh): entry.value for entry in found if isinstance(entry.value, DTensor)}
    return ModuleItems(
        entries=found, replicas=max((mesh_ranks(tensor) for tensor in meshes.values()), key=len, default=())
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """The modules of a state and the canonical paths of their parameters, both by identity."""

    paths: Mapping[int, str]
    replicas: Mapping[int, tuple[int, ...]]
    modules: Mapping[int, ModuleItems]

    def path_of(self, parameter: torch.Tensor, group: int, position: int) -> str:
        """Its path, or its place in the optimizer if no module of the state holds it."""
        return self.paths.get(id(parameter)) or f"~param/{group}/{position}"


def name_groups(optimizer: Optimizer, parameters: Parameters) -> list[list[str]]:
    """For each parameter group the paths of its parameters."""
    return [
        [parameters.path_of(parameter, g, p) for p, parameter in enumerate(group["params"])]
        for g, group in enumerate(optimizer.param_groups)
    ]


def state_name(optimizer_path: str, parameter_path: str, key: object) -> str:
    """Name of one value of an optimizer's state."""
    return join(f"{optimizer_path}/{parameter_path}", key)

"""Modules and optimizers: one name for a parameter, whatever wraps the module it lives in.

DDP, ``torch.compile``, FSDP1 and activation checkpointing put a segment of their own into names; it is taken out here. An optimizer's state is named by its
parameters, not by their position, so groups and ids may differ between save and restore.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from ckpt.adapters.declared import DeclaredPart, declared
from ckpt.adapters.layout import mesh_ranks
from ckpt.adapters.local_shards import LocalShards, Source
from ckpt.adapters.sharded import Piece, flat_parameters, flat_ranks, gathered, hookless_state, is_fsdp1
from ckpt.adapters.stand_in import ModuleStandIn
from ckpt.adapters.zero import is_zero
from ckpt.errors import RestoreError, UnsupportedValue
from ckpt.model.manifest import Tensor
from ckpt.model.values import join

AnyPiece = Piece | DeclaredPart
_WRAPPERS: Final = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Entry:
    """One item of a module's state dict. ``key`` is the module's own name for it, ``fqn`` the canonical one. ``piece``: it is no more than that of ``value``."""

    key: str
    fqn: str
    value: Any
    piece: AnyPiece | None = None


class Part(NamedTuple):
    """A parameter that an optimizer has, all of it or a piece."""

    path: str
    piece: AnyPiece | None = None

    @property
    def is_here(self) -> bool:
        """Whether this rank holds any of it."""
        return self.piece is None or self.piece.is_here

    def all_of(self, parameter: Source) -> Source:
        """The parameter itself."""
        if self.piece is None or not isinstance(parameter, torch.Tensor):
            return parameter
        return self.piece.of(self.path, parameter)

    def of(self, name: str, value: Source) -> Source:
        """A value of the optimizer's state, as far as it belongs to this part: a step counter belongs to all."""
        if self.piece is None or not isinstance(value, torch.Tensor) or not self.piece.fits(value):
            return value
        return self.piece.of(name, value)


def unwrapped(optimizer: Any) -> Optimizer:
    """The optimizer whose ``step`` does the work: Accelerate and others hold it as ``.optimizer``."""
    found: Optimizer = optimizer
    while (inner := _inner(found)) is not None and (
        found.state is inner.state and found.param_groups is inner.param_groups
    ):
        found = inner
    return found


def _inner(optimizer: Optimizer) -> Optimizer | None:
    held = (optimizer.__dict__.get(name) for name in ("optimizer", "_optimizer"))  # Accelerate, Lightning
    return next((each for each in held if isinstance(each, Optimizer)), None)


def check_optimizer(path: str, optimizer: Optimizer) -> None:
    """Raises ``UnsupportedValue`` for an optimizer that keeps state where nobody but itself finds it: it would be lost without a word."""
    kind = type(optimizer).__qualname__
    way = "put an object into the state whose state_dict() and load_state_dict() call the optimizer's own"
    if is_zero(optimizer):
        return
    if (
        isinstance(optimizer.__dict__.get("optimizer"), Optimizer)
        or type(optimizer).state_dict is not Optimizer.state_dict
    ):
        raise UnsupportedValue(path, f"{kind}, an optimizer with a state_dict() of its own", way)
    known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if any(id(key) not in known for key in optimizer.state):
        raise UnsupportedValue(path, f"{kind} with state that belongs to no parameter", way)


def raw_state(module: nn.Module) -> dict[str, Any]:
    """The module's own state dict, its tensors as they are: with its hooks run, but for those of FSDP1, which gather."""
    return hookless_state(module) if is_fsdp1(module) else module.state_dict(keep_vars=True)


def entries(module: nn.Module) -> Iterator[Entry]:
    """The module's state dict with canonical names, tensors not detached. Order is the module's own."""
    prefixes = _wrapper_prefixes(module)
    flats: Mapping[int, Mapping[str, AnyPiece | None]] = flat_parameters(module)
    for key, value in raw_state(module).items():
        for name, piece in flats.get(id(value), {"": declared(value)}).items():
            yield Entry(key=name or key, fqn=_clean(name or key, prefixes), value=value, piece=piece)


def canonical(module: nn.Module) -> Callable[[str], str]:
    """From the module's own names to canonical ones."""
    prefixes = _wrapper_prefixes(module)
    return lambda key: _clean(key, prefixes)


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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModuleItems:
    """A module's state.

    Attributes:
        replicas: Ranks known to hold the same *plain* tensors: a DDP group's, or the widest mesh of the module's DTensors; else none.
        parts: Identity of each parameter -> its canonical path, or what it consists of.
        first_only: Identity of tensors that the first of these ranks alone saves: DDP overwrites buffers with its first rank's before each forward, so a
            BatchNorm's running statistics rightly differ between ranks after one.
        is_first: Whether this is that rank.
    """

    entries: tuple[Entry, ...]
    replicas: tuple[int, ...]
    parts: Mapping[int, tuple[Part, ...]]
    first_only: frozenset[int]
    is_first: bool


def items_of(path: str, module: nn.Module) -> ModuleItems:
    """What the module at ``path`` of a state saves, and who holds the same."""
    if isinstance(module, ModuleStandIn):
        return module.items(path)
    found = tuple(entries(module))
    if flat_parameters(module).keys() - {id(entry.value) for entry in found}:
        raise gathered(f"{path}/{found[0].fqn}")
    first_only: frozenset[int] = frozenset()
    is_first = True
    if isinstance(module, DistributedDataParallel):
        ranks = tuple(sorted(torch.distributed.get_process_group_ranks(module.process_group)))
        if module.broadcast_buffers:
            first_only, is_first = (
                frozenset(map(id, module.modules_buffers)),
                torch.distributed.get_rank() == ranks[0],
            )
    else:
        meshes = {
            id(entry.value.device_mesh): entry.value for entry in found if isinstance(entry.value, DTensor)
        }
        ranks = max((mesh_ranks(tensor) for tensor in meshes.values()), key=len, default=())
        ranks = max(ranks, flat_ranks(module), key=len)
    parts: dict[int, dict[AnyPiece | None, Part]] = defaultdict(dict)
    for entry in found:
        if isinstance(entry.value, nn.Parameter):
            parts[id(entry.value)].setdefault(entry.piece, Part(f"{path}/{entry.fqn}", entry.piece))
    return ModuleItems(
        entries=found,
        replicas=ranks,
        parts={key: tuple(of.values()) for key, of in parts.items()},
        first_only=first_only,
        is_first=is_first,
    )


class Parameters:
    """The modules of a state, and the canonical paths of their parameters, by identity; the first module wins where two share one."""

    def __init__(self, modules: Iterable[tuple[nn.Module, ModuleItems]]) -> None:
        self._items = {id(module): items for module, items in modules}
        self.items = tuple(self._items.values())

    def of(self, module: nn.Module) -> ModuleItems | None:
        """The items of a module of the state; None for one that lies hidden in an object."""
        return self._items.get(id(module))

    def parts_of(self, parameter: Source, group: int, position: int) -> tuple[Part, ...]:
        """Its path, or its place in the optimizer if no module of the state holds it. More than one if it is a flat one."""
        for items in self._items.values():
            if found := items.parts.get(id(parameter)):
                return found
        return (Part(f"~param/{group}/{position}"),)

    def replicas_of(self, parameter: Source) -> tuple[int, ...]:
        """Who replicates the module that holds it; none known if no module does."""
        for items in self._items.values():
            if id(parameter) in items.parts:
                return items.replicas
        return ()


def part_groups(optimizer: Optimizer, parameters: Parameters) -> list[list[tuple[Part, ...]]]:
    """For each parameter group the parts of its parameters."""
    return [
        [parameters.parts_of(parameter, g, p) for p, parameter in enumerate(group["params"])]
        for g, group in enumerate(optimizer.param_groups)
    ]


def state_name(optimizer_path: str, parameter_path: str, key: object) -> str:
    """Name of one value of an optimizer's state."""
    return join(f"{optimizer_path}/{parameter_path}", key)


def fits(held: Any, saved: Tensor, piece: AnyPiece | None) -> bool:
    """Whether a value of an optimizer's state can be filled in place."""
    if not isinstance(held, torch.Tensor | LocalShards):
        return False
    if held.dtype is not None and str(held.dtype) != f"torch.{saved.dtype}":
        return False
    return tuple(held.shape) == saved.shape or (
        piece is not None
        and isinstance(held, torch.Tensor)
        and piece.fits(held)
        and piece.shape == saved.shape
    )


def new_state(
    parameter: torch.Tensor, group: Mapping[str, Any], key: object, saved: Tensor, piece: AnyPiece | None
) -> torch.Tensor:
    """A tensor for optimizer state that is not there yet, laid out as the optimizer itself would: like its parameter, or plain."""
    dtype = getattr(torch, saved.dtype)
    if piece is not None and piece.shape == saved.shape and key != "step":
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False).detach()
    if tuple(parameter.shape) == saved.shape and key != "step":
        return torch.empty_like(
            parameter, dtype=dtype, memory_format=torch.preserve_format, requires_grad=False
        ).detach()
    if isinstance(parameter, DTensor) and saved.shape != ():
        raise RestoreError(
            f"{saved.name!r} has another shape than its sharded parameter: take one optimizer step before restoring, so that its layout is known"
        )
    on_device = key != "step" or group.get("capturable") or group.get("fused")
    return torch.empty(saved.shape, dtype=dtype, device=parameter.device if on_device else "cpu")

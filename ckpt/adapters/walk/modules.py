"""Modules and optimizers: one name for a parameter, whatever wraps the module it lives in.

DDP, ``torch.compile``, FSDP1 and activation checkpointing put a segment of their own into names; it
is taken out here. An optimizer's state is named by its parameters, not by their position, so groups
and ids may differ between save and restore.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import chain
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from ckpt.adapters.tensors.declared import declared
from ckpt.adapters.tensors.layout import holders_of, mesh_ranks
from ckpt.adapters.tensors.local_shards import LocalShards, Source
from ckpt.adapters.tensors.sharded import (
    flat_parameters,
    gathered,
    hookless_state,
    is_fsdp1,
    over_tensor_parallel,
)
from ckpt.adapters.tensors.units import units_of
from ckpt.adapters.tensors.zero import is_zero
from ckpt.adapters.walk.items import AnyPiece, Entry, ModuleItems, Part
from ckpt.adapters.walk.segments import place_of, same_view
from ckpt.adapters.walk.stand_in import ModuleStandIn
from ckpt.errors import CkptError, RestoreError, UnsupportedValue
from ckpt.model.manifest import Tensor
from ckpt.model.values import join

PLACELESS: Final = "~param/"
OWN_STATE: Final = (
    "put an object into the state whose state_dict() and load_state_dict() call the optimizer's own"
)
_WRAPPERS: Final = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def unwrapped(optimizer: Any) -> Optimizer:
    """Return the optimizer whose ``step`` does the work. Accelerate and others hold it as
    ``.optimizer``.
    """
    found: Optimizer = optimizer
    while (inner := _inner(found)) is not None and (
        found.state is inner.state and found.param_groups is inner.param_groups
    ):
        found = inner
    return found


def _inner(optimizer: Optimizer) -> Optimizer | None:
    # Accelerate uses ``optimizer``, and Lightning uses ``_optimizer``.
    held = (optimizer.__dict__.get(name) for name in ("optimizer", "_optimizer"))
    return next((each for each in held if isinstance(each, Optimizer)), None)


def methods_beyond_step(optimizer: Optimizer) -> tuple[str, ...]:
    """Return the public methods by which an optimizer may change its tensors, beside those of
    ``torch.optim.Optimizer``.

    Without any, only ``step`` changes them, which a hook can hold: they may be copied while
    training goes on. Schedule-free optimizers have ``train`` and ``eval``,
    sharpness-aware ones ``first_step`` and ``second_step``. The classes of torch and of ckpt are
    known to have none that matters.
    """
    inner: Optimizer = getattr(optimizer, "optim", optimizer) if is_zero(optimizer) else optimizer
    kind: Any = type(inner)  # Mypy takes the hash of an optimizer for that of its class
    return _own_methods(kind)


def is_capturable(optimizer: Optimizer) -> bool:
    """Return True if the steps are made for capture in a graph, whose replays run no hook."""
    return any(group.get("capturable") for group in optimizer.param_groups)


@cache
def _own_methods(kind: type) -> tuple[str, ...]:
    unknown = [
        each for each in kind.__mro__ if each.__module__.partition(".")[0] not in ("torch", "ckpt")
    ]
    named = {name: value for each in unknown for name, value in vars(each).items()}
    methods = (
        name for name, value in named.items() if callable(value) or isinstance(value, classmethod)
    )
    return tuple(sorted(n for n in methods if not n.startswith("_") and not hasattr(Optimizer, n)))


def check_optimizer(path: str, optimizer: Optimizer, others: Sequence[Optimizer] = ()) -> None:
    """Raises ``UnsupportedValue`` for an optimizer whose state is not all in ``state`` and
    ``param_groups``. ``others``: the optimizers in the same state.
    """
    kind = type(optimizer).__qualname__
    if is_zero(optimizer):
        return
    if type(optimizer).state_dict is not Optimizer.state_dict:
        raise UnsupportedValue(
            path, f"{kind}, an optimizer with a state_dict() of its own", OWN_STATE
        )
    for name, held in vars(optimizer).items():
        inside = held if isinstance(held, list | tuple) else [held]
        alone = [
            each
            for each in inside
            if isinstance(each, Optimizer)
            and each.state is not optimizer.state
            and not any(each is other for other in others)
        ]
        if alone:
            raise UnsupportedValue(
                path,
                f"{kind}, which holds another optimizer ({type(alone[0]).__qualname__}) with "
                "state of its own",
                f"put that one into the state as well, under a name of its own: .{name}",
            )


def check_owners(path: str, optimizer: Optimizer) -> None:
    """Raises ``UnsupportedValue`` for an optimizer with state that belongs to none of its
    parameters.
    """
    if is_zero(optimizer):
        return
    known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if any(id(key) not in known for key in optimizer.state):
        kind = type(optimizer).__qualname__
        raise UnsupportedValue(path, f"{kind} with state that belongs to no parameter", OWN_STATE)


@contextmanager
def asked(path: str, value: object) -> Generator[None]:
    """Call the ``state_dict()`` of ``value``. If it raises, the error names ``path``."""
    try:
        yield
    except UnsupportedValue as error:  # The error names a value within the object
        raise UnsupportedValue(f"{path}/{error.name}", error.kind, error.detail) from None
    except CkptError:
        raise
    except Exception as error:
        raise UnsupportedValue(
            path,
            f"{type(value).__qualname__} whose state_dict() raises {type(error).__name__}",
            f"{error}. Correct its state_dict(), or leave the object out of the state",
        ) from error


def raw_state(path: str, module: nn.Module) -> dict[str, Any]:
    """Return the module's own state dict with its tensors as they are. Its hooks run, except for
    those of FSDP1, which gather.
    """
    with asked(path, module):
        return hookless_state(module) if is_fsdp1(module) else module.state_dict(keep_vars=True)


def entries(path: str, module: nn.Module) -> Iterator[Entry]:
    """Return the module's state dict with canonical names. Its tensors are not detached.

    Order is the module's own.
    """
    prefixes = _wrapper_prefixes(module)
    flats: Mapping[int, Mapping[str, AnyPiece | None]] = flat_parameters(module)
    for key, value in raw_state(path, module).items():
        for name, piece in flats.get(id(value), {"": declared(value)}).items():
            yield Entry(
                key=name or key, fqn=_clean(name or key, prefixes), value=value, piece=piece
            )


def canonical(module: nn.Module) -> Callable[[str], str]:
    """Return the function from the module's own names to canonical ones."""
    prefixes = _wrapper_prefixes(module)
    return lambda key: _clean(key, prefixes)


def _wrapper_prefixes(module: nn.Module) -> list[str]:
    """Return the prefixes that end in what a wrapper adds to a name, longest first."""
    found: list[str] = []
    for name, child in module.named_modules(remove_duplicate=False):
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


def items_of(path: str, module: nn.Module) -> ModuleItems:
    """Return what the module at ``path`` of a state saves, and the ranks that hold the same."""
    if isinstance(module, ModuleStandIn):
        return module.items(path)
    found = tuple(_shared(module, tuple(entries(path, module))))
    _check_fsdp1(path, module, {id(entry.value) for entry in found})
    parts: dict[int, dict[AnyPiece | None, Part]] = defaultdict(dict)
    holders: dict[int, tuple[int, ...]] = {}
    for entry in found:
        if isinstance(value := entry.value, nn.Parameter):
            parts[id(value)].setdefault(entry.piece, Part(f"{path}/{entry.fqn}", entry.piece))
            ranks = (
                entry.replicas
                if not isinstance(value, DTensor)
                else holders_of(value, entry.replicas)
            )
            holders.setdefault(id(value), ranks)
    return ModuleItems(
        entries=found, parts={key: tuple(of.values()) for key, of in parts.items()}, holders=holders
    )


def _check_fsdp1(path: str, module: nn.Module, found: set[int]) -> None:
    """Raises ``UnsupportedValue`` for flat parameters that are not in their places, or are parts
    of parts.
    """
    if not is_fsdp1(module):
        return
    name = canonical(module)
    for key in over_tensor_parallel(module):
        raise UnsupportedValue(
            f"{path}/{name(key)}",
            "parameter of FSDP1 over tensor parallelism",
            "take fully_shard() (FSDP2) instead, which can be combined with parallelize_module()",
        )
    for identity, pieces in flat_parameters(module).items():
        if identity not in found:
            key, piece = next(iter(pieces.items()))
            raise gathered(f"{path}/{name(key or piece.fqn)}")


def _shared(module: nn.Module, found: Sequence[Entry]) -> Iterator[Entry]:
    """Yield the entries of ``module``, each with the ranks that are replicas of it."""
    unit_of = units_of(module)
    units = [unit_of(entry.key) for entry in found]
    ranks = {unit: unit.ranks for unit in units}
    meshes = {
        (unit, id(entry.value.device_mesh)): entry.value
        for entry, unit in zip(found, units, strict=True)
        if isinstance(entry.value, DTensor)
    }
    for (unit, _), tensor in meshes.items():
        ranks[unit] = max(ranks[unit], mesh_ranks(tensor), key=len)
    buffers = {id(buffer) for buffer in module.buffers() if not isinstance(buffer, DTensor)}
    for entry, unit in zip(found, units, strict=True):
        is_buffer = id(entry.value) in buffers
        is_ignored = id(entry.value) in unit.ignored and (is_buffer or entry.value.requires_grad)
        if is_ignored or (not ranks[unit] and unit.is_first is None):
            # Nothing is known about other ranks.
            yield entry
        elif is_buffer and unit.is_first is not None:
            yield entry if unit.is_first else replace(entry, replicas=ranks[unit], left=True)
        else:
            yield replace(entry, replicas=ranks[unit])


class Parameters:
    """The modules of a state, and the canonical paths of their parameters, by identity.

    If two modules share a parameter, the first module has it.
    """

    def __init__(self, modules: Iterable[tuple[nn.Module, ModuleItems]]) -> None:
        self._items = {id(module): items for module, items in modules}
        self.items = tuple(self._items.values())
        self.alone: dict[int, str] = {}

    def look_for(
        self, optimizers: Iterable[Optimizer], tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> None:
        """Find the parameters of ``optimizers`` that no module holds among ``tensors``, which stand
        in the state by themselves: each as itself, or as another tensor of the same memory, as
        ``state_dict()`` gives it.
        """
        # Each save looks for thousands of parameters, so this compares sets.
        held = set[int]().union(*(items.parts for items in self.items))
        groups = [group["params"] for optimizer in optimizers for group in optimizer.param_groups]
        if all(held.issuperset(map(id, parameters)) for parameters in groups):
            return
        at: dict[int, list[torch.Tensor]] = defaultdict(list)
        for parameter in chain.from_iterable(groups):
            if id(parameter) not in held and isinstance(parameter, torch.Tensor):
                at[place_of(parameter)].append(parameter)
        for path, tensor in tensors if at else ():
            for parameter in at.get(place_of(tensor), ()):
                if tensor is parameter or (place_of(tensor) and same_view(tensor, parameter)):
                    self.alone.setdefault(id(parameter), path)

    def in_module(self, parameter: Source) -> bool:
        """Return True if a module of the state holds the parameter."""
        return any(id(parameter) in items.parts for items in self._items.values())

    def of(self, module: nn.Module) -> ModuleItems | None:
        """Return the items of a module of the state; None for a module inside of an object."""
        return self._items.get(id(module))

    def parts_of(self, parameter: Source, group: int, position: int) -> tuple[Part, ...]:
        """Return the parts of a parameter: its path, or its place in the optimizer if the state
        does not hold it.

        A flat parameter may have several parts.
        """
        for items in self._items.values():
            if found := items.parts.get(id(parameter)):
                return found
        return (Part(self.alone.get(id(parameter)) or placeless(group, position)),)

    def holders_of(self, parameter: Source) -> tuple[int, ...]:
        """Return the ranks that are known to have a parameter with the same name; none if no module
        of the state holds ``parameter``.
        """
        for items in self._items.values():
            if id(parameter) in items.holders:
                return items.holders[id(parameter)]
        return ()


def placeless(group: int, position: int) -> str:
    """Return a name in place of the path of a parameter that the state does not hold."""
    return f"{PLACELESS}{group}/{position}"


def part_groups(optimizer: Optimizer, parameters: Parameters) -> list[list[tuple[Part, ...]]]:
    """Return the parts of the parameters of each parameter group."""
    return [
        [parameters.parts_of(parameter, g, p) for p, parameter in enumerate(group["params"])]
        for g, group in enumerate(optimizer.param_groups)
    ]


def state_name(optimizer_path: str, parameter_path: str, key: object) -> str:
    """Return the name of one value of an optimizer's state."""
    return join(f"{optimizer_path}/{parameter_path}", key)


def fits(held: Any, saved: Tensor, piece: AnyPiece | None) -> bool:
    """Return True if a value of an optimizer's state can be filled in place."""
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
    parameter: torch.Tensor,
    group: Mapping[str, Any],
    key: object,
    saved: Tensor,
    piece: AnyPiece | None,
) -> torch.Tensor:
    """Return a tensor for optimizer state that does not exist yet. Its layout is the one that the
    optimizer would choose: that of its parameter, or plain.
    """
    dtype = getattr(torch, saved.dtype)
    if piece is not None and piece.shape == saved.shape and key != "step":
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False).detach()
    if tuple(parameter.shape) == saved.shape and key != "step":
        return torch.empty_like(
            parameter, dtype=dtype, memory_format=torch.preserve_format, requires_grad=False
        ).detach()
    if isinstance(parameter, DTensor) and saved.shape != ():
        raise RestoreError(
            f"{saved.name!r} has another shape than its sharded parameter: take one optimizer "
            "step before restoring, so that its layout is known"
        )
    on_device = key != "step" or group.get("capturable") or group.get("fused")
    return torch.empty(saved.shape, dtype=dtype, device=parameter.device if on_device else "cpu")

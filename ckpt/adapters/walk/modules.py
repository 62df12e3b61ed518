"""Find the tensors of modules and optimizers, and give them canonical names.

DDP, ``torch.compile``, FSDP1 and activation checkpointing insert a part of their own into the names
of parameters. A canonical name is the name without these insertions. The state of an optimizer is
named by the paths of its parameters and not by their positions, so the parameter groups may differ
between a save and a restore.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import chain
from typing import Any, Final

import msgspec
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from ckpt.adapters.tensors.declared import declared
from ckpt.adapters.tensors.layout import (
    empty_in_order,
    empty_like_in_order,
    holders_of,
    local,
    mesh_ranks,
    order_of,
)
from ckpt.adapters.tensors.local_shards import LocalShards, Source
from ckpt.adapters.tensors.sharded import (
    check_hooks,
    flat_parameters,
    gathered,
    hookless_state,
    is_fsdp1,
    over_tensor_parallel,
)
from ckpt.adapters.tensors.units import units_of
from ckpt.adapters.tensors.zero import is_zero
from ckpt.adapters.torch_private import has_step_hooks
from ckpt.adapters.walk.items import FIRST_VERSION, AnyPiece, Entry, ModuleItems, Part
from ckpt.adapters.walk.segments import place_of, same_view
from ckpt.adapters.walk.stand_in import ModuleStandIn, OptimizerStandIn
from ckpt.errors import CkptError, RestoreError, UnsupportedValue
from ckpt.model.manifest import Tensor
from ckpt.model.values import VERSIONS, join

PLACELESS: Final = "~param/"
OWN_STATE: Final = (
    "put an object into the state whose state_dict() and load_state_dict() call the optimizer's "
    "own. Under sharded parameters, let its load_state_dict() distribute the tensors first as the "
    "parameters are, since a restore makes whole ones"
)
PLACING: Final = ("capturable", "fused")
"""The settings of a parameter group that place ``step`` on the device of the parameter."""
_WRAPPING: Final = ("accelerate", "lightning", "pytorch_lightning", "lightning_fabric")
"""The packages whose wrappers of optimizers have no state of their own."""
_DICT: Final = frozenset({dict})
WRAPPERS: Final = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""The children of wrapper modules, whose names a state dict may have inside of other names."""


def unwrapped(optimizer: Any) -> Optimizer:
    """Return the optimizer inside of a wrapper that Accelerate or Lightning has made, or
    ``optimizer`` itself if it is no such wrapper.

    Such a wrapper has the same ``state`` and ``param_groups`` objects as the optimizer inside. A
    wrapper of another package may have these too, and more state beside them.
    """
    found: Optimizer = optimizer
    while (inner := _inner(found)) is not None and (
        found.state is inner.state and found.param_groups is inner.param_groups
    ):
        found = inner
    return found


def _inner(optimizer: Optimizer) -> Optimizer | None:
    if not any(each.__module__.partition(".")[0] in _WRAPPING for each in type(optimizer).__mro__):
        return None
    # Accelerate keeps the inner one in the attribute ``optimizer``, and Lightning in
    # ``_optimizer``.
    held = (optimizer.__dict__.get(name) for name in ("optimizer", "_optimizer"))
    return next((each for each in held if isinstance(each, Optimizer)), None)


def methods_beyond_step(optimizer: Optimizer) -> tuple[str, ...]:
    """Return the names of the public methods that an optimizer has besides those of
    ``torch.optim.Optimizer``, and that may change its tensors.

    If there are none, only ``step`` changes the tensors. A hook can hold ``step``, so the tensors
    may be copied while training goes on. Schedule-free optimizers have the methods ``train`` and
    ``eval``, for instance, and sharpness-aware ones ``first_step`` and ``second_step``. Methods
    that classes of torch and of ckpt define do not count, since they are known to be harmless.
    """
    inner: Optimizer = getattr(optimizer, "optim", optimizer) if is_zero(optimizer) else optimizer
    kind: Any = type(inner)  # Mypy takes the hash of an optimizer for that of its class
    return _own_methods(kind)


def is_capturable(optimizer: Optimizer) -> bool:
    """Return True if a parameter group has ``capturable=True``, so that the steps may be captured
    in a CUDA graph. Replays of the graph run no hook.
    """
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


def check_kind(path: str, optimizer: Optimizer) -> None:
    """Raise ``UnsupportedValue`` if the class of the optimizer at ``path`` shows that it cannot be
    saved or restored: it has a ``state_dict()`` of its own, or lacks the hooks of an optimizer.
    """
    if is_zero(optimizer) or isinstance(optimizer, OptimizerStandIn):
        return
    kind = type(optimizer).__qualname__
    if type(optimizer).state_dict is not Optimizer.state_dict:
        raise UnsupportedValue(
            path, f"{kind}, an optimizer with a state_dict() of its own", OWN_STATE
        )
    if not has_step_hooks(optimizer):
        raise UnsupportedValue(
            path,
            f"{kind}, an optimizer whose __init__() does not call Optimizer.__init__()",
            "call super().__init__(params, defaults) there. If it wraps another optimizer, put "
            "that one into the state",
        )


def check_optimizer(path: str, optimizer: Optimizer, others: Sequence[Optimizer] = ()) -> None:
    """Raise ``UnsupportedValue`` if the optimizer at ``path`` may have state outside of its
    attributes ``state`` and ``param_groups``, or cannot be saved for the reason that ``check_kind``
    gives.

    ``others`` are the optimizers that the state has under names of their own. The optimizer may
    hold these.
    """
    check_kind(path, optimizer)
    if is_zero(optimizer):
        return
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
                f"{type(optimizer).__qualname__}, which holds another optimizer "
                f"({type(alone[0]).__qualname__}) with state of its own",
                f"put that one into the state as well, under a name of its own: .{name}",
            )


def check_owners(path: str, optimizer: Optimizer) -> None:
    """Raise ``UnsupportedValue`` if the optimizer at ``path`` has state that belongs to none of its
    parameters.
    """
    if is_zero(optimizer):
        return
    known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if any(id(key) not in known for key in optimizer.state):
        kind = type(optimizer).__qualname__
        raise UnsupportedValue(path, f"{kind} with state that belongs to no parameter", OWN_STATE)


def check_state(path: str, optimizer: Optimizer, state: Mapping[Any, Any]) -> None:
    """Raise ``UnsupportedValue`` if ``state``, the state of the optimizer at ``path``, has a value
    that is no dict.
    """
    if not _DICT.issuperset(map(type, state.values())):
        for values in state.values():
            if not isinstance(values, dict):
                check_owners(path, optimizer)
                kind = type(optimizer).__qualname__
                what = f"{kind} whose state of a parameter is a {type(values).__name__}"
                raise UnsupportedValue(path, what, OWN_STATE)


@contextmanager
def asked(path: str, value: object) -> Generator[None]:
    """Convert an error that the ``with`` block raises to an ``UnsupportedValue`` for ``value``,
    which is at ``path`` in the state.

    The block calls ``value.state_dict()``. If it raises an ``UnsupportedValue``, ``path`` is put
    before the name in this error. Any other ``CkptError`` passes unchanged.
    """
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
    """Return the state dict of the module at ``path`` with its own tensors, not detached.

    If any part of the module is wrapped in FSDP1, no hook of the module runs, since the hooks of
    FSDP1 gather parameters. Otherwise, all hooks run.

    Raises:
        UnsupportedValue: ``state_dict()`` fails, or a hook that does not run would add a value.
    """
    with asked(path, module):
        state = hookless_state(module) if is_fsdp1(module) else module.state_dict(keep_vars=True)
    if is_fsdp1(module):
        check_hooks(path, module, state)
    return state


def entries(path: str, module: nn.Module) -> Iterator[Entry]:
    """Yield the items of the module's state dict with canonical names, in the order of the dict.

    The tensors are not detached. A flat parameter of FSDP1 gives an entry for each parameter in it.
    """
    yield from _entries(module, raw_state(path, module))


def _entries(module: nn.Module, raw: Mapping[str, Any]) -> Iterator[Entry]:
    prefixes = _wrapper_prefixes(module)
    flats: Mapping[int, Mapping[str, AnyPiece | None]] = flat_parameters(module)
    for key, value in raw.items():
        for name, piece in flats.get(id(value), {"": declared(value)}).items():
            yield Entry(
                key=name or key, fqn=_clean(name or key, prefixes), value=value, piece=piece
            )


def canonical(module: nn.Module) -> Callable[[str], str]:
    """Return a function that converts a key of the module's state dict to its canonical name."""
    prefixes = _wrapper_prefixes(module)
    return lambda key: _clean(key, prefixes)


def _wrapper_prefixes(module: nn.Module) -> list[str]:
    """Return the prefixes of the module's names that end with the insertion of a wrapper, such as
    ``block.module.``, longest first.
    """
    found: list[str] = []
    for name, child in module.named_modules(remove_duplicate=False):
        lead = f"{name}." if name else ""
        if isinstance(child, DistributedDataParallel | DataParallel):
            found.append(f"{lead}module.")
        found += [f"{lead}{segment}." for segment in WRAPPERS if segment in child._modules]
    return sorted(found, key=len, reverse=True)


def _clean(key: str, prefixes: list[str]) -> str:
    """Return ``key`` without the insertions of wrappers."""
    for prefix in prefixes:
        if key.startswith(prefix):
            lead = prefix[:-1].rpartition(".")[0]
            key = (f"{lead}." if lead else "") + key[len(prefix) :]
    return key


def items_of(path: str, module: nn.Module) -> ModuleItems:
    """Return the items that the module at ``path`` of a state saves.

    Raises:
        UnsupportedValue: The ``state_dict()`` of the module raises, or FSDP1 has parameters in it
            that cannot be saved.
    """
    if isinstance(module, ModuleStandIn):
        return module.items(path)
    raw = raw_state(path, module)
    shown = tuple(_entries(module, raw))
    _check_fsdp1(path, module, {id(entry.value) for entry in shown})
    found = tuple(_shared(module, (*shown, *_unlisted(module, shown))))
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
        entries=found[: len(shown)],
        parts={key: tuple(of.values()) for key, of in parts.items()},
        holders=holders,
        versions=_versions(module, raw),
    )


def _versions(module: nn.Module, raw: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]] | None:
    """Return the metadata of the modules in ``raw``, a state dict of ``module``, by their canonical
    names, without those that are ``FIRST_VERSION``. The metadata of a module inside of a wrapper
    replaces that of the wrapper.
    """
    if (metadata := vars(raw).get(VERSIONS) if hasattr(raw, "__dict__") else None) is None:
        return None
    name = canonical(module)
    found = {name(f"{key}." if key else "").rstrip("."): of for key, of in metadata.items()}
    return {fqn: of for fqn, of in found.items() if of != FIRST_VERSION}


def _unlisted(module: nn.Module, shown: Sequence[Entry]) -> Iterator[Entry]:
    """Yield an entry for each parameter of the module that its state dict, whose entries are
    ``shown``, does not hold.

    A hook or a ``state_dict()`` of the module's own may save a parameter as other tensors. An
    optimizer has the parameter itself, so its state needs a name. A name that the state dict has
    for another parameter is left out. FSDP1 hides its parameters behind flat ones, and no hook of
    such a module runs.
    """
    if is_fsdp1(module):
        return
    known = {id(entry.value) for entry in shown}
    taken = {entry.fqn for entry in shown if isinstance(entry.value, nn.Parameter)}
    name = canonical(module)
    for key, parameter in module.named_parameters():
        if id(parameter) not in known and (fqn := name(key)) not in taken:
            yield Entry(key=key, fqn=fqn, value=parameter, piece=declared(parameter))


def _check_fsdp1(path: str, module: nn.Module, found: set[int]) -> None:
    """Raise ``UnsupportedValue`` if FSDP1 has gathered a flat parameter of the module, or has
    flattened DTensors.

    ``found`` are the identities (``id``) of the values in the module's state dict.
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
    """Yield the entries ``found`` of ``module``, with ``replicas`` and ``left`` set if the unit of
    the entry (see ``tensors.units``) determines them.
    """
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
            # The unit does not show which other ranks hold the same tensor.
            yield entry
        elif is_buffer and unit.is_first is not None:
            yield entry if unit.is_first else replace(entry, replicas=ranks[unit], left=True)
        else:
            yield replace(entry, replicas=ranks[unit])


class Parameters:
    """Finds the parts, the paths and the ranks of a state's parameters by their identity.

    If two modules share a parameter, the parts in the first module count.

    Attributes:
        items: The items of each module of the state.
        alone: The identity (``id``) of each parameter that no module holds, and that is in a dict,
            list or tuple of the state -> its path.
    """

    def __init__(self, modules: Iterable[tuple[nn.Module, ModuleItems]]) -> None:
        self._items = {id(module): items for module, items in modules}
        self.items = tuple(self._items.values())
        self.alone: dict[int, str] = {}

    def look_for(
        self, optimizers: Iterable[Optimizer], tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> None:
        """Add to ``alone`` those parameters of ``optimizers`` that no module holds and that are
        among ``tensors``, the tensors in the dicts, lists and tuples of the state.

        A tensor in the state may be the parameter itself, or another tensor with the same memory,
        such as a tensor of a ``state_dict()``.
        """
        # A comparison of sets is fast, and each save looks up thousands of parameters.
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
        """Return the items of ``module``, or None if it is inside of an object of the state, and
        not in the dicts, lists and tuples of the state.
        """
        return self._items.get(id(module))

    def parts_of(self, parameter: Source, group: int, position: int) -> tuple[Part, ...]:
        """Return the parts of a parameter, which is number ``position`` of the optimizer's
        parameter group ``group``.

        A flat parameter of FSDP1 may have several parts. A parameter that is not in the state has
        one part, whose name is made of ``group`` and ``position`` (see ``placeless``).
        """
        for items in self._items.values():
            if found := items.parts.get(id(parameter)):
                return found
        return (Part(self.alone.get(id(parameter)) or placeless(group, position)),)

    def holders_of(self, parameter: Source) -> tuple[int, ...]:
        """Return the ranks that are known to have a parameter with the name of ``parameter``. The
        result is empty if no module of the state holds ``parameter``.
        """
        for items in self._items.values():
            if id(parameter) in items.holders:
                return items.holders[id(parameter)]
        return ()


def placeless(group: int, position: int) -> str:
    """Return the name to use in place of a path for a parameter that is not in the state. It
    consists of the index of its parameter group and its position in the group.
    """
    return f"{PLACELESS}{group}/{position}"


def part_groups(optimizer: Optimizer, parameters: Parameters) -> list[list[tuple[Part, ...]]]:
    """Return the parts of each parameter of each parameter group, in the order of
    ``optimizer.param_groups``.
    """
    return [
        [parameters.parts_of(parameter, g, p) for p, parameter in enumerate(group["params"])]
        for g, group in enumerate(optimizer.param_groups)
    ]


def state_name(optimizer_path: str, parameter_path: str, key: object) -> str:
    """Return the name of the value that an optimizer's state of a parameter has under ``key``."""
    return join(f"{optimizer_path}/{parameter_path}", key)


def part_of(key: object) -> str:
    """Return the text that stands for ``key``, a key of an optimizer's state, in a name."""
    return state_name("", "", key)[2:]


def fits(held: Any, saved: Tensor, piece: AnyPiece | None) -> bool:
    """Return True if ``held``, the present value in an optimizer's state of a parameter (or of its
    part ``piece``), has the dtype, the shape and the order of ``saved``, so that a restore can fill
    it in place.
    """
    if not isinstance(held, torch.Tensor | LocalShards):
        return False
    if held.dtype is not None and str(held.dtype) != f"torch.{saved.dtype}":
        return False
    if tuple(held.shape) == saved.shape:
        return isinstance(held, LocalShards) or _has_order(held, saved.order)
    return (
        piece is not None
        and isinstance(held, torch.Tensor)
        and piece.fits(held)
        and piece.shape == saved.shape
    )


def _has_order(held: torch.Tensor, order: tuple[int, ...]) -> bool:
    memory = local(held)
    return memory.numel() < 2 or order_of(memory) == order


def in_present_order(saved: Tensor, weight: Tensor | None, parameter: Source) -> Tensor:
    """Return ``saved``, a value of an optimizer's state, with the order that a restore gives it.

    This is the saved order. But a value that was saved with the shape and the order of its
    parameter, ``weight``, gets the order that the parameter has now, since optimizers make their
    values like the parameters.
    """
    like = weight is not None and (weight.shape, weight.order) == (saved.shape, saved.order)
    if not like or not isinstance(parameter, torch.Tensor) or parameter.shape != saved.shape:
        return saved
    return msgspec.structs.replace(saved, order=order_of(local(parameter)))


def new_state(
    parameter: torch.Tensor,
    group: Mapping[str, Any],
    key: object,
    saved: Tensor,
    piece: AnyPiece | None,
    *,
    is_plain: bool = False,
) -> torch.Tensor:
    """Return a new tensor for a value of an optimizer's state that does not exist yet.

    The tensor has the layout that the optimizer would choose. If the saved shape is that of the
    parameter, this is the layout of the parameter, but with the order of ``saved``. Otherwise, and
    always for the key ``step`` and with ``is_plain``, the tensor is plain. A tensor for ``step`` is
    on the CPU unless ``group`` is capturable or fused. Any other tensor is on the device of the
    parameter. The caller fills the tensor.

    Args:
        parameter: The parameter that the value belongs to.
        group: The settings that the parameter group of the parameter has when the value is used.
        key: The key of the value in the state of the parameter.
        saved: The tensor in the checkpoint.
        piece: The piece of the saved parameter that ``parameter`` holds; None if it holds all.
        is_plain: True if the saved tensor was plain although its parameter was a DTensor.

    Raises:
        RestoreError: The parameter is a DTensor, and the saved tensor has another shape and at
            least one dimension, and ``is_plain`` is False.
    """
    dtype = getattr(torch, saved.dtype)
    if piece is not None and piece.shape == saved.shape and key != "step":
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False).detach()
    if tuple(parameter.shape) == saved.shape and key != "step" and not is_plain:
        if not _has_order(parameter, saved.order):
            return empty_like_in_order(parameter, saved.order, dtype)
        return torch.empty_like(
            parameter, dtype=dtype, memory_format=torch.preserve_format, requires_grad=False
        ).detach()
    if isinstance(parameter, DTensor) and saved.shape != () and not is_plain:
        raise RestoreError(
            f"{saved.name!r} has another shape than its sharded parameter: take one optimizer "
            "step before restoring, so that its layout is known"
        )
    device = parameter.device if is_on_device(key, group) else "cpu"
    return empty_in_order(saved.shape, saved.order, dtype=dtype, device=device)


def is_on_device(key: object, group: Mapping[str, Any]) -> bool:
    """Return True if the value ``key`` of an optimizer's state is on the device of its parameter.
    This is so unless the value is ``step``, and the parameter group ``group`` is neither capturable
    nor fused.
    """
    return key != "step" or any(group.get(setting) for setting in PLACING)

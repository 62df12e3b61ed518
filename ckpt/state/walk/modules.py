"""Find the tensors of modules and optimizers, and give them canonical names.

DDP, ``torch.compile``, FSDP1 and activation checkpointing insert a part of their own into the names
of parameters. A canonical name is the name without these insertions. The state of an optimizer is
named by the paths of its parameters and not by their positions, so the parameter groups may differ
between a save and a restore.

An entry is an item of a module's state dict. FSDP1 holds several parameters in one flat tensor: the
*pieces* of such a tensor are its ranges, and its *parts* are the parameters that have pieces there.
A stand-in is an object that takes the place of a module or optimizer of a framework. A record is
the description of a tensor in the checkpoint. The order of a tensor lists its dimensions from the
largest stride to the smallest.
"""

from __future__ import annotations

import inspect
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
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ckpt.errors import CkptError, RestoreError, UnsupportedValue
from ckpt.model.manifest import Tensor
from ckpt.model.values import VERSIONS, join
from ckpt.state.tensors.declared import declaration_of
from ckpt.state.tensors.layout import (
    empty_in_order,
    empty_like_in_order,
    holders_of,
    mesh_ranks,
    order_of,
    to_local,
)
from ckpt.state.tensors.local_shards import LocalShards, TensorOrShards
from ckpt.state.tensors.sharded import (
    check_hooks,
    flat_parameters,
    gathered_error,
    hookless_state,
    keys_of_flat_dtensors,
)
from ckpt.state.tensors.units import units_of
from ckpt.state.walk.module_entries import FIRST_VERSION, AnyPiece, Entry, ModuleItems, Part
from ckpt.state.walk.segments import address_of, same_view
from ckpt.state.walk.stand_in import ModuleStandIn, OptimizerStandIn
from ckpt.torch_private import has_step_hooks, is_fsdp1, is_zero_redundancy

POSITIONAL: Final = "~param/"
"""The prefix of the names of parameters that are not in the state (see ``positional_name``)."""
OWN_STATE_ADVICE: Final = (
    "put an object into the state whose state_dict() and load_state_dict() call the optimizer's "
    "own. Under sharded parameters, let it give each DTensor whole (full_tensor()) beside its "
    "placements, and distribute it so again, with Replicate() for a partial one"
)
_TORCH_LOADS: Final[tuple[object, ...]] = (nn.Module.load_state_dict, Optimizer.load_state_dict)
"""The methods of torch, which take a state dict alone."""
STEP_DEVICE_SETTINGS: Final = ("capturable", "fused")
"""The settings of a parameter group that place ``step`` on the device of the parameter."""
_WRAPPER_PACKAGES: Final = ("accelerate", "lightning", "pytorch_lightning", "lightning_fabric")
"""The packages whose wrappers of optimizers have no state of their own."""
_DICT_TYPE: Final = frozenset({dict})
WRAPPERS: Final = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""The children of wrapper modules, whose names a state dict may have inside of other names."""


def unwrap_optimizer(optimizer: Any) -> Optimizer:
    """Return the optimizer inside of a wrapper that Accelerate or Lightning has made, or
    ``optimizer`` itself if it is no such wrapper.

    Such a wrapper has the same ``state`` and ``param_groups`` objects as the optimizer inside. A
    wrapper of another package may have these too, and more state beside them.
    """
    core: Optimizer = optimizer
    while (inner := _inner_optimizer(core)) is not None and (
        core.state is inner.state and core.param_groups is inner.param_groups
    ):
        core = inner
    return core


def _inner_optimizer(optimizer: Optimizer) -> Optimizer | None:
    """Return the optimizer inside of a wrapper of ``_WRAPPER_PACKAGES``; None for no wrapper."""
    if not any(
        candidate.__module__.partition(".")[0] in _WRAPPER_PACKAGES
        for candidate in type(optimizer).__mro__
    ):
        return None
    # Accelerate keeps the inner one in the attribute ``optimizer``, and Lightning in
    # ``_optimizer``.
    attributes = (optimizer.__dict__.get(name) for name in ("optimizer", "_optimizer"))
    return next((candidate for candidate in attributes if isinstance(candidate, Optimizer)), None)


def methods_beyond_step(optimizer: Optimizer) -> tuple[str, ...]:
    """Return the names of the public methods that an optimizer has besides those of
    ``torch.optim.Optimizer``, and that may change its tensors.

    If there are none, only ``step`` changes the tensors. A hook can hold ``step``, so the tensors
    may be copied while training goes on. Schedule-free optimizers have the methods ``train`` and
    ``eval``, for instance, and sharpness-aware ones ``first_step`` and ``second_step``. Methods
    that classes of torch and of ckpt define do not count, since they are known to be harmless.
    """
    inner: Optimizer = (
        getattr(optimizer, "optim", optimizer) if is_zero_redundancy(optimizer) else optimizer
    )
    kind: Any = type(inner)  # Mypy takes the hash of an optimizer for that of its class
    return _own_methods(kind)


def is_capturable(optimizer: Optimizer) -> bool:
    """Return True if a parameter group has ``capturable=True``, so that the steps may be captured
    in a CUDA graph. Replays of the graph run no hook.
    """
    return any(group.get("capturable") for group in optimizer.param_groups)


@cache
def _own_methods(kind: type) -> tuple[str, ...]:
    """Return what ``methods_beyond_step`` returns for an optimizer of the class ``kind``."""
    foreign_bases = [
        base for base in kind.__mro__ if base.__module__.partition(".")[0] not in ("torch", "ckpt")
    ]
    members = {name: value for base in foreign_bases for name, value in vars(base).items()}
    methods = (
        name for name, value in members.items() if callable(value) or isinstance(value, classmethod)
    )
    return tuple(
        sorted(
            name for name in methods if not name.startswith("_") and not hasattr(Optimizer, name)
        )
    )


def check_kind(path: str, optimizer: Optimizer) -> None:
    """Raise ``UnsupportedValue`` if the class of the optimizer at ``path`` shows that it cannot be
    saved or restored: it has a ``state_dict()`` of its own, its ``load_state_dict()`` does not take
    a state dict alone, or it lacks the hooks of an optimizer.
    """
    if is_zero_redundancy(optimizer) or isinstance(optimizer, OptimizerStandIn):
        return
    kind = type(optimizer).__qualname__
    if type(optimizer).state_dict is not Optimizer.state_dict:
        raise UnsupportedValue(
            path, f"{kind}, an optimizer with a state_dict() of its own", OWN_STATE_ADVICE
        )
    if type(optimizer).load_state_dict not in _TORCH_LOADS:
        check_load(path, optimizer)
    if not has_step_hooks(optimizer):
        raise UnsupportedValue(
            path,
            f"{kind}, an optimizer whose __init__() does not call Optimizer.__init__()",
            "call super().__init__(params, defaults) there. If it wraps another optimizer, put "
            "that one into the state",
        )


def check_optimizer(path: str, optimizer: Optimizer, siblings: Sequence[Optimizer] = ()) -> None:
    """Raise ``UnsupportedValue`` if the optimizer at ``path`` may have state outside of its
    attributes ``state`` and ``param_groups``, or cannot be saved for the reason that ``check_kind``
    gives.

    ``siblings`` are the optimizers that the state has under names of their own. The optimizer may
    hold these.
    """
    check_kind(path, optimizer)
    if is_zero_redundancy(optimizer):
        return
    for name, value in vars(optimizer).items():
        members = value if isinstance(value, list | tuple) else [value]
        foreign = [
            member
            for member in members
            if isinstance(member, Optimizer)
            and member.state is not optimizer.state
            and not any(member is candidate for candidate in siblings)
        ]
        if foreign:
            raise UnsupportedValue(
                path,
                f"{type(optimizer).__qualname__}, which holds another optimizer "
                f"({type(foreign[0]).__qualname__}) with state of its own",
                f"put that one into the state as well, under a name of its own: .{name}",
            )


def check_owners(path: str, optimizer: Optimizer) -> None:
    """Raise ``UnsupportedValue`` if the optimizer at ``path`` has state that belongs to none of its
    parameters.
    """
    if is_zero_redundancy(optimizer):
        return
    ids = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if any(id(key) not in ids for key in optimizer.state):
        kind = type(optimizer).__qualname__
        raise UnsupportedValue(
            path, f"{kind} with state that belongs to no parameter", OWN_STATE_ADVICE
        )


def check_state(path: str, optimizer: Optimizer, state: Mapping[Any, Any]) -> None:
    """Raise ``UnsupportedValue`` if ``state``, the state of the optimizer at ``path``, has a value
    that is no dict.
    """
    if not _DICT_TYPE.issuperset(map(type, state.values())):
        for values in state.values():
            if not isinstance(values, dict):
                check_owners(path, optimizer)
                kind = type(optimizer).__qualname__
                description = f"{kind} whose state of a parameter is a {type(values).__name__}"
                raise UnsupportedValue(path, description, OWN_STATE_ADVICE)


def check_load(path: str, value: Any) -> None:
    """Raise ``UnsupportedValue`` if the ``load_state_dict()`` of ``value``, which is at ``path`` in
    the state, cannot be called with a state dict as its only argument.
    """
    if not callable(method := value.load_state_dict):
        return
    try:
        inspect.signature(method).bind({})
    except ValueError:  # A method that is not written in Python may have no signature
        pass
    except TypeError as error:
        raise UnsupportedValue(
            path,
            f"{type(value).__qualname__} whose load_state_dict() does not take a state dict alone",
            f"{error}. Let its first parameter be the state dict, and give the others defaults",
        ) from error


@contextmanager
def state_dict_errors(path: str, value: object) -> Generator[None]:
    """Convert an error that the ``with`` block raises to an ``UnsupportedValue`` for ``value``,
    which is at ``path`` in the state. Raise one too if no restore could call its
    ``load_state_dict()``.

    The block calls ``value.state_dict()``. If it raises an ``UnsupportedValue``, ``path`` is put
    before the name in this error. Any other ``CkptError`` passes unchanged.
    """
    if getattr(type(value), "load_state_dict", None) not in _TORCH_LOADS:
        check_load(path, value)
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
    with state_dict_errors(path, module):
        state = hookless_state(module) if is_fsdp1(module) else module.state_dict(keep_vars=True)
    if is_fsdp1(module):
        check_hooks(path, module, state)
    return state


def entries_of(path: str, module: nn.Module) -> Iterator[Entry]:
    """Yield the items of the module's state dict with canonical names, in the order of the dict.

    The tensors are not detached. A flat parameter of FSDP1 gives an entry for each parameter in it.
    """
    yield from _entries(module, raw_state(path, module))


def _entries(module: nn.Module, raw: Mapping[str, Any]) -> Iterator[Entry]:
    """Yield the entries of ``raw``, the state dict of ``module``. See ``entries_of``."""
    prefixes = _wrapper_prefixes(module)
    pieces_by_id: Mapping[int, Mapping[str, AnyPiece | None]] = flat_parameters(module)
    for key, value in raw.items():
        for name, piece in pieces_by_id.get(id(value), {"": declaration_of(value)}).items():
            yield Entry(
                key=name or key,
                fqn=_canonical_name(name or key, prefixes),
                value=value,
                piece=piece,
            )


def canonical(module: nn.Module) -> Callable[[str], str]:
    """Return a function that converts a key of the module's state dict to its canonical name."""
    prefixes = _wrapper_prefixes(module)
    return lambda key: _canonical_name(key, prefixes)


def _wrapper_prefixes(module: nn.Module) -> list[str]:
    """Return the prefixes of the module's names that end with the insertion of a wrapper, such as
    ``block.module.``, longest first.
    """
    prefixes: list[str] = []
    for name, child in module.named_modules(remove_duplicate=False):
        outer_prefix = f"{name}." if name else ""
        if isinstance(child, DistributedDataParallel | DataParallel):
            prefixes.append(f"{outer_prefix}module.")
        prefixes += [
            f"{outer_prefix}{child_name}."
            for child_name in WRAPPERS
            if child_name in child._modules
        ]
    return sorted(prefixes, key=len, reverse=True)


def _canonical_name(key: str, prefixes: list[str]) -> str:
    """Return ``key`` without the insertions of wrappers."""
    for prefix in prefixes:
        if key.startswith(prefix):
            outer_name = prefix[:-1].rpartition(".")[0]
            key = (f"{outer_name}." if outer_name else "") + key[len(prefix) :]
    return key


def items_of(path: str, module: nn.Module, raw: Mapping[str, Any] | None = None) -> ModuleItems:
    """Return the items that the module at ``path`` of a state saves. ``raw`` is what ``raw_state``
    has returned for it, if the caller has that.

    Raises:
        UnsupportedValue: The ``state_dict()`` of the module raises, or FSDP1 has parameters in it
            that cannot be saved.
    """
    if isinstance(module, ModuleStandIn):
        return module.items(path)
    raw = raw_state(path, module) if raw is None else raw
    entries = tuple(_entries(module, raw))
    _check_fsdp1(path, module, {id(entry.value) for entry in entries})
    all_entries = tuple(_with_replicas(module, (*entries, *_unlisted_entries(module, entries))))
    parts: dict[int, dict[AnyPiece | None, Part]] = defaultdict(dict)
    holder_ranks: dict[int, tuple[int, ...]] = {}
    for entry in all_entries:
        if isinstance(value := entry.value, nn.Parameter):
            parts[id(value)].setdefault(entry.piece, Part(f"{path}/{entry.fqn}", entry.piece))
            ranks = (
                entry.replica_ranks
                if not isinstance(value, DTensor)
                else holders_of(value, entry.replica_ranks)
            )
            holder_ranks.setdefault(id(value), ranks)
    return ModuleItems(
        entries=all_entries[: len(entries)],
        parts={key: tuple(by_piece.values()) for key, by_piece in parts.items()},
        holders=holder_ranks,
        module_versions=_module_versions(module, raw),
    )


def _module_versions(
    module: nn.Module, raw: Mapping[str, Any]
) -> Mapping[str, Mapping[str, Any]] | None:
    """Return the metadata of the modules in ``raw``, a state dict of ``module``, by their canonical
    names, without those that are ``FIRST_VERSION``. The metadata of a module inside of a wrapper
    replaces that of the wrapper.
    """
    if (metadata := vars(raw).get(VERSIONS) if hasattr(raw, "__dict__") else None) is None:
        return None
    canonical_name = canonical(module)
    # A key ends with a dot here, as the prefixes of wrappers do.
    by_name = {
        canonical_name(f"{key}." if key else "").rstrip("."): version
        for key, version in metadata.items()
    }
    return {fqn: version for fqn, version in by_name.items() if version != FIRST_VERSION}


def _unlisted_entries(module: nn.Module, entries: Sequence[Entry]) -> Iterator[Entry]:
    """Yield an entry for each parameter of the module that its state dict, whose entries are
    ``entries``, does not hold.

    A hook or a ``state_dict()`` of the module's own may save a parameter as other tensors. An
    optimizer has the parameter itself, so its state needs a name. A name that the state dict has
    for another parameter is left out. FSDP1 hides its parameters behind flat ones, and no hook of
    such a module runs.
    """
    if is_fsdp1(module):
        return
    ids = {id(entry.value) for entry in entries}
    fqns = {entry.fqn for entry in entries if isinstance(entry.value, nn.Parameter)}
    canonical_name = canonical(module)
    for key, parameter in module.named_parameters():
        if id(parameter) not in ids and (fqn := canonical_name(key)) not in fqns:
            yield Entry(key=key, fqn=fqn, value=parameter, piece=declaration_of(parameter))


def _check_fsdp1(path: str, module: nn.Module, ids: set[int]) -> None:
    """Raise ``UnsupportedValue`` if FSDP1 has gathered a flat parameter of the module, or has
    flattened DTensors.

    ``ids`` are the identities (``id``) of the values in the module's state dict.
    """
    if not is_fsdp1(module):
        return
    canonical_name = canonical(module)
    for key in keys_of_flat_dtensors(module):
        raise UnsupportedValue(
            f"{path}/{canonical_name(key)}",
            "parameter of FSDP1 over tensor parallelism",
            "take fully_shard() (FSDP2) instead, which can be combined with parallelize_module()",
        )
    for identity, pieces in flat_parameters(module).items():
        if identity not in ids:
            key, piece = next(iter(pieces.items()))
            raise gathered_error(f"{path}/{canonical_name(key or piece.fqn)}")


def _with_replicas(module: nn.Module, entries: Sequence[Entry]) -> Iterator[Entry]:
    """Yield ``entries`` of ``module``, with ``replica_ranks`` and ``is_delegated`` set if the unit
    of the entry determines them.

    A unit is the part of a module that one wrapper, such as DDP, keeps equal on its ranks (see
    ``tensors.units``). ``unit.is_first`` is True on the one of these ranks whose buffers are saved,
    and ``unit.ignored`` has the identities of the tensors that the wrapper does not keep equal. A
    delegated entry is one that another rank saves.
    """
    unit_of = units_of(module)
    units = [unit_of(entry.key) for entry in entries]
    ranks = {unit: unit.ranks for unit in units}
    meshes = {
        (unit, id(entry.value.device_mesh)): entry.value
        for entry, unit in zip(entries, units, strict=True)
        if isinstance(entry.value, DTensor)
    }
    for (unit, _), tensor in meshes.items():
        ranks[unit] = max(ranks[unit], mesh_ranks(tensor), key=len)
    buffers = {id(buffer) for buffer in module.buffers() if not isinstance(buffer, DTensor)}
    for entry, unit in zip(entries, units, strict=True):
        is_buffer = id(entry.value) in buffers
        is_ignored = id(entry.value) in unit.ignored and (is_buffer or entry.value.requires_grad)
        if is_ignored or (not ranks[unit] and unit.is_first is None):
            # The unit does not show which other ranks hold the same tensor.
            yield entry
        elif is_buffer and unit.is_first is not None:
            yield (
                entry
                if unit.is_first
                else replace(entry, replica_ranks=ranks[unit], is_delegated=True)
            )
        else:
            yield replace(entry, replica_ranks=ranks[unit])


class Parameters:
    """Finds the parts, the paths and the ranks of a state's parameters by their identity.

    If two modules share a parameter, the parts in the first module count.

    Attributes:
        items: The items of each module of the state.
        loose: The identity (``id``) of each parameter that no module holds, and that is in a dict,
            list or tuple of the state -> its path.
    """

    def __init__(self, modules: Iterable[tuple[nn.Module, ModuleItems]]) -> None:
        self._items_by_module_id = {id(module): items for module, items in modules}
        self.items = tuple(self._items_by_module_id.values())
        self.loose: dict[int, str] = {}

    def add_loose(
        self, optimizers: Iterable[Optimizer], tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> None:
        """Add to ``loose`` those parameters of ``optimizers`` that no module holds and that are
        among ``tensors``, the tensors in the dicts, lists and tuples of the state.

        A tensor in the state may be the parameter itself, or another tensor with the same memory,
        such as a tensor of a ``state_dict()``.
        """
        # A comparison of sets is fast, and each save looks up thousands of parameters.
        ids = set[int]().union(*(items.parts for items in self.items))
        groups = [group["params"] for optimizer in optimizers for group in optimizer.param_groups]
        if all(ids.issuperset(map(id, parameters)) for parameters in groups):
            return
        by_address: dict[int, list[torch.Tensor]] = defaultdict(list)
        for parameter in chain.from_iterable(groups):
            if id(parameter) not in ids and isinstance(parameter, torch.Tensor):
                by_address[address_of(parameter)].append(parameter)
        for path, tensor in tensors if by_address else ():
            for parameter in by_address.get(address_of(tensor), ()):
                if tensor is parameter or (address_of(tensor) and same_view(tensor, parameter)):
                    self.loose.setdefault(id(parameter), path)

    def in_module(self, parameter: TensorOrShards) -> bool:
        """Return True if a module of the state holds the parameter."""
        return any(id(parameter) in items.parts for items in self._items_by_module_id.values())

    def of(self, module: nn.Module) -> ModuleItems | None:
        """Return the items of ``module``, or None if it is inside of an object of the state, and
        not in the dicts, lists and tuples of the state.
        """
        return self._items_by_module_id.get(id(module))

    def parts_of(self, parameter: TensorOrShards, group: int, position: int) -> tuple[Part, ...]:
        """Return the parts of a parameter, which is number ``position`` of the optimizer's
        parameter group ``group``.

        A flat parameter of FSDP1 may have several parts. A parameter that is not in the state has
        one part, whose name is made of ``group`` and ``position`` (see ``positional_name``).
        """
        for items in self._items_by_module_id.values():
            if parts := items.parts.get(id(parameter)):
                return parts
        return (Part(self.loose.get(id(parameter)) or positional_name(group, position)),)

    def holders_of(self, parameter: TensorOrShards) -> tuple[int, ...]:
        """Return the ranks that are known to have a parameter with the name of ``parameter``. The
        result is empty if no module of the state holds ``parameter``.
        """
        for items in self._items_by_module_id.values():
            if id(parameter) in items.holders:
                return items.holders[id(parameter)]
        return ()


def positional_name(group: int, position: int) -> str:
    """Return the name to use in place of a path for a parameter that is not in the state. It
    consists of the index of its parameter group and its position in the group.
    """
    return f"{POSITIONAL}{group}/{position}"


def part_groups(optimizer: Optimizer, parameters: Parameters) -> list[list[tuple[Part, ...]]]:
    """Return the parts of each parameter of each parameter group, in the order of
    ``optimizer.param_groups``.
    """
    return [
        [
            parameters.parts_of(parameter, group_index, position)
            for position, parameter in enumerate(group["params"])
        ]
        for group_index, group in enumerate(optimizer.param_groups)
    ]


def state_name(optimizer_path: str, parameter_path: str, key: object) -> str:
    """Return the name of the value that an optimizer's state of a parameter has under ``key``."""
    return join(f"{optimizer_path}/{parameter_path}", key)


def key_text(key: object) -> str:
    """Return the text that stands for ``key``, a key of an optimizer's state, in a name."""
    return state_name("", "", key)[2:]


def fits(present: Any, record: Tensor, piece: AnyPiece | None) -> bool:
    """Return True if ``present``, the present value in an optimizer's state of a parameter (or of
    its part ``piece``), has the dtype, the shape and the order of ``record``, so that a restore can
    fill it in place.
    """
    if not isinstance(present, TensorOrShards):
        return False
    if present.dtype not in (None, getattr(torch, record.dtype, None)):
        return False
    if tuple(present.shape) == record.shape:
        return isinstance(present, LocalShards) or _has_order(present, record.order)
    return (
        piece is not None
        and isinstance(present, torch.Tensor)
        and piece.fits(present)
        and piece.shape == record.shape
    )


def _has_order(tensor: torch.Tensor, order: tuple[int, ...]) -> bool:
    """Return True if the dimensions of a tensor have this order in memory (see ``order_of``)."""
    memory = to_local(tensor)
    return memory.numel() < 2 or order_of(memory) == order


def _has_shape(parameter: torch.Tensor, record: Tensor) -> bool:
    """Return True if ``parameter`` has the shape of ``record``. The parameter of a lazy module has
    no shape before its first forward pass.
    """
    return not is_lazy(parameter) and tuple(parameter.shape) == record.shape


def in_present_order(
    record: Tensor, parameter_record: Tensor | None, parameter: TensorOrShards
) -> Tensor:
    """Return ``record``, a value of an optimizer's state, with the order that a restore gives it.

    This is the saved order. But a value that was saved with the shape and the order of its
    parameter, ``parameter_record``, gets the order that the parameter has now, since optimizers
    make their values like the parameters.
    """
    is_like_parameter = parameter_record is not None and (
        parameter_record.shape,
        parameter_record.order,
    ) == (
        record.shape,
        record.order,
    )
    if (
        not is_like_parameter
        or not isinstance(parameter, torch.Tensor)
        or not _has_shape(parameter, record)
    ):
        return record
    order = order_of(to_local(parameter))
    return record if order == record.order else msgspec.structs.replace(record, order=order)


def new_state(
    parameter: torch.Tensor,
    group: Mapping[str, Any],
    key: object,
    record: Tensor,
    piece: AnyPiece | None,
    *,
    is_plain: bool = False,
) -> torch.Tensor:
    """Return a new tensor for a value of an optimizer's state that does not exist yet.

    The tensor has the layout that the optimizer would choose. If the saved shape is that of the
    parameter, this is the layout of the parameter, but with the order of ``record``. Otherwise, and
    always for the key ``step`` and with ``is_plain``, the tensor is plain. A tensor for ``step`` is
    on the CPU unless ``group`` is capturable or fused. Any other tensor is on the device of the
    parameter. The caller fills the tensor.

    Args:
        parameter: The parameter that the value belongs to.
        group: The settings that the parameter group of the parameter has when the value is used.
        key: The key of the value in the state of the parameter.
        record: The tensor in the checkpoint.
        piece: The piece of the saved parameter that ``parameter`` holds; None if it holds all.
        is_plain: True if the saved tensor was plain although its parameter was a DTensor.

    Raises:
        RestoreError: The parameter is a DTensor, and the saved tensor has another shape and at
            least one dimension, and ``is_plain`` is False.
    """
    dtype = getattr(torch, record.dtype)
    if piece is not None and piece.shape == record.shape and key != "step":
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False).detach()
    if _has_shape(parameter, record) and key != "step" and not is_plain:
        if not _has_order(parameter, record.order):
            return empty_like_in_order(parameter, record.order, dtype)
        return torch.empty_like(
            parameter, dtype=dtype, memory_format=torch.preserve_format, requires_grad=False
        ).detach()
    if isinstance(parameter, DTensor) and record.shape != () and not is_plain:
        raise RestoreError(
            f"{record.name!r} has another shape than its sharded parameter: take one optimizer "
            "step before restoring, so that its layout is known"
        )
    device = parameter.device if is_on_device(key, group) else "cpu"
    return empty_in_order(record.shape, record.order, dtype=dtype, device=device)


def is_on_device(key: object, group: Mapping[str, Any]) -> bool:
    """Return True if the value ``key`` of an optimizer's state is on the device of its parameter.
    This is so unless the value is ``step``, and the parameter group ``group`` is neither capturable
    nor fused.
    """
    return key != "step" or any(group.get(setting) for setting in STEP_DEVICE_SETTINGS)

"""Describe the parameters of FSDP1, which are pieces of flat parameters, and ``ShardedTensor``.

FSDP1's own ``state_dict()`` runs hooks that gather the parameters over the training process group
and return copies. This module does not run these hooks. The part of a parameter that a rank holds
is a range of elements of the flat parameter. ckpt reads and fills this range in place.

A wrapper is a ``FullyShardedDataParallel`` module, and its handle is the object of torch that has
the flat parameter of this wrapper. `LocalShards` describe a tensor by the boxes that this rank
holds, each with its own memory.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import nn

from ckpt.errors import UnsupportedValue
from ckpt.state.tensors.local_shards import LocalShards, TensorOrShards
from ckpt.torch_private import (
    FlatParameter,
    fsdp1_copies,
    fsdp1_flat,
    fsdp1_handle,
    fsdp1_over_dtensors,
    fsdp1_wrappers,
    module_hooks,
    version_of,
)

_WRAPPER_NAME = "_fsdp_wrapped_module"


class Piece(NamedTuple):
    """The part of one parameter that a flat parameter holds on this rank: a range of elements.

    Attributes:
        fqn: The parameter's key in the module. Two pieces without elements may differ only in it.
        shape: The shape of the whole parameter.
        start: The index of the range's first element in the flattened parameter.
        flat_start: The index of the range's first element in the flat memory.
        length: The number of elements in the range; 0 if this rank holds none.
        size: The number of elements of the flat memory.
        replicas: The ranks that hold the same piece.
    """

    fqn: str
    shape: tuple[int, ...]
    start: int
    flat_start: int
    length: int
    size: int
    replicas: tuple[int, ...]

    @property
    def has_elements(self) -> bool:
        """True if this rank holds any element of the parameter."""
        return self.length > 0

    def fits(self, memory: torch.Tensor) -> bool:
        """Return True if ``memory`` has the shape of the flat memory. The flat parameter has this
        shape, and so has optimizer state with one element for each of its elements.
        """
        return memory.shape == (self.size,)

    def as_shards(self, name: str, memory: torch.Tensor) -> LocalShards:
        """Return the tensor ``name``, a parameter or its optimizer state, as ``LocalShards`` with
        its range in ``memory``.

        Raises:
            UnsupportedValue: ``memory`` has another size, since FSDP1 has gathered the parameter.
        """
        if not self.fits(memory):
            raise gathered_error(name)
        part = memory[self.flat_start : self.flat_start + self.length]
        return LocalShards.of_range(self.shape, self.start, part, self.replicas)


def gathered_error(name: str) -> UnsupportedValue:
    """Return the error for a parameter that FSDP1 has gathered. The module then does not use the
    flat parameter, so the piece of the parameter cannot be read.
    """
    return UnsupportedValue(
        name,
        "parameter of FSDP1 that is gathered now",
        "save after backward() and before the next forward(), and outside of "
        "summon_full_params(): under SHARD_GRAD_OP "
        "parameters are gathered from forward() to backward()",
    )


PiecesByKey = Mapping[str, Piece]
"""The pieces in one tensor of ``module.parameters()``, by the keys of the original parameters in
the module. With ``use_orig_params`` there is one piece, and its key is ''.
"""


def flat_parameters(module: nn.Module) -> dict[int, PiecesByKey]:
    """Return a dict from the identity (``id``) of each tensor of FSDP1 in ``module`` to the pieces
    in this tensor.

    The tensors are the flat parameters, or with ``use_orig_params`` the original parameters. With
    ``use_orig_params``, a wrapper that does not shard its parameters adds nothing. The result is
    empty if the module has no FSDP1 wrapper.
    """
    pieces_by_id: dict[int, PiecesByKey] = {}
    for key_prefix, wrapper, handle in _handles(module):
        if (flat := fsdp1_flat(handle)) is not None:
            pieces_by_id.update(
                _flat_tensors(key_prefix, wrapper, flat, is_sharded=handle.uses_sharded_strategy)
            )
    return pieces_by_id


def keys_of_flat_dtensors(module: nn.Module) -> Iterator[str]:
    """Yield the keys of those parameters that FSDP1 has flattened and that were DTensors before, as
    ``parallelize_module`` makes them.
    """
    for key_prefix, _, handle in _handles(module):
        yield from (f"{key_prefix}{fqn}" for fqn in fsdp1_over_dtensors(handle))


def wrapper_ranks(wrapper: Any) -> tuple[tuple[int, ...], bool]:
    """Return the ranks that share the parameters of an FSDP1 wrapper, and True if this rank is the
    first of them.

    The result has the ranks of the wrapper's process group. With hybrid sharding, it has all ranks
    of the job instead, if shards and copies together occupy all of them.
    """
    ranks, replica_ranks = _rank_groups(wrapper)
    rank = torch.distributed.get_rank()
    is_first = rank == ranks[0] and (not replica_ranks or rank == replica_ranks[0])
    all_ranks = tuple(range(torch.distributed.get_world_size()))
    return (all_ranks if len(ranks) * len(replica_ranks) == len(all_ranks) else ranks), is_first


def hookless_state(module: nn.Module, prefix: str = "") -> dict[str, Any]:
    """Return ``state_dict(keep_vars=True)`` without running any hook."""
    state: dict[str, Any] = {}
    module._save_to_state_dict(state, prefix, keep_vars=True)
    for name, child in module._modules.items():
        if child is not None:
            state |= hookless_state(child, f"{prefix}{name}.")
    return state


def check_hooks(path: str, module: nn.Module, state: Mapping[str, Any]) -> None:
    """Raise ``UnsupportedValue`` if hooks of ``state_dict()``, which do not run, would add a value
    that is no tensor, and that would be lost.

    ``state`` is the ``hookless_state`` of ``module``. Each hook gets a copy of the dict.
    """
    for name, child in module.named_modules(remove_duplicate=False):
        hooks = [hook for hook in module_hooks(child, "state_dict") if not _is_of_torch(hook)]
        prefix = f"{name}." if name else ""
        entries = {key: value for key, value in state.items() if hooks and key.startswith(prefix)}
        hooked_entries = OrderedDict(entries)
        with suppress(Exception):  # A hook that converts tensors may need them whole
            for hook in hooks:
                hook(child, hooked_entries, prefix, {"version": version_of(child)})
        for key, value in hooked_entries.items():
            if key not in entries and not isinstance(value, torch.Tensor):
                raise UnsupportedValue(
                    f"{path}/{key.replace(f'{_WRAPPER_NAME}.', '')}",
                    f"{type(value).__qualname__} that a hook of state_dict() adds inside of FSDP1, "
                    "where no such hook runs",
                    "return it from get_extra_state(), or take fully_shard() (FSDP2)",
                )


def _is_of_torch(hook: object) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("torch.")


def tensor_or_shards(tensor: torch.Tensor) -> TensorOrShards:
    """Return a ``ShardedTensor`` as ``LocalShards``, and any other tensor as it is."""
    api: Any = sys.modules.get("torch.distributed._shard.sharded_tensor")
    if api is None or not isinstance(tensor, api.ShardedTensor):
        return tensor
    sharded: Any = tensor
    shards = [(shard.metadata.shard_offsets, shard.tensor) for shard in sharded.local_shards()]
    return LocalShards(tuple(tensor.size()), shards, dtype=tensor.dtype)


def _handles(module: nn.Module) -> Iterator[tuple[str, Any, Any]]:
    """Yield, for each FSDP1 wrapper with parameters: the prefix of the keys of these parameters,
    the wrapper, and its handle.
    """
    for name, wrapper in fsdp1_wrappers(module):
        if (handle := fsdp1_handle(wrapper)) is not None:
            yield f"{name}.{_WRAPPER_NAME}." if name else f"{_WRAPPER_NAME}.", wrapper, handle


def _flat_tensors(
    key_prefix: str, wrapper: Any, flat: FlatParameter, *, is_sharded: bool
) -> Iterator[tuple[int, PiecesByKey]]:
    """Yield the identity of each tensor of the flat parameter ``flat``, with the pieces in it.
    ``key_prefix`` is the prefix of the keys of its parameters.

    ``flat.size`` is None with ``use_orig_params``: each original parameter is then a tensor of its
    own. Otherwise, ``flat.size`` is the number of elements of the only tensor.
    """
    ranks, replica_ranks = _rank_groups(wrapper)
    replicas = replica_ranks if is_sharded else ranks
    if flat.size is None:
        for parameter, part in zip(flat.tensors, flat.parts, strict=True):
            fqn, shape, start, _, length = part
            piece = Piece(f"{key_prefix}{fqn}", shape, start, 0, length, length, replicas)
            yield id(parameter), {"": piece}
        return
    pieces: dict[str, Piece] = {}
    for fqn, shape, start, flat_start, length in flat.parts:
        key = f"{key_prefix}{fqn}"
        pieces[key] = Piece(key, shape, start, flat_start, length, flat.size, replicas)
    pieces |= {
        f"{key_prefix}{tied_name}": pieces[f"{key_prefix}{name}"]
        for tied_name, name in flat.ties.items()
    }
    yield id(flat.tensors[0]), pieces


def _rank_groups(wrapper: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ranks of the process group of an FSDP1 wrapper, and the ranks that hold the same
    shard as this rank (empty without hybrid sharding).
    """
    replica_ranks = fsdp1_copies(wrapper)
    return ranks_of(wrapper.process_group), ranks_of(
        replica_ranks
    ) if replica_ranks is not None else ()


def ranks_of(group: Any) -> tuple[int, ...]:
    """Return the global ranks of a process group, ascending."""
    return tuple(sorted(torch.distributed.get_process_group_ranks(group)))

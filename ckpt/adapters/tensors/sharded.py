"""FSDP1: parameters in pieces of flat parameters, and the ``ShardedTensor`` of its state dicts.

FSDP1's own ``state_dict()`` gathers over the training process group and returns copies. So its
hooks do not run here. The part of a parameter that a rank holds is a range of elements of the flat
parameter, and is read and filled there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from ckpt.adapters.tensors.local_shards import LocalShards, Source
from ckpt.adapters.torch_private import (
    FlatParameter,
    fsdp1_copies,
    fsdp1_flat,
    fsdp1_handle,
    fsdp1_over_dtensors,
    fsdp1_wrappers,
)
from ckpt.errors import UnsupportedValue

_WRAPPED = "_fsdp_wrapped_module"


class Piece(NamedTuple):
    """A range of elements of a tensor of ``shape`` in a flat memory of ``size`` elements.

    The ``length`` elements are at ``start`` of the tensor and at ``at`` of the memory.

    Attributes:
        fqn: Its key in the module, which distinguishes pieces without elements here.
        replicas: The ranks that hold the same piece.
    """

    fqn: str
    shape: tuple[int, ...]
    start: int
    at: int
    length: int
    size: int
    replicas: tuple[int, ...]

    @property
    def is_here(self) -> bool:
        """Whether this rank holds any element."""
        return self.length > 0

    def fits(self, memory: torch.Tensor) -> bool:
        """Return True if a tensor is such a memory."""
        return memory.shape == (self.size,)

    def of(self, name: str, memory: torch.Tensor) -> LocalShards:
        """Return the tensor in ``memory``.

        Raises ``UnsupportedValue`` if all of it is there just now, gathered.
        """
        if not self.fits(memory):
            raise gathered(name)
        part = memory[self.at : self.at + self.length]
        return LocalShards.of_range(self.shape, self.start, part, self.replicas)


def gathered(name: str) -> UnsupportedValue:
    """Return the error for parameters that are not in their pieces."""
    return UnsupportedValue(
        name,
        "parameter of FSDP1 that is gathered now",
        "save after backward() and before the next forward(), and outside of "
        "summon_full_params(): under SHARD_GRAD_OP "
        "parameters are gathered from forward() to backward()",
    )


Flat = Mapping[str, Piece]
"""The pieces in one parameter that an optimizer may have, by their keys in the module.

The key of the one piece in a parameter that has keys itself is ''.
"""


def flat_parameters(module: nn.Module) -> dict[int, Flat]:
    """Map the identity of each flat parameter of FSDP1 in ``module`` to the pieces in it.

    The result is empty without FSDP1.
    """
    found: dict[int, Flat] = {}
    for lead, wrapper, handle in _handles(module):
        if (flat := fsdp1_flat(handle)) is not None:
            found.update(_flats(lead, wrapper, flat, is_sharded=handle.uses_sharded_strategy))
    return found


def over_tensor_parallel(module: nn.Module) -> Iterator[str]:
    """Return the keys of the parameters that FSDP1 has flattened and that were DTensors before, as
    ``parallelize_module`` makes them.
    """
    for lead, _, handle in _handles(module):
        yield from (f"{lead}{fqn}" for fqn in fsdp1_over_dtensors(handle))


def is_fsdp1(module: nn.Module) -> bool:
    """Return True if any part of the module is wrapped in FSDP1."""
    return any(True for _ in fsdp1_wrappers(module))


def groups_of(wrapper: Any) -> tuple[tuple[int, ...], bool]:
    """Return the ranks that one FSDP1 wrapper keeps equal, and whether this rank is the first of
    all.

    The ranks include those of its copies if they are known.
    """
    ranks, copies = _groups(wrapper)
    here = torch.distributed.get_rank()
    is_first = here == ranks[0] and (not copies or here == copies[0])
    every = tuple(range(torch.distributed.get_world_size()))
    return (every if len(ranks) * len(copies) == len(every) else ranks), is_first


def hookless_state(module: nn.Module, prefix: str = "") -> dict[str, Any]:
    """Return ``state_dict(keep_vars=True)`` without running any hook."""
    state: dict[str, Any] = {}
    module._save_to_state_dict(state, prefix, keep_vars=True)
    for name, child in module._modules.items():
        if child is not None:
            state |= hookless_state(child, f"{prefix}{name}.")
    return state


def as_source(tensor: torch.Tensor) -> Source:
    """Return a ``ShardedTensor`` as its boxes, and any other tensor as it is."""
    api: Any = sys.modules.get("torch.distributed._shard.sharded_tensor")
    if api is None or not isinstance(tensor, api.ShardedTensor):
        return tensor
    held: Any = tensor
    shards = [(shard.metadata.shard_offsets, shard.tensor) for shard in held.local_shards()]
    return LocalShards(tuple(tensor.size()), shards, dtype=tensor.dtype)


def _handles(module: nn.Module) -> Iterator[tuple[str, Any, Any]]:
    """Return FSDP1's wrappers with parameters: the prefix of their names, the wrapper and its
    handle.
    """
    for name, wrapper in fsdp1_wrappers(module):
        if (handle := fsdp1_handle(wrapper)) is not None:
            yield f"{name}.{_WRAPPED}." if name else f"{_WRAPPED}.", wrapper, handle


def _flats(
    lead: str, wrapper: Any, flat: FlatParameter, *, is_sharded: bool
) -> Iterator[tuple[int, Flat]]:
    ranks, copies = _groups(wrapper)
    replicas = copies if is_sharded else ranks
    if flat.size is None:
        for parameter, part in zip(flat.held, flat.parts, strict=True):
            fqn, shape, start, _, length = part
            piece = Piece(f"{lead}{fqn}", shape, start, 0, length, length, replicas)
            yield id(parameter), {"": piece}
        return
    keyed: dict[str, Piece] = {}
    for fqn, shape, start, at, length in flat.parts:
        key = f"{lead}{fqn}"
        keyed[key] = Piece(key, shape, start, at, length, flat.size, replicas)
    keyed |= {f"{lead}{other}": keyed[f"{lead}{first}"] for other, first in flat.tied.items()}
    yield id(flat.held[0]), keyed


def _groups(wrapper: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ranks that FSDP1 shards over, and those that replicate the shard of this rank."""
    copies = fsdp1_copies(wrapper)
    return ranks_of(wrapper.process_group), ranks_of(copies) if copies is not None else ()


def ranks_of(group: Any) -> tuple[int, ...]:
    """Return the global ranks of a process group, ascending."""
    return tuple(sorted(torch.distributed.get_process_group_ranks(group)))

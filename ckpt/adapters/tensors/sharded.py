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
        """The tensor in ``memory``.

        Raises ``UnsupportedValue`` if all of it is there just now, gathered.
        """
        if not self.fits(memory):
            raise gathered(name)
        part = memory[self.at : self.at + self.length]
        return LocalShards.of_range(self.shape, self.start, part, self.replicas)


def gathered(name: str) -> UnsupportedValue:
    """The error for parameters that are not in their pieces."""
    return UnsupportedValue(
        name,
        "parameter of FSDP1 that is gathered now",
        "save after backward() and before the next forward(), and outside of "
        "summon_full_params(): under SHARD_GRAD_OP "
        "parameters are gathered from forward() to backward()",
    )


Flat = Mapping[str, Piece]
"""What lies in one parameter that an optimizer may have: pieces by their keys in the module.

The key of the one piece in a parameter that has keys itself is ''.
"""


def flat_parameters(module: nn.Module) -> dict[int, Flat]:
    """Map the identity of each flat parameter of FSDP1 in ``module`` to the pieces in it.

    The result is empty without FSDP1.
    """
    found: dict[int, Flat] = {}
    for name, wrapper in _wrappers(module):
        if (handle := wrapper._handle) is not None:  # None: it has no parameters of its own
            found.update(_flats(f"{name}." if name else "", wrapper, handle))
    return found


def over_tensor_parallel(module: nn.Module) -> Iterator[str]:
    """Keys of the parameters that FSDP1 has flattened and that were DTensors before, as
    ``parallelize_module`` makes them.
    """
    for name, wrapper in _wrappers(module):
        flat = wrapper._handle.flat_param if wrapper._handle is not None else None
        for fqn, extension in (
            zip(flat._fqns, flat._param_extensions, strict=True) if flat is not None else ()
        ):
            if extension is not None:
                yield f"{name}.{_WRAPPED}.{fqn}" if name else f"{_WRAPPED}.{fqn}"


def handles(module: nn.Module) -> Iterator[Any]:
    """FSDP1's handles of the flat parameters of ``module``."""
    for _, wrapper in _wrappers(module):
        if (handle := wrapper._handle) is not None:  # None: it has no parameters of its own
            yield handle


def is_fsdp1(module: nn.Module) -> bool:
    """Return True if any part of the module is wrapped in FSDP1."""
    return any(True for _ in _wrappers(module))


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
    """``state_dict(keep_vars=True)`` without anybody's hooks."""
    state: dict[str, Any] = {}
    module._save_to_state_dict(state, prefix, keep_vars=True)
    for name, child in module._modules.items():
        if child is not None:
            state |= hookless_state(child, f"{prefix}{name}.")
    return state


def as_source(tensor: torch.Tensor) -> Source:
    """A ``ShardedTensor`` as the boxes it is; every other tensor is itself."""
    api: Any = sys.modules.get("torch.distributed._shard.sharded_tensor")
    if api is None or not isinstance(tensor, api.ShardedTensor):
        return tensor
    held: Any = tensor
    shards = [(shard.metadata.shard_offsets, shard.tensor) for shard in held.local_shards()]
    return LocalShards(tuple(tensor.size()), shards, dtype=tensor.dtype)


def _wrappers(module: nn.Module) -> Iterator[tuple[str, Any]]:
    if "torch.distributed.fsdp" in sys.modules:
        for name, child in module.named_modules():
            if _WRAPPED in child._modules:
                yield name, child


def _flats(prefix: str, wrapper: Any, handle: Any) -> Iterator[tuple[int, Flat]]:
    flat = handle.flat_param
    ranks, copies = _groups(wrapper)
    sharded = bool(handle.uses_sharded_strategy)
    replicas = copies if sharded else ranks
    lead = f"{prefix}{_WRAPPED}."
    if handle._use_orig_params and not sharded:
        return  # ordinary parameters
    if handle._use_orig_params:
        described = zip(
            flat._params, flat._fqns, flat._shard_param_infos, flat._shapes, strict=True
        )
        for parameter, fqn, info, shape in described:
            length = info.numel_in_shard or 0
            start = info.intra_param_start_idx or 0
            yield (
                id(parameter),
                {"": Piece(f"{lead}{fqn}", tuple(shape), start, 0, length, length, replicas)},
            )
        return
    size = (flat._sharded_size if sharded else flat._unpadded_unsharded_size).numel()
    keyed: dict[str, Piece] = {}
    for fqn, info, shape in zip(flat._fqns, flat._shard_param_infos, flat._shapes, strict=True):
        keyed[f"{lead}{fqn}"] = Piece(
            f"{lead}{fqn}",
            tuple(shape),
            info.intra_param_start_idx or 0,
            info.offset_in_shard or 0,
            info.numel_in_shard or 0,
            size,
            replicas,
        )
    for shared in flat._shared_param_infos:
        first, other = (
            lead + ".".join(filter(None, (module, parameter)))
            for module, parameter in (
                (shared.prim_module_name, shared.prim_param_name),
                (shared.module_name, shared.param_name),
            )
        )
        keyed[other] = keyed[first]
    yield id(flat), keyed


def _groups(wrapper: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ranks it shards over, and those that replicate this rank's shard."""
    copies = getattr(wrapper, "_inter_node_pg", None)
    return _ranks(wrapper.process_group), _ranks(copies) if copies is not None else ()


def _ranks(group: Any) -> tuple[int, ...]:
    return tuple(sorted(torch.distributed.get_process_group_ranks(group)))

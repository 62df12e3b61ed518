"""Conversions between the state dicts of DeepSpeed's files and values that a step may hold.

DeepSpeed pickles objects of a few types of its own. This module has a table of these types, and
stores such an object as a dict of plain values with the name of its type. A load makes objects of
these types only.
"""

from __future__ import annotations

import argparse
import functools
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Self

import numpy as np
import torch
from torch.optim import Optimizer

from ckpt.errors import RestoreError, UnsupportedValue
from ckpt.model.values import join
from ckpt.state.tensors.local_shards import LocalShards

_KIND, _VALUE, _METADATA = "ckpt.kind", "value", "metadata"
_STATE_DICT, _ARRAY = "state_dict", "numpy"
_PLAIN_TYPES: Final = (
    *(type(None), bool, int, float, complex, str, bytes, bytearray, set, frozenset),
    *(torch.Size, torch.dtype, torch.device),
)
_ADVICE: Final = (
    "client_state takes tensors, arrays and plain values: give an object's state_dict() there"
)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Stands for the tensor ``name`` of a step, which is not read yet."""

    name: str


@dataclass(frozen=True, slots=True)
class OptimizerMemory:
    """The memory that only the ``step`` of one optimizer changes.

    A save copies this memory while training goes on, and the optimizer's ``step`` waits for the
    copy.

    Attributes:
        optimizer: The torch optimizer inside of DeepSpeed's own optimizer; None if there is none.
        addresses: The addresses of the storages of the tensors in this memory.
    """

    optimizer: Optimizer | None
    addresses: Set[int]

    @classmethod
    def of(cls, engine: Any) -> Self:
        """Return the memory that the optimizer of ``engine`` owns.

        This memory holds the optimizer's state, the master weights, and the trained weights that
        DeepSpeed computes from the master weights after a step.
        """
        optimizer = engine.optimizer
        while not isinstance(optimizer, Optimizer):
            if optimizer is None:
                return cls(None, frozenset())
            optimizer = getattr(optimizer, "optimizer", None)
        values: list[Any] = [
            weight for weight in engine.module.parameters() if weight.requires_grad
        ]
        values += [master for group in optimizer.param_groups for master in group["params"]]
        for parameter, state in optimizer.state.items():
            values += [parameter, *state.values()]
        addresses = {_address(value) for value in values if isinstance(value, torch.Tensor)}
        return cls(optimizer, addresses - {0})


def pack(value: Any, path: str, memory: OptimizerMemory) -> Any:
    """Return ``value`` in a form that a step may hold. `unpack` does the reverse.

    Args:
        value: A state dict of DeepSpeed, or a part of one.
        path: The name of the value in the state, for errors.
        memory: The memory that is copied while training goes on.

    Raises:
        UnsupportedValue: A part of ``value`` would need pickle.
    """
    return _Packer(memory).pack(value, path)


class _Packer:
    """Packs the values of one state dict (see `pack`).

    A tensor in the optimizer's memory becomes a ``LocalShards`` whose owner is the optimizer. Such
    tensors are copied *late*: while training goes on, until the owner's ``step``.
    """

    def __init__(self, memory: OptimizerMemory) -> None:
        self._memory = memory
        self._shards: dict[object, LocalShards] = {}

    def pack(self, value: Any, path: str) -> Any:
        """Return ``value``, which has the name ``path`` in the state, in its packed form."""
        kind = type(value)
        if kind in _PLAIN_TYPES or isinstance(value, np.generic):
            return value
        if kind in (torch.Tensor, torch.nn.Parameter):
            return self._tensor(value.detach())
        if kind is np.ndarray:
            return {_KIND: _ARRAY, _VALUE: value}
        if kind in (dict, OrderedDict, Counter):
            return self._mapping(value, path)
        if kind in (list, tuple):
            return kind(self.pack(item, join(path, str(i))) for i, item in enumerate(value))
        if (
            name := next(
                (name for name, candidate in _types_by_name().items() if candidate is kind), None
            )
        ) is None:
            raise UnsupportedValue(path, f"{kind.__module__}.{kind.__qualname__}", _ADVICE)
        fields = value.value if isinstance(value, Enum) else self.pack(dict(vars(value)), path)
        return {_KIND: name, _VALUE: fields}

    def _mapping(self, value: dict[Any, Any], path: str) -> Any:
        """Return a dict with packed items, and with the metadata of a module's state dict."""
        if _KIND in value:
            raise UnsupportedValue(join(path, _KIND), "key", "name it otherwise")
        items = {key: self.pack(item, join(path, key)) for key, item in value.items()}
        metadata = getattr(value, "_metadata", None)  # ``nn.Module.state_dict`` sets it
        if metadata is None:
            return type(value)(items)
        versions = self.pack(dict(metadata), join(path, _METADATA))
        return {_KIND: _STATE_DICT, _VALUE: items, _METADATA: versions}

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor | LocalShards:
        """Return a tensor in the optimizer's memory as ``LocalShards``, and others unchanged.

        The optimizer is the owner of the ``LocalShards``, so a snapshot copies them late. Tensors
        with the same memory and layout give the same object, which is saved once.
        """
        if not tensor.numel() or _address(tensor) not in self._memory.addresses:
            return tensor
        layout = (tuple(tensor.shape), tensor.stride())
        key = (tensor.data_ptr(), tensor.dtype, tensor.device, *layout)
        if key not in self._shards:
            whole_tensor = [((0,) * tensor.ndim, tensor)]  # Offsets and tensor of the only shard
            self._shards[key] = LocalShards(
                tensor.shape, whole_tensor, owner=self._memory.optimizer
            )
        return self._shards[key]


def unpack(value: Any, make_tensor: Callable[[str], torch.Tensor]) -> Any:
    """Return the value from which `pack` has made ``value``.

    Args:
        value: The value in the step, with a `StoredTensor` for each tensor.
        make_tensor: A function that returns the tensor with a given name.

    Raises:
        RestoreError: The step has an object of a type that this version of ckpt does not know.
    """

    def unpack_item(item: Any) -> Any:
        return unpack(item, make_tensor)

    match value:  # "ckpt.kind" is ``_KIND``, which a pattern would take for a new variable
        case StoredTensor():
            return make_tensor(value.name)
        case {"ckpt.kind": "state_dict"}:
            return _state_dict(unpack_item(value[_VALUE]), unpack_item(value[_METADATA]))
        case {"ckpt.kind": "numpy"}:
            return unpack_item(value[_VALUE]).numpy()
        case {"ckpt.kind": str(kind)}:
            return _make_instance(kind, unpack_item(value[_VALUE]))
        case dict():
            return type(value)({key: unpack_item(item) for key, item in value.items()})
        case list() | tuple():
            return type(value)(map(unpack_item, value))
        case _:
            return value


def _state_dict(items: Mapping[str, Any], metadata: Any) -> Any:
    """Return the items as a state dict of a module, with ``metadata`` as its ``_metadata``."""
    state: Any = OrderedDict(items)
    vars(state)["_metadata"] = metadata
    return state


def _make_instance(kind: str, value: Any) -> Any:
    """Return an object of the type that is stored as ``kind``, with its enum value or its
    attributes.
    """
    if (cls := _types_by_name().get(kind)) is None:
        raise RestoreError(f"the checkpoint has a value of the type {kind!r}: install a later ckpt")
    if issubclass(cls, Enum):
        return cls(value)
    instance = cls.__new__(cls)
    vars(instance).update(value)
    return instance


@functools.cache
def _types_by_name() -> Mapping[str, Any]:
    """Return the types of the objects that a step may hold: name in the step -> type.

    An enum is stored by its value, and any other object by its attributes.
    """
    from deepspeed.runtime.fp16.loss_scaler import (  # pyright: ignore[reportMissingImports]
        DynamicLossScaler,
        LossScaler,
    )
    from deepspeed.runtime.zero.config import (  # pyright: ignore[reportMissingImports]
        ZeroStageEnum,
    )
    from deepspeed.utils.tensor_fragment import (  # pyright: ignore[reportMissingImports]
        fragment_address,
    )

    return {
        "LossScaler": LossScaler,
        "DynamicLossScaler": DynamicLossScaler,
        "ZeroStageEnum": ZeroStageEnum,
        "fragment_address": fragment_address,
        "Namespace": argparse.Namespace,
    }


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()

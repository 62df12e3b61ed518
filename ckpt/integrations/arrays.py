"""States without torch tensors: NumPy arrays, JAX arrays, variables and models of TensorFlow and
Keras, and trees of these.

    train = state_of({"params": params, "optimizer": opt_state})
    state = {"train": train, "step": 0}
    manager.restore(state)
    ...
    train.value = update(train.value, batch)      # JAX arrays are replaced, not filled
    manager.save_async(state)

A save reads the memory of the arrays directly. For a save, this module copies only arrays that it
cannot give to torch, such as NumPy arrays that are read-only or not contiguous. A restore fills
NumPy arrays and variables in place, and puts new arrays into ``value`` where arrays cannot change.

A tree consists of containers, such as dicts and tuples, and of leaves. A *leaf* is an array, a
variable or another value without items.

This module imports neither TensorFlow nor JAX.
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

import numpy as np
import torch
from torch.distributed.checkpoint.stateful import Stateful
from torch.utils.dlpack import from_dlpack

from ckpt.errors import ConfigError, UnsupportedValue
from ckpt.model.dtype import DTYPES
from ckpt.state.tensors.local_shards import LocalShards
from ckpt.state.walk.stand_in import Refillable

_SINGLE_VALUE: Final = "value"
"""The name of the value in the state if it is a single array or plain value, and no container."""
_PLAIN_TYPES: Final = (str, bytes, int, float, complex, bool, type(None), np.generic)


class Arrays(Refillable, Stateful):
    """A value with arrays, as an entry of a state. `state_of` makes such entries.

    Attributes:
        value: The value that the next save saves. A restore fills the arrays and variables that can
            change, and replaces all other arrays and values by new ones.
    """

    def __init__(self, value: Any, replicas: Iterable[int] = ()) -> None:
        self.value = value
        self._replicas = tuple(replicas)

    def state_dict(self) -> dict[str, Any]:
        """Return ``value`` with a dict for each container and a tensor for each array.

        A tensor shares the memory of its array. It is a copy if torch cannot address this memory,
        or if the array is a NumPy array that is read-only or not contiguous.
        """
        return self._leaf_values(_to_tensor)

    def targets(self) -> dict[str, Any]:
        """Return the tensors and values that a restore fills, in the form of ``state_dict()``.

        The tensors share the memory of NumPy arrays and torch tensors if a restore can fill these
        in place. For all other arrays, the tensors are copies.
        """
        return self._leaf_values(_target_tensor)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Put the values that a restore has filled into ``value``."""
        content = state_dict if _is_container(self.value) else state_dict[_SINGLE_VALUE]
        self.value = _rebuilt(self.value, content)

    def _leaf_values(self, convert: Callable[[str, Any], Any]) -> dict[str, Any]:
        content = _map_leaves(
            "", self.value, lambda path, leaf: self._as_shards(convert(path, leaf))
        )
        return content if _is_container(self.value) else {_SINGLE_VALUE: content}

    def _as_shards(self, tensor: Any) -> Any:
        if not isinstance(tensor, torch.Tensor) or len(self._replicas) < 2:
            return tensor
        return LocalShards(tensor.shape, [((0,) * tensor.ndim, tensor)], self._replicas)


def state_of(value: Any, *, replicas: Iterable[int] = ()) -> Arrays:
    """Return an entry of a state that saves and restores ``value``.

    Args:
        value: An array or variable, a Keras model or optimizer, a ``tf.Module``, or a tree of
            these: dicts, lists, tuples, named tuples, and classes that are registered with JAX as
            trees. Plain values in the tree are saved too. An optimizer of Keras must be built
            (``optimizer.build``).
        replicas: The ranks that hold the same values, this rank included: ``range(world_size)`` in
            data-parallel training. Each of these ranks writes a part of the values. If their values
            differ, the save fails. Without ``replicas``, each rank writes all of its values.

    Raises:
        ConfigError: Two keys of a container are equal as text, such as 1 and "1".
    """
    arrays = Arrays(value, replicas)
    _map_leaves("", value, lambda _path, _leaf: None)
    return arrays


# -- trees -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Container:
    """A container in a tree.

    ``items`` are the items of the container by name. ``make`` takes a list of new items in the same
    order, and returns a container with the new items.
    """

    items: dict[str, Any]
    make: Callable[[list[Any]], Any]


def _container_of(value: Any) -> _Container | None:
    """Return ``value`` as a container, or None if it is a leaf."""
    if _is_leaf(value):
        return None
    if (variables := getattr(value, "variables", None)) is not None and not callable(variables):
        # Its variables are filled in place.
        return _Container(_by_unique_name(variables), lambda _: value)
    if type(value) in (dict, OrderedDict):
        make = type(value)
        return _Container(
            _by_name(value.keys(), value.values()),
            lambda items: make(zip(value.keys(), items, strict=True)),
        )
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        kind = cast(Any, type(value))
        return _Container(_by_name(kind._fields, value), lambda items: kind(*items))
    if type(value) in (list, tuple):
        return _Container(_by_name(range(len(value)), value), type(value))
    return _jax_container(value)


def _jax_container(value: Any) -> _Container | None:
    """Return ``value`` as a container if its class is registered with JAX as a tree, else None."""
    if "jax" not in sys.modules:
        return None
    tree = _jax().tree_util
    # Only one level: the items of ``value`` count as leaves.
    items_by_path, structure = tree.tree_flatten_with_path(
        value, is_leaf=lambda item: item is not value
    )
    if len(items_by_path) == 1 and items_by_path[0][1] is value:
        return None
    keys = [tree.keystr(path, simple=True) for path, _ in items_by_path]
    return _Container(
        _by_name(keys, [item for _, item in items_by_path]),
        lambda items: tree.tree_unflatten(structure, items),
    )


def _is_container(value: Any) -> bool:
    return _container_of(value) is not None


def _is_leaf(value: Any) -> bool:
    return isinstance(value, _PLAIN_TYPES) or _is_variable(value) or _is_array(value)


def _by_name(names: Iterable[object], items: Iterable[Any]) -> dict[str, Any]:
    """Return the items of a container by their names as text."""
    pairs = list(zip(map(str, names), items, strict=True))
    by_name = dict(pairs)
    if len(by_name) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        duplicates = sorted(name for name, count in counts.items() if count > 1)
        raise ConfigError(
            f"state_of: several keys of a dict are {duplicates[0]!r} as text: rename one of them"
        )
    return by_name


def _by_unique_name(variables: Iterable[Any]) -> dict[str, Any]:
    """Return the variables by their ``path`` or ``name``. Repeated names get a number."""
    by_name: dict[str, Any] = {}
    for variable in variables:
        name = str(getattr(variable, "path", None) or getattr(variable, "name", "") or "variable")
        base = name.removesuffix(":0")  # TensorFlow names the first output of an operation so
        unique_name, number = base, 1
        while unique_name in by_name:
            unique_name, number = f"{base}_{number}", number + 1
        by_name[unique_name] = variable
    return by_name


def _map_leaves(path: str, value: Any, convert: Callable[[str, Any], Any]) -> Any:
    """Return ``value`` with a dict for each container, and ``convert(path, leaf)`` for a leaf."""
    if (container := _container_of(value)) is None:
        return convert(path, value)
    return {
        name: _map_leaves(f"{path}/{name}", item, convert) for name, item in container.items.items()
    }


def _rebuilt(value: Any, state: Any) -> Any:
    """Return ``value`` with the restored ``state`` of its tree. What can change is filled in place,
    and all other leaves and containers are new.
    """
    if (container := _container_of(value)) is not None:
        return container.make(
            [_rebuilt(item, state[name]) for name, item in container.items.items()]
        )
    if isinstance(state, LocalShards):
        (state,) = state.tensors
    return _assign(value, state) if isinstance(state, torch.Tensor) else state


# -- leaves ----------------------------------------------------------------------------------------


def _is_variable(value: Any) -> bool:
    return callable(getattr(value, "assign", None)) and hasattr(value, "value")


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _array_of(leaf: Any) -> Any:
    """Return the array that the variable ``leaf`` holds, or ``leaf`` if it is no variable."""
    while _is_variable(leaf):
        leaf = leaf.value() if callable(leaf.value) else leaf.value
    return leaf


def _is_random_key(array: Any) -> bool:
    """Return True for a typed key of random numbers, as ``jax.random.key`` makes it."""
    if _library(array) != "jax":
        return False
    dtypes = _jax().dtypes
    return bool(dtypes.issubdtype(array.dtype, dtypes.prng_key))


def _to_tensor(path: str, leaf: Any) -> Any:
    """Return a tensor with the content of ``leaf``.

    The tensor shares the memory of ``leaf``. It is a copy if torch cannot address this memory, or
    if ``leaf`` is a NumPy array that is read-only or not contiguous.

    Plain values and torch tensors are returned as they are. Errors name ``path``.
    """
    array = _array_of(leaf)
    if not _is_array(array) or isinstance(array, torch.Tensor | np.generic):
        return array
    if isinstance(array, np.ndarray):
        return _from_numpy(path, array)
    if _library(array) not in ("jax", "tensorflow"):
        raise _unsupported_error(
            path, array, "put it into the state as a NumPy array or a torch tensor"
        )
    if _is_random_key(array):
        array = _jax().random.key_data(array)
    if not getattr(array, "is_fully_addressable", True):
        way = "put ckpt.LocalShards of its addressable_shards into the state"
        raise _unsupported_error(path, array, way)
    _torch_dtype(path, array)  # TensorFlow aborts the process when a tensor of strings is exported
    if hasattr(array, "block_until_ready"):
        array.block_until_ready()
    try:
        return from_dlpack(array)
    except (RuntimeError, BufferError, TypeError, ValueError):  # torch cannot address the memory
        return _from_numpy(path, np.asarray(array))


def _from_numpy(path: str, array: np.ndarray[Any, Any]) -> torch.Tensor:
    """Return a tensor with the content of a NumPy array, and with its memory if possible."""
    if isinstance(array, np.ma.MaskedArray):
        raise _unsupported_error(path, array, "save its data and its mask as arrays of their own")
    dtype = _torch_dtype(path, array)
    contiguous = array if array.flags.c_contiguous else np.ascontiguousarray(array)
    contiguous = contiguous if contiguous.flags.writeable else contiguous.copy()
    # torch.from_numpy accepts no dtype that another package has added, such as bfloat16.
    raw = torch.from_numpy(contiguous.reshape(-1).view(np.uint8))
    return raw.view(dtype).reshape(array.shape)


def _torch_dtype(path: str, array: Any) -> torch.dtype:
    """Return torch's dtype for the elements of an array.

    Raises:
        UnsupportedValue: torch has no such dtype.
    """
    dtype = _numpy_dtype(array)
    if dtype is None or dtype.name not in DTYPES or not dtype.isnative:
        raise _unsupported_error(path, array, "convert it to a numeric dtype of this machine")
    return cast(torch.dtype, getattr(torch, dtype.name))


def _numpy_dtype(array: Any) -> np.dtype[Any] | None:
    try:
        dtype: np.dtype[Any] = np.dtype(getattr(array.dtype, "as_numpy_dtype", array.dtype))
    except TypeError:
        return None
    return dtype


def _library(array: Any) -> str:
    """Return the name of the library that made the array, such as ``jax``."""
    package = type(array).__module__.partition(".")[0]
    return "jax" if package == "jaxlib" else package


def _jax() -> Any:
    return sys.modules["jax"]


def _unsupported_error(path: str, array: Any, way: str) -> UnsupportedValue:
    kind = f"{type(array).__module__}.{type(array).__qualname__} of dtype {array.dtype}"
    return UnsupportedValue(path.lstrip("/"), kind, way)


def _target_tensor(path: str, leaf: Any) -> Any:
    """Return a tensor with the present values of ``leaf``, which a restore fills, or a plain value.

    If ``leaf`` is a torch tensor or a NumPy array that can be filled in place, the tensor has the
    memory of ``leaf``. Otherwise the tensor is a copy.
    """
    value = _to_tensor(path, leaf)
    in_place = isinstance(_array_of(leaf), torch.Tensor) or (
        isinstance(leaf, np.ndarray) and leaf.flags.writeable and leaf.flags.c_contiguous
    )
    return value.clone() if isinstance(value, torch.Tensor) and not in_place else value


def _assign(leaf: Any, tensor: torch.Tensor) -> Any:
    """Return ``leaf`` with the values of ``tensor``, or a new array if ``leaf`` cannot change."""
    array = _array_of(leaf)
    if isinstance(array, torch.Tensor):
        return leaf
    if _library(array) == "jax" and not _is_variable(leaf):
        return _new_jax(array, tensor)
    values = _to_numpy(tensor, _numpy_dtype(array))
    if _is_variable(leaf):
        leaf.assign(values)
    elif not isinstance(leaf, np.ndarray):
        return cast(Any, sys.modules["tensorflow"]).constant(values)
    elif not leaf.flags.writeable:
        array_copy = np.empty_like(leaf, subok=False)
        array_copy[...] = values
        return array_copy
    elif not leaf.flags.c_contiguous:
        leaf[...] = values
    return leaf


def _new_jax(array: Any, tensor: torch.Tensor) -> Any:
    """Return a JAX array with the values of ``tensor`` and the sharding of ``array``."""
    jax = _jax()
    # An array that is committed to no device may be used with arrays on any devices.
    target_sharding = array.sharding if array.committed else None
    if _is_random_key(array):
        data = jax.numpy.asarray(tensor.numpy())
        key = jax.random.wrap_key_data(data, impl=jax.random.key_impl(array))
        return jax.device_put(key, target_sharding)
    values = jax.device_put(_to_numpy(tensor, _numpy_dtype(array)), target_sharding)
    return array.at[...].set(values) if array.weak_type else values


def _to_numpy(tensor: torch.Tensor, dtype: np.dtype[Any] | None) -> np.ndarray[Any, Any]:
    """Return an array of ``dtype`` with the bytes of ``tensor``.

    ``dtype`` may be one that another package has added to NumPy, such as bfloat16.
    """
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return cast("np.ndarray[Any, Any]", raw.view(cast(Any, dtype)).reshape(tensor.shape))

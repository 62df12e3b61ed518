"""Take apart wrapper tensors, which are tensors whose elements are in other tensors.

A wrapper tensor is of a subclass of ``torch.Tensor`` and has no memory of its own. Examples are
quantised weights, quantised optimizer state and jagged tensors. The ``__tensor_flatten__`` of the
class returns the names of the tensors inside, and metadata. A save stores the tensors inside and
the metadata. A restore compares the metadata and fills the tensors inside in place. It never makes
an object of a class that a checkpoint names.

A layer is one wrapper tensor with the tensors inside of it, which may be wrapper tensors too. The
innermost tensors of a wrapper tensor are those that are no wrapper tensors. An alias is a plain
tensor with the memory and the version counter of another one. The metadata of a DTensor's local
tensor has the size of this part in some places: a save writes the size of the whole tensor there.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from typing import Any, Final, NamedTuple, TypeGuard
from weakref import WeakKeyDictionary

import torch
from torch.distributed.tensor import DTensor

from ckpt.errors import UnsupportedValue
from ckpt.model.values import Node, encode, join
from ckpt.state.tensors.layout import (
    PLAIN_CLASSES,
    boxes_of,
    holders_of,
    replicas_of,
    without_dtensor,
)
from ckpt.state.tensors.local_shards import LocalShards, TensorOrShards
from ckpt.torch_private import plain_alias, storage_identity


def is_wrapper(value: object) -> TypeGuard[torch.Tensor]:
    """Return True if ``value`` is a wrapper tensor, whose elements are in other tensors, or a
    DTensor whose local tensor is one.
    """
    if type(value) in PLAIN_CLASSES or not isinstance(value, torch.Tensor):
        return False
    return _is_wrapper_class(type(without_dtensor(value)))


def wrappers_in(tensors: Sequence[TensorOrShards]) -> Iterator[int]:
    """Yield the indices of the wrapper tensors among ``tensors``. The call is fast for thousands of
    tensors if none is a wrapper.
    """
    if PLAIN_CLASSES.issuperset(map(type, tensors)):
        return
    kinds = set[type](map(type, tensors))
    kinds.update(type(tensor._local_tensor) for tensor in tensors if isinstance(tensor, DTensor))
    if any(_is_wrapper_class(kind) for kind in kinds if kind is not DTensor):
        yield from (index for index, tensor in enumerate(tensors) if is_wrapper(tensor))


def _is_wrapper_class(kind: type) -> bool:
    return hasattr(kind, "__tensor_flatten__")


def kind_of(tensor: torch.Tensor) -> str:
    """Return the qualified name of the class of a tensor, or of the local tensor of a DTensor."""
    return _full_name(type(without_dtensor(tensor)))


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """One wrapper tensor and the tensors inside of it. These may be wrapper tensors, too.

    Attributes:
        kind: The qualified name of the wrapper's class.
        values: The metadata as a node of plain values, which is saved and compared.
        inner: The tensors inside, by the attributes that hold them. Wrapper tensors among them are
            layers.
        tensor: The wrapper tensor itself.
        alias: A plain tensor with the version counter of the wrapper. Operations on the wrapper
            move this counter, and do not always move the counters of the tensors inside.
    """

    kind: str
    values: Node
    inner: Mapping[str, torch.Tensor | Layer]
    tensor: torch.Tensor
    alias: torch.Tensor = field(repr=False)  # Torch crashes when it prints an alias

    def inner_tensors(self, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the path and the tensor of each innermost tensor. ``path`` is the path of this
        wrapper in the outermost one.
        """
        for name, part in self.inner.items():
            if isinstance(part, Layer):
                yield from part.inner_tensors(join(path, name))
            else:
                yield join(path, name), part

    def layers(self) -> Iterator[Layer]:
        """Yield this layer and the layers of the wrapper tensors inside of it."""
        yield self
        for part in self.inner.values():
            if isinstance(part, Layer):
                yield from part.layers()

    def node(self, name: str, stored_name: Callable[[str], str]) -> Node:
        """Return the node of the manifest's tree for this wrapper tensor, which is ``name`` in the
        state.

        ``stored_name`` takes the name of an innermost tensor, and returns the name under which its
        bytes are stored.
        """
        inner = {
            attribute: part.node(join(name, attribute), stored_name)
            if isinstance(part, Layer)
            else {"$": "tensor", "n": stored_name(join(name, attribute))}
            for attribute, part in self.inner.items()
        }
        return {"$": "subclass", "class": self.kind, "inner": inner, "v": self.values}


class InnerTensor(NamedTuple):
    """An innermost tensor of a wrapper tensor, to be saved under a name of its own.

    Attributes:
        tensor: The tensor, or ``LocalShards`` if the tensor is a part of a larger one, cut like the
            DTensor around it.
        replicas: The ranks that are known to hold the same tensor; empty if ``tensor`` is
            ``LocalShards``, which have replicas of their own.
    """

    tensor: TensorOrShards
    replicas: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class WrapperParts:
    """The result of `take_apart`: a wrapper tensor and its layers.

    Attributes:
        name: The name of the wrapper tensor in the state.
        tensor: The wrapper tensor, or the DTensor whose local tensor it is.
        layer: The layer of the wrapper tensor on this rank.
        outer_tensors: The tensors around the innermost ones that have version counters of their
            own.
        key: A value that is equal on the next save if the wrapper tensors and the layout of the
            DTensor have not changed. It does not cover the innermost tensors, so these must be
            compared separately.
    """

    name: str
    tensor: torch.Tensor
    layer: Layer
    outer_tensors: tuple[torch.Tensor, ...] = field(repr=False)
    key: Hashable

    def innermost_tensors(self, ranks: tuple[int, ...] = ()) -> dict[str, InnerTensor]:
        """Return the innermost tensors, by their paths in the wrapper tensor.

        Args:
            ranks: The ranks that are known to hold the same wrapper tensor, or for a DTensor the
                ``unit_ranks`` of ``layout.replicas_of``.

        Raises:
            UnsupportedValue: The tensor is a DTensor, and it is not possible to tell which parts of
                the inner tensors belong to this rank.
        """
        if isinstance(self.tensor, DTensor):
            return _innermost_of_sharded(self.name, self.tensor, self.layer, ranks)
        return {
            path: InnerTensor(inner_tensor, ranks)
            for path, inner_tensor in self.layer.inner_tensors()
        }


def take_apart(name: str, tensor: torch.Tensor) -> WrapperParts:
    """Take apart a wrapper tensor, or a DTensor whose local tensor is one. ``name`` is its name in
    the state.

    Raises:
        UnsupportedValue: The wrapper tensor cannot be saved. For example, it has memory of its own,
            or metadata with a value that is not plain.
    """
    part = without_dtensor(tensor)
    layer = _layer(name, part, _without_resize)
    if not isinstance(tensor, DTensor):
        return WrapperParts(name, tensor, layer, _aliases(layer), _identities(layer))
    if part.shape != tensor.shape and (size_paths := _size_paths(name, layer)):
        whole = tensor.shape
        layer = _layer(name, part, lambda path, items: whole if path in size_paths else items)
    spec = tensor._spec
    key = (_Identity(tensor), _identities(layer), spec.mesh, spec.placements, spec.tensor_meta)
    return WrapperParts(name, tensor, layer, (tensor, *_aliases(layer)), key)


class _Identity:
    """Holds a tensor. Two of these are equal if and only if they hold the same tensor object."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __eq__(self, candidate: object) -> bool:
        return isinstance(candidate, _Identity) and candidate.tensor is self.tensor

    def __hash__(self) -> int:
        return id(self.tensor)


def _identities(layer: Layer) -> Hashable:
    return (*(_Identity(inner.tensor) for inner in layer.layers()), *dict(layer.inner_tensors()))


def _aliases(layer: Layer) -> tuple[torch.Tensor, ...]:
    return tuple(inner.alias for inner in layer.layers())


# -- one layer -------------------------------------------------------------------------------------

_Resize = Callable[[str, Sequence[Any]], Sequence[Any]]


def _without_resize(_: str, items: Sequence[Any]) -> Sequence[Any]:
    return items


def _layer(name: str, tensor: torch.Tensor, resize: _Resize) -> Layer:
    """Return the class, the metadata and the inner tensors of the wrapper tensor ``tensor``, which
    is ``name`` in the state.

    ``resize(path, items)`` is called for each tuple or list in the metadata of ``tensor``, with its
    path and its items, and returns the items to save in place of these. It is not called for
    wrapper tensors inside of ``tensor``.

    Raises:
        UnsupportedValue: The wrapper tensor cannot be saved.
    """
    kind = _full_name(type(tensor))
    if tensor.is_meta:
        raise UnsupportedValue(name, f"{kind} on the meta device", "materialise it first")
    # A plain tensor with the memory and the version counter of the wrapper, not of its parts.
    alias = plain_alias(tensor)
    if _has_memory(alias):
        raise UnsupportedValue(
            name,
            f"{kind}, a tensor with memory of its own and with tensors inside of it",
            "save its parts under names of their own",
        )
    try:
        inner_tensors, metadata = _flatten(tensor)
        second_read, _ = _flatten(tensor)
    except Exception as error:
        raise UnsupportedValue(
            name, f"{kind} whose __tensor_flatten__() raises {type(error).__name__}", f"{error}"
        ) from error
    inner: dict[str, torch.Tensor | Layer] = {}
    for attribute, part in inner_tensors.items():
        if not isinstance(part, torch.Tensor) or part is tensor:
            raise UnsupportedValue(
                name,
                f"{kind} whose __tensor_flatten__() names {attribute!r}, which is no tensor inside "
                "of it",
                "correct the class",
            )
        if not _is_same_tensor(part, second_read.get(attribute)):
            raise UnsupportedValue(
                name,
                f"{kind} whose {attribute!r} is a new tensor each time it is read",
                "name the tensors that it keeps in __tensor_flatten__()",
            )
        is_layer = is_wrapper(part) and not isinstance(part, DTensor)
        inner[attribute] = (
            _layer(join(name, attribute), part, _without_resize) if is_layer else part
        )
    try:
        values = _metadata_node(metadata, _metadata_path(name), resize)
    except RecursionError:
        raise UnsupportedValue(name, f"{kind} with metadata nested too deeply") from None
    return Layer(kind, values, inner, tensor, alias)


def _metadata_path(name: str) -> str:
    return f"the metadata of {name}"


def _flatten(tensor: Any) -> tuple[dict[str, Any], Any]:
    """Return the tensors inside of a wrapper tensor by the attributes that hold them, and the
    metadata.
    """
    attributes, metadata = tensor.__tensor_flatten__()
    return {str(attribute): getattr(tensor, attribute) for attribute in attributes}, metadata


def _is_same_tensor(first_read: torch.Tensor, second_read: Any) -> bool:
    """Return True if two reads of the same attribute have returned tensors with the same memory,
    so that the attribute does not make a new tensor on each read.
    """
    if first_read is second_read:
        return True
    if not isinstance(second_read, torch.Tensor) or type(first_read) is not type(second_read):
        return False
    first_read, second_read = without_dtensor(first_read), without_dtensor(second_read)
    if _is_wrapper_class(type(first_read)):
        (parts, _), (second_parts, _) = _flatten(first_read), _flatten(second_read)
        return all(_is_same_tensor(part, second_parts.get(name)) for name, part in parts.items())
    return (
        first_read.layout == second_read.layout == torch.strided
        and storage_identity(first_read) == storage_identity(second_read)
        and first_read.storage_offset() == second_read.storage_offset()
    )


def _has_memory(alias: torch.Tensor) -> bool:
    """Return True if a wrapper tensor has memory of its own. ``alias`` is a plain alias of it."""
    try:
        return alias.data_ptr() != 0
    except RuntimeError:  # The tensor has symbolic sizes, as a jagged tensor has
        return False


def _metadata_node(value: Any, path: str, resize: _Resize) -> Node:
    """Return the metadata ``value`` as a node of plain values. A restore only compares it.

    Devices become None, since a restore leaves a tensor on its device. ``resize(path, items)``
    returns the items to save in place of a tuple or list.
    """

    def node_of_entries(entries: Mapping[str, Any]) -> Node:
        return {key: _metadata_node(item, f"{path}/{key}", resize) for key, item in entries.items()}

    match value:
        case torch.device():
            return None
        case Enum():
            return {"class": _full_name(type(value)), "member": value.name}
        case tuple() if (names := getattr(value, "_fields", None)) is not None:
            members = dict(zip(names, value, strict=True))
            return {"class": _full_name(type(value)), "fields": node_of_entries(members)}
        case list() | tuple():
            items = enumerate(resize(path, value))
            return [_metadata_node(item, f"{path}/{i}", resize) for i, item in items]
        case dict() if all(type(key) is str and not key.startswith("$") for key in value):
            return node_of_entries(value)
        case _ if is_dataclass(value) and not isinstance(value, type):
            members = {member.name: getattr(value, member.name) for member in fields(value)}
            return {"class": _full_name(type(value)), "fields": node_of_entries(members)}
        case _:
            return encode(value, path, _dtype_node)


def _dtype_node(value: object, path: str) -> Node:
    """Return the node of a dtype in the metadata, and raise ``UnsupportedValue`` for any other
    value. ``encode`` calls this function for values that are not plain.
    """
    if isinstance(value, torch.dtype):
        return {"$": "dtype", "v": str(value).removeprefix("torch.")}
    raise UnsupportedValue(
        path,
        _full_name(type(value)),
        "save what the wrapper holds as tensors and plain values of their own",
    )


def _full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


_size_place_cache: Final = WeakKeyDictionary[type, dict[Hashable, frozenset[str]]]()


def _size_paths(name: str, layer: Layer) -> frozenset[str]:
    """Return the paths in the metadata of this rank's part of a DTensor that hold the size of the
    part. The saved metadata has the size of the whole tensor at these paths.

    A path counts only if a slice of the part has the size of the slice at this path. Another value,
    such as a block size, may equal the size of the part by chance. The result for a class, a shape
    and the metadata is cached, since each save needs it.
    """
    part, path = layer.tensor, _metadata_path(name)
    places = _places_of_size(part, path, torch.Size)
    if not places:
        return places
    places_by_metadata = _size_place_cache.setdefault(type(part), {})
    key = (part.shape, str(layer.values))
    for _, row_slice in _slices(part) if key not in places_by_metadata else ():
        with suppress(Exception):  # A user's code may raise anything
            places_by_metadata[key] = places & _places_of_size(row_slice, path, tuple)
            break
    return frozenset(path + place for place in places_by_metadata.get(key, ()))


def _places_of_size(tensor: torch.Tensor, path: str, kind: type) -> frozenset[str]:
    """Return the places in the metadata that hold the size of ``tensor`` as an instance of
    ``kind``.

    The metadata is at ``path``, and the places are paths without this prefix.
    """
    places = set[str]()

    def record_place(place: str, items: Sequence[Any]) -> Sequence[Any]:
        if isinstance(items, kind) and items == tensor.shape:
            places.add(place.removeprefix(path))
        return items

    _, metadata = _flatten(tensor)
    _metadata_node(metadata, path, record_place)
    return frozenset(places)


# -- sharded ---------------------------------------------------------------------------------------


def _innermost_of_sharded(
    name: str, tensor: DTensor, layer: Layer, unit_ranks: tuple[int, ...]
) -> dict[str, InnerTensor]:
    """Return the innermost tensors of a DTensor of a wrapper tensor, by their paths.

    If the DTensor is not sharded, its inner tensors are whole. If it is sharded by rows, each inner
    tensor is either whole on each rank, or a part of a larger tensor that is cut by rows. An inner
    tensor is a part if it is shorter in a slice ``[:n]`` of this rank's part of the DTensor.
    """
    part, boxes = without_dtensor(tensor), boxes_of(name, tensor)
    inner_tensors = dict(layer.inner_tensors())
    replicas = replicas_of(tensor, unit_ranks)
    if len(boxes) == 1 and boxes[0].shape == tuple(tensor.shape):
        return {
            path: InnerTensor(inner_tensor, replicas)
            for path, inner_tensor in inner_tensors.items()
        }
    if (
        len(boxes) != 1
        or boxes[0].shape != tuple(part.shape)
        or boxes[0].shape[1:] != tuple(tensor.shape)[1:]
    ):
        raise _refusal(name, layer.kind, "which is not cut by rows into one part for each rank")
    first_row, rows, all_rows = boxes[0].offsets[0], boxes[0].shape[0], tensor.shape[0]
    cut_paths = _cut_by_rows(name, layer)
    innermost_tensors: dict[str, InnerTensor] = {}
    for path, inner_tensor in inner_tensors.items():
        if path not in cut_paths:
            innermost_tensors[path] = InnerTensor(inner_tensor, holders_of(tensor, unit_ranks))
            continue
        offset, length = inner_tensor.shape[0] * first_row, inner_tensor.shape[0] * all_rows
        if offset % rows or length % rows:
            raise _refusal(name, layer.kind, f"whose {path} is not cut in proportion to its rows")
        box = ((offset // rows, *[0] * (inner_tensor.ndim - 1)), inner_tensor)
        shape = (length // rows, *inner_tensor.shape[1:])
        innermost_tensors[path] = InnerTensor(
            LocalShards(shape, [box], replicas, dtype=inner_tensor.dtype)
        )
    return innermost_tensors


def _cut_by_rows(name: str, layer: Layer) -> set[str]:
    """Return the paths of the innermost tensors that become shorter when the wrapper tensor is
    sliced by rows.

    Slices of several lengths are tried, since a class whose blocks are larger than a row can be
    sliced only at the boundaries of blocks.
    """
    inner_tensors = dict(layer.inner_tensors())
    for slice_count, row_slice in _slices(layer.tensor):
        with suppress(Exception):  # A user's code may raise anything
            shapes = {
                path: tuple(inner_tensor.shape)
                for path, inner_tensor in _layer(name, row_slice, _without_resize).inner_tensors()
            }
            cut_paths = {
                path for path in inner_tensors if shapes[path] != tuple(inner_tensors[path].shape)
            }
            if cut_paths and all(
                (shapes[path][0] * slice_count, *shapes[path][1:])
                == tuple(inner_tensors[path].shape)
                for path in cut_paths
            ):
                return cut_paths
    raise _refusal(name, layer.kind, "which does not show by slices how it is cut")


def _slices(tensor: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield pairs of a number and a slice of the first rows of ``tensor``. The number says how many
    slices of this length make up ``tensor``. Lengths that the class cannot slice are left out.
    """
    rows = tensor.shape[0] if tensor.ndim else 0
    for slice_count in dict.fromkeys((*_prime_factors(rows), rows)):
        row_slice: torch.Tensor | None = None
        if slice_count > 1:
            with suppress(Exception), torch.no_grad():  # A user's code may raise anything
                row_slice = torch.ops.aten.slice.Tensor(tensor, 0, 0, rows // slice_count)
        if row_slice is not None:
            yield slice_count, row_slice


def _prime_factors(number: int) -> Iterator[int]:
    """Yield the prime factors of ``number``, each once, ascending."""
    factor = 2
    while factor * factor <= number:
        if number % factor == 0:
            yield factor
        while number % factor == 0:
            number //= factor
        factor += 1
    if number > 1:
        yield number


def _refusal(name: str, kind: str, reason: str) -> UnsupportedValue:
    """Return the error for a DTensor of a wrapper tensor that cannot be taken apart."""
    return UnsupportedValue(
        name,
        f"DTensor of {kind}, {reason}",
        "save the tensors inside of it as DTensors of their own, or dequantise it first",
    )

"""Load the values of a checkpoint without a model: the implementation of ``ckpt.load``."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import torch

from ckpt.catalog.tensor_reader import LIST_NAMES, ReadRequest, StepReader
from ckpt.config import Tier
from ckpt.errors import ConfigError, EntryMissing
from ckpt.errors.frames import frameless
from ckpt.exchange.opened import OpenCheckpoint
from ckpt.exchange.torch_writer import in_saved_order
from ckpt.model.box import Box
from ckpt.model.manifest import Manifest, Tensor
from ckpt.model.values import join
from ckpt.state.match.tree import MakeTensor, StateTree

_CPU: Final = torch.device("cpu")


@frameless
def load(
    root: str | os.PathLike[str] | Tier,
    name: str | None = None,
    *,
    step: int | str | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> Any:
    """Return the values of a committed checkpoint, as ``torch.load`` returns those of a file.

    A module becomes a dict of tensors by the names of its ``state_dict()``, sorted and with the
    versions of the modules inside. An optimizer becomes the dict that ``Optimizer.state_dict()``
    gives, and any other object with a ``state_dict()`` what that gave. Whole tensors are returned,
    whatever ranks wrote their parts. Names that were tied share a tensor; every other tensor has
    memory of its own. A value of `PerRank` becomes a list with the value of each rank, a NumPy
    array becomes a tensor, and a tensor subclass becomes a dict of the tensors inside of it.

    ::

        weights = ckpt.load("runs/gpt", "model", device="cuda", dtype=torch.bfloat16)
        model.load_state_dict(weights)

    Args:
        root: The folder or URL of the root, or a `Tier` if its backend needs options.
        name: The name of the part to read, such as ``"model"`` or ``"model/embed.weight"``; None
            for the whole state. Nothing else is read.
        step: The number of the step, or a selector such as ``"best:loss"``, as for
            ``CheckpointManager.restore``; None for the newest checkpoint.
        device: The device of the tensors.
        dtype: The dtype of all floating-point tensors, those of an optimizer included; None for
            the saved dtypes.

    Raises:
        NoCheckpoint: The root has no checkpoint of ``step``, or no checkpoint at all.
        EntryMissing: The checkpoint has nothing of this name.
        IntegrityError: A chunk or the manifest is damaged.
        StorageError: The root cannot be read.
        ConfigError: No backend serves the URL, or ``name``, ``step``, ``device`` or ``dtype`` is
            invalid. ``dtype`` must be a floating-point dtype.
    """
    _check_dtype(dtype)
    _check_device(device)
    if name is not None and (not isinstance(name, str) or not name):
        raise ConfigError(f"name={name!r}: give the name of a part, or None for the whole state")
    with OpenCheckpoint(root, step) as checkpoint:
        return load_part(checkpoint.reader, name, torch.device(device), dtype)


def load_part(
    reader: StepReader,
    name: str | None,
    device: torch.device = _CPU,
    dtype: torch.dtype | None = None,
) -> Any:
    """Return the part ``name`` of a step (None: the whole state), as ``load`` does."""
    return _Load(reader, device, dtype).load(name)


def _check_dtype(dtype: object) -> None:
    if dtype is None:
        return
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ConfigError(f"dtype={dtype!r}: give a floating-point dtype, such as torch.bfloat16")
    try:
        torch.zeros(1).to(dtype)
    except (RuntimeError, NotImplementedError) as error:
        raise ConfigError(f"dtype={dtype!r}: torch converts no float to it ({error})") from None


def _check_device(device: torch.device | str) -> None:
    try:
        torch.zeros(1, device=torch.device(device))
    except Exception as error:  # noqa: BLE001 - each backend of torch has errors of its own
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"device={device!r}: torch has no such device here ({reason})") from None


class _Load:
    def __init__(self, reader: StepReader, device: torch.device, dtype: torch.dtype | None) -> None:
        self._reader, self._device, self._dtype = reader, device, dtype
        self._tensors: dict[str, torch.Tensor] = {}

    def load(self, name: str | None) -> Any:
        manifest = self._reader.manifest
        self._read(stored_names(manifest, name))
        return part_of(manifest, name, self._tensors)

    def _read(self, names: Iterable[str]) -> None:
        tensors = [self._reader.tensors[name] for name in sorted(names)]
        values = {tensor.name: empty_tensor(tensor) for tensor in tensors}
        self._reader.read(
            [
                ReadRequest(tensor.name, Box.whole(tensor.shape), bytes_of(values[tensor.name]))
                for tensor in tensors
                if tensor.nbytes
            ]
        )
        for tensor in tensors:
            value = in_saved_order(values.pop(tensor.name), tensor)
            dtype = self._dtype if value.is_floating_point() else None
            self._tensors[tensor.name] = value.to(self._device, dtype or value.dtype)


def stored_names(manifest: Manifest, name: str | None) -> set[str]:
    """Return the names under which the tensors of the part ``name`` (None: of all parts) are
    stored.

    Raises:
        EntryMissing: The checkpoint has nothing of this name.
    """
    tensors = manifest.tensor_map()
    if name is not None and name in tensors:
        return {tensors[name].name}
    return {tensors[item].name for item in _names_in(_build(manifest, name, _Name))}


def part_of(manifest: Manifest, name: str | None, values: Mapping[str, torch.Tensor]) -> Any:
    """Return the part ``name`` of the state (None: all of it), with the tensors in ``values``, by
    their stored names.

    Raises:
        EntryMissing: The checkpoint has nothing of this name.
    """
    tensors = manifest.tensor_map()
    if name is not None and name in tensors:
        return values[tensors[name].name]
    return _build(manifest, name, lambda item: values.get(tensors[item].name))


def _build(manifest: Manifest, name: str | None, make: MakeTensor) -> Any:
    tree = StateTree(manifest, make, (), by_name=False, safe=False, parameter_names=False).build()
    path, value = "", tree
    while name is not None and path != name:
        items = _items(path, value)
        path = next((key for key in items if name == key or name.startswith(f"{key}/")), "")
        if not path:
            present = [*manifest.tensor_map(), *_items("", tree)]
            raise EntryMissing([name], manifest.step, present=present, way=LIST_NAMES)
        value = items[path]
    return value


class _Name(str):
    """The name of a tensor, in the place of the tensor."""

    __slots__ = ()


def _names_in(value: Any) -> Iterator[str]:
    if isinstance(value, _Name):
        yield value
    for item in _items("", value).values():
        yield from _names_in(item)


def _items(path: str, value: Any) -> dict[str, Any]:
    """Return the items of the container ``value`` by their names."""
    if isinstance(value, Mapping):
        return {join(path, key): item for key, item in value.items()}
    if isinstance(value, list | tuple):
        return {join(path, str(index)): item for index, item in enumerate(value)}
    return {}


def empty_tensor(tensor: Tensor) -> torch.Tensor:
    """Return a contiguous tensor with the shape and dtype of ``tensor``, not initialized."""
    return torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype))


def bytes_of(value: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU."""
    # An array is a buffer, but Python 3.11 has no ``collections.abc.Buffer`` to declare that.
    return memoryview(value.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]

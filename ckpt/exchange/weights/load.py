"""Load the values of a checkpoint without a model: the implementation of ``ckpt.load``.

Tied names stand for one tensor. Its bytes are stored under one of them, its *stored name*.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch

from ckpt.catalog.tensor_reader import BATCH_BYTES, ReadRequest, StepReader
from ckpt.config import Tier
from ckpt.errors import ConfigError
from ckpt.errors.base import few
from ckpt.errors.storage import with_short_traceback
from ckpt.exchange.weights.open_checkpoint import OpenCheckpoint
from ckpt.exchange.weights.part import Names, Part
from ckpt.model.box import Box
from ckpt.model.dtype import is_float
from ckpt.model.manifest import Tensor
from ckpt.state.match.sink import overflows
from ckpt.state.tensors.saved_order import in_saved_order

_CPU: Final = torch.device("cpu")
_COMPARED_ELEMENTS: Final = 1 << 22
"""How many values at a time are compared with the range of a dtype."""
_log = logging.getLogger("ckpt")


@with_short_traceback
def load(
    root: str | os.PathLike[str] | Tier,
    name: str | None = None,
    *,
    step: int | str | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    names: Names | None = None,
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
            the saved dtypes. A warning names the tensors with values beyond its range. Tensors of
            ``float4_e2m1fn_x2`` keep their dtype, since an element is two numbers.
        names: Other names for the tensors of the part, for an engine that takes a dict: name in the
            part -> new name, or None to leave the tensor out. Each tensor must have an entry. The
            result is a dict of tensors by their new names, without plain values. Tied names may
            get one name.

    Raises:
        NoCheckpoint: The root has no checkpoint of ``step``, or no checkpoint at all.
        EntryMissing: The checkpoint has nothing of this name, or ``names`` has a name that the part
            does not have.
        IntegrityError: A chunk or the manifest is damaged.
        StorageError: The root cannot be read.
        ConfigError: No backend serves the URL, or ``name``, ``step``, ``device``, ``dtype`` or
            ``names`` is invalid. ``dtype`` must be a floating-point dtype. ``names`` must have each
            tensor, and must not give one name to two of them.
    """
    _check_dtype(dtype)
    _check_device(device)
    part = Part(name, names)
    with OpenCheckpoint(root, step) as checkpoint:
        return _Loader(checkpoint.reader, torch.device(device), dtype).load(part)


def load_part(reader: StepReader, name: str | None) -> Any:
    """Return the part ``name`` of a step (None: the whole state), as ``load`` does."""
    return _Loader(reader).load(Part(name))


def stream_part(
    reader: StepReader, part: Part, *, most_bytes: int = BATCH_BYTES
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a part with their names, and with at most ``most_bytes`` of them, or one
    larger tensor, in memory at a time.

    Raises the errors of ``load``. Some tensors may have been yielded before.
    """
    batch: list[tuple[str, str]] = []
    size = 0
    for name, stored_name in part.stored_by_new_name(reader.manifest).items():
        nbytes = reader.tensors[stored_name].nbytes
        if batch and size + nbytes > most_bytes:
            yield from _read_batch(reader, batch)
            batch, size = [], 0
        batch.append((name, stored_name))
        size += nbytes
    yield from _read_batch(reader, batch)


def _read_batch(
    reader: StepReader, batch: Sequence[tuple[str, str]]
) -> Iterator[tuple[str, torch.Tensor]]:
    values = _Loader(reader).read({stored_name for _, stored_name in batch})
    for name, stored_name in batch:
        yield name, values[stored_name]


def _check_dtype(dtype: object) -> None:
    """Raise ``ConfigError`` unless torch can convert floats to the dtype; None is valid."""
    if dtype is None:
        return
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ConfigError(f"dtype={dtype!r}: give a floating-point dtype, such as torch.bfloat16")
    try:
        torch.zeros(1).to(dtype)
    except (RuntimeError, NotImplementedError) as error:
        raise ConfigError(f"dtype={dtype!r}: torch converts no float to it ({error})") from None


def _check_device(device: torch.device | str) -> None:
    """Raise ``ConfigError`` unless torch can make a tensor on the device."""
    try:
        torch.zeros(1, device=torch.device(device))
    except Exception as error:  # noqa: BLE001 - each backend of torch has errors of its own
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"device={device!r}: torch has no such device here ({reason})") from None


class _Loader:
    """Reads tensors of a step into memory, and converts them.

    Args:
        reader: The reader of the step.
        device: The device of the tensors.
        dtype: The dtype of all floating-point tensors; None for the saved dtypes.
    """

    def __init__(
        self,
        reader: StepReader,
        device: torch.device = _CPU,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._reader, self._device, self._dtype = reader, device, dtype

    def load(self, part: Part) -> Any:
        manifest = self._reader.manifest
        return part.build(manifest, self.read(part.stored_names(manifest)))

    def read(self, stored_names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Return the tensors with these stored names."""
        tensors = [self._reader.tensors[name] for name in sorted(stored_names)]
        values = {tensor.name: empty_tensor(tensor) for tensor in tensors}
        self._reader.read(
            [
                ReadRequest(tensor.name, Box.whole(tensor.shape), bytes_of(values[tensor.name]))
                for tensor in tensors
                if tensor.nbytes
            ]
        )
        if too_large := [tensor.name for tensor in tensors if self._overflows(values, tensor)]:
            _log.warning(
                "ckpt: dtype=%s: values of %s are beyond the range of this dtype, and so infinite, "
                "NaN or its largest value now: load these names in their own dtype",
                self._dtype,
                few(too_large),
            )
        return {tensor.name: self._convert(values.pop(tensor.name), tensor) for tensor in tensors}

    def _overflows(self, values: Mapping[str, torch.Tensor], tensor: Tensor) -> bool:
        """Return True if a value of ``tensor`` is beyond the range of the dtype to convert to."""
        dtype = self._dtype
        if dtype is None or not is_float(tensor.dtype):
            return False
        flat = values[tensor.name].view(-1)
        starts = range(0, flat.numel(), _COMPARED_ELEMENTS)
        return any(overflows(flat[start : start + _COMPARED_ELEMENTS], dtype) for start in starts)

    def _convert(self, value: torch.Tensor, tensor: Tensor) -> torch.Tensor:
        value = in_saved_order(value, tensor)
        dtype = self._dtype if is_float(tensor.dtype) else None
        return value.to(self._device, dtype or value.dtype)


def empty_tensor(tensor: Tensor) -> torch.Tensor:
    """Return a contiguous tensor in host memory with the shape and dtype of ``tensor``, not
    initialized.
    """
    return torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype), device="cpu")


def bytes_of(value: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU."""
    # An array is a buffer, but Python 3.11 has no ``collections.abc.Buffer`` to declare that.
    return memoryview(value.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]

"""Make whole tensors of the parts that the files of another program hold.

An import copies the parts (`Copier`). An adoption notes where they are, and copies nothing
(`Locator`): its tensors are *stand-ins* without values, which have addresses of their own. The
*kind* of a tensor is its dtype and its shape, and a `Span` is the place of its elements in a file.
"""

from __future__ import annotations

import io
import mmap
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Final, Protocol

import torch

from ckpt.errors import IntegrityError, OutOfSpace, StorageError, UnsupportedValue
from ckpt.errors.storage import is_full_disk
from ckpt.exchange.inert.inert_torch import MappedFile, Span, read_spans
from ckpt.exchange.inert.input_limits import open_file
from ckpt.exchange.inert.memory_maps import MemoryMaps
from ckpt.exchange.inert.safetensors_reader import mapped_tensor
from ckpt.exchange.inert.torch_reader import has_bytes, load
from ckpt.exchange.scratch import Scratch
from ckpt.model.box import Box
from ckpt.model.dtype import DTYPES
from ckpt.staging.image import copyable

_BLOCK_BYTES: Final = 1 << 30
_ALIGNMENT: Final = 64
_NORESERVE: Final = getattr(mmap, "MAP_NORESERVE", 0x4000)  # The value that Linux has

Kind = tuple[str, tuple[int, ...]]
"""The dtype and the shape of a tensor."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a tensor.

    Attributes:
        box: The position of the part in the tensor.
        source: The place of its elements in a file; or the part itself, if it is in memory.
    """

    box: Box
    source: Span | torch.Tensor


class Joiner(Protocol):
    """Makes tensors of parts.

    A part is what ``load`` or ``map_tensor`` returns: a tensor, or what stands for it.
    """

    def make(self, kinds: Mapping[str, Kind]) -> dict[str, torch.Tensor]:
        """Return a new tensor of each kind, by name. The tensors have no values yet."""
        ...

    def load(self, path: str, start: int, length: int, name: str) -> torch.Tensor:
        """Return the tensor in ``length`` bytes of the file ``path`` from ``start`` on.

        Raises:
            IntegrityError: The file is missing or damaged, or has no ordinary tensor there.
            UnsupportedValue: Only pickle could load the value.
        """
        ...

    def map_tensor(self, span: Span, data: memoryview) -> torch.Tensor:
        """Return a tensor for the elements at a place in a file, which are mapped at ``data``."""
        ...

    def put(self, whole: torch.Tensor, box: Box, part: torch.Tensor) -> None:
        """Make ``part`` the values of ``whole`` in ``box``."""
        ...


def load_entry(path: str, start: int, length: int, name: str) -> Any:
    """Return the value of an entry of a file, which is a file of ``torch.save`` itself."""
    with open_file(path, name) as file:
        file_size = os.fstat(file.fileno()).st_size
        file.seek(max(0, min(start, file_size)))
        data = file.read(min(length, file_size)) if start >= 0 and length >= 0 else b""
    if len(data) != length or start < 0:
        raise IntegrityError(f"{path} is cut: it ends before {name!r} does")
    return load(io.BytesIO(data), f"{name} in {path}")


class Copier:
    """A `Joiner` that copies the parts to a scratch file, from which the tensors are mapped.

    Args:
        scratch: The folder for the scratch file; None for the system's temporary folder.
    """

    def __init__(self, scratch: str | None) -> None:
        self._scratch = scratch

    def make(self, kinds: Mapping[str, Kind]) -> dict[str, torch.Tensor]:
        """Return new tensors.

        Raises:
            OutOfSpace: The folder has no room for the tensors.
            StorageError: The scratch file cannot be created.
        """
        try:
            return Scratch(self._scratch, ((name, *kind) for name, kind in kinds.items())).tensors
        except (OSError, OverflowError) as error:
            folder = self._scratch or tempfile.gettempdir()
            if isinstance(error, OSError) and not is_full_disk(error):
                raise StorageError(folder, error.strerror or str(error)) from None
            nbytes = sum(prod(shape) * DTYPES[dtype].itemsize for dtype, shape in kinds.values())
            raise OutOfSpace(folder, f"for {nbytes} bytes of tensors") from None

    def load(self, path: str, start: int, length: int, name: str) -> torch.Tensor:
        value = load_entry(path, start, length, name)
        if not isinstance(value, torch.Tensor) or not has_bytes(value):
            raise IntegrityError(f"a part of {name!r} is not what the table of contents says")
        return value

    def map_tensor(self, span: Span, data: memoryview) -> torch.Tensor:
        return mapped_tensor(span, data)

    def put(self, whole: torch.Tensor, box: Box, part: torch.Tensor) -> None:
        dtype = str(whole.dtype).removeprefix("torch.")
        region: Any = (*box.slices(), ...)
        copyable(whole, dtype)[region].copy_(copyable(part.detach(), dtype))


class Locator:
    """A `Joiner` that reads no values, and notes the places of the parts. Other tensors of the
    state may be mapped from files, or in memory.

    Its own tensors have addresses, shapes and strides of their own, and no values: their memory is
    reserved and never used. So they can be named, tied and grouped as any tensor.

    ``_spans`` and ``_parts`` are keyed by the addresses of stand-ins. ``_spans`` has the place of
    the elements of a stand-in that was read as a whole, and ``_parts`` the parts of one that
    ``make`` has made. ``_maps`` finds the places of tensors that are mapped from files. ``_block``
    is reserved memory that no tensor has yet.
    """

    def __init__(self) -> None:
        self._files: dict[str, MappedFile] = {}
        self._spans: dict[int, Span] = {}
        self._parts: dict[int, list[Part]] = {}
        self._maps = MemoryMaps()
        self._block = memoryview(b"")

    def make(self, kinds: Mapping[str, Kind]) -> dict[str, torch.Tensor]:
        return {name: self._reserve_tensor(*kind) for name, kind in kinds.items()}

    def load(self, path: str, start: int, length: int, name: str) -> torch.Tensor:
        if path not in self._files:
            self._files[path] = MappedFile(path, name)
        value = read_spans(self._files[path], start, length, name)
        if not isinstance(value, Span):
            raise UnsupportedValue(
                name,
                "value that is no ordinary tensor",
                "its bytes cannot be used where they are: ckpt import copies what "
                "torch.load(weights_only=True) can load",
            )
        return self.stand_in(value)

    def map_tensor(self, span: Span, data: memoryview) -> torch.Tensor:  # noqa: ARG002
        return self.stand_in(span)

    def put(self, whole: torch.Tensor, box: Box, part: torch.Tensor) -> None:
        if part.numel():
            self._parts.setdefault(whole.data_ptr(), []).append(Part(box, self._source(part)))

    def stand_in(self, span: Span) -> torch.Tensor:
        """Return a tensor that stands for the elements of ``span``. It is row-major, even if these
        are not.
        """
        tensor = self._reserve_tensor(span.dtype, span.shape)
        if tensor.numel():
            self._spans[tensor.data_ptr()] = span
        return tensor

    def parts_of(self, tensor: torch.Tensor) -> list[Part]:
        """Return the parts of a tensor of the state that was read."""
        if not tensor.numel():
            return [Part(Box.whole(tensor.shape), tensor)]
        address = tensor.data_ptr()
        if address in self._parts:
            return self._parts[address]
        return [Part(Box.whole(tensor.shape), self._source(tensor))]

    def _source(self, tensor: torch.Tensor) -> Span | torch.Tensor:
        """Return the place of the elements of a tensor, or the tensor itself if they are in no
        file.
        """
        span = self._spans.get(tensor.data_ptr()) or self._maps.span(tensor)
        return tensor if span is None else span

    def _reserve_tensor(self, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a new tensor with an address of its own, in memory that is reserved and never
        used.
        """
        torch_dtype: torch.dtype = getattr(torch, dtype)
        nbytes = prod(shape) * DTYPES[dtype].itemsize
        if not nbytes:
            return torch.empty(shape, dtype=torch_dtype)
        if self._block.nbytes < nbytes:
            size = max(nbytes, _BLOCK_BYTES)
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
            self._block = memoryview(mmap.mmap(-1, size, flags=flags))
        raw = torch.frombuffer(self._block[:nbytes], dtype=torch.uint8)
        self._block = self._block[-(-nbytes // _ALIGNMENT) * _ALIGNMENT :]  # Rounded up
        return raw.view(torch_dtype).view(shape)

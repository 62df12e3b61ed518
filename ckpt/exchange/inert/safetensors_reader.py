"""Read a safetensors file, and return tensors that are mapped from it.

This module does not use the safetensors library, which is not a dependency of ckpt. ``ckpt import``
can therefore read a safetensors file in every installation of ckpt.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, Final

import torch

from ckpt.errors import IntegrityError, UnsupportedValue
from ckpt.exchange.inert.inert_torch import Span, dense_strides
from ckpt.exchange.inert.input_limits import map_file, open_file
from ckpt.model.dtype import DTYPES, DType

_LENGTH_BYTES: Final = 8
_MOST_HEADER_BYTES: Final = 100_000_000
"""The most bytes of a header that the safetensors format allows."""
STORED_AS_INTEGERS: Final = frozenset(
    {"float4_e2m1fn_x2", "bits8", "bits1x8", "bits2x4", "bits4x2", "bits16"}
)
"""The dtypes that a file stores as unsigned integers, since the format has no names for them."""
_DTYPE_BY_CODE: Final[dict[str, DType]] = {
    dtype.storage: dtype
    for dtype in DTYPES.values()
    if dtype.lanes == 1 and dtype.name not in STORED_AS_INTEGERS
}


MakeTensor = Callable[[Span, memoryview], torch.Tensor]
"""A function that returns a tensor for the elements at a place in a file, which are mapped."""


def mapped_tensor(span: Span, data: memoryview) -> torch.Tensor:
    """Return a tensor whose memory is ``data``, or a copy of it if it is not aligned."""
    torch_dtype: torch.dtype = getattr(torch, span.dtype)
    raw = torch.frombuffer(data, dtype=torch.uint8)
    if raw.data_ptr() % torch_dtype.itemsize:  # The format does not require aligned tensors
        raw = raw.clone()
    return raw.view(torch_dtype).view(span.shape)


def read_file(
    path: str, make: MakeTensor = mapped_tensor
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the tensors of a file by name, and its metadata. Writing to a tensor does not change
    the file. ``make`` makes the tensors that have elements.

    Raises:
        IntegrityError: The file is missing, cut short, or not a safetensors file.
        ConfigError: The file cannot be read.
        UnsupportedValue: A tensor has a type that torch does not have.
    """
    with open_file(path) as file:
        file_data = map_file(file)
    try:
        header_length = int.from_bytes(file_data[:_LENGTH_BYTES], "little")
        if len(file_data) < _LENGTH_BYTES + header_length:
            raise ValueError("it ends within its header")
        if header_length > _MOST_HEADER_BYTES:
            raise ValueError(f"its header has more than {_MOST_HEADER_BYTES} bytes")
        header: dict[str, Any] = json.loads(
            bytes(file_data[_LENGTH_BYTES : _LENGTH_BYTES + header_length])
        )
        metadata = {
            str(key): str(value) for key, value in (header.pop("__metadata__", None) or {}).items()
        }
        tensor_data = file_data[_LENGTH_BYTES + header_length :]
        _check_places([tuple(entry["data_offsets"]) for entry in header.values()], len(tensor_data))
        tensors: dict[str, torch.Tensor] = {}
        for name, entry in header.items():
            span = _span(name, entry, path, len(file_data) - len(tensor_data))
            begin = span.offset
            tensors[name] = (
                make(span, file_data[begin : begin + span.nbytes])
                if span.nbytes
                else torch.empty(span.shape, dtype=getattr(torch, span.dtype))
            )
        return tensors, metadata
    except (ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        raise IntegrityError(f"{path} is not a whole safetensors file: {error}") from None


def _check_places(places: list[tuple[int, ...]], size: int) -> None:
    """Raise ``ValueError`` unless the tensors follow each other without gaps and fill the file.

    Args:
        places: The start and the end of each tensor, counted from the end of the header.
        size: The bytes after the header.
    """
    position = 0
    for start, end in sorted(places):
        if start != position or end < start:
            raise ValueError(f"a tensor is at {start} to {end}, after {position} bytes of others")
        position = end
    if position != size:
        raise ValueError(f"its tensors have {position} bytes, and {size} are there")


def _span(name: str, entry: dict[str, Any], path: str, begin: int) -> Span:
    """Return the place of a tensor. ``begin`` is the position of the first byte of all tensors."""
    dtype, shape = _DTYPE_BY_CODE.get(entry["dtype"]), tuple(entry["shape"])
    if dtype is None:
        raise UnsupportedValue(
            name, f"tensor of {entry['dtype']}", "view it as a dtype that torch has"
        )
    start, end = entry["data_offsets"]
    if (
        any(type(n) is not int or n < 0 for n in shape)
        or math.prod(shape) * dtype.itemsize != end - start
    ):
        raise ValueError(
            f"{name!r} of {entry['dtype']} {list(shape)} does not have {end - start} bytes"
        )
    return Span(path, begin + start, dtype.name, shape, dense_strides(shape))

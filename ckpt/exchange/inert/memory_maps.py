"""Find the file that a tensor is mapped from, and where in the file its bytes are.

The readers of files map tensors from them. The system knows which memory is mapped from which file.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from typing import Final, NamedTuple

import torch

from ckpt.exchange.inert.inert_torch import Span, dense_strides
from ckpt.model.dtype import DTYPES

_MAPS: Final = "/proc/self/maps"
_MAP_LINE: Final = re.compile(r"([0-9a-f]+)-([0-9a-f]+) \S+ ([0-9a-f]+) \S+ [1-9]\d* +(/.*)")
_ESCAPE: Final = re.compile(r"\\([0-7]{3})")
_SAMPLE_BYTES: Final = 64
_PLAIN_TENSOR_TYPES: Final = (torch.Tensor, torch.nn.Parameter)


class _Map(NamedTuple):
    """A range of memory that is mapped from a file, from ``offset`` of the file on."""

    start: int
    end: int
    offset: int
    path: str


class MemoryMaps:
    """The files that are mapped into the memory of this process."""

    def __init__(self) -> None:
        self._maps: list[_Map] = []

    def span(self, tensor: torch.Tensor) -> Span | None:
        """Return the place of the elements of a contiguous tensor that is mapped from a file; None
        if the tensor is another one.
        """
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in DTYPES or not tensor.numel() or not tensor.is_contiguous():
            return None
        if tensor.is_conj() or tensor.is_neg() or type(tensor) not in _PLAIN_TENSOR_TYPES:
            return None
        address = tensor.data_ptr()
        entry = self._map_of(address)
        if entry is None:
            self._read_maps()
            entry = self._map_of(address)
        if entry is None or address + tensor.nbytes > entry.end:
            return None
        offset = entry.offset + address - entry.start
        shape = tuple(tensor.shape)
        span = Span(entry.path, offset, dtype, shape, dense_strides(shape))
        return span if _has_same_bytes(span, tensor) else None

    def _map_of(self, address: int) -> _Map | None:
        index = bisect_right(self._maps, address, key=lambda item: item.start) - 1
        return self._maps[index] if index >= 0 and address < self._maps[index].end else None

    def _read_maps(self) -> None:
        """Read the list of all maps. Neighbours that are one range of one file become one."""
        maps: list[_Map] = []
        with open(_MAPS, encoding="utf-8", errors="surrogateescape") as file:
            for line in file:
                if match := _MAP_LINE.match(line):
                    *numbers, escaped_path = match.groups()
                    start, end, offset = (int(number, 16) for number in numbers)
                    path = _ESCAPE.sub(lambda code: chr(int(code[1], 8)), escaped_path)
                    new_map = _Map(start, end, offset, path)
                    last_map = maps[-1] if maps else None
                    if (
                        last_map
                        and (last_map.end, last_map.path) == (new_map.start, path)
                        and (new_map.offset - last_map.offset == new_map.start - last_map.start)
                    ):
                        maps[-1] = last_map._replace(end=new_map.end)
                    else:
                        maps.append(new_map)
        self._maps = maps


def _has_same_bytes(span: Span, tensor: torch.Tensor) -> bool:
    """Return True if the file has the first and the last bytes of ``tensor`` at the place ``span``.

    The path may name another file meanwhile.
    """
    data = memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
    try:
        with open(span.path, "rb") as file:
            return all(
                os.pread(file.fileno(), len(part), span.offset + start) == bytes(part)
                for start, part in (
                    (0, data[:_SAMPLE_BYTES]),
                    (max(0, data.nbytes - _SAMPLE_BYTES), data[-_SAMPLE_BYTES:]),
                )
            )
    except OSError:
        return False

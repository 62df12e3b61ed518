"""Read a file of ``torch.save`` as inert data, without importing or calling anything.

``torch.load(weights_only=True)`` refuses a file as a whole if one value in it needs a class that
torch does not allow, such as the states of NumPy's random generator. This module reads what torch,
NumPy and Python write for tensors, arrays and plain values. Everything else stays an `Inert`.
"""

from __future__ import annotations

import mmap
import struct
import zipfile
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch

from ckpt.errors import IntegrityError
from ckpt.exchange.inert_pickle import Inert, read_inert
from ckpt.exchange.input_limits import check_state, check_torch_file, open_file

_STORAGES: Final = {
    "ByteStorage": torch.uint8,
    "CharStorage": torch.int8,
    "ShortStorage": torch.int16,
    "IntStorage": torch.int32,
    "LongStorage": torch.int64,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
}
_NUMPY: Final = ("numpy.core.multiarray", "numpy._core.multiarray")
_KINDS: Final = "biufc"  # The letters of NumPy's dtypes of numbers
_LOCAL_HEADER: Final = 30  # Bytes before the name of an entry of a zip archive


def read_file(path: str) -> Any:
    """Return the value in a file of ``torch.save``, with an `Inert` in place of each object that is
    no tensor, no array of numbers and no plain value.

    Tensors are mapped from the file, as copies on write.

    Raises:
        IntegrityError: The file is damaged, or is from torch before 1.6.
        UnsupportedValue: The file has a pickle that is not supported, or its values refer to each
            other without end.
        ConfigError: The file cannot be read.
    """
    with open_file(path) as file:
        check_torch_file(file, path)
        try:
            with zipfile.ZipFile(file) as archive:
                entries = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
                order = archive.read(entries["byteorder"]) if "byteorder" in entries else b""
                if order == b"big":
                    raise ValueError("it is from a machine with the other byte order")
                content = read_inert(archive.read(entries["data.pkl"]), path)
            whole = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
            check_state(content, path)
            return _Values(whole, entries).of(content)
        except (
            zipfile.BadZipFile, ValueError, LookupError, TypeError, AttributeError, RuntimeError,
            struct.error, OverflowError,
        ) as error:  # fmt: skip
            text = f"{path} is not a whole file of torch.save: {str(error)[:200]}"
            raise IntegrityError(text) from None


class _Values:
    """Makes values from inert data, with the bytes of one file."""

    def __init__(self, whole: memoryview, entries: Mapping[str, zipfile.ZipInfo]) -> None:
        self._whole, self._entries = whole, entries

    def of(self, value: Any) -> Any:
        match value:
            case dict():
                return {key: self.of(item) for key, item in value.items()}
            case list():
                return [self.of(item) for item in value]
            case tuple():
                return tuple(self.of(item) for item in value)
            case Inert(name="torch._utils._rebuild_tensor_v2"):
                tensor = self._tensor(*value.args[:4])
                return _resolve(tensor, *value.args[6:])
            case Inert(name="torch._utils._rebuild_parameter"):
                return self.of(value.args[0])
            case Inert(name="torch.Size"):
                return torch.Size(value.args[0])
            case Inert() if value.name.rpartition(".")[0] in _NUMPY:
                return _from_numpy(value)
            case _:
                return value

    def _tensor(self, storage: Any, start: int, size: Any, stride: Any) -> torch.Tensor:
        (pid,) = storage.args
        _, kind, key, _, count = pid
        dtype = _STORAGES[kind.name.rpartition(".")[2]]
        entry = self._entries[f"data/{key}"]
        if count * dtype.itemsize > entry.file_size:
            raise ValueError(f"the storage {key} is cut short")
        place = entry.header_offset
        name, extra = struct.unpack_from("<HH", self._whole, place + _LOCAL_HEADER - 4)
        place += _LOCAL_HEADER + name + extra
        data = self._whole[place : place + count * dtype.itemsize]
        if not count:
            return torch.empty(size, dtype=dtype)
        raw = torch.frombuffer(data, dtype=torch.uint8)
        flat = (raw.clone() if raw.data_ptr() % dtype.itemsize else raw).view(dtype)
        return torch.as_strided(flat, size, stride, start)


def _resolve(tensor: torch.Tensor, bits: Mapping[str, bool] | None = None) -> torch.Tensor:
    """Return the value of a tensor that was saved with ``bits``, by which torch marks a tensor
    that is still to be conjugated or negated.
    """
    bits = bits or {}
    if bits.get("conj"):
        tensor = tensor.conj_physical()
    return -tensor if bits.get("neg") else tensor


def _from_numpy(value: Inert) -> Any:
    """Return an array or a number of NumPy; ``value`` itself if it is neither."""
    match value:
        case Inert(name=name, args=(Inert() as dtype, data)) if name.endswith(".scalar"):
            return np.frombuffer(_bytes(data), _dtype(dtype), 1)[0]
        case Inert(name=name, args=(*_, shape, Inert() as dtype, is_fortran, data)) if (
            name.endswith("._reconstruct") and value.has_state
        ):
            order = "F" if is_fortran else "C"
            flat = np.frombuffer(_bytes(data), _dtype(dtype)).copy()
            return flat.reshape(shape, order=order)  # type: ignore[call-overload]
        case _:
            return value


def _dtype(value: Inert) -> np.dtype[Any]:
    """Return a dtype of numbers. The byte order is the second value of its state."""
    code, order = value.args[0], value.args[4] if len(value.args) > 4 else "="
    if not (isinstance(code, str) and code[:1] in _KINDS and order in ("<", ">", "=", "|")):
        raise ValueError(f"an array of {code!r}")
    return np.dtype(f"{order}{code}")


def _bytes(value: Any) -> bytes:
    """Return the bytes of an array, which protocol 2 of pickle writes as a text in Latin-1."""
    if isinstance(value, Inert) and value.name == "_codecs.encode":
        return str(value.args[0]).encode("latin1")
    if not isinstance(value, bytes):
        raise TypeError("an array without bytes")
    return value

"""Read a file of ``torch.save`` as inert data, without importing or calling anything.

``torch.load(weights_only=True)`` refuses a file as a whole if one value in it needs a class that
torch does not allow, such as the states of NumPy's random generator. This module reads what torch,
NumPy and Python write for tensors, arrays and plain values. Everything else stays an `Inert`: a
class, a function or a call that is only named. A `Span` is the place of a tensor's elements in a
file.
"""

from __future__ import annotations

import io
import math
import struct
import zipfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any, Final, cast

import numpy as np
import torch

from ckpt.errors import IntegrityError, UnsupportedValue
from ckpt.exchange.inert.inert_pickle import Inert, read_inert
from ckpt.exchange.inert.input_limits import check_nesting, check_torch_file, map_file, open_file
from ckpt.model.dtype import DTYPES
from ckpt.model.validate import MAX_DIMENSIONS

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
    "UntypedStorage": torch.uint8,
}
_NUMPY_MODULES: Final = ("numpy.core.multiarray", "numpy._core.multiarray")
_NUMBER_KINDS: Final = "biufc"  # The letters of NumPy's dtypes of numbers
_LOCAL_HEADER_BYTES: Final = 30  # Bytes before the name of an entry of a zip archive


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
        with _damage_errors(path):
            inert_value, entries = _read_archive(file, path)
            return _ValueBuilder(map_file(file), entries).build(inert_value)


@contextmanager
def _damage_errors(name: str) -> Generator[None]:
    """Return a context manager that replaces the errors that damaged bytes cause in its block with
    ``IntegrityError``. ``name`` is the name of the bytes in the error.
    """
    try:
        yield
    except (
        zipfile.BadZipFile, ValueError, LookupError, TypeError, AttributeError, RuntimeError,
        struct.error, OverflowError,
    ) as error:  # fmt: skip
        text = f"{name} is not a whole file of torch.save: {str(error)[:200]}"
        raise IntegrityError(text) from None


def _read_archive(file: IO[bytes], name: str) -> tuple[Any, dict[str, zipfile.ZipInfo]]:
    """Return the inert value in an archive of ``torch.save``, and the entries of the archive."""
    with zipfile.ZipFile(file) as archive:
        entries = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
        byte_order = archive.read(entries["byteorder"]) if "byteorder" in entries else b""
        if byte_order == b"big":
            raise ValueError("it is from a machine with the other byte order")
        inert_value = read_inert(archive.read(entries["data.pkl"]), name)
    check_nesting(inert_value, name)
    return inert_value, entries


# -- places ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Span:
    """The elements of a tensor in a file.

    Attributes:
        path: The path of the file.
        offset: The position of the first element in bytes.
        dtype: The name of the dtype.
        shape: The shape of the tensor.
        strides: The distance of the elements of each dimension, in elements.
    """

    path: str
    offset: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    @property
    def is_row_major(self) -> bool:
        """Return True if the elements are one after another, in row-major order."""
        return self.strides == dense_strides(self.shape)

    @property
    def order(self) -> tuple[int, ...]:
        """Return the dimensions from the largest stride to the smallest; empty if the elements are
        in row-major order.
        """
        if self.is_row_major:
            return ()
        return tuple(sorted(range(len(self.shape)), key=lambda dim: -self.strides[dim]))


def dense_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor of this shape. A dimension of one element has that
    of the others too.
    """
    return tuple(math.prod(max(1, n) for n in shape[dim + 1 :]) for dim in range(len(shape)))


class MappedFile:
    """A file of another program, mapped into memory for reading.

    Args:
        path: The path of the file.
        value_name: The name of a value that the file holds, for errors.

    Raises:
        IntegrityError: The file is missing.
        ConfigError: The file cannot be opened, or is no ordinary file.
    """

    def __init__(self, path: str, value_name: str = "") -> None:
        self.path = path
        with open_file(path, value_name) as file:
            self.memory = map_file(file)


def read_spans(file: MappedFile, start: int, length: int, name: str) -> Any:
    """Return the value of a file of ``torch.save`` that is ``length`` bytes of ``file`` from
    ``start`` on, with a `Span` in place of each tensor.

    Args:
        name: The name of the value, for errors.

    Raises:
        IntegrityError: The file is damaged, or ends before.
        UnsupportedValue: The file has a pickle that is not supported, or a tensor whose bytes are
            not its values.
    """
    if not 0 <= start <= start + length <= file.memory.nbytes:
        raise IntegrityError(f"{file.path} is cut: it ends before {name!r} does")
    name_in_errors = f"{name} in {file.path}"
    memory = file.memory[start : start + length]
    memory_file = cast("IO[bytes]", _MemoryFile(memory))
    check_torch_file(memory_file, name_in_errors)
    with _damage_errors(name_in_errors):
        memory_file.seek(0)
        inert_value, entries = _read_archive(memory_file, name_in_errors)
        return _SpanBuilder(memory, entries, file.path, start).build(inert_value)


class _MemoryFile(io.RawIOBase):
    """A file over memory, which is not copied."""

    def __init__(self, memory: memoryview) -> None:
        super().__init__()
        self._memory, self._position = memory, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._memory.nbytes}
        if base[whence] + offset < 0:
            raise ValueError("a position before the first byte")
        self._position = base[whence] + offset
        return self._position

    def readinto(self, out: Any, /) -> int:
        data = self._memory[self._position : self._position + len(out)]
        out[: data.nbytes] = data
        self._position += data.nbytes
        return data.nbytes


# -- values ----------------------------------------------------------------------------------------


class _ValueBuilder:
    """Builds values from inert data, with the bytes of one file of ``torch.save``.

    Args:
        whole: The bytes of the file, which is a zip archive.
        entries: The entries of the archive, by name.
    """

    def __init__(self, whole: memoryview, entries: Mapping[str, zipfile.ZipInfo]) -> None:
        self._whole, self._entries = whole, entries

    def build(self, value: Any) -> Any:
        """Return ``value`` with tensors and arrays in place of what stands for them.

        torch calls ``_rebuild_tensor_v2`` with the storage, the position of the first element, the
        shape, the strides, ``requires_grad``, the hooks and the marks of the tensor, and v3 with
        its dtype before the marks.
        """
        match value:
            case dict():
                return {key: self.build(item) for key, item in value.items()}
            case list():
                return [self.build(item) for item in value]
            case tuple():
                return tuple(self.build(item) for item in value)
            case Inert(name="torch._utils._rebuild_tensor_v2"):
                return self._tensor(value.args[:4], None, *value.args[6:7])
            case Inert(name="torch._utils._rebuild_tensor_v3"):
                return self._tensor(value.args[:4], value.args[6].name, *value.args[7:8])
            case Inert(name="torch._utils._rebuild_parameter"):
                return self.build(value.args[0])
            case Inert(name="torch.Size"):
                return torch.Size(value.args[0])
            case Inert() if value.name.rpartition(".")[0] in _NUMPY_MODULES:
                return _from_numpy(value)
            case _:
                return value

    def _tensor(
        self, view: tuple[Any, ...], dtype_name: str | None, bits: Mapping[str, bool] | None = None
    ) -> Any:
        """Return a tensor.

        Args:
            view: The storage, the position of the first element, the shape and the strides.
            dtype_name: The full name of the dtype; None for that of the storage.
            bits: How torch marks a tensor that is still to be conjugated or negated.
        """
        storage, start, size, stride = view
        position, nbytes, dtype = self._find_storage(storage, dtype_name)
        if not nbytes:
            return torch.empty(size, dtype=dtype)
        raw = torch.frombuffer(self._whole[position : position + nbytes], dtype=torch.uint8)
        flat = (raw.clone() if raw.data_ptr() % dtype.itemsize else raw).view(dtype)
        return _apply_bits(torch.as_strided(flat, size, stride, start), bits)

    def _find_storage(self, storage: Any, dtype_name: str | None) -> tuple[int, int, torch.dtype]:
        """Return the position and the length of a storage in bytes, and the dtype of a tensor."""
        (persistent_id,) = storage.args  # ("storage", class, key, device, number of elements)
        _, storage_class, key, _, element_count = persistent_id
        storage_dtype = _STORAGES[storage_class.name.rpartition(".")[2]]
        nbytes = int(element_count) * storage_dtype.itemsize
        entry = self._entries[f"data/{key}"]
        if not 0 <= nbytes <= entry.file_size:
            raise ValueError(f"the storage {key} is cut short")
        position = entry.header_offset
        # The header ends with the lengths of the name and of the extra field, which follow it.
        lengths = struct.unpack_from("<HH", self._whole, position + _LOCAL_HEADER_BYTES - 4)
        position += _LOCAL_HEADER_BYTES + sum(lengths)
        if position + nbytes > self._whole.nbytes:
            raise ValueError(f"the storage {key} is cut short")
        if dtype_name is None:
            return position, nbytes, storage_dtype
        dtype = getattr(torch, dtype_name.removeprefix("torch."), None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"a tensor of {dtype_name[:40]!r}")  # noqa: TRY004
        return position, nbytes // dtype.itemsize * dtype.itemsize, dtype


class _SpanBuilder(_ValueBuilder):
    """Builds values with a `Span` in place of each tensor.

    Args:
        whole: The bytes of the archive.
        entries: The entries of the archive, by name.
        path: The path of the file that holds the archive.
        start: The position of the archive in the file.
    """

    def __init__(
        self, whole: memoryview, entries: Mapping[str, zipfile.ZipInfo], path: str, start: int
    ) -> None:
        super().__init__(whole, entries)
        self._path, self._archive_start = path, start

    def _tensor(
        self, view: tuple[Any, ...], dtype_name: str | None, bits: Mapping[str, bool] | None = None
    ) -> Any:
        """Return the place of a tensor's elements. The arguments are as in ``_ValueBuilder``."""
        if any((bits or {}).values()):
            raise UnsupportedValue(
                self._path,
                "tensor that is still to be conjugated or negated",
                "its bytes are not its values: ckpt import copies them",
            )
        storage, start, size, stride = view
        position, nbytes, dtype = self._find_storage(storage, dtype_name)
        shape, strides = _checked_sizes(self.build(size)), _checked_sizes(self.build(stride))
        if len(shape) != len(strides) or len(shape) > MAX_DIMENSIONS or start < 0:
            raise ValueError("a tensor of other strides than dimensions")
        last_element = sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
        if math.prod(shape) and (start + last_element + 1) * dtype.itemsize > nbytes:
            raise ValueError("a tensor that ends after its storage")
        strides = tuple(
            step if n > 1 else dense
            for n, step, dense in zip(shape, strides, dense_strides(shape), strict=True)
        )
        offset = self._archive_start + position + start * dtype.itemsize
        return Span(self._path, offset, str(dtype).removeprefix("torch."), shape, strides)


def _checked_sizes(numbers: Any) -> tuple[int, ...]:
    sizes = tuple(numbers)
    if not all(type(n) is int and 0 <= n < 1 << 62 for n in sizes):
        raise ValueError("a tensor of impossible sizes")
    return sizes


def _apply_bits(tensor: torch.Tensor, bits: Mapping[str, bool] | None) -> torch.Tensor:
    """Return the value of a tensor that was saved with ``bits``, by which torch marks a tensor
    that is still to be conjugated or negated.
    """
    bits = bits or {}
    if bits.get("conj"):
        tensor = tensor.conj_physical()
    return -tensor if bits.get("neg") else tensor


def _from_numpy(value: Inert) -> Any:
    """Return an array or a number of NumPy; ``value`` itself if it is neither.

    The last arguments of an array are from its state (see `Inert`): a version, the shape, the
    dtype, whether the order is that of Fortran, and the bytes.
    """
    match value:
        case Inert(name=name, args=(Inert() as dtype, data)) if name.endswith(".scalar"):
            return np.frombuffer(_array_bytes(data), _numpy_dtype(dtype), 1)[0]
        case Inert(name=name, args=(*_, shape, Inert() as dtype, is_fortran, data)) if (
            name.endswith("._reconstruct") and value.has_state
        ):
            order = "F" if is_fortran else "C"
            flat = np.frombuffer(_array_bytes(data), _numpy_dtype(dtype)).copy()
            return flat.reshape(shape, order=order)  # type: ignore[call-overload]
        case _:
            return value


def _numpy_dtype(value: Inert) -> np.dtype[Any]:
    """Return a dtype of numbers.

    A dtype is called with its code and two flags, to which the values of its state are added (see
    `Inert`): a version, the byte order, and others.
    """
    code, order = value.args[0], value.args[4] if len(value.args) > 4 else "="
    if not (isinstance(code, str) and code[:1] in _NUMBER_KINDS and order in ("<", ">", "=", "|")):
        raise ValueError(f"an array of {code!r}")
    return np.dtype(f"{order}{code}")


def _array_bytes(value: Any) -> bytes:
    """Return the bytes of an array, which protocol 2 of pickle writes as a text in Latin-1."""
    if isinstance(value, Inert) and value.name == "_codecs.encode":
        return str(value.args[0]).encode("latin1")
    if not isinstance(value, bytes):
        raise TypeError("an array without bytes")
    return value

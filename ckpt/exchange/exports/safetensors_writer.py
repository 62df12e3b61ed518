"""Write tensors as one safetensors file, or as several files with an index in the layout of Hugging
Face.

This module does not use the safetensors library, which needs all tensors of a file in memory. Tests
read the files with the library. Tied names stand for one tensor. Its bytes are stored under one of
them, its *stored name*.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

from ckpt.catalog.tensor_reader import Piece, StepReader
from ckpt.errors import ConfigError
from ckpt.exchange.inert.safetensors_reader import STORED_AS_INTEGERS
from ckpt.exchange.weights.load import bytes_of
from ckpt.model.dtype import DTYPES, is_float, safetensors_entry
from ckpt.model.manifest import Tensor
from ckpt.state.match.manifest_tree import Notes
from ckpt.storage.local_files import durable_file, write_durably

SUFFIX: Final = ".safetensors"
INDEX: Final = "model.safetensors.index.json"
_ALIGNMENT: Final = 8
_WIDE_DTYPES: Final = ("bfloat16", "float32")  # What may hold a number that is too large for others


@dataclass(frozen=True, slots=True, kw_only=True)
class FileForm:
    """How tensors are written to files.

    Attributes:
        names: The names in the files, by the stored names of the tensors.
        metadata: Entries for the metadata in the headers.
        dtype: The dtype of all floating-point tensors in the files; None for the saved dtypes.
    """

    names: Mapping[str, str]
    metadata: Mapping[str, str] = field(default_factory=dict[str, str])
    dtype: str | None = None

    def dtype_of(self, tensor: Tensor) -> str:
        """Return the dtype of a tensor in a file."""
        return self.dtype if self.dtype is not None and is_float(tensor.dtype) else tensor.dtype

    def size_of(self, tensor: Tensor) -> int:
        """Return the bytes of a tensor in a file."""
        return math.prod(tensor.shape) * DTYPES[self.dtype_of(tensor)].itemsize


def write_file(path: str, tensors: Sequence[Tensor], form: FileForm, reader: StepReader) -> None:
    """Write one safetensors file, and make it durable.

    At most ``catalog.tensor_reader.BATCH_BYTES`` of tensors are in memory at a time.

    Args:
        path: The path of the file.
        tensors: The tensors to write.
        form: Their names and dtypes in the file.
        reader: The reader of the checkpoint.

    Raises:
        ConfigError: The dtype of ``form`` cannot hold a number of a tensor.
    """
    names = form.names
    # The largest elements come first, so that each tensor is aligned to its elements.
    ordered_tensors = sorted(
        tensors,
        key=lambda tensor: (-DTYPES[form.dtype_of(tensor)].itemsize, names[tensor.name]),
    )
    entries: dict[str, object] = {"__metadata__": {"format": "pt", **form.metadata}}
    end = 0
    for tensor in ordered_tensors:
        entry, end = safetensors_entry(form.dtype_of(tensor), tensor.shape, end)
        entries[names[tensor.name]] = entry
    header = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    header += b" " * (-len(header) % _ALIGNMENT)
    with durable_file(path) as file:
        file.write(len(header).to_bytes(8, "little"))
        file.write(header)
        for piece in reader.stream(ordered_tensors):
            file.write(_convert(piece, form.dtype_of(piece.tensor)))


def write_folder(
    folder: str,
    tensors: Sequence[Tensor],
    form: FileForm,
    reader: StepReader,
    most_bytes: int,
    on_file: Callable[[str], None] = lambda _: None,
) -> None:
    """Write ``model.safetensors`` if one file is enough, else several files and an index. A file
    has at most ``most_bytes`` of tensors, or a single larger tensor.

    ``folder`` is an existing folder, and ``on_file`` is called with the path of each file of
    tensors when it is complete. The other arguments are those of ``write_file``.
    """
    names = form.names
    files = _shards(sorted(tensors, key=lambda tensor: names[tensor.name]), form, most_bytes)
    for name, group in files.items():
        write_file(path := os.path.join(folder, name), group, form, reader)
        on_file(path)
    if len(files) > 1:
        index = {
            "metadata": {"total_size": sum(map(form.size_of, tensors)), **form.metadata},
            "weight_map": {
                names[tensor.name]: name for name, group in files.items() for tensor in group
            },
        }
        text = json.dumps(index, indent=2, ensure_ascii=False)
        write_durably(os.path.join(folder, INDEX), text.encode())


def _shards(tensors: Sequence[Tensor], form: FileForm, most_bytes: int) -> dict[str, list[Tensor]]:
    """Divide the tensors into files as ``write_folder`` does. Return the tensors of each file by
    the name of the file.
    """
    groups: list[list[Tensor]] = [[]]
    size = 0
    for tensor in tensors:
        if groups[-1] and size + form.size_of(tensor) > most_bytes:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += form.size_of(tensor)
    if len(groups) == 1:
        return {f"model{SUFFIX}": groups[0]}
    count = len(groups)
    return {f"model-{i:05d}-of-{count:05d}{SUFFIX}": group for i, group in enumerate(groups, 1)}


def cast(values: torch.Tensor, dtype: str, name: str) -> torch.Tensor:
    """Return ``values`` in another floating-point dtype.

    Raises:
        ConfigError: A finite number has no finite one in ``dtype``.
    """
    result = values.to(getattr(torch, dtype))
    if _overflows(result, values):
        wider = [
            wide for wide in _WIDE_DTYPES if not _overflows(values.to(getattr(torch, wide)), values)
        ]
        way = f"take {' or '.join(wider)}" if wider else "export it in the saved dtype"
        raise ConfigError(f"{name!r} has a number that is too large for {dtype}: {way}")
    return result


def _overflows(result: torch.Tensor, values: torch.Tensor) -> bool:
    return bool((result.isinf() & ~values.isinf()).any())


def _convert(piece: Piece, dtype: str) -> memoryview:
    if dtype == piece.tensor.dtype:
        return piece.data
    values = torch.frombuffer(piece.data, dtype=getattr(torch, piece.tensor.dtype))
    return bytes_of(cast(values, dtype, piece.tensor.name))


def check_names(names: Mapping[str, str], tensors: Mapping[str, Tensor], way: str) -> None:
    """Raise ``ConfigError`` if two tensors would have the same name in the file, or if a name is
    empty or reserved by the format.

    Args:
        names: The name in the file of each name in the checkpoint.
        tensors: The tensors by their names in the checkpoint. Tied names may become one name.
        way: What the user can do about it.
    """
    owners: dict[str, str] = {}
    for name, file_name in names.items():
        owner = owners.setdefault(file_name, name)
        if tensors[owner].name != tensors[name].name:
            raise ConfigError(f"{owner!r} and {name!r} would both be {file_name!r}: {way}")
        if not file_name or file_name == "__metadata__":
            raise ConfigError(f"{name!r} would be {file_name!r}, which is not a name there: {way}")


def note_changed_dtypes(tensors: Sequence[Tensor], notes: Notes) -> None:
    """Note in ``notes`` the tensors that a safetensors file stores with another dtype."""
    for tensor in tensors:
        dtype = DTYPES[tensor.dtype]  # ``storage`` is the dtype in the file
        if dtype.lanes > 1:  # An element is several numbers
            notes.changes.append(
                (tensor.name, f"{tensor.dtype}: {dtype.storage} with one more dimension now")
            )
        elif tensor.dtype in STORED_AS_INTEGERS:
            notes.changes.append(
                (tensor.name, f"{tensor.dtype}: {dtype.storage} of the same bytes now")
            )

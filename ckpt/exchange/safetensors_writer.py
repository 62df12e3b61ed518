"""Write tensors as one safetensors file, or as several files with an index in the layout of Hugging
Face.

This module does not use the safetensors library, which needs all tensors of a file in memory. Tests
read the files with the library.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Final

from ckpt.adapters.match.tree import Notes
from ckpt.catalog.tensor_reader import StepReader
from ckpt.errors import ConfigError
from ckpt.model.dtype import DTYPES, safetensors_entry
from ckpt.model.manifest import Tensor

SUFFIX: Final = ".safetensors"
_INDEX: Final = "model.safetensors.index.json"
_ALIGNMENT: Final = 8
STORED_AS_INTEGERS: Final = frozenset(
    {"float4_e2m1fn_x2", "bits8", "bits1x8", "bits2x4", "bits4x2", "bits16"}
)
"""The dtypes that a file stores as unsigned integers, since the format has no names for them."""


def write_file(
    path: str,
    tensors: Sequence[Tensor],
    *,
    names: dict[str, str],
    metadata: dict[str, str],
    reader: StepReader,
) -> None:
    """Write one safetensors file, and make it durable.

    At most ``catalog.tensor_reader.BATCH_BYTES`` of tensors are in memory at a time.

    Args:
        path: The path of the file.
        tensors: The tensors to write.
        names: The names in the file, by the stored names of the tensors.
        metadata: Entries for the metadata in the header.
        reader: The reader of the checkpoint.
    """
    order = sorted(tensors, key=lambda tensor: (-DTYPES[tensor.dtype].itemsize, names[tensor.name]))
    entries: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    end = 0
    for tensor in order:
        entry, end = safetensors_entry(tensor.dtype, tensor.shape, end)
        entries[names[tensor.name]] = entry
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for piece in reader.stream(order):
            file.write(piece.data)
        file.flush()
        os.fsync(file.fileno())


def write_folder(
    folder: str,
    tensors: Sequence[Tensor],
    *,
    names: dict[str, str],
    metadata: dict[str, str],
    reader: StepReader,
    most_bytes: int,
) -> None:
    """Write ``model.safetensors`` if one file is enough, else several files and an index. A file
    has at most ``most_bytes`` of tensors, or a single larger tensor.

    ``folder`` is an existing folder. The other arguments are those of ``write_file``.
    """
    files = _shards(sorted(tensors, key=lambda tensor: names[tensor.name]), most_bytes)
    for name, group in files.items():
        write_file(
            os.path.join(folder, name),
            group,
            names=names,
            metadata=metadata,
            reader=reader,
        )
    if len(files) > 1:
        index = {
            "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors), **metadata},
            "weight_map": {
                names[tensor.name]: name for name, group in files.items() for tensor in group
            },
        }
        with open(os.path.join(folder, _INDEX), "w", encoding="utf-8") as out:
            json.dump(index, out, indent=2, ensure_ascii=False)
            out.flush()
            os.fsync(out.fileno())


def _shards(tensors: Sequence[Tensor], most_bytes: int) -> dict[str, list[Tensor]]:
    """Divide the tensors into files as ``write_folder`` does. Return the tensors of each file by
    the name of the file.
    """
    groups: list[list[Tensor]] = [[]]
    size = 0
    for tensor in tensors:
        if groups[-1] and size + tensor.nbytes > most_bytes:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.nbytes
    if len(groups) == 1:
        return {f"model{SUFFIX}": groups[0]}
    count = len(groups)
    return {f"model-{i:05d}-of-{count:05d}{SUFFIX}": group for i, group in enumerate(groups, 1)}


def check_names(names: dict[str, str]) -> None:
    """Raise ``ConfigError`` if two tensors would have the same name in the file, or if a name is
    empty or reserved by the format. ``names`` maps stored names to names in the file.
    """
    owners: dict[str, str] = {}
    for name, short in names.items():
        if short in owners:
            raise ConfigError(
                f"{owners[short]!r} and {name!r} would both be {short!r}: choose another --strip"
            )
        if not short or short == "__metadata__":
            raise ConfigError(
                f"{name!r} would be {short!r}, which is not a name there: choose another --strip"
            )
        owners[short] = name


def note_dtypes(tensors: Sequence[Tensor], notes: Notes) -> None:
    """Note in ``notes`` the tensors that a safetensors file stores with another dtype."""
    for tensor in tensors:
        dtype = DTYPES[tensor.dtype]
        if dtype.lanes > 1:
            notes.changes.append(
                (tensor.name, f"{tensor.dtype}: {dtype.storage} with one more dimension now")
            )
        elif tensor.dtype in STORED_AS_INTEGERS:
            notes.changes.append(
                (tensor.name, f"{tensor.dtype}: {dtype.storage} of the same bytes now")
            )

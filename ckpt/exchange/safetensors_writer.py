"""Tensors -> safetensors: one file, or shards with an index, as Hugging Face lays them out.

Written here rather than with the library, which wants all tensors of a file in memory; what is
written is read back with it in the tests.
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
SAME: Final = frozenset({"float4_e2m1fn_x2", "bits8", "bits1x8", "bits2x4", "bits4x2", "bits16"})
"""Types that the format has under the name of plain integers only."""


def write_file(
    path: str,
    tensors: Sequence[Tensor],
    *,
    names: dict[str, str],
    metadata: dict[str, str],
    reader: StepReader,
) -> None:
    """Write one file with ``tensors`` under ``names``.

    At most ``BATCH_BYTES`` of them are in memory at a time.
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
    """Write ``model.safetensors``, or shards of at most ``most_bytes`` with their index. A larger
    tensor has a shard of its own.
    """
    files = _shards(sorted(tensors, key=lambda tensor: names[tensor.name]), most_bytes)
    for name, held in files.items():
        write_file(
            os.path.join(folder, name),
            held,
            names=names,
            metadata=metadata,
            reader=reader,
        )
    if len(files) > 1:
        index = {
            "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors), **metadata},
            "weight_map": {
                names[tensor.name]: name for name, held in files.items() for tensor in held
            },
        }
        with open(os.path.join(folder, _INDEX), "w", encoding="utf-8") as out:
            json.dump(index, out, indent=2, ensure_ascii=False)
            out.flush()
            os.fsync(out.fileno())


def _shards(tensors: Sequence[Tensor], most_bytes: int) -> dict[str, list[Tensor]]:
    """Return the files by name, and the tensors of each."""
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
    return {f"model-{i:05d}-of-{count:05d}{SUFFIX}": held for i, held in enumerate(groups, 1)}


def check_names(names: dict[str, str]) -> None:
    """Raise ``ConfigError`` if two tensors would have one name, or a name of the format itself."""
    seen: dict[str, str] = {}
    for name, short in names.items():
        if short in seen:
            raise ConfigError(
                f"{seen[short]!r} and {name!r} would both be {short!r}: choose another --strip"
            )
        if not short or short == "__metadata__":
            raise ConfigError(
                f"{name!r} would be {short!r}, which is not a name there: choose another --strip"
            )
        seen[short] = name


def note_dtypes(tensors: Sequence[Tensor], notes: Notes) -> None:
    """Note the types that the format holds under another name."""
    for tensor in tensors:
        dtype = DTYPES[tensor.dtype]
        if dtype.lanes > 1:
            notes.changed.append(
                (tensor.name, f"{tensor.dtype}: {dtype.storage} with one more dimension now")
            )
        elif tensor.dtype in SAME:
            notes.changed.append(
                (tensor.name, f"{tensor.dtype}: {dtype.storage} of the same bytes now")
            )

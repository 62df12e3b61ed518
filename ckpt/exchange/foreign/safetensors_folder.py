"""Read a safetensors file or folder as one state: shards with an index, and parts of ranks.

``HuggingFaceStorageWriter(save_distributed=True)`` of torch writes a file for each rank. The header
of such a file says where its tensors begin in the whole tensors, but not how large these are. A
*joiner* makes whole tensors of the parts.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from ckpt.errors import ConfigError, IntegrityError
from ckpt.exchange.foreign.contents import Contents, State, check_name, merge
from ckpt.exchange.foreign.joined_tensors import Joiner
from ckpt.exchange.inert import safetensors_reader
from ckpt.exchange.inert.input_limits import open_file
from ckpt.model.box import Box, tiling_fault

SUFFIX: Final = ".safetensors"
_SHARDING_KEY: Final = "DCP_SHARDING_INFO"
_RANK_FILE: Final = re.compile(r"shard-([0-9]{1,9})-.*\.safetensors")
_ADAPTER: Final = "adapter_"
"""The beginning of the names of the files of an adapter of PEFT, which is a state of its own."""


def read_safetensors(source: str, joiner: Joiner) -> Contents:
    """Return the tensors of a file or folder. ``joiner`` makes whole tensors of the parts of ranks.

    Raises:
        IntegrityError: A file is missing or damaged, or the parts of ranks do not make a tensor.
        ConfigError: The source is one part of several, or two files have a tensor of one name.
    """
    if os.path.isfile(source):
        tensors, metadata = safetensors_reader.read_file(source, joiner.map_tensor)
        if _SHARDING_KEY in metadata:
            folder = os.path.dirname(source) or "."
            raise ConfigError(
                f"{source} has the part of one rank, which HuggingFaceStorageWriter("
                "save_distributed=True) wrote: name the folder with the parts of all ranks, "
                f"{folder}"
            )
        return Contents(tensors | _ties(tensors, metadata))
    files = choose_files(source, "safetensors")
    contents_by_file = {
        name: safetensors_reader.read_file(os.path.join(source, name), joiner.map_tensor)
        for name in files.names
    }
    parts = {
        name: (tensors, metadata)
        for name, (tensors, metadata) in contents_by_file.items()
        if _SHARDING_KEY in metadata
    }
    if parts:
        if len(parts) < len(contents_by_file):
            raise ConfigError(
                f"{source} holds the parts of ranks and whole files: move "
                f"{', '.join(sorted(contents_by_file.keys() - parts.keys())[:3])} to another "
                "folder, or import it by its name"
            )
        ranks = {match[1] if (match := _RANK_FILE.fullmatch(name)) else name for name in parts}
        note = (
            f"the parts of {len(ranks)} rank(s) are joined: the files do not say how many ranks "
            "have written them, so compare that number, and the shapes, with the job"
        )
        file_names = [*parts, *files.tables]  # A table is an index of files, in JSON
        return Contents(_join(source, parts, joiner), file_names, [*files.notes, note])
    state = merge(source, ((name, tensors) for name, (tensors, _) in contents_by_file.items()))
    common_metadata = {
        key: value for _, metadata in contents_by_file.values() for key, value in metadata.items()
    }
    return Contents(
        state | _ties(state, common_metadata), [*contents_by_file, *files.tables], [*files.notes]
    )


def _ties(state: State, metadata: Mapping[str, str]) -> State:
    return {
        name: state[target]
        for name, target in metadata.items()
        if target in state and name not in state
    }


# -- which files -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The files of a folder that hold one state of weights.

    Attributes:
        names: The names of the files.
        has_index: Whether the folder has an index.
        tables: The index that names the files, if it was used.
        notes: Notes for the user.
    """

    names: list[str]
    has_index: bool = False
    tables: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def choose_files(folder: str, suffix: str) -> WeightFiles:
    """Return the files with weights in a folder, as an index of Hugging Face lists them.

    Without an index, these are all files with the suffix. The adapter of PEFT beside a model is a
    state of its own, and is left aside.

    Raises:
        ConfigError: The folder has more than one index.
        IntegrityError: The index is invalid, or names a file that is missing.
    """
    present = sorted(name for name in os.listdir(folder) if name.endswith(f".{suffix}"))
    model_files = [name for name in present if not name.startswith(_ADAPTER)]
    index_file, index_names = _read_index(folder, suffix)
    if not index_file:
        return WeightFiles(model_files or present)
    single_file = index_file.removesuffix(".index.json")
    missing = [name for name in index_names if not os.path.exists(os.path.join(folder, name))]
    if single_file in present and single_file not in index_names:
        if missing:
            note = (
                f"{index_file} names {missing[0]}, which is missing: {single_file} is taken, as "
                "transformers does"
            )
            return WeightFiles([single_file], has_index=True, notes=(note,))
        note = (
            f"the files of {index_file} are taken; transformers loads {single_file}, which is not: "
            f"to import it, name {os.path.join(folder, single_file)}"
        )
        return WeightFiles(index_names, has_index=True, tables=(index_file,), notes=(note,))
    if missing:
        raise IntegrityError(
            f"{os.path.join(folder, missing[0])} is missing, which {index_file} names: bring it "
            f"back, or remove {index_file} to import the files that are there"
        )
    return WeightFiles(index_names, has_index=True, tables=(index_file,))


def _read_index(folder: str, suffix: str) -> tuple[str, list[str]]:
    """Return the name of the Hugging Face index in the folder, and the names of the files that it
    lists. Both are empty if the folder has no index for files with this suffix.

    Raises:
        ConfigError: The folder has more than one such index.
        IntegrityError: The index is invalid, or names a file outside of the folder.
    """
    index_files = sorted(
        name for name in os.listdir(folder) if name.endswith(f".{suffix}.index.json")
    )
    if not index_files:
        return "", []
    if len(index_files) > 1:
        raise ConfigError(
            f"{folder} holds more than one index: {', '.join(index_files)}: move one of them and "
            "its files to a folder of their own"
        )
    try:
        with open_file(os.path.join(folder, index_files[0]), is_part=False) as file:
            names = sorted(set(json.load(file)["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise IntegrityError(f"{index_files[0]} is not an index: {error!r}") from None
    return index_files[0], [check_name(folder, name) for name in names]


# -- parts of ranks --------------------------------------------------------------------------------


def _join(
    folder: str,
    parts: Mapping[str, tuple[dict[str, torch.Tensor], dict[str, str]]],
    joiner: Joiner,
) -> State:
    """Return the whole tensors, which the files of all ranks have in parts.

    Raises:
        IntegrityError: The part of a rank is missing, or parts overlap or leave gaps.
    """
    _check_ranks(folder, list(parts))
    pieces_by_key: dict[str, list[tuple[tuple[int, ...], torch.Tensor]]] = defaultdict(list)
    for name, (tensors, metadata) in parts.items():
        for key, offsets in _offsets(name, metadata).items():
            if key not in tensors or len(offsets) != tensors[key].ndim:
                raise IntegrityError(f"{name} has no part of {key!r} as its header says")
            pieces_by_key[key].append((offsets, tensors[key]))
        if rest := tensors.keys() - _offsets(name, metadata).keys():
            raise IntegrityError(f"{name} does not say where its part of {min(rest)!r} is")
    return {key: _whole(folder, key, pieces, joiner) for key, pieces in pieces_by_key.items()}


def _check_ranks(folder: str, names: Sequence[str]) -> None:
    numbers = sorted({int(match[1]) for name in names if (match := _RANK_FILE.fullmatch(name))})
    missing = sorted(set(range(1, max(numbers, default=0) + 1)) - set(numbers))
    if missing:
        raise IntegrityError(f"{folder}: the part of rank {missing[0]} is missing, of its files")


def _offsets(name: str, metadata: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    """Return where the part of each tensor in the file ``name`` begins in the whole tensor."""
    try:
        table = json.loads(metadata[_SHARDING_KEY])
        offsets = {key: tuple(item["saved_offsets"]) for key, item in table.items()}
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise IntegrityError(f"{name} has no table of its parts: {error!r}") from None
    if not all(type(n) is int and 0 <= n < 1 << 62 for item in offsets.values() for n in item):
        raise IntegrityError(f"{name} has a table of its parts with wrong offsets")
    return offsets


def _whole(
    folder: str,
    key: str,
    pieces: Sequence[tuple[tuple[int, ...], torch.Tensor]],
    joiner: Joiner,
) -> torch.Tensor:
    """Return the tensor ``key``, which ends where the last of its pieces ends."""
    offsets, first_piece = pieces[0]
    if len(pieces) == 1 and not any(offsets):
        return first_piece
    if len({(piece.dtype, piece.ndim) for _, piece in pieces}) > 1:
        raise IntegrityError(f"{folder}: the parts of {key!r} are of different types")
    # Ranks that hold the same part may each have written it.
    parts = {Box(offsets, tuple(piece.shape)): piece for offsets, piece in pieces}
    boxes = list(parts)
    shape = tuple(max(ends) for ends in zip(*map(_ends, boxes), strict=True))
    if math.prod(shape) > sum(box.numel for box in boxes):
        raise IntegrityError(f"{folder}: the parts of {key!r} do not fill {list(shape)}")
    if fault := tiling_fault(shape, boxes):
        raise IntegrityError(f"{folder}: the parts of {key!r} are wrong: {fault}")
    dtype = str(first_piece.dtype).removeprefix("torch.")
    whole = joiner.make({key: (dtype, shape)})[key]
    for box, piece in parts.items():
        joiner.put(whole, box, piece)
    return whole


def _ends(box: Box) -> tuple[int, ...]:
    return tuple(start + size for start, size in zip(box.offsets, box.shape, strict=True))

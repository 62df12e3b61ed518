"""Read a folder of ``torch.distributed.checkpoint`` (DCP) as one nested state.

The table of contents is a pickle, and is read as inert data: objects are only names with their
state. Each entry is a file of ``torch.save`` inside of a larger file. The *kind* of a tensor is its
dtype and its shape. A *piece* is an entry that has a value, or a part of a tensor. A *joiner* makes
tensors of their parts.
"""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any, Final

import torch

from ckpt.errors import IntegrityError, UnsupportedValue
from ckpt.errors.base import few
from ckpt.exchange.foreign.contents import Contents, State, check_name
from ckpt.exchange.foreign.joined_tensors import Joiner, load_entry
from ckpt.exchange.inert.inert_pickle import Inert, read_inert
from ckpt.exchange.inert.input_limits import open_file
from ckpt.model.box import Box, tiling_fault
from ckpt.model.dtype import DTYPES
from ckpt.model.validate import MAX_DIMENSIONS

TABLE: Final = ".metadata"
_RANK_TABLE: Final = re.compile(r"__([0-9]{1,9})\.metadata")
_MOST_DEPTH: Final = 100
_MOST_MISSING_ITEMS: Final = 1 << 20

_Kind = tuple[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class _Piece:
    """An entry of a data file.

    Attributes:
        name: The name of its value.
        offsets: Its position in the tensor if it is a part of a tensor; else empty.
        path: The path of the file.
        start: The position of the entry in the file in bytes.
        nbytes: Its size in bytes.
    """

    name: str
    offsets: tuple[int, ...]
    path: str
    start: int
    nbytes: int


def has_table(names: Collection[str]) -> bool:
    """Return True if a folder with these names is a folder of DCP."""
    return bool(_tables(names))


def _tables(names: Collection[str]) -> list[str]:
    """Return the names of the tables of contents in a folder with these names.

    With ``use_collectives=False``, each rank writes a table of its own part.
    """
    if TABLE in names:
        return [TABLE]
    matches = [match for name in names if (match := _RANK_TABLE.fullmatch(name))]
    return [match[0] for match in sorted(matches, key=lambda match: int(match[1]))]


@dataclass(slots=True)
class _Table:
    """What one or several tables of contents say.

    Attributes:
        kinds: The dtype and the shape of each tensor, by name; None for another value.
        pieces: The entries.
        paths: The path of each name.
        nbytes: The bytes of all pieces, by name.
        files: The names of the files with pieces.
        notes: Notes for the user.
    """

    kinds: dict[str, _Kind | None] = field(default_factory=dict[str, _Kind | None])
    pieces: list[_Piece] = field(default_factory=list[_Piece])
    paths: dict[str, Any] = field(default_factory=dict[str, Any])
    nbytes: Counter[str] = field(default_factory=Counter[str])
    files: set[str] = field(default_factory=set[str])
    notes: list[str] = field(default_factory=list[str])


def read_folder(source: str, joiner: Joiner) -> Contents:
    """Return the state in a folder of DCP.

    Args:
        source: The path of the folder.
        joiner: Makes the tensors.

    Raises:
        IntegrityError: The folder is damaged, or a part of it is missing.
        UnsupportedValue: A value is one that only pickle could load, or that ckpt cannot hold.
        ConfigError: A file cannot be read.
        StorageError: As ``joiner`` raises it.
    """
    names = _tables(os.listdir(source)) or [TABLE]
    table = _Table()
    for name in names:
        _add_table(table, source, name)
    tensors = joiner.make({name: kind for name, kind in table.kinds.items() if kind})
    other_values, notes = _read_entries(source, table, tensors, joiner)
    if missing := table.kinds.keys() - tensors.keys() - other_values.keys():
        raise IntegrityError(f"{source}: {sorted(missing)[0]!r} is missing")
    with _table_errors(os.path.join(source, names[0])):
        state = _nest(other_values | tensors, table.paths, notes)
    return Contents(state, [*names, *sorted(table.files)], notes)


def _add_table(table: _Table, source: str, name: str) -> None:
    """Add the table of contents ``name`` of the folder ``source`` to ``table``."""
    path = os.path.join(source, name)
    with open_file(path, is_part=False) as file:
        inert_table = read_inert(file.read(), path)
    with _table_errors(path):
        kinds = {
            key: _kind(key, item) for key, item in inert_table.state["state_dict_metadata"].items()
        }
        if conflicts := [key for key, kind in kinds.items() if table.kinds.get(key, kind) != kind]:
            raise IntegrityError(f"{source}: ranks have {conflicts[0]!r} of different types")
        pieces = list(_pieces(source, inert_table))
        _check_sizes(source, inert_table, [kind for kind in kinds.values() if kind])
        table.paths |= inert_table.state.get("planner_data") or {}
        table.files |= {
            info.state["relative_path"] for info in inert_table.state["storage_data"].values()
        }
        for key, info in inert_table.state["storage_data"].items():
            table.nbytes[str(key.state["fqn"])] += int(info.state["length"])
    known_places = {(piece.name, piece.offsets) for piece in table.pieces}
    table.kinds |= kinds
    table.pieces += [piece for piece in pieces if (piece.name, piece.offsets) not in known_places]
    if shared_keys := [
        key for key, kind in kinds.items() if kind is None and (key, ()) in known_places
    ]:
        note = f"each rank has written {few(shared_keys)}: the first rank's is taken"
        table.notes += [note] if note not in table.notes else []


def _read_entries(
    source: str, table: _Table, tensors: dict[str, torch.Tensor], joiner: Joiner
) -> tuple[dict[str, Any], list[str]]:
    """Read all entries of a folder into ``tensors``, and return the other values and
    notes for the user.

    If the table names another dtype than the entries of a tensor have, the tensor gets a new one of
    their dtype. DCP's planner writes such tables from a plan that it has cached.
    """
    other_values: dict[str, Any] = {}
    boxes: dict[str, list[Box]] = {name: [] for name in tensors}
    notes = list(table.notes)
    for piece in table.pieces:
        name = piece.name
        if name not in tensors:
            other_values[name] = load_entry(piece.path, piece.start, piece.nbytes, name)
            continue
        part = joiner.load(piece.path, piece.start, piece.nbytes, name)
        if not boxes[name] and _has_other_dtype(tensors[name], part, table.nbytes[name]):
            notes.append(
                f"{name!r} is of {part.dtype}, as its entries are: the table of contents says "
                f"{tensors[name].dtype}"
            )
            dtype = str(part.dtype).removeprefix("torch.")
            tensors |= joiner.make({name: (dtype, tuple(tensors[name].shape))})
        boxes[name].append(_put_piece(joiner, name, tensors[name], piece, part))
    for name, tensor in tensors.items():
        if fault := tiling_fault(tuple(tensor.shape), boxes[name]):
            raise IntegrityError(f"{source}: the parts of {name!r} are wrong: {fault}")
    return other_values, notes


def _has_other_dtype(whole: torch.Tensor, part: torch.Tensor, nbytes: int) -> bool:
    """Return True if ``part`` has another dtype than ``whole``, and can be a part of it."""
    return (
        part.dtype != whole.dtype
        and str(part.dtype).removeprefix("torch.") in DTYPES
        and whole.numel() * part.itemsize <= nbytes
    )


@contextmanager
def _table_errors(table_path: str) -> Generator[None]:
    """Return a context manager that replaces errors such as ``KeyError`` with ``IntegrityError``.

    The block can read the table of contents of ``torch.distributed.checkpoint`` without checking
    its structure first. A damaged or forged table may have any structure, and then causes such an
    error.
    """
    try:
        yield
    except (
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
        OverflowError,
        RecursionError,
    ) as error:
        raise IntegrityError(
            f"{table_path} is not a table of torch.distributed.checkpoint: {error!r}"
        ) from None


def _kind(name: str, item: Inert) -> _Kind | None:
    """Return the dtype and the shape of the entry ``name`` of the table of contents if it is a
    tensor, else None.
    """
    if not item.name.endswith(".TensorStorageMetadata"):
        return None
    properties = item.state["properties"]
    dtype = (
        properties.args[0] if properties.args else properties.state["dtype"]
    ).name.removeprefix("torch.")
    if dtype not in DTYPES:
        raise UnsupportedValue(
            name, f"tensor of {dtype}", "view it as a dtype that safetensors can hold"
        )
    return dtype, _checked_numbers(item.state["size"])


def _checked_numbers(size: Any) -> tuple[int, ...]:
    """Return the numbers of ``size``, which is the ``Inert`` of a ``torch.Size``, or a sequence.

    Raises:
        ValueError: The numbers are not possible as the shape or the offsets of a tensor.
    """
    items = (
        size.args[0]
        if isinstance(size, Inert) and size.args
        else ()
        if isinstance(size, Inert)
        else size
    )
    numbers = tuple(int(n) for n in items)
    if (
        len(numbers) > MAX_DIMENSIONS
        or any(n < 0 for n in numbers)
        or prod(n for n in numbers if n) >= 1 << 63
    ):
        raise ValueError(f"a tensor of {len(numbers)} dimensions: {numbers[:8]}")
    return numbers


def _check_sizes(source: str, table: Inert, kinds: Sequence[_Kind]) -> None:
    """Raise ``ValueError`` if entries of a file overlap or go beyond its end, or if the tensors
    need more bytes than all entries have.

    Otherwise a forged table of contents could make the process allocate more memory than the files
    have bytes.
    """
    ranges_by_name: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for info in table.state["storage_data"].values():
        start, length = int(info.state["offset"]), int(info.state["length"])
        ranges_by_name[check_name(source, info.state["relative_path"])].append((start, length))
    entry_bytes = 0
    for name, ranges in ranges_by_name.items():
        position = 0
        for start, length in sorted(ranges):
            if start < position or length < 0:
                raise ValueError(f"entries of {name} overlap")
            position = start + length
        entry_bytes += sum(length for _, length in ranges)
        path = os.path.join(source, name)
        if os.path.isfile(path) and position > os.path.getsize(path):
            raise IntegrityError(
                f"{path} is cut: it ends before the entries that {TABLE} has of it. Copy it again"
            )
    tensor_bytes = sum(prod(shape) * DTYPES[dtype].itemsize for dtype, shape in kinds)
    if tensor_bytes > entry_bytes:
        raise ValueError(f"tensors of {tensor_bytes} bytes in entries of {entry_bytes}")


def _pieces(source: str, table: Inert) -> Iterator[_Piece]:
    """Yield the entries of the table of contents."""
    for index, info in table.state["storage_data"].items():
        name, offset = str(index.state["fqn"]), index.state.get("offset")
        place = info.state
        if place.get("transform_descriptors"):
            raise UnsupportedValue(
                name, "transformed tensor", "save it without compression or other extensions"
            )
        yield _Piece(
            name,
            _checked_numbers(offset) if offset is not None else (),
            os.path.join(source, check_name(source, place["relative_path"])),
            int(place["offset"]),
            int(place["length"]),
        )


def _put_piece(
    joiner: Joiner, name: str, whole: torch.Tensor, piece: _Piece, part: torch.Tensor
) -> Box:
    """Make ``part`` the values of the tensor ``whole`` at the position of ``piece``, and return the
    box that it fills. ``name`` is the name of the tensor in errors.

    Raises:
        IntegrityError: The part does not have the dtype and the number of dimensions of ``whole``,
            or does not fit into ``whole`` at this position.
    """
    if part.dtype != whole.dtype or part.ndim != whole.ndim:
        raise IntegrityError(f"a part of {name!r} is not what the table of contents says")
    box = Box(piece.offsets or (0,) * whole.ndim, tuple(part.shape))
    if not box.is_inside(whole.shape):
        raise IntegrityError(f"a part of {name!r} is outside of it")
    joiner.put(whole, box, part)
    return box


def _nest(flat: Mapping[str, Any], paths: Mapping[str, Any], notes: list[str]) -> State:
    """Return the values in nested dicts and lists. Below the top level, a dict with only integer
    keys becomes a list.

    DCP writes nothing for an empty dict. A list that lacks an item before its last one therefore
    gets an empty dict there, and ``notes`` a note.

    Args:
        flat: The values by their flat names, such as 'model.a.b'.
        paths: The path of each name, as the planner of ``torch.distributed.checkpoint`` has stored
            it. A name without a path stays a key of the top level.

    Raises:
        ValueError: The paths are invalid or contradict each other.
    """
    root: dict[Any, Any] = {}
    for name, value in flat.items():
        path = paths.get(name) or (name,)
        if len(path) > _MOST_DEPTH or not all(isinstance(part, str | int) for part in path):
            raise ValueError(f"the path of {name[:80]!r}")
        node = root
        for part in path[:-1]:
            node = node.setdefault(part, {})
        if not isinstance(node, dict) or path[-1] in node:
            raise ValueError(f"{name!r} is where another value is")
        node[path[-1]] = value
    if len({str(key) for key in root}) < len(root):
        raise ValueError("two values of one name")
    return {str(key): _with_lists(value, str(key), notes) for key, value in root.items()}


def _with_lists(value: Any, path: str, notes: list[str]) -> Any:
    """Return ``value`` with a list in place of each dict in it that has only integer keys. A gap is
    noted in ``notes``.
    """
    if not isinstance(value, dict):
        return value
    items = {key: _with_lists(item, f"{path}.{key}", notes) for key, item in value.items()}
    if not items or not all(isinstance(key, int) for key in items):
        return items
    if min(items) < 0 or max(items) > len(items) + _MOST_MISSING_ITEMS:
        raise ValueError(f"the list {path[:80]!r} has an item {max(items)}")
    if gaps := sorted(set(range(max(items))) - items.keys()):
        notes.append(
            f"{path!r} is a list without an item {gaps[0]}: it is an empty dict now, for which "
            "torch.distributed.checkpoint writes nothing; empty dicts at the end of a list are lost"
        )
    return [items.get(key, {}) for key in range(max(items) + 1)]

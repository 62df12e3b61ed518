"""Read a folder of ``torch.distributed.checkpoint`` (DCP) as one nested state.

The table of contents is a pickle, and is read as inert data. Each entry is a file of ``torch.save``
inside of a larger file.
"""

from __future__ import annotations

import errno
import io
import os
import re
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any, Final

import torch

from ckpt.errors import IntegrityError, OutOfSpace, StorageError, UnsupportedValue
from ckpt.errors.base import few
from ckpt.exchange.contents import Contents, State, check_name
from ckpt.exchange.inert_pickle import Inert, read_inert
from ckpt.exchange.input_limits import open_file
from ckpt.exchange.torch_reader import has_bytes, load
from ckpt.exchange.torch_writer import Scratch
from ckpt.model.box import Box, tiling_fault
from ckpt.model.dtype import DTYPES
from ckpt.model.validate import MAX_DIMENSIONS
from ckpt.staging.image import copyable

TABLE: Final = ".metadata"
_RANK_TABLE: Final = re.compile(r"__([0-9]{1,9})\.metadata")
_MOST_DEPTH: Final = 100
_MOST_ITEMS: Final = 1 << 20

_Kind = tuple[str, tuple[int, ...]]
_Piece = tuple[str, tuple[int, ...], Callable[[], Any]]


def has_table(names: Collection[str]) -> bool:
    """Return True if a folder with these names is a folder of DCP."""
    return bool(_tables(names))


def _tables(names: Collection[str]) -> list[str]:
    """Return the names of the tables of contents in a folder with these names.

    With ``use_collectives=False``, each rank writes a table of its own part.
    """
    if TABLE in names:
        return [TABLE]
    hits = [hit for name in names if (hit := _RANK_TABLE.fullmatch(name))]
    return [hit[0] for hit in sorted(hits, key=lambda hit: int(hit[1]))]


@dataclass(slots=True)
class _Table:
    """What one or several tables of contents say.

    Attributes:
        kinds: The dtype and the shape of each tensor, by name; None for another value.
        pieces: The entries (see `_pieces`).
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


def read_folder(source: str, scratch: str | None) -> Contents:
    """Return the state in a folder of DCP.

    Args:
        source: The path of the folder.
        scratch: The folder for the scratch file; None for the system's temporary folder.

    Raises:
        IntegrityError: The folder is damaged, or a part of it is missing.
        UnsupportedValue: A value is one that only pickle could load, or that ckpt cannot hold.
        ConfigError: A file cannot be read.
        StorageError: The scratch file cannot be created, such as for lack of room.
    """
    names = _tables(os.listdir(source)) or [TABLE]
    table = _Table()
    for name in names:
        _add(table, source, name)
    tensors = _make_tensors(scratch, [(name, *kind) for name, kind in table.kinds.items() if kind])
    flat, notes = _fill(source, table, tensors)
    if missing := table.kinds.keys() - tensors.keys() - flat.keys():
        raise IntegrityError(f"{source}: {sorted(missing)[0]!r} is missing")
    with _check_table(os.path.join(source, names[0])):
        state = _nest(flat | tensors, table.paths, notes)
    return Contents(state, [*names, *sorted(table.files)], notes)


def _add(table: _Table, source: str, name: str) -> None:
    """Add the table of contents ``name`` of the folder ``source`` to ``table``."""
    path = os.path.join(source, name)
    with open_file(path, is_part=False) as file:
        inert = read_inert(file.read(), path)
    with _check_table(path):
        kinds = {
            name: _kind(name, item) for name, item in inert.state["state_dict_metadata"].items()
        }
        if conflicts := [key for key, kind in kinds.items() if table.kinds.get(key, kind) != kind]:
            raise IntegrityError(f"{source}: ranks have {conflicts[0]!r} of different types")
        pieces = list(_pieces(source, inert))
        _check_sizes(source, inert, [kind for kind in kinds.values() if kind])
        table.paths |= inert.state.get("planner_data") or {}
        table.files |= {
            info.state["relative_path"] for info in inert.state["storage_data"].values()
        }
        for key, info in inert.state["storage_data"].items():
            table.nbytes[str(key.state["fqn"])] += int(info.state["length"])
    places = {(key, offsets) for key, offsets, _ in table.pieces}
    table.kinds |= kinds
    table.pieces += [piece for piece in pieces if piece[:2] not in places]
    if shared_keys := [key for key, kind in kinds.items() if kind is None and (key, ()) in places]:
        note = f"each rank has written {few(shared_keys)}: the first rank's is taken"
        table.notes += [note] if note not in table.notes else []


def _fill(
    source: str, table: _Table, tensors: dict[str, torch.Tensor]
) -> tuple[dict[str, Any], list[str]]:
    """Read all entries of a folder into ``tensors``, and return the other values and
    notes for the user.

    If the table names another dtype than the entries of a tensor have, the tensor gets a new one of
    their dtype. DCP's planner writes such tables from a plan that it has cached.
    """
    flat: dict[str, Any] = {}
    boxes: dict[str, list[Box]] = {name: [] for name in tensors}
    notes = list(table.notes)
    for name, offsets, load_piece in table.pieces:
        if name not in tensors:
            flat[name] = load_piece()
            continue
        piece = load_piece()
        if not boxes[name] and _has_other_dtype(tensors[name], piece, table.nbytes[name]):
            notes.append(
                f"{name!r} is of {piece.dtype}, as its entries are: the table of contents says "
                f"{tensors[name].dtype}"
            )
            tensors[name] = torch.empty(tensors[name].shape, dtype=piece.dtype)
        boxes[name].append(_place(name, tensors[name], offsets, piece))
    for name, tensor in tensors.items():
        if fault := tiling_fault(tuple(tensor.shape), boxes[name]):
            raise IntegrityError(f"{source}: the parts of {name!r} are wrong: {fault}")
    return flat, notes


def _has_other_dtype(whole: torch.Tensor, piece: Any, nbytes: int) -> bool:
    """Return True if ``piece`` has another dtype than ``whole``, and can be a part of it."""
    return (
        isinstance(piece, torch.Tensor)
        and has_bytes(piece)
        and piece.dtype != whole.dtype
        and str(piece.dtype).removeprefix("torch.") in DTYPES
        and whole.numel() * piece.itemsize <= nbytes
    )


@contextmanager
def _check_table(table_path: str) -> Generator[None]:
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


def _make_tensors(
    scratch: str | None, kinds: list[tuple[str, str, tuple[int, ...]]]
) -> dict[str, torch.Tensor]:
    """Return new tensors by name. The memory of the tensors is a scratch file, and their values are
    not set.

    Args:
        scratch: The folder for the scratch file; None for the system's temporary folder.
        kinds: The name, the dtype and the shape of each tensor.

    Raises:
        OutOfSpace: The folder has no room for the tensors.
        StorageError: The scratch file cannot be created.
    """
    try:
        return Scratch(scratch, kinds).tensors
    except (OSError, OverflowError) as error:
        folder = scratch or tempfile.gettempdir()
        if isinstance(error, OSError) and error.errno not in (
            errno.ENOSPC,
            errno.EDQUOT,
            errno.EFBIG,
        ):
            raise StorageError(folder, error.strerror or str(error)) from None
        nbytes = sum(prod(shape) * DTYPES[dtype].itemsize for _, dtype, shape in kinds)
        raise OutOfSpace(folder, f"for {nbytes} bytes of tensors") from None


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
    return dtype, _numbers(item.state["size"])


def _numbers(size: Any) -> tuple[int, ...]:
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
    places: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for info in table.state["storage_data"].values():
        start, length = int(info.state["offset"]), int(info.state["length"])
        places[check_name(source, info.state["relative_path"])].append((start, length))
    entry_bytes = 0
    for name, runs in places.items():
        position = 0
        for start, length in sorted(runs):
            if start < position or length < 0:
                raise ValueError(f"entries of {name} overlap")
            position = start + length
        entry_bytes += sum(length for _, length in runs)
        path = os.path.join(source, name)
        if os.path.isfile(path) and position > os.path.getsize(path):
            raise ValueError(f"{name} ends before its entries do")
    tensor_bytes = sum(prod(shape) * DTYPES[dtype].itemsize for dtype, shape in kinds)
    if tensor_bytes > entry_bytes:
        raise ValueError(f"tensors of {tensor_bytes} bytes in entries of {entry_bytes}")


def _pieces(source: str, table: Inert) -> Iterator[_Piece]:
    """Yield for each entry of the table of contents the name of its value, its offsets, and a
    function that loads the entry.

    The offsets are the position in the tensor if the entry is a part of a tensor. Otherwise they
    are empty.
    """
    for index, info in table.state["storage_data"].items():
        name, offset = str(index.state["fqn"]), index.state.get("offset")
        place = info.state
        if place.get("transform_descriptors"):
            raise UnsupportedValue(
                name, "transformed tensor", "save it without compression or other extensions"
            )
        path = os.path.join(source, check_name(source, place["relative_path"]))
        start, length = int(place["offset"]), int(place["length"])
        offsets = _numbers(offset) if offset is not None else ()
        yield name, offsets, partial(_read, path, start, length, name)


def _read(path: str, start: int, length: int, name: str) -> Any:
    with open_file(path, name) as file:
        whole = os.fstat(file.fileno()).st_size
        file.seek(max(0, min(start, whole)))
        data = file.read(min(length, whole)) if start >= 0 and length >= 0 else b""
    if len(data) != length or start < 0:
        raise IntegrityError(f"{path} is cut: it ends before {name!r} does")
    return load(io.BytesIO(data), f"{name} in {path}")


def _place(name: str, whole: torch.Tensor, offsets: tuple[int, ...], piece: Any) -> Box:
    """Copy ``piece`` to the position ``offsets`` in the tensor ``whole``, and return the box that
    it fills. ``name`` is the name of the tensor in errors.

    Raises:
        IntegrityError: The piece is not an ordinary tensor with the dtype and the number of
            dimensions of ``whole``, or does not fit into ``whole`` at this position.
    """
    if (
        not isinstance(piece, torch.Tensor)
        or not has_bytes(piece)
        or piece.dtype != whole.dtype
        or piece.ndim != whole.ndim
    ):
        raise IntegrityError(f"a part of {name!r} is not what the table of contents says")
    box = Box(offsets or (0,) * whole.ndim, tuple(piece.shape))
    if not box.is_inside(whole.shape):
        raise IntegrityError(f"a part of {name!r} is outside of it")
    dtype = str(whole.dtype).removeprefix("torch.")
    region: Any = (*box.slices(), ...)
    copyable(whole, dtype)[region].copy_(copyable(piece.detach(), dtype))
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
    if not isinstance(value, dict):
        return value
    items = {key: _with_lists(item, f"{path}.{key}", notes) for key, item in value.items()}
    if not items or not all(isinstance(key, int) for key in items):
        return items
    if min(items) < 0 or max(items) > len(items) + _MOST_ITEMS:
        raise ValueError(f"the list {path[:80]!r} has an item {max(items)}")
    if gaps := sorted(set(range(max(items))) - items.keys()):
        notes.append(
            f"{path!r} is a list without an item {gaps[0]}: it is an empty dict now, for which "
            "torch.distributed.checkpoint writes nothing; empty dicts at the end of a list are lost"
        )
    return [items.get(key, {}) for key in range(max(items) + 1)]

"""Read a folder of torchsnapshot as one nested state.

The table of contents, ``.snapshot_metadata``, is JSON. It has an entry for each value of each rank,
under the rank's number and the path of the value. The elements of a tensor are the bytes of a file,
or a range of bytes of a larger one. Small values are in the table itself, and other objects are
files of ``torch.save``. The *location* of a value is the path of its file in the folder. A *joiner*
makes whole tensors of parts, which fill boxes: regions of the tensor.
"""

from __future__ import annotations

import base64
import json
import os
import struct
from collections import defaultdict
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import contextmanager
from math import prod
from operator import add
from typing import Any, Final
from urllib.parse import unquote

import torch

from ckpt.errors import ConfigError, IntegrityError, UnsupportedValue
from ckpt.errors.base import few
from ckpt.exchange.foreign.joined_tensors import Joiner, load_entry
from ckpt.exchange.foreign.library_folders import LibraryFolder
from ckpt.exchange.inert.inert_torch import Span, dense_strides
from ckpt.exchange.inert.input_limits import map_file, open_file
from ckpt.model.box import Box, tiling_fault
from ckpt.model.dtype import DTYPES
from ckpt.model.validate import MAX_DIMENSIONS

TABLE: Final = ".snapshot_metadata"
_RAW_SERIALIZER: Final = "buffer_protocol"
_TORCH_SERIALIZER: Final = "torch_save"
_DICT_TYPES: Final = ("dict", "OrderedDict")
_MOST_DEPTH: Final = 100

Entry = Mapping[str, Any]

_DECODERS: Final[Mapping[str, Callable[[str], Any]]] = {
    "int": int,
    "str": str,
    "bool": {"True": True, "False": False}.__getitem__,
    "bytes": lambda text: base64.b64decode(text, validate=True),
    "float": lambda text: struct.unpack("<d", base64.b64decode(text, validate=True))[0],
}
"""The values that are in the table itself, by the names of their types."""


def is_torchsnapshot(names: Collection[str]) -> bool:
    """Return True if a folder with these names is one of torchsnapshot."""
    return TABLE in names


def read_torchsnapshot(source: str, joiner: Joiner) -> LibraryFolder:
    """Return the state in the folder ``source``.

    A value that several ranks have written, each its own, is that of the first rank, with a note.

    Raises:
        ConfigError: A file cannot be read, or a release of torchsnapshot before 0.1 has written it.
        IntegrityError: The folder is damaged, or a part of it is missing.
        UnsupportedValue: A value is one that only pickle could load, or that ckpt cannot hold, or
            the ranks have parts of a tensor, and nothing says which.
        StorageError: As ``joiner`` raises it.
    """
    path = os.path.join(source, TABLE)
    with _table_errors(path):
        entries, notes = _merge_ranks(_read_table(path))
    reader = _Reader(source, joiner)
    with _table_errors(path):
        reader.check(entries)
        state = _nest({key: reader.value(key, entry) for key, entry in entries.items()}, entries)
    files = [TABLE, *sorted({location.split("/")[0] for location in reader.locations})]
    return LibraryFolder("torchsnapshot", state=state, files=files, notes=notes)


@contextmanager
def _table_errors(path: str) -> Generator[None]:
    """Return a context manager that replaces the errors that a damaged table causes in its block
    with ``IntegrityError``.
    """
    try:
        yield
    except (
        AttributeError, LookupError, TypeError, ValueError, OverflowError, RecursionError,
        struct.error,
    ) as error:  # fmt: skip
        text = f"{path} is not a table of torchsnapshot: {str(error)[:200]!r}"
        raise IntegrityError(text) from None


def _read_table(path: str) -> Mapping[str, Any]:
    """Return the table of contents of a folder."""
    with open_file(path, is_part=False) as file:
        data = file.read()
    if not data.lstrip().startswith(b"{"):
        raise ConfigError(
            f"{path} is YAML, as releases of torchsnapshot before 0.1 write it: restore the folder "
            "with release 0.1.0, and take it again"
        )
    table: Mapping[str, Any] = json.loads(data)
    return table


def _merge_ranks(table: Mapping[str, Any]) -> tuple[dict[str, Entry], list[str]]:
    """Return the entry of each path, of all ranks together, and notes for the user."""
    entries: dict[str, Entry] = {}
    differing_paths: dict[str, None] = {}
    world_size = int(table["world_size"])
    items: list[tuple[str, str, Entry]] = []
    for key, entry in table["manifest"].items():
        rank, _, path = key.partition("/")
        items.append((rank, path, entry))
    for rank, path, entry in sorted(items, key=lambda item: int(item[0])):
        if not 0 <= int(rank) < world_size or not path or path.count("/") > _MOST_DEPTH:
            raise ValueError(f"the path {path[:80]!r} of rank {rank[:9]}")
        known_entry = entries.setdefault(path, entry)
        if known_entry == entry:
            continue
        if known_entry["type"] != entry["type"]:
            raise ValueError(f"{path[:80]!r} is of another type on rank {rank}")
        if entry["type"] == "ShardedTensor":
            known_entry["shards"].extend(entry["shards"])
        elif entry["type"] in _DICT_TYPES:
            keys = dict.fromkeys([*known_entry["keys"], *entry["keys"]])
            entries[path] = {**known_entry, "keys": [*keys]}
        elif known_entry.get("shape") != entry.get("shape"):
            raise UnsupportedValue(
                path,
                "tensor that has another shape on each rank",
                "load it with torchsnapshot on all ranks, and save it with ckpt.declare_part",
            )
        else:
            differing_paths[path] = None
    note = f"each rank has written {few([*differing_paths])}: the first rank's is taken"
    return entries, [note] if differing_paths else []


class _Reader:
    """Reads the values of a folder.

    Attributes:
        locations: The locations of the files that were read.
    """

    def __init__(self, source: str, joiner: Joiner) -> None:
        self.locations: set[str] = set()
        self._source, self._joiner = source, joiner
        self._maps: dict[str, memoryview] = {}

    def check(self, entries: Mapping[str, Entry]) -> None:
        """Raise unless the values are in ranges of bytes that do not overlap, and are in their
        files. So a damaged table needs no more memory than the files have bytes.
        """
        ranges_by_location: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for path, entry in entries.items():
            for item in _stored_items(entry):
                location, start, end = self._byte_range(path, item)
                ranges_by_location[location].append((start, end))
        for location, byte_ranges in ranges_by_location.items():
            position = 0
            for start, end in sorted(byte_ranges):
                if start < position or end < start:
                    raise ValueError(f"values overlap in {location}")
                position = end
            if position > os.path.getsize(path := os.path.join(self._source, location)):
                raise IntegrityError(f"{path} is cut: it ends before its values. Copy it again")

    def value(self, path: str, entry: Entry) -> Any:
        """Return the value of an entry; None for a dict or a list, whose items have entries."""
        kind = entry["type"]
        if kind in _DICT_TYPES or kind == "list":
            return None
        if kind in _DECODERS:
            return _DECODERS[kind](entry["serialized_value"])
        if kind == "Tensor":
            return self._part(path, entry)
        if kind == "ChunkedTensor":
            return self._whole(path, entry["chunks"], _checked_numbers(entry["shape"]))
        if kind == "ShardedTensor":
            return self._whole(path, entry["shards"], _shape_of(entry["shards"]))
        if kind == "object":
            _check_serializer(path, entry, _TORCH_SERIALIZER)
            location, start, end = self._byte_range(path, entry)
            return load_entry(os.path.join(self._source, location), start, end - start, path)
        raise UnsupportedValue(path, f"value of the type {str(kind)[:80]!r} of torchsnapshot")

    def _whole(self, path: str, shards: Collection[Entry], shape: tuple[int, ...]) -> torch.Tensor:
        """Return a tensor that is made of parts."""
        parts = {
            Box(_checked_numbers(item["offsets"]), _checked_numbers(item["sizes"])): item
            for item in shards
        }
        dtypes = {_dtype_of(path, item["tensor"]) for item in parts.values()}
        if fault := tiling_fault(shape, list(parts)):
            raise IntegrityError(f"{self._source}: the parts of {path!r} are wrong: {fault}")
        if len(dtypes) > 1 or any(
            _checked_numbers(item["tensor"]["shape"]) != box.shape for box, item in parts.items()
        ):
            raise ValueError(f"the parts of {path!r} have other dtypes or shapes than it")
        whole = self._joiner.make({path: (dtypes.pop(), shape)})[path]
        for box, item in parts.items():
            self._joiner.put(whole, box, self._part(path, item["tensor"]))
        return whole

    def _part(self, path: str, entry: Entry) -> torch.Tensor:
        """Return the tensor of an entry, whose elements are in one range of bytes of a file."""
        dtype, shape = _dtype_of(path, entry), _checked_numbers(entry["shape"])
        location, start, end = self._byte_range(path, entry)
        if entry["serializer"] == _TORCH_SERIALIZER:
            name = os.path.join(self._source, location)
            tensor = self._joiner.load(name, start, end - start, path)
            if (tensor.dtype, tuple(tensor.shape)) != (getattr(torch, dtype), shape):
                raise ValueError(f"{path!r} is not of the dtype and the shape that it says")
            return tensor
        _check_serializer(path, entry, _RAW_SERIALIZER)
        if start == end:
            return torch.empty(shape, dtype=getattr(torch, dtype))
        span = Span(os.path.join(self._source, location), start, dtype, shape, dense_strides(shape))
        return self._joiner.map_tensor(span, self._map_file(location, path)[start:end])

    def _map_file(self, location: str, path: str) -> memoryview:
        if location not in self._maps:
            with open_file(os.path.join(self._source, location), path) as file:
                self._maps[location] = map_file(file)
        return self._maps[location]

    def _byte_range(self, path: str, entry: Entry) -> tuple[str, int, int]:
        """Return the location of a value, and where its bytes begin and end.

        Raises:
            IntegrityError: The file is missing, or is outside of the folder.
            ValueError: The bytes are not those of the tensor, or are too few for it.
        """
        location = entry["location"]
        names = location.split("/")
        if any(name in ("", ".", "..") for name in names) or "\0" in location:
            raise IntegrityError(
                f"{self._source} names a file outside of itself: {location[:80]!r}"
            )
        with open_file(os.path.join(self._source, location), path) as file:
            size = os.fstat(file.fileno()).st_size
        self.locations.add(location)
        start, end = map(int, entry.get("byte_range") or (0, size))
        if start < 0 or end < start:
            raise ValueError(f"{path!r} is at the bytes {start} to {end}")
        if "shape" in entry:
            nbytes = (
                prod(_checked_numbers(entry["shape"])) * DTYPES[_dtype_of(path, entry)].itemsize
            )
            if nbytes > end - start or (
                nbytes != end - start and entry["serializer"] == _RAW_SERIALIZER
            ):
                raise ValueError(f"{path!r} of {nbytes} bytes has {end - start} bytes")
        return location, start, end


def _stored_items(entry: Entry) -> list[Entry]:
    """Return the entries of what the value of ``entry`` consists of in files."""
    if entry["type"] in ("Tensor", "object"):
        return [entry]
    parts = [*entry.get("shards", ()), *entry.get("chunks", ())]
    return [*{str(item): item["tensor"] for item in parts}.values()]


def _shape_of(shards: Collection[Entry]) -> tuple[int, ...]:
    """Return the shape of the smallest tensor that has these parts."""
    ends = [
        map(add, _checked_numbers(item["offsets"]), _checked_numbers(item["sizes"]))
        for item in shards
    ]
    return _checked_numbers([max(column) for column in zip(*ends, strict=True)])


def _dtype_of(path: str, entry: Entry) -> str:
    dtype = str(entry["dtype"]).removeprefix("torch.")
    if dtype not in DTYPES:
        raise UnsupportedValue(
            path, f"tensor of {dtype}", "view it as a dtype that safetensors can hold"
        )
    return dtype


def _check_serializer(path: str, entry: Entry, serializer: str) -> None:
    if entry["serializer"] != serializer:
        raise UnsupportedValue(
            path,
            f"value in the form {str(entry['serializer'])[:80]!r} of torchsnapshot",
            "restore it with torchsnapshot, and save it without quantization",
        )


def _checked_numbers(items: Collection[Any]) -> tuple[int, ...]:
    """Return the shape or the offsets of a tensor. Raises ``ValueError`` if they are impossible."""
    numbers = tuple(items)
    if (
        len(numbers) > MAX_DIMENSIONS
        or any(type(n) is not int or n < 0 for n in numbers)
        or prod(n for n in numbers if n) >= 1 << 63
    ):
        raise ValueError(f"a tensor of {len(numbers)} dimensions: {numbers[:8]}")
    return numbers


def _nest(values: Mapping[str, Any], entries: Mapping[str, Entry]) -> dict[str, Any]:
    """Return the values in nested dicts and lists. The children of the top level are under "/".

    Raises:
        ValueError: The paths contradict the keys of their dicts or lists.
    """
    children: dict[str, list[str]] = defaultdict(list)
    for path in values:
        parent, slash, name = path.rpartition("/")
        if slash and (
            parent not in entries or entries[parent]["type"] not in (*_DICT_TYPES, "list")
        ):
            raise ValueError(f"{path[:80]!r} is in no dict or list")
        children[parent if slash else "/"].append(name)

    def build(path: str) -> Any:
        entry = entries[path]
        if entry["type"] == "list":
            items = sorted(children[path], key=int)
            if items != [str(index) for index in range(len(items))]:
                raise ValueError(f"the list {path[:80]!r} lacks an item")
            return [build(f"{path}/{item}") for item in items]
        if entry["type"] not in _DICT_TYPES:
            return values[path]
        names = {_escape(str(key)): key for key in entry["keys"]}
        if names.keys() != {*children[path]} or len(names) != len(entry["keys"]):
            raise ValueError(f"the dict {path[:80]!r} has other keys than it says")
        return {key: build(f"{path}/{name}") for name, key in names.items()}

    return {unquote(name): build(name) for name in children["/"]}


def _escape(key: str) -> str:
    return key.replace("%", "%25").replace("/", "%2F")

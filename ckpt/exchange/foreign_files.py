"""Read files of other programs, and return a nested state of tensors and plain values.

A pickle is either loaded by ``torch.load(weights_only=True)``, or read as inert data.
"""

from __future__ import annotations

import errno
import io
import json
import os
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from math import prod
from typing import Any, Final, Literal

import torch

from ckpt.errors import (
    CkptError,
    ConfigError,
    IntegrityError,
    OutOfSpace,
    StorageError,
    UnsupportedValue,
)
from ckpt.exchange import safetensors_reader
from ckpt.exchange.file_kind import is_torch, what_is
from ckpt.exchange.inert_pickle import Inert, read_inert
from ckpt.exchange.input_limits import check_state, check_torch_file, opened, regular
from ckpt.exchange.torch_writer import Scratch
from ckpt.model.box import Box, tiling_fault
from ckpt.model.dtype import DTYPES
from ckpt.model.keys import MANIFEST, parse_folder
from ckpt.model.validate import MAX_DIMENSIONS
from ckpt.staging.image import copyable

Kind = Literal["torch", "dcp", "safetensors"]
State = dict[str, Any]

_TORCH: Final = (".pt", ".pth", ".bin", ".ckpt")
_SAFETENSORS: Final = ".safetensors"
_TABLE: Final = ".metadata"
_MOST_DEPTH: Final = 100
_WAY_OUT: Final = (
    "only tensors and plain values are taken: where you trust the file, load it with "
    "torch.load(..., weights_only=False) and save the state_dict() of what is in it"
)


def detect(source: str) -> Kind:
    """Return the kind of the file or folder ``source``. The kind of a file is "safetensors" if its
    name ends in ``.safetensors``, else "torch".

    Raises:
        ConfigError: ``source`` does not exist, cannot be read, is a checkpoint of ckpt, or is a
            folder of none of the three kinds.
    """
    if os.path.isfile(source):
        return "safetensors" if source.endswith(_SAFETENSORS) else "torch"
    if not os.path.isdir(source):
        raise ConfigError(f"{source} is not there: name a local file or folder")
    names = _names_in(source)
    if MANIFEST in names and (ref := parse_folder(os.path.basename(os.path.abspath(source)))):
        parent = os.path.dirname(os.path.abspath(source))
        raise ConfigError(
            f"{source} is a checkpoint of ckpt already: copy it with ckpt copy {parent} ROOT "
            f"--step {ref.step}"
        )
    if _TABLE in names:
        return "dcp"
    if any(name.endswith(_SAFETENSORS) for name in names):
        return "safetensors"
    if any(name.endswith(_TORCH) for name in names):
        return "torch"
    if any(parse_folder(name) for name in names):
        raise ConfigError(
            f"{source} holds checkpoints of ckpt already: copy them with ckpt copy {source} ROOT "
            "(--step N, or --all)"
        )
    raise ConfigError(
        f"{source} holds neither {_TABLE} of torch.distributed.checkpoint, nor *.safetensors, nor "
        "*.pt, *.pth or *.bin of torch.save"
    )


def check_kind(source: str, kind: Kind) -> None:
    """Raise ``ConfigError`` if ``source`` cannot be of this kind.

    If the first bytes of a file show its kind, the error names that kind.
    """
    if not os.path.exists(source):
        raise ConfigError(f"{source} is not there: name a local file or folder")
    if os.path.isdir(source):
        names = _names_in(source)
        wanted = {"dcp": (_TABLE,), "safetensors": (_SAFETENSORS,), "torch": _TORCH}[kind]
        if not any(name.endswith(wanted) for name in names):
            raise ConfigError(f"--format {kind}: {source} holds no {', '.join(wanted)} file")
    elif kind == "dcp":
        what = what_is(regular(source)) or (
            "a file of torch.save: give --format torch" if is_torch(source) else "a file"
        )
        raise ConfigError(
            f"--format dcp: {source} is {what}; torch.distributed.checkpoint writes a folder with "
            f"a {_TABLE} file in it"
        )
    elif kind == "safetensors" and is_torch(regular(source)):
        raise ConfigError(
            f"--format safetensors: {source} is a file of torch.save: give --format torch"
        )


def _names_in(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be read: {error.strerror or error}") from None


def read_source(source: str, kind: Kind, scratch: str | None) -> State:
    """Return the state in ``source``.

    Tensors are mapped from the source file if possible. The tensors in a folder of
    ``torch.distributed.checkpoint`` are assembled in a scratch file, and mapped from it.

    Args:
        source: The file or folder.
        kind: The kind of ``source``.
        scratch: The folder for the scratch file; None for the system's temporary folder.

    Raises:
        UnsupportedValue: The state contains objects that only pickle could load, or a tensor that
            ckpt does not support.
        IntegrityError: The source is damaged, or a part of it is missing.
        ConfigError: The source cannot be read, or is a file of another kind.
        StorageError: The scratch file cannot be created, such as for lack of room.
    """
    match kind:
        case "torch":
            return _torch(source)
        case "dcp":
            return _dcp(source, scratch)
        case "safetensors":
            return _safetensors(source)


# -- torch.save ------------------------------------------------------------------------------------


def _torch(source: str) -> State:
    if os.path.isfile(source):
        return _state(_load(source))
    files = sorted(name for name in os.listdir(source) if name.endswith(_TORCH))
    if not files:
        raise ConfigError(f"{source} holds no {', '.join(_TORCH)} file")
    indexed = _indexed(source, "bin")
    loaded = {name: _load(os.path.join(source, name)) for name in indexed or files}
    if len(loaded) == 1 or indexed:  # All files together hold one state
        return _merged(source, ((name, _state(part)) for name, part in loaded.items()))
    stems = {name: os.path.splitext(name)[0] for name in loaded}
    alone = len(set(stems.values())) == len(stems)  # With a.pt and a.bin, full names are used
    return {stems[name] if alone else name: value for name, value in loaded.items()}


def _state(found: Any) -> State:
    return dict(found) if isinstance(found, Mapping) else {"value": found}


def _merged(source: str, parts: Iterable[tuple[str, State]]) -> State:
    """Return the values of all ``parts`` in one state.

    Args:
        source: The folder of the files.
        parts: The name and the state of each file.

    Raises:
        ConfigError: Two files have a value of the same name.
    """
    state: State = {}
    files: dict[str, str] = {}
    for name, part in parts:
        if twice := [key for key in part if key in state]:
            raise ConfigError(
                f"{source}: both {files[twice[0]]} and {name} hold {twice[0]!r}: name the one file "
                "to import instead of the folder"
            )
        state |= part
        files |= dict.fromkeys(part, name)
    return state


def _load(path: str | io.BytesIO, name: str = "") -> Any:
    name = name or str(path)
    try:
        with open(regular(path), "rb") if isinstance(path, str) else nullcontext(path) as file:
            check_torch_file(file, name)
            file.seek(0)
        try:
            found = torch.load(
                path, map_location="cpu", weights_only=True, mmap=isinstance(path, str)
            )
        except RuntimeError as error:
            if "mmap" not in str(error):
                raise
            # Files of torch before 1.6 cannot be mapped.
            found = torch.load(path, map_location="cpu", weights_only=True)
        check_state(found, name)
        return found
    except CkptError:
        raise
    except FileNotFoundError:
        raise IntegrityError(f"{name} is missing") from None
    except OSError as error:
        if error.errno == errno.EINVAL:  # ``mmap`` raises this error for a file that is cut short
            raise IntegrityError(
                f"{name} is not a whole file of torch.save: it was cut short"
            ) from None
        raise ConfigError(f"{name} cannot be read: {error.strerror or error}") from None
    except Exception as error:  # noqa: BLE001
        # Damaged bytes can cause any error in the unpickler or the zip reader.
        text = str(error)
        if isinstance(path, str) and (kind := what_is(path)):
            raise ConfigError(f"{name} is not a file of torch.save, but {kind}") from None
        if "weights_only" in text or "Unsupported" in text or "WeightsUnpickler" in text:
            found = re.search(r"GLOBAL ([\w.]+)", text)
            what = (
                f"pickle of more than tensors ({found[1]})"
                if found
                else "pickle of more than tensors"
            )
            raise UnsupportedValue(name, what, _WAY_OUT) from None
        raise IntegrityError(
            f"{name} is not a whole file of torch.save: "
            f"{(text.splitlines() or ['it is empty'])[0][:200]}"
        ) from None


def _indexed(folder: str, suffix: str) -> list[str]:
    """Return the names of the files that a Hugging Face index in the folder lists. The result is
    empty if the folder has no index for files with this suffix.

    Raises:
        ConfigError: The folder has more than one such index.
        IntegrityError: The index is invalid, or names a file outside of the folder.
    """
    found = sorted(name for name in os.listdir(folder) if name.endswith(f".{suffix}.index.json"))
    if not found:
        return []
    if len(found) > 1:
        raise ConfigError(
            f"{folder} holds more than one index: {', '.join(found)}: move one of them and its "
            "files to a folder of their own"
        )
    try:
        with opened(os.path.join(folder, found[0]), is_part=False) as file:
            names = sorted(set(json.load(file)["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise IntegrityError(f"{found[0]} is not an index: {error!r}") from None
    return [_inside(folder, name) for name in names]


def _inside(folder: str, name: object) -> str:
    """Return ``name``, a file name from an index or table of contents of ``folder``. Raises
    ``IntegrityError`` if it is not the plain name of a file in the folder.
    """
    if (
        not isinstance(name, str)
        or os.path.basename(name) != name
        or "\0" in name
        or name in ("", ".", "..")
    ):
        raise IntegrityError(f"{folder} names a file outside of itself: {str(name)[:80]!r}")
    return name


# -- safetensors -----------------------------------------------------------------------------------


def _safetensors(source: str) -> State:
    if os.path.isfile(source):
        state, shared = safetensors_reader.read_file(source)
    else:
        names = _indexed(source, "safetensors")
        names = names or sorted(name for name in os.listdir(source) if name.endswith(_SAFETENSORS))
        read = {name: safetensors_reader.read_file(os.path.join(source, name)) for name in names}
        state = _merged(source, ((name, tensors) for name, (tensors, _) in read.items()))
        shared = {key: kept for _, metadata in read.values() for key, kept in metadata.items()}
    tied = {
        name: state[kept] for name, kept in shared.items() if kept in state and name not in state
    }
    return state | tied


# -- torch.distributed.checkpoint ------------------------------------------------------------------


def _dcp(source: str, scratch: str | None) -> State:
    table_path = os.path.join(source, _TABLE)
    with opened(table_path, is_part=False) as file:
        table = read_inert(file.read(), table_path)
    with _doubted(table_path):
        kinds = {
            name: _kind(name, item) for name, item in table.state["state_dict_metadata"].items()
        }
        pieces = list(_pieces(source, table))
        _check_sizes(source, table, [kind for kind in kinds.values() if kind])
        paths: Mapping[str, Any] = table.state.get("planner_data") or {}
    made = _made(scratch, [(name, *kind) for name, kind in kinds.items() if kind])
    flat: dict[str, Any] = {}
    filled: dict[str, list[Box]] = {name: [] for name in made}
    for name, offsets, load in pieces:
        value = load()
        if name in made:
            filled[name].append(_place(name, made[name], offsets, value))
        else:
            flat[name] = value
    for name, tensor in made.items():
        if fault := tiling_fault(tuple(tensor.shape), filled[name]):
            raise IntegrityError(f"{source}: the parts of {name!r} are wrong: {fault}")
    if missing := kinds.keys() - made.keys() - flat.keys():
        raise IntegrityError(f"{source}: {sorted(missing)[0]!r} is missing")
    with _doubted(table_path):
        return _nest(flat | made, paths)


@contextmanager
def _doubted(table_path: str) -> Generator[None]:
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


def _made(
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


def _kind(name: str, item: Inert) -> tuple[str, tuple[int, ...]] | None:
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
    found = tuple(int(n) for n in items)
    if (
        len(found) > MAX_DIMENSIONS
        or any(n < 0 for n in found)
        or prod(n for n in found if n) >= 1 << 63
    ):
        raise ValueError(f"a tensor of {len(found)} dimensions: {found[:8]}")
    return found


def _check_sizes(source: str, table: Inert, kinds: Sequence[tuple[str, tuple[int, ...]]]) -> None:
    """Raise ``ValueError`` if entries of a file overlap or go beyond its end, or if the tensors
    need more bytes than all entries have.

    Otherwise a forged table of contents could make the process allocate more memory than the files
    have bytes.
    """
    places: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for info in table.state["storage_data"].values():
        start, length = int(info.state["offset"]), int(info.state["length"])
        places[_inside(source, info.state["relative_path"])].append((start, length))
    held = 0
    for name, runs in places.items():
        at = 0
        for start, length in sorted(runs):
            if start < at or length < 0:
                raise ValueError(f"entries of {name} overlap")
            at = start + length
        held += sum(length for _, length in runs)
        path = os.path.join(source, name)
        if os.path.isfile(path) and at > os.path.getsize(path):
            raise ValueError(f"{name} ends before its entries do")
    wanted = sum(prod(shape) * DTYPES[dtype].itemsize for dtype, shape in kinds)
    if wanted > held:
        raise ValueError(f"tensors of {wanted} bytes in entries of {held}")


def _pieces(source: str, table: Inert) -> Iterator[tuple[str, tuple[int, ...], Callable[[], Any]]]:
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
        path = os.path.join(source, _inside(source, place["relative_path"]))
        start, length = int(place["offset"]), int(place["length"])
        offsets = _numbers(offset) if offset is not None else ()
        yield name, offsets, partial(_read, path, start, length, name)


def _read(path: str, start: int, length: int, name: str) -> Any:
    with opened(path, name) as file:
        whole = os.fstat(file.fileno()).st_size
        file.seek(max(0, min(start, whole)))
        data = file.read(min(length, whole)) if start >= 0 and length >= 0 else b""
    if len(data) != length or start < 0:
        raise IntegrityError(f"{path} is cut: it ends before {name!r} does")
    return _load(io.BytesIO(data), f"{name} in {path}")


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
    if not box.inside(whole.shape):
        raise IntegrityError(f"a part of {name!r} is outside of it")
    dtype = str(whole.dtype).removeprefix("torch.")
    region: Any = (*box.slices(), ...)
    copyable(whole, dtype)[region].copy_(copyable(piece.detach(), dtype))
    return box


def has_bytes(tensor: torch.Tensor) -> bool:
    """Return True if ``tensor`` is an ordinary strided tensor in host memory. A save refuses
    sparse, quantized and nested tensors, and tensors on the meta device.
    """
    plain = tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested
    return plain and tensor.device.type == "cpu"


def _nest(flat: Mapping[str, Any], paths: Mapping[str, Any]) -> State:
    """Return the values in nested dicts and lists. Below the top level, a dict with only integer
    keys becomes a list.

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
        at = root
        for part in path[:-1]:
            at = at.setdefault(part, {})
        if not isinstance(at, dict) or path[-1] in at:
            raise ValueError(f"{name!r} is where another value is")
        at[path[-1]] = value
    if len({str(key) for key in root}) < len(root):
        raise ValueError("two values of one name")
    return {str(key): _with_lists(value) for key, value in root.items()}


def _with_lists(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    items = {key: _with_lists(item) for key, item in value.items()}
    if items and all(isinstance(key, int) for key in items):
        return [items[key] for key in sorted(items)]
    return items

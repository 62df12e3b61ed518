"""Check that loading a file of another program takes time and memory in proportion to its size.

``torch.load(weights_only=True)`` calls no function that a file names. But a malicious file could
still contain compressed data that unpacks to a very large size, keys that take forever to hash, or
containers that contain each other again and again. A pipe in place of a file may never end.
"""

from __future__ import annotations

import mmap
import os
import pickletools
import stat
import zipfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import IO, Any, Final

import torch

from ckpt.errors import ConfigError, IntegrityError, UnsupportedValue

_MOST_ITEMS: Final = 1 << 20
"""The most items of a tuple, counting the items of all tuples in it. If the tuple is a key of a
dict, Python hashes all these items.
"""
_MOST_DEPTH: Final = 100
_MOST_REPEATS: Final = 16
"""The most times that a state may refer to each of its values, on average. ``_MOST_ITEMS`` further
visits are allowed, so that small states always pass.
"""


def check_regular(path: str) -> str:
    """Return ``path``. Raises ``ConfigError`` if it exists and is not an ordinary file, since
    reading a pipe or a device may never end.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise ConfigError(f"{path} is not an ordinary file")
    except OSError:
        pass  # The caller then opens the file and gets the same error
    return path


@contextmanager
def open_file(path: str, value_name: str = "", *, is_part: bool = True) -> Generator[IO[bytes]]:
    """Return a context manager that opens an ordinary file of another program for reading.

    Args:
        path: The path of the file.
        value_name: The name of the value that the file holds, for errors; empty to leave it out.
        is_part: Whether another file of the checkpoint names this one.

    Raises:
        IntegrityError: The file is missing although ``is_part`` is set.
        ConfigError: The file cannot be opened, or an ``OSError`` occurs in the block.
    """
    clause = f", which holds {value_name!r}" if value_name else ""
    try:
        with open(check_regular(path), "rb") as file:
            yield file
    except OSError as error:
        if is_part and isinstance(error, FileNotFoundError):
            raise IntegrityError(f"{path} is missing{clause}") from None
        comma = "," if value_name else ""
        raise ConfigError(
            f"{path}{clause}{comma} cannot be read: {error.strerror or error}"
        ) from None


def map_file(file: IO[bytes]) -> memoryview:
    """Return the bytes of an open file, mapped as copies on write.

    A checkpoint may have more files than a process may open, and the ``mmap`` of Python would keep
    each of them open. But the kernel may refuse copies of a file that is larger than the memory of
    the machine. Such a file is mapped to be read only, and stays open.

    Raises:
        OSError: The file cannot be mapped.
    """
    size = os.fstat(file.fileno()).st_size
    if not size:
        return memoryview(b"")
    path = f"/proc/self/fd/{file.fileno()}"  # Its name may be of another file now
    try:
        data = torch.from_file(path, shared=False, size=size, dtype=torch.uint8)
    except RuntimeError:  # torch raises no other type of error
        return memoryview(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ))
    return memoryview(data.numpy())  # type: ignore[arg-type]


def check_torch_file(file: IO[bytes], name: str) -> None:
    """Check a file of ``torch.save`` before it is loaded.

    A file that is neither a zip archive nor a pickle passes this check, since ``torch.load``
    refuses it.

    Args:
        file: The file.
        name: The name of the file in errors.

    Raises:
        IntegrityError: The file is compressed, or has parts that overlap, so that loading it would
            need more memory than the file has bytes.
        UnsupportedValue: A tuple in the file has too many items (see ``check_pickle``).
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    if file.read(4) != b"PK\x03\x04":
        _check_legacy(file, name)
        return
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
            for entry in entries:
                if (
                    entry.compress_type != zipfile.ZIP_STORED
                    or entry.file_size > entry.compress_size
                ):
                    raise IntegrityError(f"{name} is compressed, which torch.save never does")
            if sum(entry.file_size for entry in entries) > size:
                raise IntegrityError(f"{name} has parts that overlap")
            for entry in entries:
                if entry.filename.rpartition("/")[2] == "data.pkl":
                    check_pickle(archive.read(entry), name)
    except (zipfile.BadZipFile, NotImplementedError, ValueError, EOFError, OSError, RuntimeError):
        return  # ``torch.load`` refuses the file


def _check_legacy(file: IO[bytes], name: str) -> None:
    """Check a file of torch before 1.6, which consists of five pickles and the bytes of the
    tensors.
    """
    file.seek(0)
    try:
        for _ in range(5):
            check_pickle(file, name)
    except (ValueError, LookupError, UnicodeError, OSError):
        return


def check_pickle(data: bytes | IO[bytes], name: str) -> None:
    """Raise ``UnsupportedValue`` if a tuple in a pickle has too many items, counting the items of
    all tuples in it.

    In a short pickle, each tuple may contain the tuple before it twice. Hashing the last tuple then
    takes forever. The check follows the opcodes with a stack of numbers: the number of items for
    each tuple, and 1 for any other object.

    Args:
        data: The pickle, or a file at the position of the pickle.
        name: The name of the file in errors.
    """
    stack: list[int] = []
    marks: list[int] = []
    memo: dict[int, int] = {}
    arg: Any
    for opcode, arg, _ in pickletools.genops(data):
        match opcode.name:
            case "MARK":
                marks.append(len(stack))
            case "MEMOIZE":
                memo[len(memo)] = stack[-1] if stack else 1
            case "PUT" | "BINPUT" | "LONG_BINPUT":
                memo[arg] = stack[-1] if stack else 1
            case "GET" | "BINGET" | "LONG_BINGET":
                stack.append(memo.get(arg, 1))
            case "POP" if marks and marks[-1] == len(stack):
                marks.pop()
            case _:
                popped_count = len(opcode.stack_before)
                if pickletools.markobject in opcode.stack_before:
                    start = marks.pop() if marks else 0
                    items = stack[start:]
                    del stack[start:]
                    popped_count = opcode.stack_before.index(pickletools.markobject)
                    if popped_count:
                        del stack[-popped_count:]
                else:
                    items = stack[len(stack) - popped_count :] if popped_count else []
                    del stack[len(stack) - len(items) :]
                item_count = 1 + sum(items) if opcode.name.startswith("TUPLE") else 1
                if item_count > _MOST_ITEMS:
                    raise UnsupportedValue(
                        name, "pickle of tuples in tuples", "it would take forever to load"
                    )
                stack += [item_count] * len(opcode.stack_after)


def check_nesting(state: Any, name: str) -> None:
    """Raise ``UnsupportedValue`` if a walk through ``state`` would take forever, because a
    container contains itself, is nested too deeply, or occurs too many times.
    """
    sizes: dict[int, int] = {}  # By id of a container: the values that a walk through it visits
    item_count = 0  # The number of items of all containers, where each container counts once
    stack: list[tuple[Any, bool, int]] = [(state, False, 0)]
    open_ids: set[int] = set()  # Of the containers around the present value
    while stack:
        value, is_walked, depth = stack.pop()
        if not isinstance(value, Mapping | list | tuple | set | frozenset):
            continue
        items = [*value.keys(), *value.values()] if isinstance(value, Mapping) else list(value)
        if is_walked:
            open_ids.discard(id(value))
            sizes[id(value)] = 1 + sum(sizes.get(id(item), 1) for item in items)
        elif id(value) in open_ids or depth > _MOST_DEPTH:
            raise UnsupportedValue(name, "container nested too deeply, or in itself")
        elif id(value) not in sizes:
            open_ids.add(id(value))
            item_count += len(items)
            stack.append((value, True, depth))
            stack += [(item, False, depth + 1) for item in items]
    if sizes and sizes[id(state)] > _MOST_ITEMS + _MOST_REPEATS * item_count:
        raise UnsupportedValue(name, "state of containers that it refers to again and again")

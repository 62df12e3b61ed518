"""Join the files that each rank of a job has written with ``torch.save``.

Some trainers save the ``state_dict()`` of a sharded model on each rank, as verl does with
``model_world_size_2_rank_0.pt`` and torch_checkpointing with ``model_0.pt``. The DTensors say which
part of the whole tensor a rank holds. Files are joined if their names differ only in the number at
the end, and there is one of each rank. A job of one rank has no DTensors, and then all files of the
folder end in 0.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch.distributed.tensor import DTensor

from ckpt.adapters.tensors.layout import boxes_of, local
from ckpt.adapters.torch_private import ranks_of_mesh
from ckpt.errors import ConfigError, IntegrityError, UnsupportedValue
from ckpt.exchange.library_folders import LibraryFolder
from ckpt.exchange.torch_writer import Scratch
from ckpt.model.box import Box, tiling_fault
from ckpt.model.cuts import local_regions
from ckpt.model.values import join
from ckpt.staging.image import copyable

_NAME: Final = re.compile(
    r"(.+?)(?:[_-]world_size[_-][0-9]+)?(?:[_-]?rank)?[_-]?([0-9]{1,7})\.(?:pt|pth|bin|ckpt)"
)

Load = Callable[[str], Any]


def check_whole(state: Any, path: str) -> None:
    """Raise ``ConfigError`` if a value in ``state``, the content of the file ``path``, is only a
    part of a tensor.
    """
    if first := next(_sharded(state), None):
        raise ConfigError(
            f"{path} holds one rank's part of {first[0]!r}: name the folder that has the file of "
            "each of the ranks"
        )


@contextmanager
def without_warnings() -> Generator[None]:
    """Return a context manager for reading files with DTensors. For each of them, torch would log
    that there is no process group, which only ``torch.compile`` needs.
    """
    logger = logging.getLogger("torch.distributed.device_mesh")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def read_rank_files(source: str, load: Load, scratch: str | None) -> LibraryFolder | None:
    """Return the joined state of the files in the folder ``source``, or None if these are not the
    files of the ranks of one job.

    Args:
        source: The folder.
        load: Returns the content of a file of ``torch.save``.
        scratch: The folder for the scratch file with the whole tensors; None for the system's
            temporary folder.

    Raises:
        IntegrityError: The file of a rank is missing, or the parts do not fit together.
        UnsupportedValue: A tensor has a placement that assigns no part to a rank.
    """
    ranks: dict[str, dict[int, str]] = {}
    for name in os.listdir(source) if os.path.isdir(source) else ():
        if hit := _NAME.fullmatch(name):
            ranks.setdefault(hit[1], {})[int(hit[2])] = name
    found = LibraryFolder("torch")
    is_of_job = len(ranks) > 1 and all(names.keys() == {0} for names in ranks.values())
    for kind, names in sorted(ranks.items()):
        try:
            parts = {rank: load(os.path.join(source, name)) for rank, name in names.items()}
        except UnsupportedValue as error:
            found.notes.append(f"the files of {kind!r} are not taken: {error}")
            continue
        files = [names[rank] for rank in sorted(names)]
        for name, tensor in _sharded(parts[min(parts)]):
            is_of_job = True
            if missing := {*ranks_of_mesh(tensor.device_mesh).flatten().tolist()} - names.keys():
                raise IntegrityError(
                    f"{source}: rank {min(missing)} holds a part of {name!r}, and its file beside "
                    f"{files[0]} is missing"
                )
        found.state[kind] = _Joined(parts, scratch).value
        found.files += files
    return found if is_of_job else None


class _Joined:
    """Joins the contents of the files of all ranks.

    Attributes:
        value: The joined content. A value that is equal on all ranks is taken once. Values that
            differ are a list with that of each rank.
    """

    def __init__(self, parts: Mapping[int, Any], scratch: str | None) -> None:
        self._ranks = sorted(parts)
        values = [parts[rank] for rank in self._ranks]
        kinds = [
            (name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
            for name, tensor in _sharded(values[0])
        ]
        self._made = Scratch(scratch, kinds).tensors
        self.value = self._join("", values)

    def _join(self, path: str, values: Sequence[Any]) -> Any:
        first = values[0]
        if isinstance(first, DTensor):
            return self._whole(path, values)
        if isinstance(first, Mapping) and all(
            isinstance(value, Mapping) and value.keys() == first.keys() for value in values
        ):
            return {
                key: self._join(join(path, key), [value[key] for value in values]) for key in first
            }
        if isinstance(first, list) and all(
            isinstance(value, list) and len(value) == len(first) for value in values
        ):
            return [
                self._join(join(path, str(index)), items)
                for index, items in enumerate(zip(*values, strict=True))
            ]
        return first if all(_is_equal(first, value) for value in values[1:]) else list(values)

    def _whole(self, path: str, values: Sequence[Any]) -> torch.Tensor:
        whole = self._made[path]
        dtype = str(whole.dtype).removeprefix("torch.")
        filled: dict[Box, None] = {}
        for rank, part in zip(self._ranks, values, strict=True):
            if not isinstance(part, DTensor) or part.shape != whole.shape:
                raise IntegrityError(f"{path!r} of rank {rank} is no part of the same tensor")
            held, boxes = local(part), boxes_of(path, part, rank)
            if sum(box.numel for box in boxes) != held.numel() or held.dtype != whole.dtype:
                raise IntegrityError(f"{path!r} of rank {rank} is not the part that it should be")
            for box, region in zip(boxes, local_regions(boxes), strict=True):
                if box not in filled:  # Other ranks may have replicas of it
                    filled[box] = None
                    there: Any = (*box.slices(), ...)
                    here: Any = (*region.slices(), ...)
                    copyable(whole, dtype)[there].copy_(copyable(held, dtype)[here])
        if fault := tiling_fault(tuple(whole.shape), list(filled)):
            raise IntegrityError(f"the parts of {path!r} are wrong: {fault}")
        return whole


def _sharded(value: Any, path: str = "") -> Iterator[tuple[str, DTensor]]:
    """Yield the DTensors in dicts and lists, with their paths."""
    if isinstance(value, DTensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _sharded(item, join(path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _sharded(item, join(path, str(index)))


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        both = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
        return both and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_is_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_is_equal, one, other))
    return type(one) is type(other) and bool(one == other)

"""Join the files that each rank of a job has written with ``torch.save``.

Some trainers save the ``state_dict()`` of a sharded model on each rank, as verl does with
``model_world_size_2_rank_0.pt`` and torch_checkpointing with ``model_0.pt`` and ``optim_0.pt``. The
DTensors say which part of the whole tensor a rank has, and which rank has written the file. The
number at the end of a name may be that of an epoch, too. So files are joined only if their numbers
are those of the ranks, and if no count in them, such as the step of an optimizer, differs. If the
files do not say which rank has written them, their names must say "rank", or several kinds of files
must have the same numbers. A job of one rank has no DTensors, and then all files of the folder end
in 0.

Files whose names differ only in the number are of one *kind*. The *stem* of a kind is the common
prefix of its names. A *joiner* makes whole tensors of their parts, and a *box* is the region of a
tensor that a part fills.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch.distributed.tensor import DTensor

from ckpt.errors import ConfigError, IntegrityError, UnsupportedValue
from ckpt.errors.base import few
from ckpt.exchange.foreign.joined_tensors import Joiner
from ckpt.exchange.foreign.library_folders import LibraryFolder
from ckpt.model.box import Box, tiling_fault
from ckpt.model.mesh_boxes import local_regions
from ckpt.model.values import join
from ckpt.staging.image import copyable
from ckpt.state.tensors.layout import boxes_of, to_local
from ckpt.torch_private import ranks_of_mesh, writer_of_mesh

_FILE_NAME: Final = re.compile(
    r"(.+?)([_-]world_size[_-][0-9]+)?([_-]?rank)?[_-]?([0-9]{1,7})\.(?:pt|pth|bin|ckpt)"
)
_COUNT_KEYS: Final = ("step", "global_step", "epoch", "iteration")

Load = Callable[[str], Any]


def check_not_of_one_rank(state: Any, path: str) -> None:
    """Raise ``ConfigError`` if a value in ``state``, the content of the file ``path``, is only a
    part of a tensor.
    """
    if shard := next(_named_dtensors(state), None):
        name, _ = shard
        raise ConfigError(
            f"{path} holds one rank's part of {name!r}: name the folder that has the file of "
            "each of the ranks"
        )


@contextmanager
def without_warnings() -> Generator[None]:
    """Return a context manager for reading files with DTensors. For each of them, torch would log
    that there is no process group, which only ``torch.compile`` needs.
    """
    logger = logging.getLogger("torch.distributed.device_mesh")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@dataclass(frozen=True, slots=True)
class _Kind:
    """Files whose names differ only in a number.

    Attributes:
        stem: What their names begin with.
        says_rank: Whether the names say that the numbers are those of ranks.
        names: The names of the files, by number.
    """

    stem: str
    says_rank: bool
    names: dict[int, str] = field(default_factory=dict[int, str])

    @property
    def files(self) -> list[str]:
        """The names of the files, in the order of their numbers."""
        return [self.names[number] for number in sorted(self.names)]


def read_rank_files(source: str, load: Load, joiner: Joiner) -> LibraryFolder | None:
    """Return the joined state of the files in the folder ``source``, or None if these are not the
    files of the ranks of one job.

    Args:
        source: The folder.
        load: Returns the content of a file of ``torch.save``.
        joiner: Makes the whole tensors.

    Raises:
        ConfigError: It is not clear whether the files are those of ranks, or of several saves.
        IntegrityError: The file of a rank is missing, or the parts do not fit together.
        UnsupportedValue: A tensor has a placement that assigns no part to a rank.
    """
    kinds, other_names = _kinds(os.listdir(source))
    is_of_one_rank = (
        len(kinds) > 1 and not other_names and all(kind.names.keys() == {0} for kind in kinds)
    )
    folder = LibraryFolder("torch")
    contents: dict[str, Any] = {}
    for kind in kinds:
        try:
            contents[kind.stem] = load(os.path.join(source, kind.names[min(kind.names)]))
        except UnsupportedValue as error:
            folder.notes.append(f"the files of {kind.stem!r} are not taken: {error}")
    sharded_stems = {
        stem for stem, content in contents.items() if next(_named_dtensors(content), None)
    }
    if not sharded_stems and not is_of_one_rank:
        return None
    for kind in kinds:
        if kind.stem not in contents:
            continue
        parts = {number: load(os.path.join(source, name)) for number, name in kind.names.items()}
        if not is_of_one_rank and (doubt := _doubt(kind, parts, kinds)):
            if kind.stem in sharded_stems:
                raise ConfigError(f"{source}: {doubt}")
            folder.notes.append(f"{kind.stem!r} is not taken: {doubt}")
            continue
        _check_ranks(source, kind, parts)
        joined_files = _JoinedFiles(parts, joiner)
        folder.state[kind.stem] = joined_files.value
        folder.files += kind.files
        if joined_files.differing_paths:
            folder.notes.append(
                f"{few(joined_files.differing_paths, 3)} of {kind.stem!r} differ between the "
                "ranks: each is a list of the tensors of all ranks now"
            )
    return folder


def _kinds(names: Iterable[str]) -> tuple[list[_Kind], list[str]]:
    """Return the kinds of the files with a number, and the names of the other files of torch."""
    kinds: dict[str, _Kind] = {}
    other_names: list[str] = []
    for name in names:
        if match := _FILE_NAME.fullmatch(name):
            stem, world_size, rank_word, number = match.groups()
            kind = kinds.setdefault(stem, _Kind(stem, bool(world_size or rank_word)))
            kind.names[int(number)] = name
        elif name.endswith((".pt", ".pth", ".bin", ".ckpt")):
            other_names.append(name)
    return [kinds[stem] for stem in sorted(kinds)], other_names


def _doubt(kind: _Kind, parts: Mapping[int, Any], kinds: Sequence[_Kind]) -> str:
    """Return why the files of ``kind``, with the contents ``parts``, may not be those of the ranks
    of one save; empty if there is no doubt.
    """
    files = few(kind.files, 2, quote=False)
    writers = {
        number: rank
        for number, part in parts.items()
        if (named_dtensor := next(_named_dtensors(part), None))
        and (rank := writer_of_mesh(named_dtensor[1].device_mesh)) is not None
    }
    for number, rank in sorted(writers.items()):
        if number != rank:
            return (
                f"rank {rank} has written {kind.names[number]}, so {files} are of several saves: "
                "import a folder with the files of all ranks of one save"
            )
    if count := _differing_count([parts[number] for number in sorted(parts)]):
        return (
            f"{files} differ in {count!r}, so they are of several saves: move the files of one "
            "save to a folder of their own, and import that"
        )
    siblings = [
        sibling
        for sibling in kinds
        if sibling is not kind and sibling.names.keys() == kind.names.keys()
    ]
    if writers or kind.says_rank or siblings or len(parts) == 1:
        return ""
    return (
        f"{files} may be the files of ranks or of several saves: if they are of the ranks of one "
        f"save, rename them to {kind.stem}_rank_N.pt"
    )


def _check_ranks(source: str, kind: _Kind, parts: Mapping[int, Any]) -> None:
    """Raise ``IntegrityError`` if the file of a rank that has a part of a tensor is missing."""
    for name, tensor in _named_dtensors(parts[min(parts)]):
        if missing := {*ranks_of_mesh(tensor.device_mesh).flatten().tolist()} - parts.keys():
            raise IntegrityError(
                f"{source}: rank {min(missing)} holds a part of {name!r}, and its file beside "
                f"{kind.files[0]} is missing"
            )


def _differing_count(values: Sequence[Any], path: str = "") -> str:
    """Return the path of a count that differs between the files; empty if there is none."""
    reference = values[0]
    if not all(isinstance(value, Mapping) and value.keys() == reference.keys() for value in values):
        return ""
    for key in reference:
        items = [value[key] for value in values]
        name = join(path, key)
        if key in _COUNT_KEYS and all(map(_is_number, items)) and not _are_equal(items):
            return name
        if inner := _differing_count(items, name):
            return inner
    return ""


def _is_number(value: Any) -> bool:
    is_plain = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
    return isinstance(value, int | float) or (is_plain and not value.ndim)


class _JoinedFiles:
    """Joins the contents of the files of all ranks.

    Attributes:
        value: The joined content. A value that is equal on all ranks is taken once. Values that
            differ are a list with that of each rank.
        differing_paths: The paths of tensors that are such lists.

    ``joiner`` fills ``_tensors``, the whole tensors by their paths, with the parts.
    """

    def __init__(self, parts: Mapping[int, Any], joiner: Joiner) -> None:
        self._joiner = joiner
        self._ranks = sorted(parts)
        values = [parts[rank] for rank in self._ranks]
        self._tensors = joiner.make(
            {
                name: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
                for name, tensor in _named_dtensors(values[0])
            }
        )
        self.differing_paths: list[str] = []
        self.value = self._join("", values)

    def _join(self, path: str, values: Sequence[Any]) -> Any:
        """Return the value at ``path`` that joins the ``values`` of all ranks."""
        reference = values[0]
        if isinstance(reference, DTensor):
            return self._whole(path, values)
        if isinstance(reference, Mapping) and all(
            isinstance(value, Mapping) and value.keys() == reference.keys() for value in values
        ):
            return {
                key: self._join(join(path, key), [value[key] for value in values])
                for key in reference
            }
        if isinstance(reference, list) and all(
            isinstance(value, list) and len(value) == len(reference) for value in values
        ):
            return [
                self._join(join(path, str(index)), items)
                for index, items in enumerate(zip(*values, strict=True))
            ]
        if _are_equal(values):
            return reference
        if any(isinstance(value, torch.Tensor) for value in values):
            self.differing_paths.append(path)
        return list(values)

    def _whole(self, path: str, values: Sequence[Any]) -> torch.Tensor:
        """Return the whole tensor at ``path``, which is made of the parts of all ranks."""
        whole = self._tensors[path]
        dtype = str(whole.dtype).removeprefix("torch.")
        filled_boxes: dict[Box, None] = {}
        for rank, part in zip(self._ranks, values, strict=True):
            if not isinstance(part, DTensor) or part.shape != whole.shape:
                raise IntegrityError(f"{path!r} of rank {rank} is no part of the same tensor")
            local_part, boxes = to_local(part), boxes_of(path, part, rank)
            if (
                sum(box.numel for box in boxes) != local_part.numel()
                or local_part.dtype != whole.dtype
            ):
                raise IntegrityError(f"{path!r} of rank {rank} is not the part that it should be")
            for box, region in zip(boxes, local_regions(boxes), strict=True):
                if box not in filled_boxes:  # Other ranks may have replicas of it
                    filled_boxes[box] = None
                    source: Any = (*region.slices(), ...)
                    part_of_box = copyable(local_part, dtype)[source].view(whole.dtype)
                    self._joiner.put(whole, box, part_of_box)
        if fault := tiling_fault(tuple(whole.shape), list(filled_boxes)):
            raise IntegrityError(f"the parts of {path!r} are wrong: {fault}")
        return whole


def _named_dtensors(value: Any, path: str = "") -> Iterator[tuple[str, DTensor]]:
    """Yield the DTensors in dicts and lists, with their paths."""
    if isinstance(value, DTensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _named_dtensors(item, join(path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _named_dtensors(item, join(path, str(index)))


def _are_equal(values: Sequence[Any]) -> bool:
    return all(_is_equal(values[0], value) for value in values[1:])


def _is_equal(a: Any, b: Any) -> bool:
    """Return True if two values are of the same type and equal, with the tensors in them."""
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        are_tensors = isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
        return are_tensors and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_is_equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_is_equal, a, b))
    return type(a) is type(b) and bool(a == b)

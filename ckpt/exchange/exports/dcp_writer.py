"""Write a state as a folder of ``torch.distributed.checkpoint`` (DCP).

Each entry of the folder is read from the checkpoint just before it is written. The format has an
entry for each tensor in dicts and lists. A tuple is one entry, which is pickled together with the
tensors in it. A list whose tensors are all in tuples is also one such entry.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict_saver import save

from ckpt.errors import ConfigError
from ckpt.state.match.manifest_tree import Notes

Read = Callable[[str], torch.Tensor]


class Placeholders:
    """Create tensors on the meta device as placeholders for the tensors of a state, and remember
    the name of the tensor that each placeholder stands for.
    """

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._tensors: list[torch.Tensor] = []

    def tensor(self, name: str, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
        self._names[id(tensor)] = name
        self._tensors.append(tensor)  # While it exists, no other tensor gets the same ``id``
        return tensor

    def name_of(self, tensor: torch.Tensor) -> str:
        return self._names[id(tensor)]


class _Planner(DefaultSavePlanner):
    """A planner that reads the tensors of an entry when DCP writes the entry."""

    def __init__(self, placeholders: Placeholders, read: Read) -> None:
        super().__init__()
        self._placeholders, self._read = placeholders, read

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self._with_tensors(super().lookup_object(index))

    def _with_tensors(self, value: Any) -> Any:
        """Return ``value`` with the tensors in place of their placeholders."""
        match value:
            case torch.Tensor():
                return self._read(self._placeholders.name_of(value))
            case list() | tuple():
                return type(value)(map(self._with_tensors, value))
            case Mapping():
                return type(value)({key: self._with_tensors(item) for key, item in value.items()})  # type: ignore[call-arg]
            case _:
                return value


def write_folder(path: str, state: dict[str, Any], placeholders: Placeholders, read: Read) -> None:
    """Write ``state`` to a folder of DCP.

    Usually one entry is in memory at a time. An entry is a tensor, or a tuple or list that is
    pickled together with the tensors in it. If CUDA is available, DCP reads the next tensors before
    it writes the present one, so two large tensors may be in memory.

    Args:
        path: The folder.
        state: The state, with placeholders in place of tensors.
        placeholders: The placeholders.
        read: Returns the tensor with a given name. Its errors are passed on.
    """
    with warnings.catch_warnings():
        # DCP warns that there is no process group, and torch warns about typed storages.
        warnings.simplefilter("ignore")
        try:
            save(
                state,
                storage_writer=FileSystemWriter(path, thread_count=1),
                planner=_Planner(placeholders, read),
                no_dist=True,
            )
        except CheckpointException as error:  # It has the error of each rank, here of one rank
            raise next(iter(error.failures.values()))[0] from error


def fit_state(state: Mapping[str, Any], notes: Notes) -> dict[str, Any]:
    """Return the state in a form that DCP can write and read, and note each loss in ``notes``.

    The format cannot hold an empty dict, except in a tuple. In a list, also in a dict in a list,
    this function replaces the empty dict with None. Elsewhere it leaves the empty dict in the
    state, and DCP writes nothing for it.

    Raises:
        ConfigError: Two values would have the same name in the format, or a key is an integer with
            too many digits.
    """
    paths: set[str] = set()

    def fit(value: Any, path: str, *, in_list: bool = False) -> Any:
        if isinstance(value, Mapping) and value:
            items = value.items()
            entries = {
                key: fit(item, _item_path(path, key), in_list=in_list) for key, item in items
            }
            return type(value)(entries)  # type: ignore[call-arg]
        if isinstance(value, list) and _is_written_by_item(value):
            return [fit(item, f"{path}.{index}", in_list=True) for index, item in enumerate(value)]
        if path in paths:
            raise ConfigError(
                f"two values of the state would both be {path!r} there: choose one with --name, "
                "or export with --format torch"
            )
        paths.add(path)
        if not isinstance(value, Mapping):
            return value
        if in_list:
            # DCP writes a list with a missing item, but cannot read it.
            notes.changes.append((path, "a dict without entries: None now"))
            return None
        notes.left_out.append((path, "a dict without entries"))
        return value

    return {key: fit(value, key) for key, value in state.items()}


def _item_path(path: str, key: object) -> str:
    """Return the name that DCP gives to the item ``key`` of the container at ``path``."""
    try:
        return f"{path}.{key}"
    except ValueError:  # Python refuses to print an int of thousands of digits
        raise ConfigError(
            f"a key in {path!r} has too many digits for the format: choose others with --name, or "
            "export with --format torch"
        ) from None


def _is_written_by_item(value: Any) -> bool:
    """Return True if ``value`` is a list and DCP writes each of its items as a separate entry.

    DCP does so if an item is a dict, a tensor, or a list for which this function returns True.
    """
    return isinstance(value, list) and any(
        isinstance(item, Mapping | torch.Tensor) or _is_written_by_item(item) for item in value
    )

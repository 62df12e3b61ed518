"""A state -> a folder of ``torch.distributed.checkpoint``, read entry by entry while it is written.

The format has an entry for each tensor in dicts and lists. A tuple is one entry, pickled with the
tensors in it, and so is a list that has tensors in its tuples only.
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

from ckpt.adapters.match.tree import Notes
from ckpt.errors import ConfigError

Read = Callable[[str], torch.Tensor]


class Unread:
    """Stand-ins for the tensors of a state: tensors without memory, with the names to read them
    by.
    """

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._kept: list[torch.Tensor] = []

    def tensor(self, name: str, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
        made = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
        self._names[id(made)] = name
        self._kept.append(made)  # No other tensor gets its identity
        return made

    def name_of(self, tensor: torch.Tensor) -> str:
        return self._names[id(tensor)]


class _Planner(DefaultSavePlanner):
    """Reads the tensors of an entry when DCP writes it."""

    def __init__(self, unread: Unread, read: Read) -> None:
        super().__init__()
        self._unread, self._read = unread, read

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self._whole(super().lookup_object(index))

    def _whole(self, value: Any) -> Any:
        match value:
            case torch.Tensor():
                return self._read(self._unread.name_of(value))
            case list() | tuple():
                return type(value)(map(self._whole, value))
            case Mapping():
                return type(value)({key: self._whole(item) for key, item in value.items()})  # type: ignore[call-arg]
            case _:
                return value


def write_folder(path: str, state: dict[str, Any], unread: Unread, read: Read) -> None:
    """Write a folder of DCP. At most one entry is in memory at a time: a whole tensor, or those of
    a tuple.

    Raises what ``read`` raises.
    """
    with warnings.catch_warnings():
        # DCP warns that there is no process group, and torch that storages are typed.
        warnings.simplefilter("ignore")
        try:
            save(
                state,
                storage_writer=FileSystemWriter(path, thread_count=1),
                planner=_Planner(unread, read),
                no_dist=True,
            )
        except CheckpointException as error:  # It holds the failure of the only rank
            raise next(iter(error.failures.values()))[0] from error


def fitted(state: Mapping[str, Any], notes: Notes) -> dict[str, Any]:
    """Return the state as the format can hold it. It has no place for an empty dict, except in a
    tuple. Raises ``ConfigError`` for two names that would become one.
    """
    taken: set[str] = set()

    def fit(value: Any, path: str, *, listed: bool = False) -> Any:
        if isinstance(value, Mapping) and value:
            items = value.items()
            kept = {key: fit(item, _inner(path, key), listed=listed) for key, item in items}
            return type(value)(kept)  # type: ignore[call-arg]
        if isinstance(value, list) and _is_walked(value):
            return [fit(item, f"{path}.{index}", listed=True) for index, item in enumerate(value)]
        if path in taken:
            raise ConfigError(
                f"two values of the state would both be {path!r} there: choose one with --name, "
                "or export with --format torch"
            )
        taken.add(path)
        if not isinstance(value, Mapping):
            return value
        if listed:
            # The format can write a list with a gap, but not read it.
            notes.changed.append((path, "a dict without entries: None now"))
            return None
        notes.left_out.append((path, "a dict without entries"))
        return value

    return {key: fit(value, key) for key, value in state.items()}


def _inner(path: str, key: object) -> str:
    """Return the name that the format gives to an item of a container."""
    try:
        return f"{path}.{key}"
    except ValueError:  # Python refuses to print an int of thousands of digits
        raise ConfigError(
            f"a key in {path!r} has too many digits for the format: choose others with --name, or "
            "export with --format torch"
        ) from None


def _is_walked(value: Any) -> bool:
    """Return True if the items of a list are entries of their own.

    One of them is then a dict, a tensor, or a list of that kind.
    """
    return isinstance(value, list) and any(
        isinstance(item, Mapping | torch.Tensor) or _is_walked(item) for item in value
    )

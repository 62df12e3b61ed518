"""Conversions between the entries of ``torch.distributed.checkpoint`` (DCP) and those of ckpt.

DCP flattens nested dicts and lists to names with dots, and assigns each entry to a rank that writes
it. For a save, this module nests the entries of a rank again, so that the checkpoint has the same
names as if a ``CheckpointManager`` had saved the state. For a load, it converts a manifest, which
describes a checkpoint of ckpt, to DCP's names.

The *path* of an entry consists of the dict keys and list positions that lead to it in the nested
state. A `Leaf` describes a tensor as one rank sees it, and its *boxes* are the rectangular regions
that the rank has or reads.
"""

from __future__ import annotations

import dataclasses
import io
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, cast

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)

from ckpt.errors import ConfigError, RestoreError, UnsupportedValue
from ckpt.model.box import Box
from ckpt.model.manifest import Manifest
from ckpt.plan.leaf import Leaf
from ckpt.state.match.manifest_tree import StateTree
from ckpt.state.tensors.local_shards import LocalShards

Path = tuple[str | int, ...]

_BUFFER_TAG: Final = "io.BytesIO"
"""An ``io.BytesIO`` is stored as a tuple of this text and the bytes of the buffer.

Transformer Engine keeps its extra state in an ``io.BytesIO``.
"""


def leaves(value: Any) -> Iterator[Any]:
    """Yield the values in nested containers, without the containers.

    If ``value`` is no container, yield ``value`` itself.
    """
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, list | tuple | set | frozenset):
        yield value
        return
    for item in value:
        yield from leaves(item)


def path_of(item: WriteItem, plan: SavePlan) -> Path:
    """Return the path of an entry in the nested state: the dict keys and list positions.

    If the planner does not flatten the state, the path is the name of the entry alone, which is a
    key of the state.
    """
    paths = cast("Mapping[str, Path]", plan.planner_data or {})
    return paths.get(item.index.fqn, (item.index.fqn,))


def _outermost_list(path: Path) -> Path | None:
    """Return the path of the outermost list that contains the entry at ``path``, or None if no list
    contains the entry.
    """
    return next((path[:i] for i, part in enumerate(path) if isinstance(part, int)), None)


def gather_lists(plans: Sequence[SavePlan]) -> tuple[list[SavePlan], frozenset[Path]]:
    """Move the entries of each list to one rank, since the merge of the ranks' states can unite
    dicts but not lists.

    An entry that this rank does not have stays where it is. Lists with sharded tensors are an
    exception: several ranks must write such a list, so it is stored as a dict with the positions as
    keys.

    Returns:
        The new plans, and the paths of the lists with sharded tensors.
    """
    ranks_by_list: dict[Path, set[int]] = defaultdict(set)
    lists_with_shards: set[Path] = set()
    for rank, plan in enumerate(plans):
        for item in plan.items:
            if (list_path := _outermost_list(path_of(item, plan))) is not None:
                ranks_by_list[list_path].add(rank)
                if item.type == WriteItemType.SHARD:
                    lists_with_shards.add(list_path)
    rank_by_list = {
        list_path: min(ranks)
        for list_path, ranks in ranks_by_list.items()
        if len(ranks) > 1 and list_path not in lists_with_shards
    }
    items: list[list[WriteItem]] = [[] for _ in plans]
    for rank, plan in enumerate(plans):
        for item in plan.items:
            target_rank = rank_by_list.get(_outermost_list(path_of(item, plan)) or (), rank)
            target_has_entry = item.index.fqn in (plans[target_rank].planner_data or {})
            items[target_rank if target_has_entry else rank].append(item)
    new_plans = [
        dataclasses.replace(plan, items=plan_items)
        for plan, plan_items in zip(plans, items, strict=True)
    ]
    return (new_plans if rank_by_list else list(plans)), frozenset(lists_with_shards)


def state_of(
    plan: SavePlan, planner: SavePlanner, lists_as_dicts: frozenset[Path]
) -> dict[str, Any]:
    """Return a nested state of the entries that this rank writes.

    Args:
        plan: The plan of this rank.
        planner: The planner, which gives the tensors and values.
        lists_as_dicts: The paths of the lists that are stored as dicts (see `gather_lists`).

    Raises:
        UnsupportedValue: An entry is a dict, or a container with tensors, which DCP would pickle.
        ConfigError: The planner provides values only as pickled bytes.
    """
    state: dict[str, Any] = {}
    shards: dict[Path, list[tuple[WriteItem, torch.Tensor]]] = defaultdict(list)
    for item in plan.items:
        path = path_of(item, plan)
        if item.type == WriteItemType.BYTE_IO:
            _put(state, path, _plain_value(item, planner), lists_as_dicts)
            continue
        tensor = planner.resolve_data(item)
        assert isinstance(tensor, torch.Tensor), item.index
        if item.type == WriteItemType.TENSOR:
            _put(state, path, tensor.detach(), lists_as_dicts)
        else:
            shards[path].append((item, tensor.detach()))
    for path, parts in shards.items():
        _put(state, path, _local_shards(parts), lists_as_dicts)
    return state


def _plain_value(item: WriteItem, planner: SavePlanner) -> Any:
    """Return the value of an entry that is no tensor, in the form in which a step holds it."""
    name = item.index.fqn
    if not isinstance(planner, DefaultSavePlanner):
        raise ConfigError(
            f"{type(planner).__name__} gives {name!r} as pickled bytes: derive it from "
            "DefaultSavePlanner, whose lookup_object() gives the value"
        )
    value = planner.lookup_object(item.index)
    if any(isinstance(leaf, torch.Tensor) for leaf in leaves(value)):
        raise UnsupportedValue(
            name, f"{type(value).__name__} with tensors in it", "use dicts or lists of tensors"
        )
    if isinstance(value, Mapping):
        raise UnsupportedValue(
            name, f"{type(value).__name__} in one entry", "use a planner that flattens the state"
        )
    return (_BUFFER_TAG, value.getvalue()) if type(value) is io.BytesIO else value


def _local_shards(parts: Sequence[tuple[WriteItem, torch.Tensor]]) -> LocalShards:
    (head, tensor), *_ = parts
    assert head.tensor_data is not None
    pieces = [(item.index.offset or (), part) for item, part in parts if part.numel()]
    return LocalShards(head.tensor_data.size, pieces, dtype=tensor.dtype)


def _put(state: dict[str, Any], path: Path, value: Any, lists_as_dicts: frozenset[Path]) -> None:
    """Set the value at ``path`` of the nested state, and make missing containers on that path. The
    lists in ``lists_as_dicts`` become dicts.
    """
    if _outermost_list(path) in lists_as_dicts:
        path = tuple(map(str, path))
    container: Any = state
    for part, next_part in zip(path, (*path[1:], None), strict=True):
        if isinstance(container, list):
            assert isinstance(part, int), path
            container += [None] * (part + 1 - len(container))
            child = container[part]
        else:
            child = container.get(part)
        if next_part is None:
            container[part] = value
        elif child is None:
            container[part] = child = [] if isinstance(next_part, int) else {}
        container = child


class Entries:
    """The tensors and values of a checkpoint by the names that DCP gives them.

    Attributes:
        names: DCP's name of each tensor -> its name in the checkpoint.
        values: DCP's name of each value that is no tensor -> the value.
        paths: DCP's name of each entry -> its path in the nested state.
    """

    def __init__(self, manifest: Manifest) -> None:
        self._tensors = manifest.tensor_map()
        names_by_id: dict[int, str] = {}
        tensors: list[torch.Tensor] = []  # It keeps them alive, so that their ids stay unique

        def stand_in(name: str) -> torch.Tensor:
            tensor = self._tensors[name]
            placeholder = torch.empty(tensor.shape, dtype=_dtype(tensor.dtype), device="meta")
            names_by_id[id(placeholder)] = name
            tensors.append(placeholder)
            return placeholder

        # The nested state with stand-ins for the tensors, all names (no patterns), optimizers keyed
        # by the names of parameters, and values that ``weights_only`` would not load.
        state = StateTree(manifest, stand_in, (), by_name=True, safe=False).build()
        planner = DefaultSavePlanner(flatten_sharded_tensors=False)
        planner.set_up_planner(state)
        # The planner has flattened the state to names of its own. Ids tell which tensor has which.
        flat, self.paths = planner.state_dict, planner.mappings
        self.names = {
            name: names_by_id[id(value)] for name, value in flat.items() if id(value) in names_by_id
        }
        self.values = {name: value for name, value in flat.items() if name not in self.names}

    def metadata(self) -> Metadata:
        """Return the metadata that DCP's planner needs.

        The metadata describes each tensor as a single chunk. DCP needs no more chunks, since ckpt
        itself finds the stored chunks that hold a box.
        """
        entries: dict[str, Any] = {name: BytesStorageMetadata() for name in self.values}
        for name, stored_name in self.names.items():
            tensor = self._tensors[stored_name]
            whole = ChunkStorageMetadata(
                offsets=torch.Size([0] * len(tensor.shape)), sizes=torch.Size(tensor.shape)
            )
            properties = TensorProperties(dtype=_dtype(tensor.dtype))
            entries[name] = TensorStorageMetadata(properties, torch.Size(tensor.shape), [whole])
        return Metadata(entries, planner_data=self.paths)

    def leaf(self, item: ReadItem) -> Leaf:
        """Return a leaf with one box: the region of a tensor that ``item`` reads."""
        tensor = self._tensors[self.names[item.storage_index.fqn]]
        chunk_offsets = item.storage_index.offset or (0,) * len(tensor.shape)
        offsets = tuple(
            start + offset
            for start, offset in zip(chunk_offsets, item.storage_offsets, strict=True)
        )
        box = Box(offsets, tuple(item.lengths))
        return Leaf(tensor.name, tensor.dtype, tensor.shape, (box,))

    def value(self, name: str) -> Any:
        """Return the value with the name ``name`` in DCP, which must not be the name of a tensor.

        Raises:
            RestoreError: The value is a container with tensors.
        """
        value = self.values[name]
        if any(isinstance(leaf, torch.Tensor) for leaf in leaves(value)):
            raise RestoreError(
                f"{name!r} is a {type(value).__name__} with tensors in it, which DCP would pickle: "
                "restore it with CheckpointManager"
            )
        match value:
            case (str() as kind, bytes() as data) if kind == _BUFFER_TAG:
                return io.BytesIO(data)
            case _:
                return value


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype

"""Collect the results of a matching: the tensors to read and their targets, the calls to make after
the reads, and the names without a counterpart.

A leaf describes a tensor without its data: its name, dtype and shape, and the boxes (rectangular
regions) that this rank holds. A record is the description of a tensor in the checkpoint. A wrapper
tensor is one whose elements are in other tensors, and a layer is one wrapper tensor with the
tensors inside of it.

A node is a saved value in the manifest's tree (see ``match.saved_nodes``).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Final

import msgspec
import torch

from ckpt.errors import (
    DtypeMismatch,
    EntryMissing,
    KindMismatch,
    ManifestCorrupt,
    RestoreError,
    ShapeMismatch,
)
from ckpt.model.dtype import converts
from ckpt.model.values import Node, join
from ckpt.plan.leaf import Leaf
from ckpt.state.match.meta_tensors import MetaReplacements
from ckpt.state.match.optimizer_slots import Slot
from ckpt.state.match.plain_values import Remaker
from ckpt.state.match.saved_nodes import SavedState, kind, tag
from ckpt.state.match.selection import Selection
from ckpt.state.match.targets import has_memory, memory_of, read_apart
from ckpt.state.tensors.layout import leaf_of
from ckpt.state.tensors.local_shards import TensorOrShards
from ckpt.state.tensors.wrapped import Layer, is_wrapper, take_apart
from ckpt.state.walk.modules import Parameters

_CAST_ADVICE: Final = "convert it on the way with restore(cast=True)"


@dataclass(slots=True)
class StateMatch:
    """The work of a restore. The restore reads ``leaves[i]`` into ``targets[i]``, and then calls
    ``apply``, which sets all other values.

    Attributes:
        leaves: The leaves to read, with the names and dtypes that they have in the checkpoint.
        targets: The tensors to fill.
        names: The names that the targets have in the state.
        actions: The calls that ``apply`` makes, in order.
        left_alone: The names of the state that the checkpoint lacks because its save left them out
            on purpose.
        missing: All other names of the state that the checkpoint lacks.
        surplus_names: The names in the checkpoint that have no counterpart in this rank's state.
            They may have one on another rank, such as another pipeline stage, so this is an error
            only if they have none on any rank.
        idle_patterns: The patterns of the selection and the renaming that match no name of this
            rank's state. They may match a name on another rank. A pattern of the selection that
            matches a name in ``surplus_names`` is not among them.
        renames: Pairs (name in the state, name in the checkpoint).
        conversions: Triples (name in the state, dtype in the checkpoint, dtype in the state).
        meta_names: The names of those tensors of modules that stay on the meta device.
    """

    leaves: list[Leaf] = field(default_factory=list[Leaf])
    targets: list[TensorOrShards] = field(default_factory=list[TensorOrShards])
    names: list[str] = field(default_factory=list[str])
    actions: list[Callable[[], None]] = field(default_factory=list[Callable[[], None]])
    missing: tuple[str, ...] = ()
    left_alone: tuple[str, ...] = ()
    surplus_names: tuple[str, ...] = ()
    idle_patterns: tuple[str, ...] = ()
    renames: tuple[tuple[str, str], ...] = ()
    conversions: tuple[tuple[str, str, str], ...] = ()
    meta_names: tuple[str, ...] = ()

    def unrestored_names(self, names: Iterable[str]) -> list[str]:
        """Return those of ``left_alone`` and ``missing`` that are among ``names``, or hold one of
        them.
        """
        names_and_containers = {
            "/".join(parts[: count + 1])
            for parts in (name.split("/") for name in names)
            for count in range(len(parts))
        }
        return [name for name in (*self.left_alone, *self.missing) if name in names_and_containers]

    def apply(self) -> None:
        """Make the calls in ``actions``. Call this after all targets were filled.

        The actions set plain values and load objects. They also give memory to tensors on the meta
        device, and copy the data that was read for targets with overlapping memory.

        Raises:
            RestoreError: Targets with overlapping memory cannot all have their saved values.
            Exception: The ``load_state_dict`` of an object raises.
        """
        for action in self.actions:
            action()


class Matcher:
    """Collects the results of a matching. ``finish`` returns them.

    Surplus names are names of the checkpoint without a counterpart in the state. Names that the
    checkpoint lacks are left alone if its save left them out on purpose, else missing. A pattern is
    idle as long as it has matched no name.

    In all methods, ``name`` is a name in the state, and ``source`` is the name of the same value in
    the checkpoint.

    Thread safety:
        Only one thread may use it.

    Args:
        checkpoint: The checkpoint.
        selection: The settings of the restore.
        parameters: The parameters of the state.

    Attributes:
        remaker: Prepares the functions that make saved plain values again.
        slots: The places in optimizers that get a saved tensor.
        meta_replacements: The real tensors that take the place of those on the meta device.
        actions: The calls that the restore makes after the reads, in order.
        last_actions: The calls that the restore makes after all ``actions``.
        targets_by_memory: The memory of each target -> the name that its bytes are stored under,
            and the target. The target is None if a module may change the value as it loads it.

    ``_open_containers`` maps the source of each container that is matched value by value to its
    names in the state, and ``_missing`` each name that the checkpoint lacks to its source.
    ``_left_alone`` has the names that the save left out on purpose, as a set in order. By their
    memory, ``_names_by_memory`` has the name of each target in the state, and ``_excluded_memory``
    the name of each tensor that the selection excludes.
    """

    def __init__(
        self, checkpoint: SavedState, selection: Selection, parameters: Parameters
    ) -> None:
        self.checkpoint, self.selection, self.parameters = checkpoint, selection, parameters
        self.remaker = Remaker(
            checkpoint.tensors, checkpoint.manifest.views, self._request_inner_read
        )
        self.slots: list[Slot] = []
        self.meta_replacements = MetaReplacements()
        self.actions: list[Callable[[], None]] = []
        self.last_actions: list[Callable[[], None]] = []
        self._open_containers: dict[str, list[str]] = {}
        self._matched_sources: set[str] = set()
        self._missing: dict[str, str] = {}
        self._left_alone: dict[str, None] = {}
        self._idle_patterns = {
            *(selection.only or ()),
            *selection.exclude,
            *selection.rename_rules.patterns,
        }
        self.targets_by_memory: dict[Hashable, tuple[str, TensorOrShards | None]] = {}
        self._missing_tensors: dict[str, torch.Tensor] = {}
        self._excluded_memory: dict[Hashable, str] = {}
        self._names_by_memory: dict[Hashable, str] = {}
        self._names: list[str] = []
        self._leaves: list[Leaf] = []
        self._targets: list[TensorOrShards] = []
        self._renames: dict[str, str] = {}
        self._conversions: list[tuple[str, str, str]] = []

    def source_of(self, name: str) -> str:
        """Return the name in the checkpoint for a name of the state, by the rules of the renaming.
        Record that the rule for ``name``, if there is one, was used.
        """
        source, pattern = self.selection.rename_rules.source(name)
        if pattern is not None:
            self._idle_patterns.discard(pattern)
        return source

    def restores(self, name: str, parameter: str = "") -> bool:
        """Return True if the restore fills ``name``. Record that the patterns which match ``name``
        were used.

        If ``name`` is the state that an optimizer has of a parameter, ``parameter`` is the name of
        the parameter. If the parameter is excluded, its state keeps its values too.
        """
        self._idle_patterns.difference_update(self.selection.matches(name))
        return self.selection.takes(name) and not self.selection.excludes(parameter)

    def open_container(self, name: str, source: str) -> None:
        """Record that the container ``source`` of the checkpoint is matched with the container
        ``name`` of the state, value by value.
        """
        self._open_containers.setdefault(source, []).append(name)

    def record_match(self, name: str, source: str, *, hide_renaming: bool = False) -> None:
        """Record that ``source`` has a counterpart in the state. If the two names differ, the
        report lists them as a renaming, unless ``hide_renaming`` is True.
        """
        self._matched_sources.add(source)
        if source != name and not hide_renaming:
            self._renames[name] = source

    def record_missing(self, name: str, source: str, parameter: str = "") -> None:
        """Record that the checkpoint has no value for ``name``, if the restore fills ``name``.

        The report lists ``name`` as left alone if the save left it out on purpose, else as missing.

        Args:
            name: The name in the state.
            source: The name that the value would have in the checkpoint.
            parameter: If ``name`` is a value of an optimizer's state, the name of its parameter in
                the checkpoint.
        """
        if not self.restores(name):
            return
        if self.checkpoint.left_out(source, parameter):
            self._left_alone[name] = None
        else:
            self._missing[name] = source

    def record_missing_tensor(self, name: str, source: str, target: object) -> None:
        """Record that the checkpoint has no value for the entry ``name`` of a module.

        The entry is not missing if the restore fills its memory as another entry.
        """
        self.record_missing(name, source)
        if isinstance(target, torch.Tensor):
            self._missing_tensors[name] = target

    def record_excluded_tensor(self, name: str, target: object) -> None:
        """Record that ``target``, which is ``name`` or inside of it, keeps its values if the
        selection excludes ``name``.
        """
        if has_memory(target) and self.selection.excludes(name):
            self._excluded_memory.setdefault(memory_of(target), name)

    @contextmanager
    def missing_as_one(self, name: str, source: str) -> Generator[None]:
        """Return a context manager for a block that matches the values inside of ``name``. If the
        checkpoint has none of them, only ``name`` itself is recorded as missing.
        """
        missing, match_count = dict(self._missing), len(self._matched_sources)
        yield
        if len(self._missing) > len(missing) and len(self._matched_sources) == match_count:
            self._missing = missing
            self.record_missing(name, source)

    def require_tag(self, node: Node, path: str, *tags: str) -> None:
        """Raise ``KindMismatch`` unless ``node``, the node of ``path``, has one of ``tags``."""
        if tag(node) not in tags:
            raise KindMismatch(path, kind(node), tags[0])

    def request_read(
        self,
        name: str,
        source: str,
        target: TensorOrShards,
        stored_as: str = "",
        *,
        state_tensor: TensorOrShards | None = None,
    ) -> None:
        """Request that the restore reads the tensor ``source`` of the checkpoint into ``target``,
        the tensor ``name`` of the state.

        ``stored_as`` is the name under which the bytes are stored, if it is not ``source``. If the
        checkpoint has no such tensor, ``name`` is recorded as missing (see ``record_missing``).
        ``state_tensor`` is the tensor of the state, if ``target`` only holds its value until the
        module loads it.

        Raises:
            ShapeMismatch: The target has another shape.
            DtypeMismatch: The target has another dtype, and the restore may not convert the saved
                dtype to it.
            RestoreError: The memory of the target is already the target of another saved tensor, or
                the target is on the meta device and cannot be replaced (see
                ``MetaReplacements.real_like``).
            UnsupportedValue: The target cannot be filled (see ``leaf_of``).
        """
        record_name = stored_as or self.checkpoint.stored_as(source)
        if (record := self.checkpoint.tensors.get(record_name)) is None:
            self.record_missing(name, source)
            return
        if isinstance(target, torch.Tensor):
            target = self.meta_replacements.tensor_to_fill(name, target)
        leaf = leaf_of(name, target, ())
        stored_name = self.checkpoint.name_of_bytes(record_name)
        memory = memory_of(target if state_tensor is None else state_tensor)
        # A module that loads a value itself may change it, so that nothing else can have it.
        first_name, _ = self.targets_by_memory.setdefault(
            memory, (stored_name, target if state_tensor is None else None)
        )
        if first_name != stored_name:
            raise RestoreError(
                f"{name!r} ({stored_name!r} in the checkpoint) and what {first_name!r} is for "
                "share their "
                "memory in the target, but were saved apart: untie them first"
            )
        if leaf.shape != record.shape:
            raise ShapeMismatch(name, record.shape, leaf.shape, source)
        if leaf.dtype != record.dtype:
            if not (self.selection.cast and converts(record.dtype, leaf.dtype)):
                advice = (
                    _CAST_ADVICE
                    if converts(record.dtype, leaf.dtype)
                    else "one cannot become the other without loss"
                )
                raise DtypeMismatch(name, record.dtype, leaf.dtype, source, advice)
            self._conversions.append((name, record.dtype, leaf.dtype))
            leaf = replace(leaf, dtype=record.dtype)
        self._names_by_memory.setdefault(memory, name)
        self._names.append(name)
        self._leaves.append(leaf if name == record_name else replace(leaf, name=record_name))
        self._targets.append(target)

    def _request_inner_read(self, name: str, target: torch.Tensor) -> None:
        """Request the read of the tensor ``name`` into ``target``, which is inside of a plain value
        that the restore makes.
        """
        self.request_read(name, name, target)

    def finish(self) -> StateMatch:
        """End the matching, and return its results.

        Raises:
            EntryMissing: The restore is strict, and the checkpoint lacks names.
            RestoreError: Elements of a part of ``LocalShards`` share their memory, or a tensor that
                the selection excludes has its memory in common with one that is filled.
        """
        self._check_excluded()
        self._match_tied()
        if self._missing and self.selection.strict:
            raise EntryMissing(
                list(self._missing),
                self.checkpoint.manifest.step,
                self._missing,
                present=self.checkpoint.names,
            )
        surplus_names = self.checkpoint.surplus_names(self._matched_sources, self._open_containers)
        if copy_back := read_apart(self._names, self._targets):
            self.actions.insert(0, copy_back)
        return StateMatch(
            leaves=self._leaves,
            targets=self._targets,
            names=self._names,
            actions=self.actions,
            missing=tuple(self._missing),
            left_alone=tuple(self._left_alone),
            surplus_names=tuple(filter(self._is_included, surplus_names)),
            idle_patterns=tuple(sorted(self._idle_patterns)),
            renames=tuple(self._renames.items()),
            conversions=tuple(self._conversions),
        )

    def _check_excluded(self) -> None:
        """Raise ``RestoreError`` if a tensor that is filled has the memory of an excluded one."""
        for memory, name in self._excluded_memory.items():
            if fill_name := self._names_by_memory.get(memory):
                raise RestoreError(
                    f"{name!r} is excluded, but shares its memory with {fill_name!r}, which is "
                    "restored: exclude both or neither"
                )

    def _match_tied(self) -> None:
        """Take the names off the missing ones whose memory the restore fills as another name.

        A model may tie a weight to one that the checkpoint has: files of GPT-2 have no ``lm_head``.
        """
        for name, target in self._missing_tensors.items():
            if name in self._missing and (
                filled_target := self.targets_by_memory.get(memory_of(target))
            ):
                stored_name, _ = filled_target
                del self._missing[name]
                self._renames[name] = stored_name

    def _is_included(self, source: str) -> bool:
        """Return True if the selection includes ``source``, which has no counterpart in the state.

        The selection applies to the name that ``source`` would have in the state. This name follows
        from the innermost matched container around ``source``. The patterns that match the name are
        recorded as used (see ``restores``).
        """
        container = source
        while container and container not in self._open_containers:
            container = container.rpartition("/")[0]
        rest = source[len(container) :]
        return any(
            self.restores(f"{name}{rest}") for name in self._open_containers.get(container, [""])
        )


_MOST_METADATA_CHARS: Final = 200
_encoder: Final = msgspec.json.Encoder(order="sorted")


def fill_tensor(
    matcher: Matcher, name: str, source: str, target: TensorOrShards, node: Node
) -> None:
    """Request that the restore reads the bytes of ``node`` into ``target``. For a wrapper tensor
    (see ``tensors.wrapped``), request it for each tensor inside.

    Args:
        matcher: The matching that the request is added to.
        name: The name of the tensor in the state.
        source: The name of the tensor in the checkpoint.
        target: The tensor to fill.
        node: The node of the tensor in the checkpoint.

    Raises:
        KindMismatch: ``node`` is not the node of a tensor, only one of ``target`` and ``node`` is a
            wrapper tensor, or they differ in their class, their metadata or the tensors inside.
        DtypeMismatch: See ``Matcher.request_read``. A tensor inside of a wrapper must have the
            dtype that was saved, since it is never converted.
        ShapeMismatch, RestoreError: See ``Matcher.request_read``.
        ManifestCorrupt: The node of a wrapper tensor names a tensor that the checkpoint lacks.
        UnsupportedValue: ``target`` cannot be filled.
    """
    if not (isinstance(target, torch.Tensor) and is_wrapper(target)):
        matcher.require_tag(node, name, "tensor", "array")
        matcher.request_read(name, source, target, node["n"])
        return
    parts = take_apart(name, target)
    innermost_tensors = parts.innermost_tensors()
    for path, stored_name in _stored_names(name, "", parts.layer, node):
        tensor = innermost_tensors[path].tensor
        record = matcher.checkpoint.tensors.get(stored_name)
        if record is None:
            raise ManifestCorrupt(
                "tree", f"it names the tensor {stored_name[:80]!r}, which is not there"
            )
        # The integers in a quantised tensor have no meaning in another dtype.
        if f"torch.{record.dtype}" != str(tensor.dtype):
            own_dtype = str(tensor.dtype).removeprefix("torch.")
            advice = "build the target with the class and the settings that were saved"
            raise DtypeMismatch(f"{name}/{path}", record.dtype, own_dtype, stored_name, advice)
        matcher.request_read(f"{name}/{path}", f"{source}/{path}", tensor, stored_name)


def _stored_names(name: str, path: str, layer: Layer, node: Node) -> Iterator[tuple[str, str]]:
    """Yield, for each innermost tensor of the wrapper tensor ``name``, its path in the wrapper and
    the name under which its bytes are stored.

    Raises:
        KindMismatch: The node does not fit ``layer``, which is at ``path`` of the wrapper tensor.
    """
    if tag(node) != "subclass":
        raise KindMismatch(name, kind(node), layer.kind)
    if node["class"] != layer.kind:
        raise KindMismatch(name, kind(node), layer.kind)
    if node["inner"].keys() != layer.inner.keys():
        raise KindMismatch(
            name, *(f"{layer.kind} of {', '.join(value)}" for value in (node["inner"], layer.inner))
        )
    saved_values, own_values = (
        _encoder.encode(value).decode() for value in (node["v"], layer.values)
    )
    if saved_values != own_values:
        raise KindMismatch(
            name,
            *(
                f"{layer.kind} with {value[:_MOST_METADATA_CHARS]}"
                for value in (saved_values, own_values)
            ),
        )
    for attribute, part in layer.inner.items():
        inner_path = join(path, attribute)
        if isinstance(part, Layer):
            yield from _stored_names(
                join(name, attribute), inner_path, part, node["inner"][attribute]
            )
        else:
            inner_node = node["inner"][attribute]
            if tag(inner_node) != "tensor":
                raise KindMismatch(join(name, attribute), kind(inner_node), "tensor")
            yield inner_path, inner_node["n"]

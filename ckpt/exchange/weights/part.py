"""A part of the state of a checkpoint, and other names for its tensors.

Tied names stand for one tensor. Its bytes are stored under one of them, its *stored name*.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ckpt.catalog.tensor_reader import LIST_NAMES
from ckpt.errors import ConfigError, EntryMissing
from ckpt.errors.base import few
from ckpt.model.manifest import Manifest
from ckpt.model.values import join
from ckpt.state.match.manifest_tree import MakeTensor, StateTree

Names = Mapping[str, str | None]
"""Name in the checkpoint -> new name, or None to leave the tensor out."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the state of a checkpoint, as ``ckpt.load`` takes it.

    Attributes:
        name: The name of the part; None for the whole state.
        names: The new names of its tensors, by their names in the part. Each tensor must have an
            entry. None: the part is built as it was saved.

    Raises:
        ConfigError: ``name`` or ``names`` is invalid.
    """

    name: str | None
    names: Names | None = None

    def __post_init__(self) -> None:
        name, names = self.name, self.names
        if name is not None and (not isinstance(name, str) or not name):
            raise ConfigError(
                f"name={name!r}: give the name of a part, or None for the whole state"
            )
        if names is not None and not isinstance(names, Mapping):
            raise ConfigError(
                f"names={names!r}: give a mapping of names, such as "
                "{'head.weight': 'lm_head.weight'}; `ckpt export --format hf` takes the names that "
                "transformers writes"
            )
        if names is not None:
            check_mapping(names)

    def stored_names(self, manifest: Manifest) -> set[str]:
        """Return the names under which the tensors of the part are stored.

        Raises:
            EntryMissing: The checkpoint has nothing of this name, or ``names`` has a name that the
                part does not have.
            ConfigError: ``names`` does not fit the part.
        """
        if self.names is not None:
            return set(self.stored_by_new_name(manifest).values())
        tensors = manifest.tensor_map()
        if self.name is not None and self.name in tensors:
            return {tensors[self.name].name}
        # The part is built with the names of its tensors in their places.
        return {
            tensors[item].name for item in _names_in(_build_part(manifest, self.name, _TensorName))
        }

    def build(self, manifest: Manifest, values: Mapping[str, torch.Tensor]) -> Any:
        """Return the part, with the tensors in ``values``, by their stored names.

        Raises the errors of ``stored_names``.
        """
        if self.names is not None:
            return {
                name: values[stored_name]
                for name, stored_name in self.stored_by_new_name(manifest).items()
            }
        tensors = manifest.tensor_map()
        if self.name is not None and self.name in tensors:
            return values[tensors[self.name].name]
        return _build_part(manifest, self.name, lambda item: values.get(tensors[item].name))

    def names_of(self, manifest: Manifest, stored_names: Collection[str]) -> frozenset[str]:
        """Return all names of tensors, tied ones too, as the part has them."""
        names = (
            self._stored_by_name(manifest)
            if self.names is None
            else self.stored_by_new_name(manifest)
        )
        return frozenset(name for name, stored_name in names.items() if stored_name in stored_names)

    def stored_by_new_name(self, manifest: Manifest) -> dict[str, str]:
        """Return the stored name of each tensor of the part, by its new name. Without ``names``,
        tensors keep the names that they have in the part.

        Tied names stand beside each other. Raises the errors of ``stored_names``.
        """
        stored_names = self._stored_by_name(manifest)
        if not stored_names:
            raise EntryMissing(
                [f"{self.name}/" if self.name else "tensor"],
                manifest.step,
                present=[*manifest.tensor_map()],
                way=LIST_NAMES,
            )
        order = sorted(stored_names, key=lambda name: (stored_names[name], name))
        if self.names is None:
            return {name: stored_names[name] for name in order}
        result: dict[str, str] = {}
        first_names: dict[str, str] = {}
        for name, new_name in new_names(order, self.names, manifest.step).items():
            first_name = first_names.setdefault(new_name, name)
            if result.setdefault(new_name, stored_names[name]) != stored_names[name]:
                raise ConfigError(
                    f"{first_name!r} and {name!r} would both be {new_name!r}: give each a name of "
                    "its own in names"
                )
        return result

    def _stored_by_name(self, manifest: Manifest) -> dict[str, str]:
        """Return the stored name of each tensor by its name in the part."""
        prefix = "" if self.name is None else f"{self.name}/"
        return {
            name.removeprefix(prefix): tensor.name
            for name, tensor in manifest.tensor_map().items()
            if name.startswith(prefix) or name == self.name
        }


def new_names(names: Collection[str], mapping: Names, step: int) -> dict[str, str]:
    """Return the new name of each of ``names`` that ``mapping`` does not leave out.

    Raises:
        ConfigError: ``mapping`` lacks one of ``names``.
        EntryMissing: ``mapping`` has a name that is not one of ``names``.
    """
    unknown_names = sorted(mapping.keys() - set(names))
    if missing_names := [name for name in names if name not in mapping]:
        if longer_name := next(
            (key for key in unknown_names if key.endswith(f"/{missing_names[0]}")), None
        ):
            prefix = longer_name.removesuffix(missing_names[0])
            raise ConfigError(
                f"the mapping of names has {longer_name!r}, and the part has {missing_names[0]!r}: "
                f"take {prefix!r} off the names that are mapped"
            )
        raise ConfigError(
            f"the mapping of names lacks {few(missing_names)}: give each its new name, or None "
            "(null in JSON) to leave it out"
        )
    if unknown_names:
        raise EntryMissing(unknown_names, step, present=[*names], way=LIST_NAMES)
    return {name: target for name in names if (target := mapping[name])}


def check_mapping(names: Mapping[Any, Any], origin: str = "names") -> None:
    """Raise ``ConfigError`` if an entry of a mapping does not give a name to a name, or None.

    ``origin`` is the argument or the file that has the mapping.
    """
    for name, target in names.items():
        if not isinstance(name, str):
            raise ConfigError(f"{origin} has the key {name!r}, which is not the name of a tensor")
        if target is not None and not (isinstance(target, str) and target):
            raise ConfigError(
                f"{origin} gives {name!r} the name {target!r}: give a new name, or None (null in "
                "JSON) to leave the tensor out"
            )


def _build_part(manifest: Manifest, name: str | None, make: MakeTensor) -> Any:
    """Return the part ``name`` of the state, with what ``make`` returns in place of its tensors."""
    # The values are as they were saved, and not changed so that ``torch.load`` takes them.
    tree = StateTree(manifest, make, (), by_name=False, safe=False, parameter_names=False).build()
    path, value = "", tree
    while name is not None and path != name:
        items = _items(path, value)
        path = next((key for key in items if name == key or name.startswith(f"{key}/")), "")
        if not path:
            present = [*manifest.tensor_map(), *_items("", tree)]
            raise EntryMissing([name], manifest.step, present=present, way=LIST_NAMES)
        value = items[path]
    return value


class _TensorName(str):
    """The name of a tensor, in the place of the tensor."""

    __slots__ = ()


def _names_in(value: Any) -> Iterator[str]:
    if isinstance(value, _TensorName):
        yield value
    for item in _items("", value).values():
        yield from _names_in(item)


def _items(path: str, value: Any) -> dict[str, Any]:
    """Return the items of the container ``value`` by their names."""
    if isinstance(value, Mapping):
        return {join(path, key): item for key, item in value.items()}
    if isinstance(value, list | tuple):
        return {join(path, str(index)): item for index, item in enumerate(value)}
    return {}

"""Try whether a module takes tensors of another size, before a restore changes anything.

Some modules resize themselves when they load a state dict, such as the observers of quantisation,
and others refuse tensors of another size. Only their own code can tell, so it loads the state dict
into a copy of the module whose tensors have no memory. A tensor without memory is on the meta
device. Tensors of a single element are zeros in memory instead, since code may read them. No copy
is made of a module whose hook refers to a module of the state: the hook would change that module.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

import torch
from torch import nn

from ckpt.errors import ShapeMismatch
from ckpt.model.values import VERSIONS
from ckpt.state.match.module_load_code import LoadCode
from ckpt.state.tensors.layout import PLAIN_CLASSES
from ckpt.torch_private import forget_post_hooks, module_hooks

_MOST_ZEROS: Final = 1
"""Tensors of at most this many elements have memory on trial, and are zeros."""


@dataclass(frozen=True, slots=True)
class SizeChange:
    """A tensor that has another shape in the checkpoint than in the state.

    Attributes:
        name: Its name in the state.
        source: Its name in the checkpoint.
        saved_shape: Its shape in the checkpoint.
        present_shape: Its shape in the state.
    """

    name: str
    source: str
    saved_shape: tuple[int, ...]
    present_shape: tuple[int, ...]


def check_sizes(
    module: nn.Module,
    code: LoadCode,
    sizes: Mapping[str, SizeChange],
    state_dict: Mapping[str, Any],
) -> None:
    """Raise ``ShapeMismatch`` if the code of ``module`` refuses one of ``sizes``.

    If the code fails in another way on tensors without memory, or if it cannot be run on a copy,
    nothing is raised. An error then appears when the restore loads the module.

    Args:
        module: The module of the state.
        code: The code of the module.
        sizes: The tensors of ``state_dict`` that have another size in ``module``, by their keys.
        state_dict: The state dict to load. Its values need not be read yet.
    """
    for prefix in {code.outermost_reader(key) for key in sizes} - {None}:
        inner_sizes = {
            key: size for key, size in sizes.items() if code.outermost_reader(key) == prefix
        }
        if (key := _find_refusal(module, str(prefix), inner_sizes, state_dict)) is not None:
            size = inner_sizes[key]
            raise ShapeMismatch(size.name, size.saved_shape, size.present_shape, size.source)


def _find_refusal(
    module: nn.Module, prefix: str, sizes: Mapping[str, SizeChange], state_dict: Mapping[str, Any]
) -> str | None:
    """Return the key of a size that the module at ``prefix`` refuses; None if it takes all of them,
    or if something else makes its code fail.

    A size is refused if the code fails with it, and does not fail with the present size. The text
    of the error does not count: it differs between modules, and may change with torch. None is
    returned also if the code cannot be run on a copy.
    """
    owner = module.get_submodule(prefix[:-1])
    tensors = {id(tensor): tensor for tensor in chain(owner.parameters(), owner.buffers())}
    are_plain = PLAIN_CLASSES.issuperset(map(type, tensors.values()))
    if not are_plain or any(map(_has_hook_on_module, owner.modules())):
        return None
    tensors_by_name = {**dict(owner.named_parameters()), **dict(owner.named_buffers())}
    # A tensor of another size has no memory at all (see ``_part_of_state_dict``).
    resized_ids = {
        id(tensors_by_name[name])
        for key in sizes
        if (name := key[len(prefix) :]) in tensors_by_name
    }
    memo = {
        key: _without_memory(tensor, zeros_up_to=0 if key in resized_ids else _MOST_ZEROS)
        for key, tensor in tensors.items()
    }

    def takes(keys: Iterable[str]) -> bool:
        """Return True if the module loads ``keys`` in their saved sizes."""
        present = {key: size for key, size in sizes.items() if key not in keys}
        values = {**state_dict, **_tensors_in_present_size(present, state_dict)}
        part = _part_of_state_dict(prefix, values, sizes, vars(state_dict)[VERSIONS])
        return _loads(owner, part, dict(memo), is_inner=bool(prefix))

    if takes(sizes) or not takes(()):
        return None
    return next((key for key in sizes if not takes([key])), next(iter(sizes)))


def _part_of_state_dict(
    prefix: str,
    values: Mapping[str, Any],
    resized_keys: Collection[str],
    versions: Mapping[str, Mapping[str, Any]],
) -> Any:
    """Return the part of the state dict ``values`` for the module at ``prefix``.

    ``resized_keys`` are the keys whose tensors have no memory, however small they are: torch copies
    no tensor without memory into one that has some.
    """
    part: Any = OrderedDict(
        (
            key[len(prefix) :],
            _without_memory(value, zeros_up_to=0 if key in resized_keys else _MOST_ZEROS),
        )
        for key, value in values.items()
        if key.startswith(prefix)
    )
    setattr(
        part,
        VERSIONS,
        {
            key[len(prefix) :]: version
            for key, version in versions.items()
            if f"{key}.".startswith(prefix)
        },
    )
    return part


def _tensors_in_present_size(
    sizes: Mapping[str, SizeChange], state_dict: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """Return tensors without memory in the present shapes of ``sizes``."""
    return {
        key: torch.empty(size.present_shape, dtype=state_dict[key].dtype, device="meta")
        for key, size in sizes.items()
    }


def _loads(owner: nn.Module, part: Any, memo: dict[int, Any], *, is_inner: bool) -> bool:
    """Return True if a copy of ``owner`` loads ``part`` without an error.

    Args:
        memo: What takes the place of the tensors of ``owner`` in the copy.
        is_inner: Whether ``owner`` is inside of another module. The ``load_state_dict`` of an outer
            module loads its inner ones without their own ``load_state_dict``.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            copy = deepcopy(owner, memo)
            for child in copy.modules():  # A post-hook may change objects outside of the copy
                forget_post_hooks(child)
            load = copy.load_state_dict if not is_inner else nn.Module.load_state_dict.__get__(copy)
            load(part)
    except Exception:  # noqa: BLE001 - The code of a module may raise anything
        return False
    return True


def _without_memory(value: Any, *, zeros_up_to: int) -> Any:
    """Return a tensor like ``value`` that has no memory, or zeros if it has at most ``zeros_up_to``
    elements. Code may read a single number, such as a version, but hardly all numbers of a weight.
    """
    if not isinstance(value, torch.Tensor):
        return value
    device = "cpu" if 0 < zeros_up_to >= value.numel() else "meta"
    empty = torch.zeros_like(value.detach(), device=device)
    return nn.Parameter(empty, value.requires_grad) if isinstance(value, nn.Parameter) else empty


def _has_hook_on_module(module: nn.Module) -> bool:
    """Return True if a pre-hook of ``module`` is a closure over a module, which a copy would not
    replace.
    """
    cells = [
        cell.cell_contents
        for hook in module_hooks(module, "load_state_dict_pre")
        for cell in getattr(getattr(hook, "hook", hook), "__closure__", None) or ()
    ]
    return any(isinstance(cell, nn.Module) for cell in cells)

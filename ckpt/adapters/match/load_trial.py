"""Try whether a module takes tensors of another size, before a restore changes anything.

Some modules resize themselves when they load a state dict, such as the observers of quantisation,
and others refuse tensors of another size. Only their own code can tell, so it loads the state dict
into a copy of the module whose tensors have no memory.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

import torch
from torch import nn

from ckpt.adapters.match.load_code import LoadCode
from ckpt.adapters.tensors.layout import PLAIN
from ckpt.adapters.torch_private import forget_post_hooks, module_hooks
from ckpt.errors import ShapeMismatch
from ckpt.model.values import VERSIONS

_SMALL: Final = 1


@dataclass(frozen=True, slots=True)
class Size:
    """A tensor that has another shape in the checkpoint than in the state.

    Attributes:
        name: Its name in the state.
        source: Its name in the checkpoint.
        saved: Its shape in the checkpoint.
        present: Its shape in the state.
    """

    name: str
    source: str
    saved: tuple[int, ...]
    present: tuple[int, ...]


def check_sizes(
    module: nn.Module, code: LoadCode, sizes: Mapping[str, Size], state_dict: Mapping[str, Any]
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
    for prefix in {code.reader(key) for key in sizes} - {None}:
        text = _refusal(module, str(prefix), state_dict)
        for key, size in sizes.items():
            if (
                code.reader(key) == prefix
                and f"size mismatch for {key[len(prefix or '') :]}" in text
            ):
                raise ShapeMismatch(size.name, size.saved, size.present, size.source)


def _refusal(module: nn.Module, prefix: str, state_dict: Mapping[str, Any]) -> str:
    """Return the text of the error that the module at ``prefix`` raises for its part of
    ``state_dict``; empty if it raises none or cannot be copied.
    """
    owner = module.get_submodule(prefix[:-1])
    tensors = {id(each): each for each in chain(owner.parameters(), owner.buffers())}
    is_plain = PLAIN.issuperset(map(type, tensors.values()))
    if not is_plain or any(map(_refers_to_module, owner.modules())):
        return ""
    part: Any = OrderedDict(
        (key[len(prefix) :], _without_memory(value))
        for key, value in state_dict.items()
        if key.startswith(prefix)
    )
    versions = vars(state_dict)[VERSIONS]
    setattr(
        part,
        VERSIONS,
        {k[len(prefix) :]: v for k, v in versions.items() if f"{k}.".startswith(prefix)},
    )
    memo: dict[int, Any] = {key: _without_memory(each) for key, each in tensors.items()}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            copy = deepcopy(owner, memo)
            for child in copy.modules():
                forget_post_hooks(child)
            load = copy.load_state_dict if not prefix else nn.Module.load_state_dict.__get__(copy)
            load(part)
    except Exception as error:  # noqa: BLE001 - The code of a module may raise anything
        return str(error)
    return ""


def _without_memory(value: Any) -> Any:
    """Return a tensor like ``value`` that has no memory, or zeros if it is small. Code may read a
    single number, such as a version, but hardly all numbers of a weight.
    """
    if not isinstance(value, torch.Tensor):
        return value
    device = "cpu" if value.numel() <= _SMALL else "meta"
    empty = torch.zeros_like(value.detach(), device=device)
    return nn.Parameter(empty, value.requires_grad) if isinstance(value, nn.Parameter) else empty


def _refers_to_module(module: nn.Module) -> bool:
    """Return True if a pre-hook of ``module`` is a closure over a module, which a copy would not
    replace.
    """
    cells = [
        cell.cell_contents
        for hook in module_hooks(module, "load_state_dict_pre")
        for cell in getattr(getattr(hook, "hook", hook), "__closure__", None) or ()
    ]
    return any(isinstance(each, nn.Module) for each in cells)

"""A module of the state, matched with what a checkpoint holds of one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from ckpt.adapters.match.matching import Matching
from ckpt.adapters.match.saved import ABSENT, is_mapping, kind, tag
from ckpt.adapters.tensors.local_shards import LocalShards
from ckpt.adapters.walk.items import Part
from ckpt.adapters.walk.modules import items_of
from ckpt.errors import KindMismatch
from ckpt.model.values import Node


def match_module(match: Matching, module: nn.Module, node: Node, path: str, source: str) -> None:
    """Match a module by canonical names, with a saved module or a plain dict of tensors.

    ``ABSENT`` stands for a module whose tensors are all elsewhere.

    Raises:
        KindMismatch, ShapeMismatch, DtypeMismatch: The saved values do not fit.
    """
    if node is not ABSENT and not is_mapping(node):
        match.expect(node, path, "module")
    match.open(path, source)
    own = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    extra: dict[str, Callable[[], Any]] = {}
    items = items_of(path, module)
    for fqn in items.left:
        match.claim(f"{path}/{fqn}", match.source(f"{path}/{fqn}"), silent=True)
    for entry in items.entries:
        name = f"{path}/{entry.fqn}"
        there = match.source(name)
        found = match.saved.node(there)
        if not match.takes(name):
            match.claim(name, there, silent=True)
        elif found is ABSENT:
            match.lack(name, there)
        elif id(entry.value) not in own and not isinstance(
            entry.value, LocalShards
        ):  # extra state: whatever it was
            match.claim(name, there)
            extra[entry.key] = match.values.order(found, name)
        elif tag(found) not in ("tensor", "array"):
            raise KindMismatch(name, kind(found), "tensor")
        else:
            match.claim(name, there)
            match.want(name, there, Part(name, entry.piece).all_of(entry.value), found["n"])
    if extra:
        match.actions.append(partial(_load_extra, module, extra))


def _load_extra(module: nn.Module, extra: dict[str, Callable[[], Any]]) -> None:
    module.load_state_dict({key: made() for key, made in extra.items()}, strict=False)

"""Values of the tree, created again: plain ones, and the tensors and arrays inside of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from ckpt.errors import FormatUnsupported, KindMismatch, ManifestCorrupt
from ckpt.model.manifest import Tensor
from ckpt.model.values import Node, decode


class Remaker:
    """Creates the tensors inside of plain values, each once, and the values when those are filled.

    Args:
        tensors: Those of the manifest, by name.
        want: Called with the name and the memory of each tensor that is to be read.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], want: Callable[[str, torch.Tensor], object]
    ) -> None:
        self._tensors, self._want = tensors, want
        self._made: dict[str, torch.Tensor] = {}

    def order(self, node: Node, path: str = "") -> Callable[[], Any]:
        """Order the tensors of ``node`` to be read; the value can be had once they are."""
        decode(node, partial(self._order, path))
        return lambda: decode(node, self.make)

    def _order(self, path: str, tag: str, node: Mapping[str, Node]) -> object:
        if tag in ("module", "optimizer", "per_rank", "subclass"):
            raise KindMismatch(path, f"container with a {tag}", "plain value")
        if tag in ("tensor", "array") and node["n"] not in self._made:
            name = node["n"]
            if (tensor := self._tensors.get(name)) is None:
                raise ManifestCorrupt(
                    "tree", f"it names the tensor {str(name)[:80]!r}, which is not there"
                )
            self._made[name] = torch.empty(
                tensor.shape, dtype=getattr(torch, tensor.dtype), device="cpu"
            )
            self._want(name, self._made[name])
        elif tag == "object":
            decode(node["v"], partial(self._order, path))
        elif tag not in ("tensor", "array"):
            # A value that cannot be made raises now, before anything is set.
            self.make(tag, node)
        return None

    def make(self, tag: str, node: Mapping[str, Node]) -> object:
        match tag:
            case "tensor":
                return self._made[node["n"]]
            case "array":
                return self._made[node["n"]].numpy()
            case "object":
                return decode(node["v"], self.make)
            case _:
                return torch_value(tag, node)


def torch_value(tag: str, node: Mapping[str, Node]) -> object:
    """Return a plain value of torch's own.

    Raises:
        FormatUnsupported: It is a dtype that this torch does not have.
        ManifestCorrupt: The node is no such value.
    """
    match tag:
        case "size":
            return torch.Size(node["v"])
        case "device":
            return torch.device(node["v"])
        case "dtype" if isinstance(found := vars(torch).get(node["v"]), torch.dtype):
            return found
        case "dtype":
            raise FormatUnsupported(
                "tree",
                f"has the value {str(node['v'])[:40]!r}, a dtype that torch {torch.__version__} "
                "lacks: restore with the torch that saved it",
            )
        case _:
            raise ManifestCorrupt("tree", f"unknown node {tag[:40]!r}")

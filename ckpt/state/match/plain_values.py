"""Make plain values from the manifest's tree, with the tensors and arrays inside of them.

The tree consists of nodes (see ``match.saved_nodes``). A view is the place of a tensor in a buffer
that several saved tensors shared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any

import torch

from ckpt.errors import FormatUnsupported, KindMismatch, ManifestCorrupt
from ckpt.model.manifest import Tensor
from ckpt.model.values import Node, decode
from ckpt.model.views import View, buffer_sizes
from ckpt.state.tensors.layout import empty_in_order, view_in


class Remaker:
    """Makes plain values in two stages: first the tensors inside of them, for the restore to fill,
    and then the values with these tensors. Each tensor is made once.

    Args:
        tensors: The tensors of the manifest, by name.
        views: The places of tensors in buffers, by the names of the tensors.
        request_read: Requests the read of a tensor. It is called with the name and the memory to
        fill.

    Attributes:
        buffers: The buffers that were made for tensors, as bytes, by their names.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        views: Mapping[str, View],
        request_read: Callable[[str, torch.Tensor], object],
    ) -> None:
        self._tensors, self._views, self._request_read = tensors, views, request_read
        self._new_tensors: dict[str, torch.Tensor] = {}
        self.buffers: dict[str, torch.Tensor] = {}

    def prepare(self, node: Node, path: str = "") -> Callable[[], Any]:
        """Make the tensors inside of ``node``, and request that they are read. Return a function
        that makes the value of ``node``, to be called after they were read.

        Raises:
            KindMismatch: The node has a module, an optimizer, a ``PerRank`` value or a wrapper
                tensor inside, which is no plain value. The error names ``path``.
            ManifestCorrupt, FormatUnsupported: A value inside of the node cannot be made.
        """
        has_tagged_nodes = False

        def prepare_tagged(tag: str, inner: Mapping[str, Node]) -> object:
            nonlocal has_tagged_nodes
            has_tagged_nodes = True
            return self._prepare(path, tag, inner)

        values = [decode(node, prepare_tagged)]
        if has_tagged_nodes:
            values.clear()
        # A value without tensors inside is made already. Each further call makes another one.
        return lambda: values.pop() if values else decode(node, self.make)

    def _prepare(self, path: str, tag: str, node: Mapping[str, Node]) -> object:
        """Make the tensors inside of a node with a tag, and check that its value can be made.
        ``decode`` calls this method, and ``prepare`` ignores the result.
        """
        if tag in ("module", "optimizer", "per_rank", "subclass"):
            raise KindMismatch(path, f"container with a {tag}", "plain value")
        if tag in ("tensor", "array") and node["n"] not in self._new_tensors:
            name = node["n"]
            self._new_tensors[name] = self._empty(tensor_named(self._tensors, name))
            self._request_read(name, self._new_tensors[name])
        elif tag == "object":
            decode(node["v"], partial(self._prepare, path))
        elif tag not in ("tensor", "array"):
            # Make the value on trial, so that a value that cannot be made raises an error now,
            # before the restore changes the state.
            self.make(tag, node)
        return None

    def _empty(self, tensor: Tensor) -> torch.Tensor:
        """Return a new tensor for ``tensor``, in its buffer if it was in one."""
        if (view := self._views.get(tensor.name)) is None:
            dtype = getattr(torch, tensor.dtype)
            return empty_in_order(tensor.shape, tensor.order, dtype=dtype)
        if view.buffer not in self.buffers:
            size = self._buffer_sizes[view.buffer]
            self.buffers[view.buffer] = torch.empty(size, dtype=torch.uint8, device="cpu")
        return view_in(self.buffers[view.buffer], view, tensor.dtype, tensor.shape)

    @cached_property
    def _buffer_sizes(self) -> Mapping[str, int]:
        """The bytes of each buffer, by its name."""
        tensors = {name: self._tensors[name] for name in self._views}
        return buffer_sizes(
            self._views, {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
        )

    def make(self, tag: str, node: Mapping[str, Node]) -> object:
        """Return the value of a node with a tag, with the tensors that were read."""
        match tag:
            case "tensor":
                return self._new_tensors[node["n"]]
            case "array":
                return self._new_tensors[node["n"]].numpy()
            case "object":
                return decode(node["v"], self.make)
            case _:
                return torch_value(tag, node)


def tensor_named(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """Return the tensor that a node names. Raises ``ManifestCorrupt`` if there is none."""
    if (tensor := tensors.get(name)) is None:
        raise ManifestCorrupt("tree", f"it names the tensor {str(name)[:80]!r}, which is not there")
    return tensor


def torch_value(tag: str, node: Mapping[str, Node]) -> object:
    """Return the ``torch.Size``, ``torch.device`` or ``torch.dtype`` that a node with ``tag``
    stands for.

    Raises:
        FormatUnsupported: The node is a dtype that this torch does not have.
        ManifestCorrupt: The tag is none of these.
    """
    match tag:
        case "size":
            return torch.Size(node["v"])
        case "device":
            return torch.device(node["v"])
        case "dtype" if isinstance(dtype := vars(torch).get(node["v"]), torch.dtype):
            return dtype
        case "dtype":
            raise FormatUnsupported(
                "tree",
                f"has the value {str(node['v'])[:40]!r}, a dtype that torch {torch.__version__} "
                "lacks: restore with the torch that saved it",
            )
        case _:
            raise ManifestCorrupt("tree", f"unknown node {tag[:40]!r}")

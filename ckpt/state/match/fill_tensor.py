"""Match one tensor of the state with its node in the checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec
import torch

from ckpt.errors import DtypeMismatch, KindMismatch, ManifestCorrupt
from ckpt.model.values import Node, join
from ckpt.state.match.matching import Matcher
from ckpt.state.match.saved import kind, tag
from ckpt.state.tensors.local_shards import Source
from ckpt.state.tensors.wrapped import Layer, is_wrapper, take_apart

_LONG: Final = 200
_encoder: Final = msgspec.json.Encoder(order="sorted")


def fill_tensor(match: Matcher, name: str, source: str, target: Source, node: Node) -> None:
    """Request that the restore reads the bytes of ``node`` into ``target``. For a wrapper tensor
    (see ``tensors.wrapped``), request it for each tensor inside.

    Args:
        match: The matching that the request is added to.
        name: The name of the tensor in the state.
        source: The name of the tensor in the checkpoint.
        target: The tensor to fill.
        node: The node of the tensor in the checkpoint.

    Raises:
        KindMismatch: ``node`` is not the node of a tensor, only one of ``target`` and ``node`` is a
            wrapper tensor, or they differ in their class, their metadata or the tensors inside.
        DtypeMismatch: See ``Matcher.want``. A tensor inside of a wrapper must have the dtype that
            was saved, since it is never converted.
        ShapeMismatch, RestoreError: See ``Matcher.want``.
        ManifestCorrupt: The node of a wrapper tensor names a tensor that the checkpoint lacks.
        UnsupportedValue: ``target`` cannot be filled.
    """
    if not (isinstance(target, torch.Tensor) and is_wrapper(target)):
        match.expect(node, name, "tensor", "array")
        match.want(name, source, target, node["n"])
        return
    parts = take_apart(name, target)
    sources = parts.sources()
    for path, stored_name in _stored_names(name, "", parts.layer, node):
        tensor = sources[path].source
        record = match.checkpoint.tensors.get(stored_name)
        if record is None:
            raise ManifestCorrupt(
                "tree", f"it names the tensor {stored_name[:80]!r}, which is not there"
            )
        # The integers in a quantised tensor have no meaning in another dtype.
        if f"torch.{record.dtype}" != str(tensor.dtype):
            own_dtype = str(tensor.dtype).removeprefix("torch.")
            way = "build the target with the class and the settings that were saved"
            raise DtypeMismatch(f"{name}/{path}", record.dtype, own_dtype, stored_name, way)
        match.want(f"{name}/{path}", f"{source}/{path}", tensor, stored_name)


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
            name, *(f"{layer.kind} with {value[:_LONG]}" for value in (saved_values, own_values))
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

"""Match one tensor of the state with its node in the checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec
import torch

from ckpt.adapters.match.matching import Matching
from ckpt.adapters.match.saved import kind, tag
from ckpt.adapters.tensors.local_shards import Source
from ckpt.adapters.tensors.wrapped import Layer, apart, is_wrapper
from ckpt.errors import DtypeMismatch, KindMismatch, ManifestCorrupt
from ckpt.model.values import Node, join

_LONG: Final = 200
_encoder: Final = msgspec.json.Encoder(order="sorted")


def fill_tensor(match: Matching, name: str, source: str, target: Source, node: Node) -> None:
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
        DtypeMismatch: See ``Matching.want``. A tensor inside of a wrapper must have the dtype that
            was saved, since it is never converted.
        ShapeMismatch, RestoreError: See ``Matching.want``.
        ManifestCorrupt: The node of a wrapper tensor names a tensor that the checkpoint lacks.
        UnsupportedValue: ``target`` cannot be filled.
    """
    if not (isinstance(target, torch.Tensor) and is_wrapper(target)):
        match.expect(node, name, "tensor", "array")
        match.want(name, source, target, node["n"])
        return
    taken = apart(name, target)
    sources = taken.sources()
    for path, stored in _stored(name, "", taken.layer, node):
        held = sources[path].source
        saved = match.saved.tensors.get(stored)
        if saved is None:
            raise ManifestCorrupt(
                "tree", f"it names the tensor {stored[:80]!r}, which is not there"
            )
        # The integers in a quantised tensor have no meaning in another dtype.
        if f"torch.{saved.dtype}" != str(held.dtype):
            here = str(held.dtype).removeprefix("torch.")
            way = "build the target with the class and the settings that were saved"
            raise DtypeMismatch(f"{name}/{path}", saved.dtype, here, stored, way)
        match.want(f"{name}/{path}", f"{source}/{path}", held, stored)


def _stored(name: str, path: str, layer: Layer, node: Node) -> Iterator[tuple[str, str]]:
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
            name, *(f"{layer.kind} of {', '.join(each)}" for each in (node["inner"], layer.inner))
        )
    saved, here = (_encoder.encode(each).decode() for each in (node["v"], layer.values))
    if saved != here:
        raise KindMismatch(name, *(f"{layer.kind} with {each[:_LONG]}" for each in (saved, here)))
    for attribute, part in layer.inner.items():
        inside = join(path, attribute)
        if isinstance(part, Layer):
            yield from _stored(join(name, attribute), inside, part, node["inner"][attribute])
        else:
            found = node["inner"][attribute]
            if tag(found) != "tensor":
                raise KindMismatch(join(name, attribute), kind(found), "tensor")
            yield inside, found["n"]

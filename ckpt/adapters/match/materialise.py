"""Tensors on the meta device -> real ones, which are still the same objects.

Every holder of such a tensor (a module, a tied module, an optimizer) has the real tensor
afterwards. Nothing changes before that: data is read into a stand-in, and the two are swapped when
all of it is there.
"""

from __future__ import annotations

import weakref

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ckpt.adapters.tensors.layout import local
from ckpt.adapters.torch_private import has_hooks, use_count
from ckpt.adapters.walk.modules import canonical
from ckpt.errors import RestoreError

_WAY = "materialise the module first, with to_empty(device=...), and build its optimizer after that"


def is_meta(value: object) -> bool:
    """Return True for a tensor without memory."""
    return isinstance(value, torch.Tensor) and (
        value.is_meta or (isinstance(value, DTensor) and local(value).is_meta)
    )


class RealTensors:
    """Real tensors for those of a match that are on the meta device; one for each, however often it
    is named.

    They are made on the device of a DTensor's mesh, else on torch's default device.
    """

    def __init__(self) -> None:
        self._made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._filled: set[int] = set()

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self._filled

    def to_fill(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the stand-in that is read in place of ``tensor``. Raises as ``like``."""
        if (real := self.like(name, tensor)) is not tensor:
            self._filled.add(id(tensor))
        return real

    def like(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor if it is real, else the one that will replace it, which shows the
        layout. The tensor is only replaced if it is filled.

        Raises:
            RestoreError: Something else than Python holds on to the tensor that is to be replaced.
        """
        if not is_meta(tensor):
            return tensor
        if id(tensor) not in self._made:
            self._made[id(tensor)] = (tensor, _real(name, tensor))
        return self._made[id(tensor)][1]

    def change_places(self) -> None:
        """Make the tensors real.

        ``fully_shard`` examines its shards again before the first forward, which cannot have
        happened yet.
        """
        for tensor, real in (self._made[each] for each in self._filled):
            torch.utils.swap_tensors(tensor, real)  # type: ignore[no-untyped-call]

    def left_out(self, path: str, module: nn.Module) -> list[str]:
        """Return the names of the module's tensors that stay without memory."""
        names = canonical(module)
        named = (*module.named_parameters(), *module.named_buffers())
        return [
            f"{path}/{names(key)}"
            for key, tensor in named
            if is_meta(tensor) and tensor not in self
        ]


def _real(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if weakref.getweakrefs(tensor) or has_hooks(tensor):
        raise RestoreError(
            f"{name!r} is on the meta device and has hooks or weak references, which a real "
            f"tensor would not take over: {_WAY}"
        )
    if _is_held(tensor):
        raise RestoreError(
            f"{name!r} is on the meta device, and a graph or a view of it is still alive, which a "
            f"real tensor would not take over: let go of what was computed with it, or {_WAY}"
        )
    device = (
        torch.device(tensor.device_mesh.device_type)
        if isinstance(tensor, DTensor)
        else torch.get_default_device()
    )
    if device.type == "meta":
        raise RestoreError(
            f"{name!r} is on the meta device, and so is all that is made here: call restore() "
            "outside of torch.device('meta')"
        )
    with torch.no_grad():
        made = torch.empty_like(tensor.detach(), device=device)
    if isinstance(tensor, nn.Parameter):
        plain = type(tensor) in (nn.Parameter, DTensor)
        kept = tensor.requires_grad
        made = (
            nn.Parameter(made, kept)
            if plain
            else made.as_subclass(type(tensor)).requires_grad_(kept)
        )
    vars(made).update(vars(tensor))
    return made


def _is_held(tensor: torch.Tensor) -> bool:
    """Return True if C++ code holds the tensor too: then torch does not allow a swap."""
    count = use_count(tensor)
    if count != 2 or not (tensor.is_leaf and tensor.requires_grad):
        return count > 1
    # The node that accumulates the gradient may hold one of the references.
    accumulates = torch.autograd.graph.get_gradient_edge(tensor).node
    count = use_count(tensor)
    del accumulates
    return count != 2

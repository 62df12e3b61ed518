"""Restore tensors that are on the meta device: give them memory, and keep the tensor objects.

So every holder of such a tensor (a module, a tied module, an optimizer) has the real tensor
afterwards. A real tensor is one that is not on the meta device. The restore reads the data into a
replacement. After all data was read, it swaps the contents of the two tensor objects.
"""

from __future__ import annotations

import weakref

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ckpt.errors import RestoreError
from ckpt.state.tensors.layout import to_local
from ckpt.state.walk.modules import canonical
from ckpt.torch_private import has_hooks, use_count

_ADVICE = (
    "materialise the module first, with to_empty(device=...), and build its optimizer after that"
)


def is_meta(value: object) -> bool:
    """Return True if ``value`` is a tensor on the meta device, or a DTensor whose local tensor is
    on the meta device.
    """
    return isinstance(value, torch.Tensor) and (
        value.is_meta or (isinstance(value, DTensor) and to_local(value).is_meta)
    )


class MetaReplacements:
    """The replacements for the tensors of one matching that are on the meta device.

    A tensor has one replacement, however many names it has. The replacement of a DTensor is on the
    device type of its mesh, and any other replacement is on torch's default device.
    ``_replacements`` has each tensor with its replacement, by the identity (``id``) of the tensor.
    ``_requests`` are the identities of the tensors for which ``tensor_to_fill`` was called.
    """

    def __init__(self) -> None:
        self._replacements: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._requests: set[int] = set()

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self._requests

    def tensor_to_fill(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor that the restore fills for ``tensor``: its replacement if it is on the
        meta device, else ``tensor`` itself. ``swap_in`` will then make ``tensor`` real.

        Raises:
            RestoreError: See ``real_like``.
        """
        if (real := self.real_like(name, tensor)) is not tensor:
            self._requests.add(id(tensor))
        return real

    def real_like(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a real tensor with the layout of ``tensor``: its replacement if it is on the meta
        device, else ``tensor`` itself. This call alone does not make ``tensor`` real.

        Raises:
            RestoreError: ``tensor`` cannot be replaced, since it has hooks or weak references, a
                graph or a view holds it, or torch's default device is the meta device.
        """
        if not is_meta(tensor):
            return tensor
        if id(tensor) not in self._replacements:
            self._replacements[id(tensor)] = (tensor, _new_real_tensor(name, tensor))
        _, real = self._replacements[id(tensor)]
        return real

    def swap_in(self) -> None:
        """Swap each tensor for which ``tensor_to_fill`` was called with its replacement.

        Modules of ``fully_shard`` need no update, since they read their shards again before their
        first forward pass. With parameters on the meta device, no forward pass has run yet.
        """
        for tensor, real in (self._replacements[key] for key in self._requests):
            torch.utils.swap_tensors(tensor, real)  # type: ignore[no-untyped-call]

    def remaining_names(self, path: str, module: nn.Module) -> list[str]:
        """Return the names of those tensors of the module at ``path`` that stay on the meta device,
        since ``tensor_to_fill`` was not called for them.
        """
        canonical_name = canonical(module)
        tensors = (*module.named_parameters(), *module.named_buffers())
        return [
            f"{path}/{canonical_name(key)}"
            for key, tensor in tensors
            if is_meta(tensor) and tensor not in self
        ]


def _new_real_tensor(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a new replacement for ``tensor``, which is ``name`` in the state (see
    ``real_like``).
    """
    if weakref.getweakrefs(tensor) or has_hooks(tensor):
        raise RestoreError(
            f"{name!r} is on the meta device and has hooks or weak references, which a real "
            f"tensor would not take over: {_ADVICE}"
        )
    if _is_held(tensor):
        raise RestoreError(
            f"{name!r} is on the meta device, and a graph or a view of it is still alive, which a "
            f"real tensor would not take over: let go of what was computed with it, or {_ADVICE}"
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
        real = torch.empty_like(tensor.detach(), device=device)
    if isinstance(tensor, nn.Parameter):
        plain = type(tensor) in (nn.Parameter, DTensor)
        requires_grad = tensor.requires_grad
        real = (
            nn.Parameter(real, requires_grad)
            if plain
            else real.as_subclass(type(tensor)).requires_grad_(requires_grad)
        )
    vars(real).update(vars(tensor))
    return real


def _is_held(tensor: torch.Tensor) -> bool:
    """Return True if references in C++ code make torch refuse to swap ``tensor``."""
    count = use_count(tensor)
    if count != 2 or not (tensor.is_leaf and tensor.requires_grad):
        return count > 1
    # The second reference may be that of the node which accumulates the gradient, and a swap is
    # allowed then. If there was no such node, this call makes one, and the count rises.
    gradient_node = torch.autograd.graph.get_gradient_edge(tensor).node
    count = use_count(tensor)
    del gradient_node
    return count != 2

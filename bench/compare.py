"""Whether what was loaded is what was saved: a 128-bit hash of every tensor, taken when the
state is saved, and the plain values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from bench.state import Subject


def contents(subject: Subject) -> dict[str, Any]:
    """Name -> hash (with dtype and shape) of every tensor, a rank's own part of a DTensor, and
    the plain values under ``""``.
    """
    import torch
    import xxhash

    found: dict[str, Any] = {"": subject.values()}
    for name, tensor in subject.tensors().items():
        local = cast(Any, tensor.detach())
        local = local.to_local() if hasattr(local, "to_local") else local
        data = local.contiguous().reshape(-1).view(torch.uint8).numpy()
        found[name] = f"{tensor.dtype} {list(tensor.shape)} {xxhash.xxh3_128_hexdigest(data)}"
    return found


def differences(saved: dict[str, Any], loaded: dict[str, Any]) -> list[str]:
    """What is not the same, by name."""
    return [
        name or "the plain values"
        for name in sorted(saved.keys() | loaded.keys())
        if saved.get(name) != loaded.get(name)
    ]

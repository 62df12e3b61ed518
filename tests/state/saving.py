"""Functions of the tests of ``ckpt.state`` that save, restore, and compare bit for bit."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import torch

from ckpt import CheckpointManager, RestoreReport
from ckpt.catalog.step_listing import find, read_manifest
from ckpt.model.manifest import Manifest
from ckpt.storage.registry import open_backend


def new_root() -> str:
    return f"memory://{uuid.uuid4().hex}"


def saved(state: Mapping[str, Any], root: str | None = None, step: int = 0) -> str:
    """Save with a manager of its own, and return the root."""
    root = root or new_root()
    with CheckpointManager(root) as manager:
        manager.save(state, step)
    return root


def restored(
    root: str, target: dict[str, Any], step: int | None = None, **how: Any
) -> RestoreReport:
    with CheckpointManager(root) as manager:
        report = manager.restore(target, step, **how)
    assert report is not None
    return report


def round_trip(state: Mapping[str, Any], target: dict[str, Any]) -> dict[str, Any]:
    restored(saved(state), target)
    return target


def manifest_of(root: str) -> Manifest:
    backend = open_backend(root)
    return read_manifest(backend, find(backend, None)[0])


def tree_of(root: str) -> Any:
    return msgspec.json.decode(manifest_of(root).tree)


def bits(tensor: torch.Tensor) -> bytes:
    """Return its elements as bytes in row-major order, for any strides, dtype and flags."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    if str(plain.dtype).startswith(
        ("torch.float4", "torch.bits", "torch.float8_e8m0", "torch.complex32")
    ):
        plain = plain.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[plain.itemsize])
    return plain.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same(one: Any, two: Any, path: str = "state") -> None:
    """Check that both are equal in kind and to the bit."""
    assert type(one) is type(two), (path, one, two)
    if isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape) == (two.dtype, two.shape), path
        assert bits(one) == bits(two), path
    elif isinstance(one, np.ndarray):
        assert (one.dtype, one.shape) == (two.dtype, two.shape), path
        assert one.tobytes() == two.tobytes(), path
    elif isinstance(one, dict):
        assert one.keys() == two.keys(), path
        for key in one:
            assert_same(one[key], two[key], f"{path}/{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(two), path
        for index, (a, b) in enumerate(zip(one, two, strict=True)):
            assert_same(a, b, f"{path}/{index}")
    else:
        assert repr(one) == repr(two), path

"""Manifests and fragments as the engine writes them, without an engine."""

from __future__ import annotations

import uuid

import msgspec
import numpy as np

from ckpt.model.keys import fragment_name
from ckpt.model.manifest import Manifest, Packed
from ckpt.model.record_encoding import unpack
from ckpt.storage.api import read_object
from ckpt_backends.memory import forget_memory, open_memory
from tests.checkpoints import write_checkpoint

ARRAYS: dict[str, np.ndarray] = {
    "weight": np.arange(40, dtype=np.float32).reshape(10, 4),
    "bias": np.arange(3, dtype=np.int64),
    "scalar": np.array(2.5),
    "empty": np.zeros((0, 3), dtype=np.float16),
}


def records(**options: object) -> tuple[Manifest, Packed]:
    """Return a manifest of two ranks and the fragment of rank 1, as they are stored.

    Chunks have 64 bytes.
    """
    name = uuid.uuid4().hex
    backend = open_memory(f"memory://{name}", {})
    try:
        settings = {
            "world_size": 2,
            "chunk_bytes": 64,
            "tied": {"head": "weight"},
            "tree": {"step": 3},
            **options,
        }
        written = write_checkpoint(backend, 3, ARRAYS, **settings)  # type: ignore[arg-type]
        key = written.ref.key(fragment_name(1))
        return written.stored, unpack(read_object(backend, key, limit=1 << 30), Packed, key=key)
    finally:
        forget_memory(name)


def large_record(mebibytes: int = 2) -> Manifest:
    """Return a manifest that is stored compressed."""
    text = np.random.default_rng(5).bytes(mebibytes << 19).hex()
    return msgspec.structs.replace(records()[0], metadata=msgspec.Raw(msgspec.json.encode(text)))

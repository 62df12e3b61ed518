"""Checkpoints without torch or an engine.

They have the same planning, merging and packing, with arrays as the state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from ckpt.model.box import Box, even_slab
from ckpt.model.checksum import checksum
from ckpt.model.fill_manifest import fill_manifest
from ckpt.model.fragment_columns import fragment_of, pack_fragment
from ckpt.model.keys import OWNER, StepRef, data_name, fragment_name
from ckpt.model.manifest import FORMAT, Chunk, File, Fragment, FragmentRef, Manifest, Packed
from ckpt.model.record_encoding import pack
from ckpt.plan.leaf import Leaf
from ckpt.plan.merge import merge
from ckpt.plan.save import plan_save
from ckpt.root.owner import Owner
from ckpt.storage.api import StorageBackend

Arrays = Mapping[str, np.ndarray[Any, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """``manifest`` has all fragments filled in, and ``stored`` is as it is on the tier."""

    ref: StepRef
    manifest: Manifest
    stored: Manifest


def write_checkpoint(
    backend: StorageBackend,
    step: int,
    arrays: Arrays,
    *,
    world_size: int = 1,
    attempt: str = "abcxyz",
    chunk_bytes: int = 1024,
    created_at: float | None = None,
    tree: object = None,
    metadata: object = None,
    per_rank: Mapping[int, object] | None = None,
    tied: Mapping[str, str] | None = None,
    commit: bool = True,
) -> Written:
    """Save ``arrays``, cut along their first dimension among ``world_size`` ranks.

    Arrays that are too short belong to rank 0.
    """
    ref = StepRef(step, attempt)
    parts = [
        _write_rank(
            backend,
            ref,
            arrays,
            Fragment(
                format=FORMAT,
                step=step,
                attempt=attempt,
                rank=rank,
                world_size=world_size,
                created_at=created_at if created_at is not None else 1_700_000_000.0 + step,
                chunk_bytes=chunk_bytes,
                file=None,
                tensors=(),
                tied=dict(tied or {}),
                tree=_raw(tree if tree is not None else {}),
                per_rank=_raw((per_rank or {}).get(rank, {})),
                replicas={},
                metadata=_raw(metadata if metadata is not None else {}),
            ),
        )
        for rank in range(world_size)
    ]
    stored = merge(parts)
    if commit:
        backend.put(ref.manifest, [pack(stored)], if_absent=True)
    whole = fill_manifest(
        stored, {part.rank: fragment_of(part, key="k") for part, _ in parts}, key="k"
    )
    return Written(ref=ref, manifest=whole, stored=stored)


def _write_rank(
    backend: StorageBackend, ref: StepRef, arrays: Arrays, empty: Fragment
) -> tuple[Packed, FragmentRef]:
    rank, world_size = empty.rank, empty.world_size
    leaves = [
        Leaf(name, str(array.dtype), array.shape, _boxes(array, rank, world_size))
        for name, array in arrays.items()
    ]
    plan = plan_save(leaves, rank=rank, chunk_bytes=empty.chunk_bytes)
    image = bytearray(plan.header)
    for item in plan.items:
        image += np.ascontiguousarray(arrays[leaves[item.leaf].name][item.box.slices()]).tobytes()
    assert len(image) == plan.size
    chunks: list[Chunk] = []
    end = 0
    for nbytes in plan.chunks:
        chunks.append(Chunk(nbytes, checksum(memoryview(image)[end : end + nbytes])))
        end += nbytes
    backend.put(ref.key(data_name(rank)), [image])
    file = File(data_name(rank), rank, plan.size, tuple(chunks))
    fragment = pack_fragment(msgspec.structs.replace(empty, file=file, tensors=plan.tensors))
    packed = pack(fragment)
    backend.put(ref.key(fragment_name(rank)), [packed])
    return fragment, FragmentRef(fragment_name(rank), rank, len(packed), checksum(packed))


def _boxes(array: np.ndarray[Any, Any], rank: int, world_size: int) -> tuple[Box, ...]:
    whole = Box.whole(array.shape)
    if not array.shape or array.shape[0] < world_size:
        return (whole,) if rank == 0 else ()
    part = even_slab(whole, world_size, rank)
    return (part,) if part is not None else ()


def _raw(node: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(node, order="deterministic"))


DEAD = replace(Owner.of_this_process("abcxyz"), pid=2**22 + 1, started=1)  # beyond the largest pid


def own(backend: StorageBackend, owner: Owner) -> None:
    backend.put(OWNER, [msgspec.json.encode(owner)])

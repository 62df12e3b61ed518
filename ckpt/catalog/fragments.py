"""Fragments of a committed step, proven to be those that its manifest was merged from; and a manifest by reference, filled in with them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Final

from msgspec.structs import replace

from ckpt.errors import ChecksumMismatch, ManifestCorrupt
from ckpt.model.checksum import checksum
from ckpt.model.keys import StepRef
from ckpt.model.manifest import File, Fragment, FragmentRef, Manifest
from ckpt.model.packed import read_fragment
from ckpt.model.reference import fill
from ckpt.pipeline.workers import Workers
from ckpt.storage.api import StorageBackend, read_object

_THREADS: Final = 16
"""Requests are what takes time: fragments are small, and there may be thousands."""


def load_fragment(
    backend: StorageBackend, ref: StepRef, manifest: Manifest, named: FragmentRef, file: File | None
) -> tuple[Fragment, bytes]:
    """A fragment that is the one the manifest was merged from, and its bytes.

    Raises:
        ObjectNotFound: It is missing.
        ChecksumMismatch, ManifestCorrupt: It is another, or damaged.
    """
    key = ref.key(named.name)
    size = backend.head(key).size
    if size != named.size:
        raise ManifestCorrupt(key, f"has {size} bytes, should have {named.size}")
    data = read_object(backend, key, limit=named.size)
    if checksum(data) != named.checksum:
        raise ChecksumMismatch(key, 0, len(data))
    fragment = read_fragment(data, key=key)
    mine = (fragment.step, fragment.attempt, fragment.rank, fragment.world_size, fragment.chunk_bytes)
    if mine != (ref.step, ref.attempt, named.rank, manifest.world_size, manifest.chunk_bytes):
        raise ManifestCorrupt(key, "belongs to another save")
    told = fragment.file
    if told is not None and file is not None and not file.chunks:  # the manifest leaves them to the fragment
        told = replace(told, chunks=())
    if told != file:
        raise ManifestCorrupt(key, "its data file is not the one that the manifest tells of")
    return fragment, data


def filled(
    manifest: Manifest,
    read: Callable[[FragmentRef, File | None], Fragment],
    ranks: Collection[int] | None,
    *,
    key: str,
) -> Manifest:
    """A manifest by reference with the fragments of ``ranks``, or of all (None), filled in; any other as it is.

    Args:
        read: Gives a fragment, from any thread.

    Raises:
        ManifestCorrupt: The fragments are not those of such a manifest.
    """
    if not manifest.by_reference:
        return manifest
    files = manifest.file_map()
    named = [each for each in manifest.fragments if ranks is None or each.rank in ranks]
    if len(named) < 2:
        found = [read(each, files.get(each.rank)) for each in named]
    else:
        with Workers("fragments", min(_THREADS, len(named))) as workers:
            found = workers.run_all(partial(read, each, files.get(each.rank)) for each in named)
    return fill(manifest, {part.rank: part for part in found}, key=key)

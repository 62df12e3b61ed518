"""Read the fragments of a committed step, and verify them by the checksums in its manifest.

A *fragment* is the record of what one rank has written: its data file, with the chunks of the file
and the boxes of tensors that they hold. A stored manifest only refers to the fragments. To *fill
in* a fragment is to add its contents to the manifest. A manifest *carries* the fragments if it
contains copies of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Final

import msgspec
from msgspec.structs import replace

from ckpt.errors import ChecksumMismatch, ManifestCorrupt
from ckpt.model.checksum import checksum
from ckpt.model.fill_manifest import carried_fragment, fill_manifest, ranks_of
from ckpt.model.fragment_columns import read_fragment
from ckpt.model.keys import StepRef
from ckpt.model.manifest import File, Fragment, FragmentRef, Manifest
from ckpt.model.record_encoding import MAX_RECORD_BYTES
from ckpt.pipeline.workers import Workers
from ckpt.plan.leaf import Leaf
from ckpt.storage.api import StorageBackend, read_record

_THREADS: Final = 16
"""How many threads read fragments.

Fragments are small and there may be thousands of them, so the latency of requests dominates.
"""


def load_fragment(
    backend: StorageBackend,
    ref: StepRef,
    manifest: Manifest,
    fragment_ref: FragmentRef,
    file: File | None,
) -> tuple[Fragment, bytes]:
    """Read one fragment that ``manifest`` was merged from.

    Args:
        fragment_ref: The reference to the fragment in the manifest.
        file: The data file of the fragment's rank in the manifest; None if the rank has none.

    Returns:
        The fragment, and the bytes of its record.

    Raises:
        ObjectNotFound: The fragment is missing.
        ChecksumMismatch, ManifestCorrupt: The fragment is damaged, or belongs to another save.
    """
    key = ref.key(fragment_ref.name)
    if fragment_ref.size > MAX_RECORD_BYTES:
        raise ManifestCorrupt(key, f"has {fragment_ref.size} bytes, more than a fragment may have")
    decode = partial(check_bytes, fragment_ref=fragment_ref, key=key)
    data = read_record(backend, key, decode, limit=fragment_ref.size)
    fragment = read_fragment(data, key=key)
    identity = (
        fragment.step,
        fragment.attempt,
        fragment.rank,
        fragment.world_size,
        fragment.chunk_bytes,
    )
    if identity != (
        ref.step,
        ref.attempt,
        fragment_ref.rank,
        manifest.world_size,
        manifest.chunk_bytes,
    ):
        raise ManifestCorrupt(key, "belongs to another save")
    fragment_file = replace(fragment.file, chunks=()) if fragment.file else None
    if fragment_file != (replace(file, chunks=()) if file else None):
        raise ManifestCorrupt(key, "its data file is not the one that the manifest names")
    return fragment, data


def check_bytes(data: bytes, *, fragment_ref: FragmentRef, key: str) -> bytes:
    """Return ``data`` if these are the bytes of the fragment that a manifest names.

    Raises:
        ManifestCorrupt: The size is another one.
        ChecksumMismatch: The bytes are other ones.
    """
    if len(data) != fragment_ref.size:
        raise ManifestCorrupt(key, f"has {len(data)} bytes, should have {fragment_ref.size}")
    if checksum(data) != fragment_ref.checksum:
        raise ChecksumMismatch(key, 0, len(data))
    return data


def fill_from(
    manifest: Manifest,
    read: Callable[[FragmentRef, File | None], Fragment],
    ranks: Collection[int] | None,
    *,
    key: str,
) -> Manifest:
    """Return the manifest with the fragments of ``ranks`` (None: of all ranks) filled in.

    A manifest that is filled already is returned as it is.

    Args:
        read: Reads a fragment that the manifest does not carry. Several threads call it.
        key: The key of the manifest, for errors.

    Raises:
        ManifestCorrupt: The fragments are not the ones that the manifest was merged from.
    """
    if manifest.is_filled:
        return manifest
    files = manifest.file_map()
    fragment_refs = [
        fragment_ref
        for fragment_ref in manifest.fragments
        if ranks is None or fragment_ref.rank in ranks
    ]

    def load(fragment_ref: FragmentRef) -> Fragment:
        return carried_fragment(manifest, fragment_ref.rank, key=key) or read(
            fragment_ref, files.get(fragment_ref.rank)
        )

    if len(fragment_refs) < 2:
        parts = list(map(load, fragment_refs))
    else:
        with Workers("fragments", min(_THREADS, len(fragment_refs))) as workers:
            parts = workers.run_all(partial(load, fragment_ref) for fragment_ref in fragment_refs)
    return fill_manifest(manifest, {part.rank: part for part in parts}, key=key)


Read = Callable[[Manifest, FragmentRef, File | None], Fragment]
"""A function that reads a fragment of a manifest. Any thread may call the function.

The arguments are the manifest, its reference to the fragment, and the data file of the rank (None
if the rank has none).
"""


class Parts:
    """A manifest, and its fragments, which are read when they are needed and then remembered.

    Thread safety: only the owner's thread may use it.

    Attributes:
        manifest: The manifest as it was read, without fragments filled in.
        ranks: The ranks whose fragments the last call of ``fill_for`` has filled in.
    """

    def __init__(self, manifest: Manifest, read: Read) -> None:
        self.manifest, self.ranks = manifest, set[int]()
        self._read = read
        self._fragments: dict[int, Fragment] = {}

    @property
    def outline(self) -> Manifest:
        """Return the manifest with the ``PerRank`` values of all ranks. The value of a rank is read
        from the fragment of the rank on access.
        """
        return replace(self.manifest, per_rank=_PerRank(self))

    def fill_for(self, leaves: Sequence[Leaf] | None, *, key: str) -> Manifest:
        """Return the manifest with the fragments filled in that hold a part of ``leaves``, or with
        all fragments for None. A leaf is a tensor with its wanted boxes. The result does not have
        the other fragments that an earlier call has filled in.
        """
        if leaves is None:
            self.ranks = set(range(self.manifest.world_size))
        else:
            self.ranks = ranks_of(self.manifest, [(leaf.name, leaf.boxes) for leaf in leaves])
        return fill_from(self.manifest, self._load, self.ranks, key=key)

    def of(self, rank: int) -> Fragment:
        """Return the fragment of one rank."""
        fragment_ref = next(
            part_ref for part_ref in self.manifest.fragments if part_ref.rank == rank
        )
        return self._load(fragment_ref, self.manifest.file_map().get(rank))

    def _load(self, fragment_ref: FragmentRef, file: File | None) -> Fragment:
        """Return a fragment that is remembered, carried by the manifest, or read now."""
        if fragment_ref.rank not in self._fragments:
            fragment = carried_fragment(self.manifest, fragment_ref.rank, key=fragment_ref.name)
            self._fragments[fragment_ref.rank] = fragment or self._read(
                self.manifest, fragment_ref, file
            )
        return self._fragments[fragment_ref.rank]


class _PerRank(Mapping[str, msgspec.Raw]):
    """The ``PerRank`` values of all ranks, by rank.

    A value is read from the fragment of its rank on access, since most ranks need only their own
    value.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def __getitem__(self, rank: str) -> msgspec.Raw:
        return self._parts.of(int(rank)).per_rank

    def __iter__(self) -> Iterator[str]:
        return map(str, range(self._parts.manifest.world_size))

    def __len__(self) -> int:
        return self._parts.manifest.world_size

"""Copies the files of one step from other nodes to a local tier of this node.

All chunks of a file are checked before the copy of the file becomes visible. A *fragment* describes
the data file of one rank. It is written after its data file, because it states that the data file
is durable.

A ``Peer`` is another node, with the address of its server and its steps. ``peer_store`` returns a
store that reads from it. A ``StepFolder`` is the folder of the step on this node.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from ckpt.catalog.fragments import load_fragment
from ckpt.catalog.transfer import copy_files
from ckpt.catalog.verify import StepFolder
from ckpt.coordination.step_files import delete_files
from ckpt.errors import CkptError, OutOfSpace, StorageError
from ckpt.model.keys import StepRef
from ckpt.model.manifest import Fragment, Manifest, StoredFile
from ckpt.model.readable import size
from ckpt.nodes.peer_store import NodeStore
from ckpt.nodes.wire import Peer, StepFiles
from ckpt.pipeline.chunk_reader import ChunkReader, Sink, runs_of
from ckpt.pipeline.rate_limit import Pace
from ckpt.pipeline.retry import RetryPolicy
from ckpt.pipeline.workers import Workers
from ckpt.plan.restore import ChunkRead
from ckpt.storage.api import HasSpace, StorageBackend
from ckpt.storage.tiers import OpenTier


@dataclass(frozen=True, slots=True)
class CopyExecutor:
    """The threads that make copies, and their rate.

    Attributes:
        workers: The threads that write.
        pace: The limit of the rate. Once ``pace.is_stopped`` is True, the copying ends with an
            error.
    """

    workers: Workers
    pace: Pace


@dataclass(slots=True)
class StepCopies:
    """The copies of one step that this node makes on a tier.

    Attributes:
        tier: The tier that gets the copies.
        manifest: The manifest of the step.
        own_bytes: The size of this node's own files of the step in bytes. The copies leave at least
            this much room for the next save.
        executor: The threads that make the copies, and their rate.
        written_keys: The keys of the objects that were written, in the order of writing.

    Thread safety: one thread.
    """

    tier: OpenTier
    manifest: Manifest
    own_bytes: int
    executor: CopyExecutor
    written_keys: list[str] = field(default_factory=list[str])

    @property
    def ref(self) -> StepRef:
        return StepRef(self.manifest.step, self.manifest.attempt)

    def fetch(self, peer: Peer, ranks: frozenset[int]) -> int:
        """Copy the files and fragments of ``ranks`` from the node ``peer``.

        Returns:
            The size of the copied data files in bytes.

        Raises:
            OutOfSpace: The copies would take the room of the next save.
            CkptError: A file cannot be read from the other node, or cannot be written on this node.
        """
        backend, ref, files = self.tier.backend, self.ref, self.manifest.file_map()
        peer_entries = [entry for entry in self.manifest.fragments if entry.rank in ranks]
        sizes = {files[entry.rank].name: files[entry.rank].size for entry in peer_entries}
        store = peer_store(self.tier, peer, ref, sizes, self.executor.pace)
        fragments = [
            # The name of the fragment, the fragment, and its bytes
            (entry.name, *load_fragment(store, ref, self.manifest, entry, files[entry.rank]))
            for entry in peer_entries
        ]
        stored_files = [
            file for _, fragment, _ in fragments if (file := _stored_file(ref, fragment))
        ]
        self._check_room(sum(file.size for file in stored_files))
        self.written_keys += [file.key for file in stored_files]
        folder = StepFolder(backend, ref, self.executor.workers, RetryPolicy(patience_seconds=0))
        fetch = _fetch_function(store, stored_files, self.executor.pace)
        copy_files(fetch, stored_files, folder, on_bytes=self.executor.pace.spend)
        for name, _, data in fragments:
            self.written_keys.append(ref.key(name))
            backend.put(ref.key(name), [data])
        return sum(file.size for file in stored_files)

    def _check_room(self, nbytes: int) -> None:
        """Raise ``OutOfSpace`` if copies of ``nbytes`` bytes would take the room of the next save.
        Do nothing if the backend of the tier does not know its free space.
        """
        backend = self.tier.backend
        if isinstance(backend, HasSpace) and backend.free_bytes() < nbytes + self.own_bytes:
            raise OutOfSpace(
                self.tier.url, f"copies of {size(nbytes)} would leave no room for the next save"
            )

    def remove(self) -> None:
        """Remove the objects that were written, in the opposite order of their writing."""
        remove(self.tier.backend, self.written_keys)


def remove(backend: StorageBackend, keys: Sequence[str]) -> None:
    """Remove the objects ``keys`` in the opposite order of their writing. Errors of the store are
    ignored.
    """
    for key in reversed(keys):
        with suppress(CkptError):
            delete_files(backend, [key])


def peer_store(
    tier: OpenTier, peer: Peer, ref: StepRef, files: Mapping[str, int], pace: Pace
) -> NodeStore:
    """Return a store that reads files of one step from the node ``peer``.

    Args:
        tier: The local tier of this node. The store reads from the same tier of the other node.
        peer: The other node.
        ref: The step.
        files: The sizes of the data files, by name. The store gives these files, their fragments
            and the manifest.
        pace: Once ``pace.is_stopped`` is True, the store reads nothing more and raises an error.
    """
    tiers = {tier.index: {ref.folder: StepFiles(has_manifest=True, files=dict(files))}}
    encryption = tier.nodes.encryption if tier.nodes else None
    peer_part = msgspec.structs.replace(peer, tiers=tiers)
    return NodeStore(tier.index, tier.url, [peer_part], encryption, lambda: pace.is_stopped)


def _fetch_function(
    store: NodeStore, files: Sequence[StoredFile], pace: Pace
) -> Callable[[Sequence[ChunkRead], Sink], int]:
    """Return the function with which ``copy_files`` reads chunks of ``files`` from ``store``. The
    function always returns 0, the position of the source that gave the chunks.
    """
    reader, files_by_rank = ChunkReader(store, RetryPolicy()), {file.rank: file for file in files}

    def fetch(reads: Sequence[ChunkRead], sink: Sink) -> int:
        for run in runs_of(reads):
            if pace.is_stopped:
                raise StorageError("replicas", "the copying of other nodes' files has ended")
            for _missed_chunk, error in reader.read(run, files_by_rank[run.rank], sink):
                raise error
        return 0

    return fetch


def _stored_file(ref: StepRef, fragment: Fragment) -> StoredFile | None:
    """Return the data file that ``fragment`` describes, or None if its rank has no data file."""
    if fragment.file is None:
        return None
    return StoredFile.of(ref, fragment.file, next(iter(fragment.encoded), None))

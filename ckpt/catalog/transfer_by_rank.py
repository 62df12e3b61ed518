"""A step that several processes bring to one store, each the files of some ranks.

The agents of a job whose nodes have tiers of their own do so when the job has ended. They share
nothing but the store, so they meet in the folder of the step there:

1. Each process notes the ranks that it has seen end, and whose files it has.
2. When all ranks are noted, each process copies the files of its ranks, the data before the
   fragments. A rank that lives may be clearing the step away there. That is why a process must not
   copy earlier: it would make a set of fragments complete that is being removed.
3. A process that knows the manifest from elsewhere, and finds all fragments, puts it.

If a node is lost, its ranks are not noted, or their files do not come. A process that has copies of
these files brings them. A rank that is not noted may live, so the process first puts a marker that
keeps the rank from clearing its files away (``ckpt.coordination.claim_marker``).

The notes and these markers stay with the step, and are removed with it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial

import msgspec

from ckpt.catalog.finalize import read_fragments
from ckpt.catalog.index import own_objects, read_packed
from ckpt.catalog.transfer import Recoding, check_files, commit_copy
from ckpt.catalog.verify import StepFolder, size_faults
from ckpt.codec.registry import NO_CODEC, encoder_of
from ckpt.coordination.claim_marker import claim_rank_to_bring, is_marker_to_bring
from ckpt.errors import CkptError, CommitError, IntegrityError, ManifestCorrupt, ObjectNotFound
from ckpt.model.encoding import pack
from ckpt.model.keys import fragment_name, marked_rank, noted_rank
from ckpt.model.manifest import Encoding, Manifest, StoredFile
from ckpt.model.packed import read_fragment
from ckpt.pipeline.image_writer import ImageWrite, OnBytes
from ckpt.pipeline.stored_image import StoredImage
from ckpt.plan.merge import merge
from ckpt.storage.api import StorageBackend


def note_ends(folder: StepFolder, ranks: Collection[int]) -> None:
    """Note that ``ranks`` have ended, and that this process has their files of the step."""
    put = folder.backend.put
    folder.workers.run_all(
        partial(folder.retry.call, partial(put, folder.ref.end_note(rank), [b""])) for rank in ranks
    )


def noted_ends(folder: StepFolder) -> set[int]:
    """Return the ranks that are noted."""
    names = [info.key.rpartition("/")[2] for info in own_objects(folder.backend, folder.ref)]
    return {rank for name in names if (rank := noted_rank(name)) is not None}


def brought_ranks(folder: StepFolder) -> set[int]:
    """Return the ranks whose files processes of other nodes bring."""
    marked = {
        marked_rank(info.key.rpartition("/")[2])
        for info in own_objects(folder.backend, folder.ref)
        if is_marker_to_bring(info.size)
    }
    return {rank for rank in marked if rank is not None}


def mark_to_bring(folder: StepFolder, ranks: Collection[int]) -> set[int]:
    """Note that this process brings the files of ``ranks``, which are not noted.

    Returns:
        Those that do not clear their files away from now on. The others do so just now, or were
        killed while they did.
    """
    if not folder.backend.capabilities.put_if_absent:
        return set()  # Neither the rank nor this process knows which was first
    ask = partial(claim_rank_to_bring, folder.backend, folder.ref)
    return {rank for rank in ranks if folder.retry.call(partial(ask, rank))}


class RankPart:
    """The files of one rank, in a store that has them.

    Args:
        source: The step there.
        rank: Whose files.
        codec: That of the store to which they are copied.

    Raises:
        StorageError: The store has no fragment of the rank.
        IntegrityError: The fragment is damaged, or belongs to another save.
    """

    def __init__(self, source: StepFolder, rank: int, codec: str) -> None:
        self._source, self._rank = source, rank
        ref, self._name = source.ref, fragment_name(rank)
        key = ref.key(self._name)
        self._data = source.read(key)
        self._part = part = read_fragment(self._data, key=key)
        if (part.step, part.attempt, part.rank) != (ref.step, ref.attempt, rank):
            raise ManifestCorrupt(key, "it belongs to another save, or to another rank")
        self._recoding = Recoding(encoder_of(codec), {rank: part})

    @property
    def nbytes(self) -> int:
        """The size of the data file before any codec."""
        return self._part.file.size if self._part.file else 0

    def is_at(self, folder: StepFolder) -> bool:
        """Return whether the files are in another store."""
        key = folder.ref.key(self._name)
        try:
            data = folder.read(key)
            encoding = next(iter(read_fragment(data, key=key).encoded), None)
        except (ObjectNotFound, IntegrityError):
            return False
        if data != self._fragment(encoding):
            return False
        return self._part.file is None or not size_faults(
            folder, [self._recoding.stored(self._stored(), encoding)]
        )

    def write_data(self, folder: StepFolder, on_bytes: OnBytes) -> Encoding | None:
        """Copy the data file, and return how it is encoded in the other store.

        Raises:
            ChecksumMismatch: The file is damaged at the source.
            StorageError: Nothing is visible then.
        """
        if self._part.file is None:
            return None
        stored = self._stored()
        image = StoredImage.of(self._source.backend, stored, self._source.retry)
        write = ImageWrite(
            source=image,
            chunks=image.lengths,
            key=folder.ref.key(self._recoding.name(self._rank)),
            workers=folder.workers,
            retry=folder.retry,
            on_bytes=on_bytes,
            known=stored.file.chunks,
        )
        return self._recoding.write(write, stored, folder.backend).encoding

    def put_fragment(self, folder: StepFolder, encoding: Encoding | None) -> None:
        """Put the fragment beside the data file, which is durable by now."""
        key, data = folder.ref.key(self._name), self._fragment(encoding)
        folder.retry.call(partial(folder.backend.put, key, [data]))

    def _stored(self) -> StoredFile:
        assert self._part.file is not None
        encoding = next(iter(self._part.encoded), None)
        return StoredFile.of(self._source.ref, self._part.file, encoding)

    def _fragment(self, encoding: Encoding | None) -> bytes:
        """Return the bytes of the fragment at a store: the same ones if nothing is encoded."""
        if not self._part.encoded and self._recoding.encoder is None:
            return self._data
        return pack(self._recoding.fragment(self._rank, encoding))


def copy_rank(
    sources: Sequence[StorageBackend],
    folder: StepFolder,
    rank: int,
    codec: str,
    on_bytes: OnBytes,
    *,
    is_damaged: bool = False,
) -> bool:
    """Copy the files of a rank from the first of ``sources`` that has them intact.

    Args:
        sources: The stores that may have the files, nearest first.
        folder: The step in the other store.
        rank: Whose files.
        codec: That of the other store.
        on_bytes: Called with the number of bytes just written.
        is_damaged: Whether files that are there already are to be replaced.

    Returns:
        Whether something had to be copied.

    Raises:
        IntegrityError: No source has them intact. It is the error of the first.
        StorageError: The other store has failed.
    """
    first: CkptError | None = None
    for source in sources:
        try:
            part = RankPart(replace(folder, backend=source), rank, codec)
            if not is_damaged and part.is_at(folder):
                return False
            encoding = part.write_data(folder, on_bytes)
        except (IntegrityError, ObjectNotFound) as error:
            first = first or error
            continue
        part.put_fragment(folder, encoding)
        return True
    raise first or ObjectNotFound(folder.ref.key(fragment_name(rank)))


def copy_part(
    source: StorageBackend,
    folder: StepFolder,
    ranks: Collection[int],
    on_bytes: OnBytes,
    confirm: Callable[[], None],
) -> None:
    """Copy the files of some ranks from ``source`` to another store of the same node, and commit
    the copy there. Both stores have no codec.

    Args:
        folder: The step in the other store.
        ranks: Whose files.
        confirm: Called before each file, and right before the manifest is put. It raises if the
            step must not become a checkpoint there any more.

    Raises:
        IntegrityError: The source does not have the files intact.
        StorageError: The other store has failed, or the step is being cleared away there.
    """
    _, packed = read_packed(source, folder.ref)
    for rank in sorted(ranks):
        confirm()
        copy_rank([source], folder, rank, NO_CODEC, on_bytes)
    commit_copy(folder, packed, look=confirm)


def commit_parts(folder: StepFolder, known: Manifest, confirm: Callable[[], object]) -> None:
    """Make a step a checkpoint whose parts are all there.

    The manifest is the one that the leader of the job would have put: the same merge of the same
    fragments.

    Args:
        folder: The step. All processes of its job have ended.
        known: Its manifest in another store.
        confirm: Called right before the manifest is put. It raises if the step must not become a
            checkpoint any more.

    Raises:
        CommitError: A part is missing, or the parts are not those of ``known``.
        StorageError: The step is being cleared away there, or was.
    """
    manifest = merge(read_fragments(folder))
    if _apart_from_files(manifest) != _apart_from_files(known):
        raise CommitError(
            f"step {folder.ref.step}: the fragments on {folder.backend.url} are not those of the "
            "checkpoint that this node has: restore it, or another step"
        )
    commit_copy(folder, pack(manifest), look=partial(check_files, folder, manifest, confirm))


def _apart_from_files(manifest: Manifest) -> Manifest:
    """Return what a manifest says on each tier, however files are encoded there."""
    files = tuple(msgspec.structs.replace(file, name="", chunks=()) for file in manifest.files)
    return msgspec.structs.replace(manifest, files=files, fragments=(), encoded=(), carried=())

"""Copy a step to one store from several processes. Each process copies the files of some ranks.

The agents of a job whose nodes have tiers of their own do this after the job has ended. They share
nothing but the destination store, so they coordinate through the folder of the step there:

1. Each process puts a note for each rank that it has seen end and whose files it has.
2. When all ranks have notes, each process copies the files of its ranks, the data files before the
   fragments. A process must not copy earlier, since a rank that is still alive may be removing the
   step there. The copied fragments would complete a set of fragments that is being removed.
3. A process that has the manifest from another store, and finds all fragments, commits the step.

If a node is lost, there are no notes for its ranks, or their files are never copied. A process that
has copies of these files on another node then copies them. A rank without a note may be alive, so
the process first puts a marker that keeps the rank from removing its files
(``ckpt.root.claim_marker``). To *bring* files is to copy them in this way.

A *fragment* is the record of what one rank has written. An *increment* is a data file that leaves
out the chunks that the file of an older step, its *base*, also has. A *packed* manifest has the
form in which it is stored.

The notes and these markers stay in the folder of the step, and are removed with the step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import TypeVar

import msgspec

from ckpt.catalog.finalize import read_fragments
from ckpt.catalog.step_listing import is_committed, own_objects, read_packed
from ckpt.catalog.transfer import Recoding, check_files, commit_copy, write_file
from ckpt.catalog.verify import StepFolder, size_faults
from ckpt.codec.registry import NO_CODEC, encoder_of
from ckpt.errors import (
    CkptError,
    CommitError,
    IntegrityError,
    ManifestCorrupt,
    ObjectNotFound,
)
from ckpt.model.checksum import checksum
from ckpt.model.fragment_columns import pack_fragment, read_fragment
from ckpt.model.keys import fragment_name, marked_rank, noted_rank
from ckpt.model.manifest import Encoding, FragmentRef, Manifest, StoredFile
from ckpt.model.record_encoding import pack
from ckpt.pipeline.encoded_writer import widths_of
from ckpt.pipeline.image_writer import OnBytes
from ckpt.pipeline.stored_image import StoredImage
from ckpt.pipeline.workers import Workers
from ckpt.plan.merge import merge
from ckpt.root.claim_marker import (
    claim_rank_to_bring,
    discard_part,
    is_marker_to_bring,
)
from ckpt.root.leases import pins_on
from ckpt.storage.api import StorageBackend

T = TypeVar("T")


def note_ends(folder: StepFolder, ranks: Collection[int]) -> None:
    """Put notes that ``ranks`` have ended, and that this process has their files of the step."""
    put = folder.backend.put
    folder.workers.run_all(
        partial(folder.retry.call, partial(put, folder.ref.end_note(rank), [b""])) for rank in ranks
    )


def noted_ends(folder: StepFolder) -> set[int]:
    """Return the ranks for which a note in ``folder`` says that the rank has ended."""
    names = [info.name for info in own_objects(folder.backend, folder.ref)]
    return {rank for name in names if (rank := noted_rank(name)) is not None}


def ranks_marked_to_bring(folder: StepFolder) -> set[int]:
    """Return the ranks with a marker which says that this or another process copies their files
    (see ``mark_to_bring``).
    """
    # The markers of one rank have the same name, whatever they say: their sizes differ.
    marked_ranks = {
        marked_rank(info.name)
        for info in own_objects(folder.backend, folder.ref)
        if is_marker_to_bring(info.size)
    }
    return {rank for rank in marked_ranks if rank is not None}


def mark_to_bring(folder: StepFolder, ranks: Collection[int]) -> set[int]:
    """For each of ``ranks``, put a marker which says that this process copies the files of the
    rank. The ranks have no notes.

    Returns:
        The ranks that do not remove their files from now on. Each other rank is removing its files,
        or was killed while it removed them. The result is empty if the store cannot put an object
        *if absent*.
    """
    if not folder.backend.capabilities.put_if_absent:
        return set()  # The store cannot decide whether the rank or this process was first
    claim = partial(claim_rank_to_bring, folder.backend, folder.ref)
    return {rank for rank in ranks if folder.retry.call(partial(claim, rank))}


class RankPart:
    """The files of one rank on a source store, to be copied to other stores.

    ``_part`` is the fragment of the rank at the source, and ``_record`` has its bytes.
    ``_recoding`` describes the data file at a store with the codec, and ``_image`` gives its bytes
    before any codec.

    Args:
        source: The folder of the step on the source.
        rank: The rank.
        codec: The codec of the stores to which the files are copied.

    Raises:
        ObjectNotFound: The source has no fragment of the rank.
        StorageError: The fragment cannot be read.
        IntegrityError: The fragment is damaged, or belongs to another save.
    """

    def __init__(self, source: StepFolder, rank: int, codec: str) -> None:
        self._source, self._rank = source, rank
        ref, self._name = source.ref, fragment_name(rank)
        key = ref.key(self._name)
        self._part, self._record = source.fragment(rank)
        part = self._part
        if (part.step, part.attempt, part.rank) != (ref.step, ref.attempt, rank):
            raise ManifestCorrupt(key, "it belongs to another save, or to another rank")
        self._recoding = Recoding(encoder_of(codec), {rank: part})

    @property
    def nbytes(self) -> int:
        """Return the size of the data file before any codec, in bytes; 0 if the rank has none."""
        return self._part.file.size if self._part.file else 0

    def is_at(self, folder: StepFolder) -> bool:
        """Return True if the store of ``folder`` has the same fragment, and a data file of the
        right size.

        If the data file there is an increment, it and its base have the right sizes. It stays,
        since another process may have read its fragment, and may put a manifest that names it.
        """
        try:
            copy, data = folder.fragment(self._rank)
            encoding = next(iter(copy.encoded), None)
        except (ObjectNotFound, IntegrityError):
            return False
        if copy.increments:
            data = pack(pack_fragment(msgspec.structs.replace(copy, increments=())))
        if data != self.fragment(encoding):
            return False
        increment = next(iter(copy.increments), None)
        return copy.file is None or not size_faults(
            folder, [StoredFile.of(folder.ref, copy.file, encoding, increment)]
        )

    def write_data(self, folder: StepFolder, on_bytes: OnBytes) -> Encoding | None:
        """Copy the data file to the store of ``folder``.

        Returns:
            The encoding of the file on that store; None if the file is not encoded, or if the rank
            has no data file.

        Raises:
            IntegrityError: The file is missing or damaged at the source.
            StorageError: A store has failed. No part of the file is visible.
        """
        if self._part.file is None:
            return None
        return write_file(
            self._image(), self._stored_file(), folder, on_bytes=on_bytes, recoding=self._recoding
        ).encoding

    def encoding(self, workers: Workers, on_bytes: OnBytes) -> Encoding | None:
        """Return what ``write_data`` would return, and write nothing. If the other stores have a
        codec, the data file is read and encoded. Raises the errors of ``write_data`` that concern
        the source.
        """
        encoder = self._recoding.encoder
        if self._part.file is None or encoder is None:
            return None
        image, encode = self._image(), encoder.encode
        starts = list(accumulate(image.lengths, initial=0))

        def encoded_length(start: int, end: int, element_width: int) -> int:
            nbytes = sum(piece.nbytes for piece in encode(image.view(start, end), element_width))
            on_bytes(end - start)
            return nbytes

        element_widths = widths_of(image.lengths, self._part.tensors)
        encoded_lengths = workers.run_all(
            partial(encoded_length, start, end, element_width)
            for start, end, element_width in zip(
                starts[:-1], starts[1:], element_widths, strict=True
            )
        )
        return (
            Encoding(self._rank, encoder.codec, tuple(encoded_lengths)) if encoded_lengths else None
        )

    @property
    def data_name(self) -> str:
        """Return the name of the data file on the other stores."""
        return self._recoding.name(self._rank)

    def put_fragment(self, folder: StepFolder, encoding: Encoding | None) -> None:
        """Put the fragment on the store of ``folder``. Call this after ``write_data``.

        ``encoding`` is the result of ``write_data``.
        """
        key, data = folder.ref.key(self._name), self.fragment(encoding)
        folder.retry.call(partial(folder.backend.put, key, [data]))

    def _stored_file(self) -> StoredFile:
        assert self._part.file is not None
        encoding = next(iter(self._part.encoded), None)
        increment = next(iter(self._part.increments), None)
        return StoredFile.of(self._source.ref, self._part.file, encoding, increment)

    def _image(self) -> StoredImage:
        """Return the data file at the source. Raises ``IntegrityError`` if its size is wrong."""
        stored_file = self._stored_file()
        for fault in size_faults(self._source, [stored_file]):
            raise fault.error()
        return StoredImage.of(self._source.backend, stored_file, self._source.retry)

    def fragment(self, encoding: Encoding | None) -> bytes:
        """Return the bytes of the fragment for another store, where the data file has ``encoding``.

        The result has the bytes of the source if neither store encodes the data file, and the
        source has the whole file.
        """
        part = self._part
        if not (part.encoded or part.increments) and self._recoding.encoder is None:
            return self._record
        return pack(self._recoding.fragment(self._rank, encoding))


def copy_rank(
    sources: Sequence[StorageBackend],
    folder: StepFolder,
    rank: int,
    codec: str,
    on_bytes: OnBytes,
) -> bool:
    """Copy the files of one rank from the first of ``sources`` that has them intact.

    Args:
        sources: The stores that may have the files, nearest first.
        folder: The folder of the step at the destination.
        rank: The rank.
        codec: The codec of the destination.
        on_bytes: Called with the number of bytes just written.

    Returns:
        True if the files were copied, and False if the destination already had them.

    Raises:
        IntegrityError: The files are damaged on some source, and intact on none. This is the error
            of the first source with damaged files.
        ObjectNotFound: No source has the files.
        StorageError: The destination has failed, or a source cannot be read, for example because it
            does not answer. No further source is tried.
    """

    def copy(part: RankPart) -> bool:
        if part.is_at(folder):
            return False
        part.put_fragment(folder, part.write_data(folder, on_bytes))
        return True

    return _call_with_first_intact(sources, folder, rank, codec, copy)


def mend_rank(
    sources: Sequence[StorageBackend],
    folder: StepFolder,
    fragment_ref: FragmentRef,
    codec: str,
    on_bytes: OnBytes,
) -> None:
    """Replace the files of one rank of a committed step by files of the first of ``sources`` that
    has them intact. The manifest and an intact fragment stay as they are.

    If the files of a source do not become those that the manifest and the fragment describe,
    nothing is written. This may happen if the codec or its version has changed. If another process
    removes the step meanwhile, the new files are removed again.

    Args:
        sources: Other stores that have the step, nearest first.
        folder: The folder of the step where a file of the rank is damaged.
        fragment_ref: The reference that the manifest there has for the fragment of the rank.
        codec: The codec of the store of ``folder``.
        on_bytes: Called with the number of bytes just encoded for a comparison, or just written.

    Raises:
        IntegrityError, ObjectNotFound: No source has the files intact, or the files do not become
            those that the manifest describes.
        StorageError: A store has failed.
    """
    ref, backend = folder.ref, folder.backend
    key = ref.key(fragment_ref.name)

    def mend(part: RankPart) -> None:
        encoding = part.encoding(folder.workers, on_bytes)
        intact_data = folder.intact_fragment(fragment_ref)
        if intact_data is not None:
            intact_fragment = read_fragment(intact_data, key=key)
            is_alike = (
                encoding == next(iter(intact_fragment.encoded), None)
                and not intact_fragment.increments
            )
        else:
            is_alike = checksum(part.fragment(encoding)) == fragment_ref.checksum
        if not is_alike:
            raise IntegrityError(
                f"{key!r} on {backend.url}: the rank's files cannot be written again as the "
                "manifest describes them, since the codec or its version has changed, or the file "
                "is an increment"
            )
        part.write_data(folder, on_bytes)
        if intact_data is None:
            part.put_fragment(folder, encoding)
        if not is_committed(backend, ref):  # The step was removed meanwhile
            discard_part(backend, ref, key, ref.key(part.data_name))

    _call_with_first_intact(sources, folder, fragment_ref.rank, codec, mend)


def _call_with_first_intact(
    sources: Sequence[StorageBackend],
    folder: StepFolder,
    rank: int,
    codec: str,
    work: Callable[[RankPart], T],
) -> T:
    """Call ``work`` with the files of a rank on each of ``sources``, until a source has them
    intact. Return the result of ``work``. Raises the errors of ``copy_rank``.
    """
    first_error: CkptError | None = None
    for source in sources:
        try:
            return work(RankPart(replace(folder, backend=source), rank, codec))
        except (IntegrityError, ObjectNotFound) as error:
            if first_error is None or isinstance(first_error, ObjectNotFound):
                first_error = error
    raise first_error or ObjectNotFound(folder.ref.key(fragment_name(rank)))


def copy_part(
    source: StorageBackend,
    folder: StepFolder,
    ranks: Collection[int],
    on_bytes: OnBytes,
    confirm: Callable[[], None],
) -> None:
    """Copy the files of some ranks from ``source`` to another store of the same node, and commit
    the copy. Neither store may have a codec.

    Args:
        source: The store that has the files and the manifest.
        folder: The folder of the step at the destination.
        ranks: The ranks.
        on_bytes: Called with the number of bytes just written.
        confirm: Called before the files of each rank are copied, and right before the manifest is
            put. It raises if the step must not become a checkpoint at the destination any more.

    Raises:
        IntegrityError: The source does not have the files intact.
        StorageError: A store has failed, or the step is being removed at the destination, or a file
            was removed there.
    """
    manifest, manifest_data = read_packed(source, folder.ref)
    part_manifest = msgspec.structs.replace(
        manifest,
        files=tuple(file for file in manifest.files if file.rank in ranks),
        fragments=tuple(
            fragment_ref for fragment_ref in manifest.fragments if fragment_ref.rank in ranks
        ),
    )
    for rank in sorted(ranks):
        confirm()
        copy_rank([source], folder, rank, NO_CODEC, on_bytes)
    commit_copy(folder, manifest_data, check=partial(check_files, folder, part_manifest, confirm))


def commit_parts(
    folder: StepFolder, known_manifest: Manifest, confirm: Callable[[], object]
) -> None:
    """Commit a step after the files of all ranks were copied.

    The manifest is the one that the leader of the job would have put: it is the same merge of the
    same fragments.

    Args:
        folder: The folder of the step. All processes of its job have ended.
        known_manifest: The manifest of the step on another store.
        confirm: Called before the manifest is put, once or several times. It raises if the step
            must not become a checkpoint any more.

    Raises:
        CommitError: A fragment is missing, or the fragments are not those of ``known_manifest``.
        ManifestCorrupt: A fragment is damaged.
        ObjectExists: The step has another manifest already.
        StorageError: A file is missing, or the step is being removed.
    """
    manifest = merge(read_fragments(folder))
    if _without_file_fields(manifest) != _without_file_fields(known_manifest):
        raise CommitError(
            f"step {folder.ref.step}: the fragments on {folder.backend.url} are not those of the "
            "checkpoint that this node has: restore it, or another step"
        )
    with pins_on(folder.backend, manifest.bases):
        commit_copy(folder, pack(manifest), check=partial(check_files, folder, manifest, confirm))


def _without_file_fields(manifest: Manifest) -> Manifest:
    """Return a manifest without the fields that depend on how a tier stores the files."""
    files = tuple(msgspec.structs.replace(file, name="", chunks=()) for file in manifest.files)
    return msgspec.structs.replace(
        manifest, files=files, fragments=(), encoded=(), increments=(), carried=()
    )

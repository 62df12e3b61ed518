"""Copy a checkpoint, or files of it, to another store, and verify every byte that is copied.

The backfill, read-through, ``ckpt copy`` and the agent use this module. While a job runs, its saves
go to farther tiers through `ckpt.save.tier_writer`.

1. Files that the destination already has intact are kept, so an interrupted copy continues where it
   stopped.
2. Data files are written as a save writes them, from images whose chunks are read on demand. Each
   chunk comes from the nearest source that has it intact. A file becomes visible only when all of
   it is verified. A destination with another codec gets the same chunks in another encoding.
3. The fragments follow, and the manifest comes last, since a step is a checkpoint if and only if
   its manifest exists. Fragments and manifest are copied byte for byte, unless the destination has
   another codec. In that case they are written with the new encoding of the files. Before the
   manifest is put, the claim marker (``root.claim_marker``) is put and all files are
   checked once more, as for any save that is finished from outside of its job.

Each worker needs memory for one part of a file, and for the chunks at the ends of the part. A store
whose uploads keep all parts until ``finish``, which the contract of a backend allows, also needs
memory for the files that are being written.

A *fragment* is the record of what one rank has written. An *increment* is a data file that leaves
out the chunks that the file of an older step, its *base*, also has. The *heirs* of a step are the
steps that refer to its files in this way. A manifest or fragment is *packed* if it has the form in
which it is stored. A *tombstone* is an object that stands in the place of the manifest of a removed
step.

A `StoredImage` gives the image of a file on a source. A `TailImage` gives what an increment holds:
a header of its own, and then the image without its first chunks.

``require_finish`` puts the claim marker, or raises an error if the step is being removed, and
``release_finish`` removes the marker. A ``StepFolder`` is the folder of the step at the
destination, with the threads that copy.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from msgspec.structs import replace

from ckpt.catalog.base_protection import require_no_heirs
from ckpt.catalog.self_contained import SelfContainedStep
from ckpt.catalog.step_listing import own_objects, read_manifest, read_packed
from ckpt.catalog.tiered_reader import OnRepair, SourceManifest, TieredReader
from ckpt.catalog.verify import Meter, OnProgress, StepFolder, fault_of, size_faults, verify_files
from ckpt.codec.registry import NO_CODEC, Encoder, encoder_of
from ckpt.coordination.step_files import delete_files, put_manifest
from ckpt.coordination.tombstone import delete_tombstone, has_manifest
from ckpt.errors import (
    CommitError,
    FormatUnsupported,
    IntegrityError,
    ObjectExists,
    ObjectNotFound,
    StorageError,
)
from ckpt.model.checksum import checksum
from ckpt.model.fragment_columns import pack_fragment, read_fragment
from ckpt.model.keys import StepRef, data_name, fragment_name, is_late_metrics
from ckpt.model.manifest import (
    Encoding,
    File,
    Fragment,
    FragmentRef,
    Manifest,
    Packed,
    StoredFile,
    Tensor,
)
from ckpt.model.record_encoding import pack, unpack
from ckpt.pipeline.chunk_reader import Sink
from ckpt.pipeline.encoded_writer import widths_of, write_encoded
from ckpt.pipeline.image_writer import ImageWrite, OnBytes, Source, write_image
from ckpt.pipeline.stored_image import StoredImage
from ckpt.pipeline.tail_image import TailImage
from ckpt.plan.merge import merge
from ckpt.plan.reads_on_other_tier import same_chunks
from ckpt.plan.restore import ChunkRead, chunks_of
from ckpt.plan.save import tail_header
from ckpt.root.claim_marker import release_finish, require_finish
from ckpt.storage.api import StorageBackend

Fetch = Callable[[Sequence[ChunkRead], Sink], int]
"""A function that reads chunks of one file into a sink, and returns the position of the farthest
source that was needed.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class FetchReport:
    """The result of a copy.

    Attributes:
        nbytes: The size of the step's data files at the destination.
        copied_bytes: How many of these bytes the copy has written.
    """

    ref: StepRef
    nbytes: int
    copied_bytes: int
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class FileCopy:
    """A data file that was copied.

    Attributes:
        stored: The file at the destination.
        position: The position of the farthest source that was needed for it.
    """

    stored: StoredFile
    position: int


@dataclasses.dataclass(frozen=True, slots=True)
class Recoding:
    """Writes the files of a step for a destination with another codec, or as a whole where the
    source has increments.

    Attributes:
        encoder: The encoder of the destination; None if the destination has no codec.
        parts: The fragments at the source, by rank.
    """

    encoder: Encoder | None
    parts: Mapping[int, Fragment]

    def name(self, rank: int) -> str:
        """Return the name of a rank's data file at the destination."""
        return data_name(rank, is_encoded=self.encoder is not None)

    def stored(self, source: StoredFile, encoding: Encoding | None) -> StoredFile:
        """Return the file at the destination that has the content of the file ``source``.

        ``encoding`` is the encoding of the file at the destination; None if it is not encoded.
        """
        return StoredFile.of(
            source.ref, replace(source.file, name=self.name(source.rank)), encoding
        )

    def write(
        self, write: ImageWrite, source: StoredFile, destination: StorageBackend
    ) -> StoredFile:
        """Write a file of the source to the destination, and return the file at the destination."""
        if (encoder := self.encoder) is None:
            write_image(write, destination)
            return self.stored(source, None)
        element_widths = widths_of(write.chunks, self.parts[source.rank].tensors)
        _, lengths = write_encoded(write, destination, encoder, element_widths)
        encoding = Encoding(source.rank, encoder.codec, lengths) if lengths else None
        return self.stored(source, encoding)

    def fragment(self, rank: int, encoding: Encoding | None) -> Packed:
        """Return the fragment of a rank for the destination, with the new encoding of its file."""
        part = self.parts[rank]
        file = replace(part.file, name=self.name(rank)) if part.file else None
        encoded = (encoding,) if encoding else ()
        return pack_fragment(replace(part, file=file, encoded=encoded, increments=()))


def fetch_nearest(
    sources: Sequence[StorageBackend],
    folder: StepFolder,
    *,
    on_progress: OnProgress | None = None,
    on_repair: OnRepair = lambda _: None,
) -> FetchReport:
    """Copy a step, each chunk from the nearest of ``sources`` that has it intact.

    The copy has the encoding of one of the sources. Chunks that are not encoded can come from any
    source, but encoded chunks only from sources with the same encoding. So if the step cannot be
    copied in the encoding of the nearest source, the encodings of the other sources are tried. If
    such a try succeeds, files that the failed tries have left are removed.

    Raises:
        IntegrityError: As for ``fetch_step``. This is the error of the first try.
        StorageError: As for ``fetch_step``.
    """
    ref = folder.ref
    first_error: IntegrityError | None = None
    tried_manifests: set[bytes] = set()
    for position, source in enumerate(sources):
        if position and (
            not (manifest_data := _manifest_data(source, ref)) or manifest_data in tried_manifests
        ):
            continue
        other_sources = [*sources[:position], *sources[position + 1 :]]
        try:
            report = fetch_step(
                [source, *other_sources], folder, on_progress=on_progress, on_repair=on_repair
            )
        except FormatUnsupported:
            if first_error is None:
                raise
            continue
        except IntegrityError as error:
            first_error = first_error or error
            tried_manifests.add(_manifest_data(source, ref))
            continue
        if first_error is not None:
            # Earlier tries may have left files that this manifest does not name.
            manifest, _ = read_packed(folder.backend, ref)
            _remove_files_without_entry(folder, manifest)
        return report
    assert first_error is not None
    raise first_error


def _manifest_data(source: StorageBackend, ref: StepRef) -> bytes:
    """Return the bytes of the manifest; empty bytes if it is missing or cannot be read."""
    try:
        _, manifest_data = read_packed(source, ref)
    except (IntegrityError, StorageError):
        return b""
    return manifest_data


def _copy_meter(
    manifest: Manifest,
    missing: Sequence[StoredFile],
    on_progress: OnProgress | None,
    *,
    is_recoded: bool,
) -> Meter:
    """Return a meter for the bytes of all data files, which counts all but ``missing`` as done.

    If ``is_recoded`` is True, the meter counts bytes before any codec, and not the bytes on the
    store.
    """
    meter = Meter(manifest.nbytes if is_recoded else manifest.stored_bytes, on_progress)
    missing_bytes = sum(source.file.size if is_recoded else source.size for source in missing)
    meter.add(meter.total - missing_bytes)
    return meter


def fetch_step(
    sources: Sequence[StorageBackend],
    folder: StepFolder,
    *,
    on_progress: OnProgress | None = None,
    on_repair: OnRepair = lambda _: None,
    codec: str | None = None,
    confirm: Callable[[], object] = lambda: None,
) -> FetchReport:
    """Copy a committed step from the first of ``sources`` to the store of ``folder``. The copy of
    an adopted step needs no file of another program.

    On an error, files that are finished stay for the next try, and the step does not become a
    checkpoint at the destination (unless it was one before). A damaged manifest at the destination
    is removed before any file is written.

    If the destination already has an intact copy of the step in another encoding, nothing is
    changed. If such a copy is damaged, its manifest is removed after the new data files were
    written, and its other files after the commit. An error in between leaves a step without a
    manifest.

    Args:
        sources: The source, followed by stores that are asked for chunks that the source does not
            have intact, nearest first.
        folder: The folder of the step at the destination.
        on_progress: Called as bytes are written.
        on_repair: Called when another store than the source is asked.
        codec: The codec of the destination; None to keep the encoding of the source.
        confirm: Called right before the manifest is put. It raises if the step must not become a
            checkpoint at the destination any more.

    Raises:
        ChecksumMismatch, ManifestCorrupt, FormatUnsupported: The step is damaged on all sources, or
            its format is not supported. Any ``IntegrityError`` is about the sources.
        IntegrityError: A file is missing on all sources, or cannot be read.
        ObjectExists: Other steps at the destination refer to a copy of the step there, which is
            damaged and has another encoding. Or the destination has another manifest of the same
            attempt, which is not damaged. It differs in more than the encoding of the files, or its
            fragments are damaged or missing, or its format is not supported.
        StorageError: The destination has failed, the step is being removed there, or the sources
            deny access or do not answer.
    """
    start = time.perf_counter()
    origin = TieredReader(sources, folder.ref, retry=folder.retry, on_repair=on_repair)
    with _store_errors_as_damage():
        step_reader, source = _reader_for_copy(origin)
    manifest, manifest_data = source.manifest, source.data
    old_manifest = _other_manifest(folder, manifest, manifest_data)
    # A destination that has this manifest keeps it, so its files are not encoded again.
    has_same_manifest = old_manifest is None and _make_way_for_manifest(folder, manifest_data)
    if old_manifest is not None:
        old_faults, _ = verify_files(folder, old_manifest.stored_files().values())
        if not old_faults:
            return FetchReport(
                folder.ref, old_manifest.stored_bytes, 0, time.perf_counter() - start
            )
    if codec is None and manifest.increments:
        codec = next(iter(manifest.codecs), NO_CODEC)
    if old_manifest is not None:
        require_no_heirs(folder)
    recoding = (
        None if codec is None or has_same_manifest else _recoding(step_reader, manifest, codec)
    )
    intact_files = _intact_files(manifest, folder, recoding)
    missing = [file for rank, file in manifest.stored_files().items() if rank not in intact_files]
    if len(sources) == 1 and step_reader is origin:  # No other source could give the file
        source_folder = dataclasses.replace(folder, backend=sources[0])
        for fault in size_faults(source_folder, missing):
            raise fault.error()
    meter = _copy_meter(manifest, missing, on_progress, is_recoded=recoding is not None)
    copies = copy_files(step_reader.fetch, missing, folder, on_bytes=meter.add, recoding=recoding)
    if old_manifest is not None:
        # The old manifest is removed only after all data files were written.
        folder.retry.call(partial(delete_files, folder.backend, [folder.ref.manifest]))
    if recoding is None:
        copy_fragments(step_reader, manifest, manifest.fragments, folder)
    else:
        files = {copy.stored.rank: copy.stored for copy in copies} | intact_files
        manifest = _put_fragments(folder, recoding, files)
        manifest_data = pack(manifest)
    commit_copy(folder, manifest_data, check=partial(check_files, folder, manifest, confirm))
    if old_manifest is not None:
        _remove_files_without_entry(folder, manifest)
    copied_bytes = sum(copy.stored.size for copy in copies)
    return FetchReport(folder.ref, manifest.stored_bytes, copied_bytes, time.perf_counter() - start)


def _reader_for_copy(
    origin: TieredReader,
) -> tuple[TieredReader | SelfContainedStep, SourceManifest]:
    """Return what reads the step of ``origin`` for a copy, and the manifest of the copy."""
    source = origin.try_manifests(lambda source: origin.with_fragments(source, None))
    if not source.manifest.locations:
        return origin, source
    step_reader = SelfContainedStep(origin, source)
    return step_reader, step_reader.source


def copy_files(
    fetch: Fetch,
    files: Sequence[StoredFile],
    folder: StepFolder,
    *,
    on_bytes: OnBytes = lambda _: None,
    recoding: Recoding | None = None,
    tensors: Sequence[Tensor] = (),
) -> list[FileCopy]:
    """Copy data files, each of them completely or not at all.

    Without ``recoding``, the files keep their encoding, and increments stay increments.
    ``tensors`` are those of the manifest, which the header of an increment is made from. Returns
    the files at the destination. Raises the errors of ``fetch_step``.
    """
    workers = folder.workers
    failures: list[BaseException] = []

    def copy(source: StoredFile) -> FileCopy:
        positions = [0]  # Of the sources that the reads needed

        def read(reads: Sequence[ChunkRead], sink: Sink) -> None:
            if failures:
                raise StorageError(source.file.name, "another file could not be copied")
            with _store_errors_as_damage():
                positions.append(fetch(reads, sink))

        image = StoredImage(chunks_of(source, as_stored=recoding is None), read)
        try:
            content = _stored_content(image, source, tensors) if recoding is None else image
            stored_file = write_file(content, source, folder, on_bytes=on_bytes, recoding=recoding)
        except BaseException as error:
            failures.append(error)
            raise
        return FileCopy(stored_file, max(positions))

    if not files:
        return []
    # Each copy waits for work on ``workers``, so the copies run on threads of their own.
    with workers.peer_group("copy", min(len(files), workers.count)) as group:
        try:
            return list(group.stream(partial(copy, file) for file in files))
        except BaseException as error:  # noqa: BLE001 - the first is raised
            failures.append(error)  # The copies that are under way stop at their next read
            raise failures[0] from None


def _stored_content(image: StoredImage, source: StoredFile, tensors: Sequence[Tensor]) -> Source:
    """Return the bytes of ``image`` that the file ``source`` holds: all, unless it is an
    increment.
    """
    if (increment := source.increment) is None:
        return image
    own_tensors = [
        replace(tensor, shards=tuple(shard for shard in tensor.shards if shard.rank == source.rank))
        for tensor in tensors
    ]
    # The first ``count`` chunks are those of the base.
    start = sum(image.lengths[: increment.count])
    lengths = [chunk.nbytes for chunk in source.chunks]
    header = b""
    if source.encoding is None:
        header = tail_header(
            own_tensors,
            lengths,
            increment.count,
            source.rank,
            has_image_header=increment.has_image_header,
        )
    if increment.has_image_header:  # The first chunk is in this file too
        header += bytes(image.view(0, image.lengths[0]))
    return TailImage(image, start, header)


def write_file(
    image: Source,
    source: StoredFile,
    folder: StepFolder,
    *,
    on_bytes: OnBytes,
    recoding: Recoding | None = None,
) -> StoredFile:
    """Write the data file ``source``, whose content is ``image``, to the store of ``folder``, and
    return the file there. It is not visible before all of it is written and verified.

    Without ``recoding``, the file keeps its encoding.
    """
    write = ImageWrite(
        source=image,
        chunks=[chunk.nbytes for chunk in source.chunks],
        key=source.key if recoding is None else folder.ref.key(recoding.name(source.rank)),
        workers=folder.workers,
        retry=folder.retry,
        on_bytes=on_bytes,
        hashed_chunks=source.file.chunks,
    )
    if recoding is not None:
        return recoding.write(write, source, folder.backend)
    write_image(write, folder.backend)
    return source


def copy_fragments(
    origin: TieredReader | SelfContainedStep,
    manifest: Manifest,
    fragments: Sequence[FragmentRef],
    folder: StepFolder,
) -> None:
    """Copy the entries of ``fragments`` that ``folder`` lacks or has damaged.

    Copy their data files first, since a process that finds all fragments may commit the step.
    """
    files = manifest.file_map()
    folder.workers.run_all(
        partial(
            _copy_fragment, origin, folder, manifest, fragment_ref, files.get(fragment_ref.rank)
        )
        for fragment_ref in fragments
    )


def commit_copy(folder: StepFolder, manifest_data: bytes, *, check: Callable[[], None]) -> None:
    """Put the manifest of a step after all of its files were copied.

    If the folder already has this manifest, only ``check`` is called. A damaged manifest is removed
    first. If an error occurs after the claim marker was put, the marker stays.

    Args:
        folder: The folder of the step at the destination.
        manifest_data: The bytes of the manifest.
        check: Called before the manifest is put, once before and once after the claim marker is
            put. It raises if the step must not become a checkpoint, for example because a file is
            missing. As long as the step has no manifest, a process that makes room may remove its
            files as the remains of a save.

    Raises:
        ObjectExists: As for ``fetch_step``.
        StorageError: The step is being removed at the destination, or was removed.
    """
    if _make_way_for_manifest(folder, manifest_data):
        check()
        return
    destination, ref = folder.backend, folder.ref
    # The first check avoids a marker in the folder of a step that cannot be finished.
    check()
    folder.retry.call(partial(require_finish, destination, ref))
    check()
    folder.retry.call(partial(delete_tombstone, destination, ref))
    _put_manifest(folder, manifest_data)
    release_finish(destination, ref)


def check_files(folder: StepFolder, manifest: Manifest, confirm: Callable[[], object]) -> None:
    """Raise ``StorageError`` if a data file is missing or has another size, or if a fragment is
    missing. Otherwise call ``confirm``, which may raise, too.
    """
    if faults := size_faults(folder, manifest.stored_files().values()):
        raise StorageError(
            faults[0].key,
            f"{faults[0].what} on {folder.backend.url}: another process has discarded it",
        )
    folder.require_fragments(manifest)
    confirm()


def _make_way_for_manifest(folder: StepFolder, manifest_data: bytes) -> bool:
    """Return True if the folder already has this manifest, and False if it has none.

    A damaged manifest is removed, since it would keep the intact one from being put.

    Raises:
        ObjectExists: The folder has another manifest that is intact or in an unsupported format.
    """
    destination, ref = folder.backend, folder.ref
    try:
        if folder.read(ref.manifest, partial(_is_same_manifest, manifest_data, key=ref.manifest)):
            return True
    except ObjectNotFound:
        return False
    except IntegrityError as error:
        if not folder.retry.call(partial(has_manifest, destination, ref)):
            return False  # A tombstone stays until all files are there
        if not isinstance(error, FormatUnsupported):
            folder.retry.call(partial(delete_files, destination, [ref.manifest]))
            return False
    raise ObjectExists(
        ref.manifest,
        f"{destination.url} has another manifest of the same attempt: remove the folder "
        f"{ref.folder} there, then copy again",
    )


def _other_manifest(
    folder: StepFolder, manifest: Manifest, manifest_data: bytes
) -> Manifest | None:
    """Return the manifest at the destination if it has the same chunks in other files: encoded in
    another way, or as increments where the source has whole files or the other way round.

    Increments count as other files in any case, since the base of those at the source may be
    missing at the destination. Return None if it does not have the chunks, is missing or is
    damaged.
    """
    try:
        key = folder.ref.manifest
        is_same = folder.read(key, partial(_is_same_manifest, manifest_data, key=key))
        if is_same and not manifest.increments:
            return None
        present = read_manifest(folder.backend, folder.ref, retry=folder.retry)
    except (ObjectNotFound, IntegrityError):
        return None
    has_increments = bool(present.increments or manifest.increments)
    is_alike = present.encoded == manifest.encoded and not has_increments
    return present if not is_alike and same_chunks(present, manifest) else None


def _remove_files_without_entry(folder: StepFolder, manifest: Manifest) -> None:
    """Remove from the folder of a step that was just committed what its manifest does not name.

    This is mainly for files in another encoding. The markers and notes of ranks (see
    ``catalog.transfer_by_rank``) are removed too. The claim marker stays, since another process may
    remove the step already. Added metrics stay, and so do files without the name of a checkpoint
    file.
    """
    ref = folder.ref
    names = [*(file.name for file in manifest.files), *(part.name for part in manifest.fragments)]
    kept_keys = {ref.manifest, ref.claim_marker, *map(ref.key, names)}
    keys = [info.key for info in own_objects(folder.backend, ref) if info.key not in kept_keys]
    outdated_keys = [key for key in keys if not is_late_metrics(key.rpartition("/")[2])]
    folder.retry.call(partial(delete_files, folder.backend, outdated_keys))


def has_codec(manifest: Manifest, codec: str) -> bool:
    """Return True if all data files are encoded as a tier with this codec stores them."""
    encoder = encoder_of(codec)
    name = encoder.codec if encoder else NO_CODEC
    return all((file.codec or NO_CODEC) == name for file in manifest.stored_files().values())


def _recoding(
    origin: TieredReader | SelfContainedStep, manifest: Manifest, codec: str
) -> Recoding | None:
    """Return the `Recoding` for a destination with ``codec``; None if the source already has whole
    files in the encoding of such a destination.
    """
    if has_codec(manifest, codec) and not manifest.increments:
        return None
    encoder = encoder_of(codec)
    files = manifest.file_map()
    with _store_errors_as_damage():
        parts = {
            fragment_ref.rank: read_fragment(
                origin.fragment(manifest, fragment_ref, files.get(fragment_ref.rank)),
                key=origin.ref.key(fragment_ref.name),
            )
            for fragment_ref in manifest.fragments
        }
    return Recoding(encoder, parts)


def _intact_files(
    manifest: Manifest, folder: StepFolder, recoding: Recoding | None
) -> dict[int, StoredFile]:
    """Return the data files that the destination already has intact, by rank.

    With ``recoding``, the encoding of a file is read from its fragment at the destination.
    """
    files = manifest.stored_files()
    if recoding is not None:
        equal_files: dict[int, StoredFile] = {}
        for rank, file in files.items():
            try:
                fragment, data = folder.fragment(rank)
                encoding = next(iter(fragment.encoded), None)
            except (ObjectNotFound, IntegrityError):
                continue
            if data == pack(recoding.fragment(rank, encoding)):
                equal_files[rank] = recoding.stored(file, encoding)
        files = equal_files
    faults, _ = verify_files(folder, files.values())
    damaged_keys = {fault.key for fault in faults}
    return {rank: file for rank, file in files.items() if file.key not in damaged_keys}


def _put_fragments(
    folder: StepFolder, recoding: Recoding, files: Mapping[int, StoredFile]
) -> Manifest:
    """Put the fragments of files that were encoded again, and return the merged manifest."""
    parts: list[tuple[Packed, FragmentRef]] = []
    puts: list[Callable[[], object]] = []
    for rank in sorted(recoding.parts):
        file = files.get(rank)
        name = fragment_name(rank)
        packed_fragment = recoding.fragment(rank, file.encoding if file else None)
        data = pack(packed_fragment)
        put = partial(folder.backend.put, folder.ref.key(name), [data])
        puts.append(partial(folder.retry.call, put))
        parts.append((packed_fragment, FragmentRef(name, rank, len(data), checksum(data))))
    folder.workers.run_all(puts)
    return merge(parts)


def _copy_fragment(
    origin: TieredReader | SelfContainedStep,
    folder: StepFolder,
    manifest: Manifest,
    fragment_ref: FragmentRef,
    file: File | None,
) -> None:
    """Copy a fragment, unless the folder has it intact."""
    with _store_errors_as_damage():
        data = origin.fragment(manifest, fragment_ref, file)
    if folder.intact_fragment(fragment_ref) is None:
        key = origin.ref.key(fragment_ref.name)
        folder.retry.call(partial(folder.backend.put, key, [data]))


def _put_manifest(folder: StepFolder, manifest_data: bytes) -> None:
    """Put the manifest. Raises ``ObjectExists`` if the folder has another manifest."""
    key = folder.ref.manifest
    try:
        folder.retry.call(partial(put_manifest, folder.backend, key, manifest_data))
    except CommitError as error:
        raise ObjectExists(key, str(error)) from error


def _is_same_manifest(manifest_data: bytes, data: bytes, *, key: str) -> bool:
    """Return True if ``data`` is the manifest ``manifest_data``, and False if it is another one.

    Raises:
        ManifestCorrupt, FormatUnsupported: ``data`` is no manifest that this ckpt can read.
    """
    if data != manifest_data:
        unpack(data, Manifest, key=key)
    return data == manifest_data


@contextmanager
def _store_errors_as_damage() -> Generator[None]:
    """Turn a ``StorageError`` inside of the block into an ``IntegrityError`` about the source.

    An error of a source that tells nothing about the data (see ``fault_of``) stays as it is. Only
    reads of the sources are inside of such blocks, so errors of the destination are not changed.
    """
    try:
        yield
    except StorageError as error:
        raise fault_of(error).error() from error

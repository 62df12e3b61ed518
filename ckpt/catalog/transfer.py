"""Copy a checkpoint, or files of it, to another store, proving every byte on the way.

1. Files that the destination already has, whole and right, are kept: a copy that was cut short goes
   on where it was.
2. Data files are written as a save writes them, from images whose chunks are read when they are
   asked for, each from the nearest source that has it intact. Nothing of a file is visible until
   all of it is right. A destination with another codec gets the same chunks, encoded for it.
3. Fragments, then the manifest, last: the step exists if and only if the manifest does. They are
   copied byte for byte, or, for another codec, say how the files are encoded. Before the manifest
   come the claim marker (``coordination.claim_marker``) and one more look at all files, as for any
   save that is finished from outside of its job.

Memory: for each worker a part, and the chunks at its ends. A store whose uploads keep what they are
given until ``finish`` (the contract allows it) holds the files under way.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from msgspec.structs import replace

from ckpt.catalog.index import own_objects, read_manifest, read_packed
from ckpt.catalog.tiered_reader import OnRepair, TieredReader
from ckpt.catalog.verify import Meter, OnProgress, StepFolder, fault_of, size_faults, verify_files
from ckpt.codec.registry import NO_CODEC, Encoder, encoder_of
from ckpt.coordination.claim_marker import claim_for_finish, release_finish
from ckpt.errors import (
    FormatUnsupported,
    IntegrityError,
    ObjectExists,
    ObjectNotFound,
    StorageError,
)
from ckpt.model.checksum import checksum
from ckpt.model.encoding import pack, unpack
from ckpt.model.keys import StepRef, data_name, fragment_name, is_late_metrics
from ckpt.model.manifest import (
    Encoding,
    File,
    Fragment,
    FragmentRef,
    Manifest,
    Packed,
    StoredFile,
)
from ckpt.model.packed import pack_fragment, read_fragment
from ckpt.pipeline.chunk_reader import Sink
from ckpt.pipeline.encoded_writer import widths_of, write_encoded
from ckpt.pipeline.image_writer import ImageWrite, OnBytes, write_image
from ckpt.pipeline.stored_image import StoredImage
from ckpt.plan.merge import merge
from ckpt.plan.rebase import same_chunks
from ckpt.plan.restore import ChunkRead, chunks_of
from ckpt.storage.api import StorageBackend

Fetch = Callable[[Sequence[ChunkRead], Sink], int]
"""Reads chunks of one file; returns the position of the farthest source that was needed."""


@dataclasses.dataclass(frozen=True, slots=True)
class FetchReport:
    """The result of a copy.

    Attributes:
        nbytes: The size of the step's data files at the destination.
        copied_bytes: How many of them were not there before.
    """

    ref: StepRef
    nbytes: int
    copied_bytes: int
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class FileCopy:
    """A data file at the destination, and the position of the farthest source that was needed
    for it.
    """

    stored: StoredFile
    position: int


@dataclasses.dataclass(frozen=True, slots=True)
class Recoding:
    """Files of the same chunks for a tier with another codec.

    ``parts``: the fragments at the source, by rank.
    """

    encoder: Encoder | None
    parts: Mapping[int, Fragment]

    def name(self, rank: int) -> str:
        """Return the name of a rank's file at the destination."""
        return data_name(rank, encoded=self.encoder is not None)

    def stored(self, source: StoredFile, encoding: Encoding | None) -> StoredFile:
        """Return a file of the source as it is at the destination."""
        return StoredFile.of(
            source.ref, replace(source.file, name=self.name(source.rank)), encoding
        )

    def write(
        self, write: ImageWrite, source: StoredFile, destination: StorageBackend
    ) -> StoredFile:
        """Write a file of the source there."""
        if (encoder := self.encoder) is None:
            write_image(write, destination)
            return self.stored(source, None)
        widths = widths_of(write.chunks, self.parts[source.rank].tensors)
        _, lengths = write_encoded(write, destination, encoder, widths)
        encoding = Encoding(source.rank, encoder.codec, lengths) if lengths else None
        return self.stored(source, encoding)

    def fragment(self, rank: int, encoding: Encoding | None) -> Packed:
        """Return the fragment of a rank at the destination."""
        part = self.parts[rank]
        file = replace(part.file, name=self.name(rank)) if part.file else None
        return pack_fragment(replace(part, file=file, encoded=(encoding,) if encoding else ()))


def fetch_nearest(
    sources: Sequence[StorageBackend],
    folder: StepFolder,
    *,
    on_progress: OnProgress | None = None,
    on_repair: OnRepair = lambda _: None,
) -> FetchReport:
    """Copy a step, each part from the nearest of ``sources`` that has it intact.

    Any source can give raw bytes. Encoded bytes can come only from sources that encode alike. If
    the step cannot be copied in the form of the nearest source, the form of the next source with
    another manifest is tried.

    Raises:
        IntegrityError: As ``fetch_step``. It is the error of the first try.
        StorageError: As ``fetch_step``.
    """
    ref = folder.ref
    first: IntegrityError | None = None
    tried: set[bytes] = set()
    for position, source in enumerate(sources):
        if position and (not (packed := _manifest(source, ref)) or packed in tried):
            continue
        others = [*sources[:position], *sources[position + 1 :]]
        try:
            report = fetch_step(
                [source, *others], folder, on_progress=on_progress, on_repair=on_repair
            )
        except FormatUnsupported:
            if first is None:
                raise
            continue
        except IntegrityError as error:
            first = first or error
            tried.add(_manifest(source, ref))
            continue
        if first is not None:
            # Earlier tries may have left files that this manifest does not name.
            _clear_unnamed(folder, read_packed(folder.backend, ref)[0])
        return report
    assert first is not None
    raise first


def _manifest(source: StorageBackend, ref: StepRef) -> bytes:
    """Return the manifest; empty bytes if there is none that can be read."""
    try:
        return read_packed(source, ref)[1]
    except (IntegrityError, StorageError):
        return b""


def _meter(
    manifest: Manifest,
    missing: Sequence[StoredFile],
    on_progress: OnProgress | None,
    *,
    recoded: bool,
) -> Meter:
    """Return a meter of the whole step, which has passed all files that are not ``missing``."""
    meter = Meter(manifest.nbytes if recoded else manifest.stored_bytes, on_progress)
    left = sum(stored.file.size if recoded else stored.size for stored in missing)
    meter.add(meter.total - left)
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
    """Make a committed step of the first of ``sources`` one of the store of ``folder``.

    On an error, what is finished stays for the next try, and the step is not listed at the
    destination (unless it was before). A destination where the step is encoded otherwise is left
    alone if it is intact.

    Args:
        sources: The source, then the stores that are asked for what it does not have intact,
            nearest first.
        folder: The step at the destination.
        on_repair: Called when another store is asked.
        codec: That of the destination. None: files are copied as they are at the source.
        confirm: Called right before the manifest is put. It raises if the step must not become a
            checkpoint there any more.

    Raises:
        ChecksumMismatch, ManifestCorrupt, FormatUnsupported: All sources are damaged. Any
            ``IntegrityError`` is about the sources.
        IntegrityError: They lack a file, or a file cannot be read where it should have bytes.
        ObjectExists: The destination has an intact manifest of this very attempt that differs, and
            not only in how files are encoded.
    """
    start = time.perf_counter()
    origin = TieredReader(sources, folder.ref, retry=folder.retry, on_repair=on_repair)
    with _about_the_source():
        found = origin.whole(lambda found: origin.filled(found, None))
    manifest, packed = found.manifest, found.packed
    old = _encoded_otherwise(folder, manifest, packed)
    listed = old is None and _make_way(folder, packed)
    if old is not None and not verify_files(folder, old.stored_files().values())[0]:
        return FetchReport(folder.ref, old.stored_bytes, 0, time.perf_counter() - start)
    recoding = None if codec is None or listed else _recoding(origin, manifest, codec)
    kept = _kept(manifest, folder, recoding)
    missing = [file for rank, file in manifest.stored_files().items() if rank not in kept]
    here = dataclasses.replace(folder, backend=sources[0])
    for fault in size_faults(here, missing) if len(sources) == 1 else ():
        raise fault.error()
    meter = _meter(manifest, missing, on_progress, recoded=recoding is not None)
    copies = copy_files(origin.fetch, missing, folder, on_bytes=meter.add, recoding=recoding)
    if old is not None:
        # The old manifest is removed only when all of the data is there.
        folder.retry.call(partial(folder.backend.delete, folder.ref.manifest))
    if recoding is None:
        copy_fragments(origin, manifest, manifest.fragments, folder)
    else:
        files = {copy.stored.rank: copy.stored for copy in copies} | kept
        manifest = _put_fragments(folder, recoding, files)
        packed = pack(manifest)
    commit_copy(folder, packed, look=partial(check_files, folder, manifest, confirm))
    if old is not None:
        _clear_unnamed(folder, manifest)
    copied = sum(copy.stored.size for copy in copies)
    return FetchReport(folder.ref, manifest.stored_bytes, copied, time.perf_counter() - start)


def copy_files(
    fetch: Fetch,
    files: Sequence[StoredFile],
    folder: StepFolder,
    *,
    on_bytes: OnBytes = lambda _: None,
    recoding: Recoding | None = None,
) -> list[FileCopy]:
    """Copy data files, all of each or nothing: as they are at the sources, or as ``recoding``
    has it. Raises as ``fetch_step`` does.
    """
    workers = folder.workers
    failed: list[BaseException] = []

    def copy(source: StoredFile) -> FileCopy:
        positions = [0]

        def read(reads: Sequence[ChunkRead], sink: Sink) -> None:
            if failed:
                raise StorageError(source.file.name, "another file could not be copied")
            with _about_the_source():
                positions.append(fetch(reads, sink))

        image = StoredImage(chunks_of(source, as_stored=recoding is None), read)
        key = source.key if recoding is None else folder.ref.key(recoding.name(source.rank))
        write = ImageWrite(
            source=image,
            chunks=image.lengths,
            key=key,
            workers=workers,
            retry=folder.retry,
            on_bytes=on_bytes,
            known=source.file.chunks,
        )
        try:
            if recoding is not None:
                written = recoding.write(write, source, folder.backend)
            else:
                write_image(write, folder.backend)
                written = source
        except BaseException as error:
            failed.append(error)
            raise
        return FileCopy(written, max(positions))

    if not files:
        return []
    # The copies wait for ``workers``, so they run on threads of their own.
    with workers.beside("copy", min(len(files), workers.count)) as group:
        try:
            return list(group.stream(partial(copy, file) for file in files))
        except BaseException as error:  # noqa: BLE001 - the first is raised
            failed.append(error)  # Ends the copies that are under way
            raise failed[0] from None


def copy_fragments(
    origin: TieredReader,
    manifest: Manifest,
    fragments: Sequence[FragmentRef],
    folder: StepFolder,
) -> None:
    """Copy those of ``fragments`` that are not there.

    Their data files go first: a process that finds all fragments may commit them.
    """
    files = manifest.file_map()
    folder.workers.run_all(
        partial(_copy_fragment, origin, folder, manifest, named, files.get(named.rank))
        for named in fragments
    )


def commit_copy(folder: StepFolder, packed: bytes, *, look: Callable[[], None]) -> None:
    """Put the manifest of a step whose files are all there.

    ``look`` raises if one of them is missing: until there is a manifest, a process that makes room
    may take them for remains.

    Raises:
        ObjectExists: As ``fetch_step``.
        StorageError: It is being cleared away there, or was.
    """
    if _make_way(folder, packed):
        look()
        return
    destination, ref = folder.backend, folder.ref
    # A look before the marker is put leaves no marker for a step that cannot be finished.
    look()
    if not folder.retry.call(partial(claim_for_finish, destination, ref)):
        raise StorageError(ref.folder, f"it is being cleared away on {destination.url}")
    look()
    _commit(folder, packed)
    release_finish(destination, ref)


def check_files(folder: StepFolder, manifest: Manifest, confirm: Callable[[], object]) -> None:
    """Raise ``StorageError`` if a file or a fragment is missing or has another size, and what
    ``confirm`` raises.
    """
    if faults := size_faults(folder, manifest.stored_files().values()):
        raise StorageError(
            faults[0].key,
            f"{faults[0].what} on {folder.backend.url}: another process has cleared it away",
        )
    folder.require_fragments(manifest)
    confirm()


def _make_way(folder: StepFolder, packed: bytes) -> bool:
    """Return True if the manifest is there.

    A damaged copy of it is removed: it would keep the good one out. An intact one that differs, or
    of a later format, is not ours to judge.
    """
    destination, ref = folder.backend, folder.ref
    try:
        there = folder.read(ref.manifest)
        if there == packed:
            return True
        unpack(there, Manifest, key=ref.manifest)
    except ObjectNotFound:
        return False
    except IntegrityError as error:
        if not isinstance(error, FormatUnsupported):
            folder.retry.call(partial(destination.delete, ref.manifest))
            return False
    raise ObjectExists(
        ref.manifest,
        f"{destination.url} has another manifest of the same attempt: remove the folder "
        f"{ref.folder} there, then copy again",
    )


def _encoded_otherwise(folder: StepFolder, manifest: Manifest, packed: bytes) -> Manifest | None:
    """Return the manifest of a destination that has the same chunks with another encoding; None if
    there is none.
    """
    try:
        there = folder.read(folder.ref.manifest)
        if there == packed:
            return None
        old = read_manifest(folder.backend, folder.ref, retry=folder.retry)
    except (ObjectNotFound, IntegrityError):
        return None
    return old if old.encoded != manifest.encoded and same_chunks(old, manifest) else None


def _clear_unnamed(folder: StepFolder, manifest: Manifest) -> None:
    """Remove files of another encoding from the folder of a step that was just committed."""
    ref = folder.ref
    names = [*(file.name for file in manifest.files), *(part.name for part in manifest.fragments)]
    named = {ref.manifest, *map(ref.key, names)}
    for info in own_objects(folder.backend, ref):
        if info.key not in named and not is_late_metrics(info.key.rpartition("/")[2]):
            folder.retry.call(partial(folder.backend.delete, info.key))


def has_codec(manifest: Manifest, codec: str) -> bool:
    """Return whether the files are encoded as a tier with this codec has them."""
    encoder = encoder_of(codec)
    name = encoder.codec if encoder else NO_CODEC
    return all((file.codec or NO_CODEC) == name for file in manifest.stored_files().values())


def _recoding(origin: TieredReader, manifest: Manifest, codec: str) -> Recoding | None:
    """Return how the files are encoded again for a codec; None if they have that encoding at the
    source.
    """
    if has_codec(manifest, codec):
        return None
    encoder = encoder_of(codec)
    files = manifest.file_map()
    with _about_the_source():
        parts = {
            named.rank: read_fragment(
                origin.fragment(manifest, named, files.get(named.rank)),
                key=origin.ref.key(named.name),
            )
            for named in manifest.fragments
        }
    return Recoding(encoder, parts)


def _kept(
    manifest: Manifest, folder: StepFolder, recoding: Recoding | None
) -> dict[int, StoredFile]:
    """Return the files that are there already and intact, by rank.

    Those that are recoded are as the fragment beside them says.
    """
    files = manifest.stored_files()
    if recoding is not None:
        found: dict[int, StoredFile] = {}
        for rank, file in files.items():
            key = folder.ref.key(fragment_name(rank))
            try:
                data = folder.read(key)
                encoding = next(iter(read_fragment(data, key=key).encoded), None)
            except (ObjectNotFound, IntegrityError):
                continue
            if data == pack(recoding.fragment(rank, encoding)):
                found[rank] = recoding.stored(file, encoding)
        files = found
    faults, _ = verify_files(folder, files.values())
    wrong = {fault.key for fault in faults}
    return {rank: file for rank, file in files.items() if file.key not in wrong}


def _put_fragments(
    folder: StepFolder, recoding: Recoding, files: Mapping[int, StoredFile]
) -> Manifest:
    """Put the fragments of files that were recoded; returns the manifest that says the same."""
    merged: list[tuple[Packed, FragmentRef]] = []
    puts: list[Callable[[], object]] = []
    for rank in sorted(recoding.parts):
        file = files.get(rank)
        name = fragment_name(rank)
        packed = recoding.fragment(rank, file.encoding if file else None)
        data = pack(packed)
        put = partial(folder.backend.put, folder.ref.key(name), [data])
        puts.append(partial(folder.retry.call, put))
        merged.append((packed, FragmentRef(name, rank, len(data), checksum(data))))
    folder.workers.run_all(puts)
    return merge(merged)


def _copy_fragment(
    origin: TieredReader,
    folder: StepFolder,
    manifest: Manifest,
    named: FragmentRef,
    file: File | None,
) -> None:
    with _about_the_source():
        data = origin.fragment(manifest, named, file)
    key = origin.ref.key(named.name)
    try:
        there = folder.read(key, limit=named.size)
    except StorageError:  # It is absent, or longer than it should be
        there = b""
    if checksum(there) != named.checksum:
        folder.retry.call(partial(folder.backend.put, key, [data]))


def _commit(folder: StepFolder, packed: bytes) -> None:
    key = folder.ref.manifest
    try:
        folder.retry.call(partial(folder.backend.put, key, [packed], if_absent=True))
    except ObjectExists:
        # The manifest was there before, another fetch was faster, or the reply to a first try was
        # lost.
        if folder.read(key) != packed:
            raise


@contextmanager
def _about_the_source() -> Generator[None]:
    """Raise an error inside of the block as damage of the source. An error of the destination is a
    failure of that store, and does not come from here.
    """
    try:
        yield
    except StorageError as error:
        raise fault_of(error).error() from error

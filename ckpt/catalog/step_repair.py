"""Repair a damaged step of one store from other stores that have the step.

Each file is replaced atomically, after every byte of the new file was verified. A process that is
killed leaves either the old file or the new one. While a manifest is replaced, the claim marker of
a finisher keeps the step from being removed.

If the files must be encoded again (see ``mend_step``), the marker stands all the time, and the old
manifest is deleted before the new one is put. A process that is killed in between leaves a step
without a manifest.

A *fragment* is the record of what one rank has written. An *increment* is a data file that leaves
out the chunks that the file of an older step, its *base*, also has. In the list of all stores, the
damaged one comes first, at position 0.

The *heirs* of a step are the steps that refer to its files. A ``StepFolder`` is the folder of the
step on the damaged store, and a ``TieredReader`` reads each chunk from the nearest store that has
it intact. ``discard_part`` removes the files of a rank, unless a manifest names them.
``release_finish`` removes the claim marker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from ckpt.catalog.base_protection import require_no_heirs
from ckpt.catalog.step_listing import is_committed
from ckpt.catalog.tiered_reader import SourceManifest, TieredReader
from ckpt.catalog.transfer import (
    check_files,
    copy_files,
    copy_fragments,
    fetch_step,
    has_codec,
)
from ckpt.catalog.verify import Fault, StepFolder, verify_files
from ckpt.coordination.step_files import put_manifest
from ckpt.errors import IntegrityError, ObjectNotFound, StorageError
from ckpt.model.keys import fragment_name
from ckpt.model.manifest import StoredFile
from ckpt.pipeline.image_writer import OnBytes
from ckpt.root.claim_marker import discard_part, release_finish, require_finish
from ckpt.storage.api import StorageBackend
from ckpt.storage.outside_files import names_of


def mend_step(
    sources: Sequence[StorageBackend],
    folder: StepFolder,
    faults: Sequence[Fault],
    *,
    codec: str,
    confirm: Callable[[], object],
    on_bytes: OnBytes,
) -> None:
    """Replace the damaged files of a committed step.

    If another process removes the step meanwhile, this function does not put it back.

    Args:
        sources: Other stores that have the step, nearest first.
        folder: The folder of the step on the store where it is damaged.
        faults: The faults that a verification of the folder has found.
        codec: The codec of the store of ``folder``. If the sources have the files in another
            encoding, the files are encoded with this codec, and then the manifest is replaced.
        confirm: Called before each data file is written, before the fragments are written, and
            before the manifest is put. If the files are encoded again, it is called only before the
            first file is written and before the manifest is put. It raises if this process must not
            write to the store any more.
        on_bytes: Called with the number of bytes just written.

    Raises:
        IntegrityError: Some file is intact on no store. Other damaged files may have been replaced.
            A damaged manifest stays.
        ObjectExists: The sources have the files in another encoding, and a fragment is damaged or
            increments of other steps refer to the files.
        StorageError: A store has failed, or the step is being removed.
    """
    _check_not_removed(folder)
    damaged_keys = {fault.key for fault in faults}
    origin = TieredReader([folder.backend, *sources], folder.ref, retry=folder.retry)
    source = origin.try_manifests(lambda source: origin.with_fragments(source, None))
    has_own_manifest = source.position == 0
    has_same_encoding = has_codec(source.manifest, codec) and not source.manifest.increments
    if not has_own_manifest and not (folder.ref.manifest in damaged_keys and has_same_encoding):
        _encode_again(sources, folder, codec, confirm, on_bytes)
        return
    files = list(source.manifest.stored_files().values())
    if not has_own_manifest:  # Without an intact manifest, ``faults`` has no faults of data files
        data_faults, _ = verify_files(folder, files)
        damaged_keys = {fault.key for fault in data_faults}
    # ``names_of`` returns the keys of the files that a base consists of.
    bases = [file.base for file in files if file.base and names_of(file.base) & damaged_keys]
    # The verification of an older step mends its files. Those in another root are never written.
    are_mended = (not base.root and is_committed(folder.backend, base.ref) for base in bases)
    if has_own_manifest and not all(are_mended):
        _encode_again(sources, folder, codec, confirm, on_bytes)
        return
    files = [file for file in files if file.key in damaged_keys]
    if foreign := next((file for file in files if file.location), None):
        raise IntegrityError(
            f"{foreign.location!r} is a file of another program, which ckpt never writes: put it "
            "back as it was, or remove the step"
        )
    try:
        _replace_files(origin, source, files, folder, confirm, on_bytes)
    except IntegrityError:
        if not any(file.codec or file.increment for file in files):
            raise
        _encode_again(sources, folder, codec, confirm, on_bytes)


def _replace_files(
    origin: TieredReader,
    source: SourceManifest,
    files: Sequence[StoredFile],
    folder: StepFolder,
    confirm: Callable[[], object],
    on_bytes: OnBytes,
) -> None:
    """Replace ``files``, damaged fragments and a damaged manifest by intact copies.

    If another process has removed the step meanwhile, remove the new data files and their fragments
    again. Raises the errors of ``mend_step``.
    """
    failure: IntegrityError | None = None
    for file in files:
        confirm()
        try:
            tensors = source.manifest.tensors
            copy_files(origin.fetch, [file], folder, on_bytes=on_bytes, tensors=tensors)
        except IntegrityError as error:
            failure = failure or error
    confirm()
    copy_fragments(origin, source.manifest, source.manifest.fragments, folder)
    if source.position:  # The manifest of the step itself is damaged
        if failure is not None:  # With an intact manifest, the damaged step would be listed
            raise failure
        _put_manifest(folder, source, confirm)
    elif not is_committed(folder.backend, folder.ref):  # The step was removed meanwhile
        for file in files:
            fragment = folder.ref.key(fragment_name(file.rank))
            discard_part(folder.backend, folder.ref, fragment, file.key)
    if failure is not None:
        raise failure


def _check_not_removed(folder: StepFolder) -> None:
    """Raise ``ObjectNotFound`` if the step was removed."""
    if not is_committed(folder.backend, folder.ref):
        raise ObjectNotFound(folder.ref.manifest)


def _claim_for_finish(folder: StepFolder) -> None:
    """Put the claim marker of a finisher. Raise ``StorageError`` if the step is being removed."""
    folder.retry.call(partial(require_finish, folder.backend, folder.ref))


def _put_manifest(
    folder: StepFolder, source: SourceManifest, confirm: Callable[[], object]
) -> None:
    """Replace a damaged manifest. A claim marker keeps the step from being removed meanwhile."""
    backend, ref = folder.backend, folder.ref
    _claim_for_finish(folder)
    try:
        _check_not_removed(folder)
        check_files(folder, source.manifest, confirm)
        folder.retry.call(
            partial(put_manifest, backend, ref.manifest, source.data, replaces_damaged=True)
        )
    finally:
        release_finish(backend, ref)


def _encode_again(
    sources: Sequence[StorageBackend],
    folder: StepFolder,
    codec: str,
    confirm: Callable[[], object],
    on_bytes: OnBytes,
) -> None:
    """Copy the step to ``folder``, encoded with ``codec``. Intact files there are not written.

    A claim marker keeps the step from being removed meanwhile. After an error it stays if the step
    has no manifest, since a put of one may still be on its way.
    """
    backend, ref = folder.backend, folder.ref
    reported_bytes: int | None = None

    def progress(done_bytes: int, _: int) -> None:
        nonlocal reported_bytes
        # The first call counts the bytes of files that were intact before.
        on_bytes(0 if reported_bytes is None else done_bytes - reported_bytes)
        reported_bytes = done_bytes

    require_no_heirs(folder)
    confirm()
    _claim_for_finish(folder)
    try:
        _check_not_removed(folder)
    except ObjectNotFound:
        release_finish(backend, ref)
        raise
    try:
        fetch_step(sources, folder, on_progress=progress, codec=codec, confirm=confirm)
    finally:
        with suppress(StorageError):
            if is_committed(backend, ref):
                release_finish(backend, ref)

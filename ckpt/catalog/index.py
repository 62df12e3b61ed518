"""Which steps does a tier hold? A step is listed if and only if its manifest is there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from typing import Final

from ckpt.catalog.fragments import filled, load_fragment
from ckpt.catalog.late_metrics import late_metrics, with_late
from ckpt.errors import (
    AccessDenied,
    IntegrityError,
    LinkRefused,
    ManifestCorrupt,
    NoCheckpoint,
    ObjectNotFound,
    StorageError,
    TransientStorageError,
    about,
)
from ckpt.model.encoding import MAX_RECORD_BYTES, unpack
from ckpt.model.keys import OWNER, StepRef, is_file_name, is_fragment, parse_folder
from ckpt.model.manifest import File, Fragment, FragmentRef, Manifest
from ckpt.model.validate import check_manifest
from ckpt.pipeline.retry import RetryPolicy
from ckpt.storage.api import (
    KeepsUnfinished,
    ObjectInfo,
    StorageBackend,
    Unfinished,
    is_there,
    read_object,
)

_RETRY: Final = RetryPolicy()


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One attempt at a step, as far as its manifest tells. Its data was not looked at.

    Attributes:
        manifest: As it is stored. None if the attempt is not committed, or its manifest is damaged.
        damage: Why the manifest cannot be trusted.
        finished_ranks: Fragments that are there; counted for an attempt without a manifest only.
        nbytes: Of all data files; for an attempt without a manifest, of what lies there.
    """

    ref: StepRef
    manifest: Manifest | None = None
    damage: IntegrityError | None = None
    finished_ranks: int = 0
    nbytes: int = 0


def attempts(backend: StorageBackend) -> list[StepRef]:
    """Every attempt at a step, committed or not, newest step first.

    Folders that are not ours are left alone.
    """
    with about(backend.url):
        found = [parse_folder(name) for name in _RETRY.call(lambda: list(backend.folders("")))]
    return sorted((ref for ref in found if ref is not None), reverse=True)


def own_objects(backend: StorageBackend, ref: StepRef) -> list[ObjectInfo]:
    """The files in the folder of an attempt that are named as ours."""
    folder = f"{ref.folder}/"
    with about(backend.url):
        listed = _RETRY.call(lambda: list(backend.list(folder)))
    return [info for info in listed if is_file_name(info.key.removeprefix(folder))]


def unfinished_of(backend: StorageBackend, ref: StepRef) -> tuple[Unfinished, ...]:
    """Unfinished writes to files of an attempt that are named as ours."""
    if not isinstance(backend, KeepsUnfinished):
        return ()
    folder = f"{ref.folder}/"
    with about(backend.url):
        found = _RETRY.call(lambda: tuple(backend.unfinished(folder)))
    return tuple(one for one in found if is_file_name(one.key.removeprefix(folder)))


def is_committed(backend: StorageBackend, ref: StepRef) -> bool:
    with about(backend.url):
        return _RETRY.call(partial(is_there, backend, ref.manifest))


def committed(backend: StorageBackend) -> list[StepRef]:
    """Attempts with a manifest, newest step first."""
    return [ref for ref in attempts(backend) if is_committed(backend, ref)]


def read_manifest(
    backend: StorageBackend, ref: StepRef, *, retry: RetryPolicy = _RETRY
) -> Manifest:
    """The manifest of a committed step, checked, with all of its fragments filled in.

    Raises:
        ObjectNotFound: The step is not committed here, or a fragment is missing.
        ManifestCorrupt, ChecksumMismatch, FormatUnsupported: It cannot be trusted.
    """
    manifest = read_packed(backend, ref, retry=retry)[0]

    def read(named: FragmentRef, file: File | None) -> Fragment:
        return retry.call(partial(load_fragment, backend, ref, manifest, named, file))[0]

    with about(backend.url):
        return filled(manifest, read, None, key=ref.manifest)


def read_packed(
    backend: StorageBackend, ref: StepRef, *, retry: RetryPolicy = _RETRY
) -> tuple[Manifest, bytes]:
    """The manifest as it is stored, checked, and its bytes. Reads no fragment.

    Raises as ``read_manifest`` does.
    """
    with about(backend.url):
        data = retry.call(partial(read_object, backend, ref.manifest, limit=MAX_RECORD_BYTES))
    manifest = check_manifest(unpack(data, Manifest, key=ref.manifest), key=ref.manifest)
    if (manifest.step, manifest.attempt) != (ref.step, ref.attempt):
        raise ManifestCorrupt(
            ref.manifest, f"it is that of step {manifest.step}, attempt {manifest.attempt[:40]!r}"
        )
    return manifest, data


def find(backend: StorageBackend, step: int | None) -> list[StepRef]:
    """Committed attempts to try for ``step`` (None: any), best first.

    Where a step was saved by two attempts, the one whose manifest is younger comes first; damaged
    ones come last.

    Raises:
        NoCheckpoint: There is none; its ``detail`` says what there is instead.
    """
    everything = attempts(backend)
    refs = [ref for ref in everything if step in (None, ref.step) and is_committed(backend, ref)]
    if not refs:
        raise NoCheckpoint(backend.url, instead_of(backend, everything, step))
    attempts_at = Counter(ref.step for ref in refs)
    ages = {ref: born(backend, ref) if attempts_at[ref.step] > 1 else 0.0 for ref in refs}
    return sorted(refs, key=lambda ref: (ref.step, ages[ref]), reverse=True)


def survey(backend: StorageBackend) -> list[Entry]:
    """Every attempt with its manifest or what is wrong with it, newest step first.

    Raises:
        NoCheckpoint: There is not one attempt here; its ``detail`` says what there is instead.
    """
    refs = attempts(backend)
    if not refs:
        raise NoCheckpoint(backend.url, instead_of(backend, refs, None))
    return [_entry(backend, ref) for ref in refs]


def _entry(backend: StorageBackend, ref: StepRef) -> Entry:
    try:
        manifest, _ = read_packed(backend, ref)
        listed = {info.key for info in own_objects(backend, ref)}
        if gone := _missing(backend, ref, manifest, listed):
            return Entry(
                ref=ref,
                damage=ManifestCorrupt(
                    ref.manifest, f"{len(gone)} of its files are gone, such as {gone[0]}"
                ),
            )
        manifest = with_late(manifest, late_metrics(backend, ref, listed))
        return Entry(ref=ref, manifest=manifest, nbytes=manifest.nbytes)
    except IntegrityError as error:
        return Entry(ref=ref, damage=error)
    except ObjectNotFound:
        objects = own_objects(backend, ref)
        finished = sum(is_fragment(info.key.rpartition("/")[2]) for info in objects)
        return Entry(ref=ref, finished_ranks=finished, nbytes=sum(info.size for info in objects))
    except LinkRefused as error:
        return Entry(ref=ref, damage=ManifestCorrupt(ref.manifest, error.what))
    except (AccessDenied, TransientStorageError):
        raise
    except (
        StorageError
    ) as error:  # a bad sector: one step less to restore, no reason to hide the others
        return Entry(
            ref=ref, damage=ManifestCorrupt(ref.manifest, f"cannot be read: {error.detail}")
        )


def _missing(
    backend: StorageBackend, ref: StepRef, manifest: Manifest, listed: Collection[str]
) -> list[str]:
    """Files that a restore needs, and the store does not have. ``listed``: what it lists.

    A listing may lag behind, so each name that it lacks is looked up.
    """
    fragments = () if manifest.carried else manifest.fragments
    needed: list[File | FragmentRef] = [*manifest.files, *fragments]
    doubtful = [file.name for file in needed if ref.key(file.name) not in listed]
    return [name for name in doubtful if not _RETRY.call(partial(is_there, backend, ref.key(name)))]


def born(backend: StorageBackend, ref: StepRef) -> float:
    """When a manifest was made.

    One that is damaged, or was pruned meanwhile, only loses its place: reading it later tells why.
    """
    try:
        return read_packed(backend, ref)[0].created_at
    except LinkRefused:
        return 0.0
    except (AccessDenied, TransientStorageError):
        raise
    except (IntegrityError, StorageError):
        return 0.0


def instead_of(backend: StorageBackend, refs: list[StepRef], step: int | None) -> str:
    """What there is where ``step`` (None: any) is not; ``refs`` are the attempts there."""
    if step is not None and any(ref.step == step for ref in refs):
        return f"step {step} was begun, but never committed"
    if refs and step is not None:
        return f"step {step} is not there"
    if refs:
        return f"{len(refs)} save(s) were begun, none was committed"
    stranger = next((info for info in backend.list("") if info.key != OWNER), None)
    if stranger is None:
        return "it is empty, or does not exist"
    *parents, _ = stranger.key.split("/")
    if steps := next((index for index, name in enumerate(parents) if parse_folder(name)), 0):
        return (
            f"it holds no steps, but its folder {'/'.join(parents[:steps])!r} does: give that one"
        )
    return f"it holds no steps, but other files, such as {stranger.key!r}: is this the right place?"

"""Which steps does a tier hold? A step is listed if and only if its manifest is there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Final, TypeVar

from ckpt.catalog.fragments import filled, load_fragment
from ckpt.errors import (
    AccessDenied,
    IntegrityError,
    LinkRefused,
    ManifestCorrupt,
    NoCheckpoint,
    StorageError,
    TransientStorageError,
    about,
)
from ckpt.model.encoding import MAX_RECORD_BYTES, unpack
from ckpt.model.keys import OWNER, StepRef, is_file_name, parse_folder
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

T = TypeVar("T")

_RETRY: Final = RetryPolicy()
_LOOKED_AT: Final = 8
"""How many attempts an error asks for to name steps that are there. A store may be far."""
_NAMED: Final = 5
_STRANGERS: Final = 1000  # How many files of others are looked at


def ask(backend: StorageBackend, work: Callable[[], T]) -> T:
    """Return the answer of a store. It is asked again as often as is worthwhile, and an error says
    which store it was.
    """
    with about(backend.url):
        return _RETRY.call(work)


def attempts(backend: StorageBackend) -> list[StepRef]:
    """Return every attempt at a step, committed or not, newest step first.

    Folders that are not ours are left alone.
    """
    found = map(parse_folder, ask(backend, lambda: list(backend.folders(""))))
    return sorted((ref for ref in found if ref is not None), reverse=True)


def own_objects(backend: StorageBackend, ref: StepRef) -> list[ObjectInfo]:
    """Return the files in the folder of an attempt that are named as ours."""
    folder = f"{ref.folder}/"
    listed = ask(backend, lambda: list(backend.list(folder)))
    return [info for info in listed if is_file_name(info.key.removeprefix(folder))]


def unfinished_of(backend: StorageBackend, ref: StepRef) -> tuple[Unfinished, ...]:
    """Return the unfinished writes to files of an attempt that have names of ours."""
    if not isinstance(backend, KeepsUnfinished):
        return ()
    folder = f"{ref.folder}/"
    found = ask(backend, lambda: list(backend.unfinished(folder)))
    return tuple(one for one in found if is_file_name(one.key.removeprefix(folder)))


def is_committed(backend: StorageBackend, ref: StepRef) -> bool:
    return ask(backend, partial(is_there, backend, ref.manifest))


def committed(backend: StorageBackend) -> list[StepRef]:
    """Return the attempts with a manifest, newest step first."""
    return [ref for ref in attempts(backend) if is_committed(backend, ref)]


def read_manifest(
    backend: StorageBackend, ref: StepRef, *, retry: RetryPolicy = _RETRY
) -> Manifest:
    """Return the manifest of a committed step, checked, with all of its fragments filled in.

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
    """Return the manifest as it is stored, checked, and its bytes. Reads no fragment.

    Raises as ``read_manifest`` does.
    """
    with about(backend.url):
        data = retry.call(partial(read_object, backend, ref.manifest, limit=MAX_RECORD_BYTES))
    manifest = check_manifest(unpack(data, Manifest, key=ref.manifest), key=ref.manifest)
    check_place(StepRef(manifest.step, manifest.attempt), ref)
    return manifest, data


def check_place(named: StepRef, ref: StepRef) -> None:
    """Check that the manifest in the folder of ``ref``, which names ``named``, belongs there.

    Raises:
        ManifestCorrupt: It is that of another step.
    """
    if named != ref:
        raise ManifestCorrupt(
            ref.manifest, f"it is that of step {named.step}, attempt {named.attempt[:40]!r}"
        )


def find(backend: StorageBackend, step: int | None) -> list[StepRef]:
    """Return the committed attempts to try for ``step`` (None: any), best first.

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


def born(backend: StorageBackend, ref: StepRef) -> float:
    """Return when a manifest was made.

    It is 0 for a manifest that is damaged or was pruned meanwhile. A later read reports the reason.
    """
    try:
        return read_packed(backend, ref)[0].created_at
    except LinkRefused:
        return 0.0
    except (AccessDenied, TransientStorageError):
        raise
    except (IntegrityError, StorageError):
        return 0.0


def _newest_there(backend: StorageBackend, refs: Sequence[StepRef]) -> str:
    """Return the newest committed steps as words; empty if none of the newest is committed."""
    newest = dict.fromkeys(ref.step for ref in refs[:_LOOKED_AT] if is_committed(backend, ref))
    if not newest:
        return ""
    named = list(map(str, newest))[:_NAMED]
    return f"; the newest {'are' if len(named) > 1 else 'is'} {', '.join(named)}"


def _is_of_dcp(key: str) -> bool:
    name = key.rpartition("/")[2]
    return name == ".metadata" or name.endswith(".distcp")


def instead_of(backend: StorageBackend, refs: list[StepRef], step: int | None) -> str:
    """Return what there is in the place of ``step`` (None: any). ``refs`` are the attempts
    there.
    """
    if step is not None and any(ref.step == step for ref in refs):
        return f"step {step} was begun, but never committed"
    if refs and step is not None:
        return f"step {step} is not there{_newest_there(backend, refs)}"
    if refs:
        return f"{len(refs)} save(s) were begun, none was committed"
    strangers = [info.key for info in islice(backend.list(""), _STRANGERS) if info.key != OWNER]
    if not strangers:
        return "it is empty, or does not exist"
    if (of_dcp := min(filter(_is_of_dcp, strangers), default=None)) is not None:
        return (
            f"it holds files of torch.distributed.checkpoint, such as {of_dcp!r}: that reads them "
            "with its own FileSystemReader, and ckpt import makes a step of such a folder"
        )
    stranger = strangers[0]
    *parents, _ = stranger.split("/")
    if steps := next((index for index, name in enumerate(parents) if parse_folder(name)), 0):
        return (
            f"it holds no steps, but its folder {'/'.join(parents[:steps])!r} does: give that one"
        )
    return f"it holds no steps, but other files, such as {stranger!r}: is this the right place?"

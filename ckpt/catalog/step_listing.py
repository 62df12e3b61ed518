"""List the attempts and the committed steps of a store, and read manifests.

A step is committed if and only if its manifest exists. A *tombstone* is an object with the key of
the manifest that marks a removed step. Several jobs, and several tries of a job, may save the same
step: each is an *attempt*, with a folder of its own that a `StepRef` names. A *rollback* is the
record that the run goes on from an older step. It begins a *branch*, and the later steps are
*abandoned*.

A *fragment* is the record of what one rank has written. A stored manifest is *packed*: it only
refers to the fragments. To *fill in* a fragment is to add its contents to the manifest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Final, TypeVar

from ckpt.catalog.fragments import fill_from, load_fragment
from ckpt.catalog.rollbacks import newest_rollback
from ckpt.coordination.tombstone import TOMBSTONE, has_manifest, has_tombstone, is_of_manifest
from ckpt.errors import (
    AccessDenied,
    FormatUnsupported,
    IntegrityError,
    LinkRefused,
    ManifestCorrupt,
    NoCheckpoint,
    ObjectNotFound,
    StorageError,
    TransientStorageError,
    errors_of,
)
from ckpt.errors.base import few
from ckpt.errors.storage import with_short_traceback
from ckpt.model.keys import (
    MANIFEST,
    OWNER,
    ROLLBACKS,
    STEP_PREFIX,
    StepId,
    StepRef,
    is_file_name,
    parse_folder,
)
from ckpt.model.manifest import File, Fragment, FragmentRef, Manifest
from ckpt.model.record_encoding import MAX_RECORD_BYTES, unpack
from ckpt.model.rollback import Rollback, current_branch, last_rollback, on_branch
from ckpt.model.validate import check_manifest
from ckpt.pipeline.retry import RetryPolicy, ask
from ckpt.root.claim_marker import is_being_removed
from ckpt.storage.api import (
    HasRoot,
    KeepsUnfinishedWrites,
    ObjectInfo,
    StorageBackend,
    UnfinishedWrite,
    read_record,
)

T = TypeVar("T")

_RETRY: Final = RetryPolicy()
_MOST_CHECKED_ATTEMPTS: Final = 8
"""How many of the newest attempts are checked for a manifest, to name the newest committed steps in
an error message.

Each check is a request, and a store may be slow to answer.
"""
_LISTING_THRESHOLD: Final = 16
"""From this number of attempts on, a listing of all keys may replace a request for each of them."""
_KEYS_PER_REQUEST: Final = 100
"""How many keys are listed at most for each request that the listing may save."""
_MOST_NAMED_STEPS: Final = 5
_MOST_FOREIGN_OBJECTS: Final = 1000
"""How many objects are listed to describe a root that has no steps."""


@dataclass(frozen=True, slots=True)
class RootContents:
    """What a root has.

    Attributes:
        refs: Every attempt at a step, committed or not, newest step first.
        rollback: The rollback that counts; None if there is none.
    """

    refs: list[StepRef]
    rollback: Rollback | None = None

    @property
    def on_branch(self) -> list[StepRef]:
        """Those of ``refs`` that are on the current branch."""
        return on_branch(self.rollback, self.refs)


def list_root(backend: StorageBackend) -> RootContents:
    """Return the attempts and the rollback of a store. Folders with other names are ignored.

    This is one request if there is no rollback.
    """
    names = ask(backend, lambda: list(backend.folders("")))
    refs = sorted((ref for ref in map(parse_folder, names) if ref is not None), reverse=True)
    return RootContents(refs, newest_rollback(backend) if ROLLBACKS in names else None)


def own_objects(backend: StorageBackend, ref: StepRef) -> list[ObjectInfo]:
    """Return the objects in the folder of an attempt that have names of checkpoint files."""
    folder = f"{ref.folder}/"
    objects = ask(backend, lambda: list(backend.list(folder)))
    return [info for info in objects if is_file_name(info.key.removeprefix(folder))]


def unfinished_of(backend: StorageBackend, ref: StepRef) -> tuple[UnfinishedWrite, ...]:
    """Return the unfinished writes to objects of an attempt that have names of checkpoint files.

    The result is empty if the store does not keep unfinished writes.
    """
    if not isinstance(backend, KeepsUnfinishedWrites):
        return ()
    folder = f"{ref.folder}/"
    writes = ask(backend, lambda: list(backend.unfinished_writes(folder)))
    return tuple(write for write in writes if is_file_name(write.key.removeprefix(folder)))


def is_committed(backend: StorageBackend, ref: StepRef) -> bool:
    """Return True if the store has a manifest for ``ref``. An empty file is none."""
    return ask(backend, partial(has_manifest, backend, ref))


def committed(backend: StorageBackend) -> list[StepRef]:
    """Return the attempts with a manifest, newest step first. Those of abandoned branches come
    last.
    """
    listing = list_root(backend)
    present, branch = committed_among(backend, listing.refs), set(listing.on_branch)
    return sorted(
        (ref for ref in listing.refs if ref in present), key=lambda ref: ref not in branch
    )


def committed_among(backend: StorageBackend, refs: Collection[StepRef]) -> set[StepRef]:
    """Return those of ``refs`` that have a manifest.

    On an object store with many steps of few ranks, a listing of all keys takes fewer requests than
    one request for each step: a page has a thousand keys. An attempt without a manifest in the
    listing is asked for.
    """
    present: set[StepRef] = set()
    if _is_listed_at_once(backend, refs):
        limit = len(refs) * _KEYS_PER_REQUEST
        ending = f"/{MANIFEST}"
        # ``is_of_manifest`` tells by the size whether an object is a manifest or a tombstone.
        keys = ask(
            backend,
            lambda: [
                info.key
                for info in islice(backend.list(STEP_PREFIX), limit)
                if info.key.endswith(ending) and is_of_manifest(info.size)
            ],
        )
        folders = (key.removesuffix(ending) for key in keys)
        present = {ref for ref in map(parse_folder, folders) if ref is not None}
    return {ref for ref in refs if ref in present or is_committed(backend, ref)}


def _is_listed_at_once(backend: StorageBackend, refs: Collection[StepRef]) -> bool:
    return len(refs) >= _LISTING_THRESHOLD and not isinstance(backend, HasRoot)


def objects_by_one_listing(
    backend: StorageBackend, refs: Collection[StepRef]
) -> dict[StepRef, tuple[ObjectInfo, ...]]:
    """Return the objects with names of checkpoint files in the folder of each of ``refs``, by one
    listing of all keys. Attempts without such objects are left out. Return an empty dict if a
    listing for each of ``refs`` may take fewer requests.
    """
    if not _is_listed_at_once(backend, refs):
        return {}
    limit = len(refs) * _KEYS_PER_REQUEST
    infos = ask(backend, lambda: list(islice(backend.list(STEP_PREFIX), limit + 1)))
    if len(infos) > limit:
        return {}
    objects_by_ref: dict[StepRef, list[ObjectInfo]] = {}
    for info in infos:
        folder, _, name = info.key.partition("/")
        if is_file_name(name) and (ref := parse_folder(folder)) is not None:
            objects_by_ref.setdefault(ref, []).append(info)
    return {ref: tuple(objects_by_ref[ref]) for ref in refs if ref in objects_by_ref}


class Listing:
    """The steps on some stores whose manifests can be read.

    A manifest in a format that this ckpt cannot read counts as one that can be read. Each manifest
    is read once.

    The methods raise ``AccessDenied`` and ``TransientStorageError`` if a store denies access or
    does not answer.

    Args:
        stores: The stores.
        check_open: Raises if the owner of the stores has closed them.
    """

    def __init__(
        self,
        stores: Sequence[StorageBackend],
        check_open: Callable[[], None] = lambda: None,
    ) -> None:
        self._check_open = check_open
        # Each store with the steps whose manifests were intact. These are not read again.
        self._stores = [(store, set[StepRef]()) for store in stores]

    @with_short_traceback
    def steps(self, rollback: Rollback | None = None) -> list[int]:
        """Return the numbers of the steps of the current branch, ascending.

        ``rollback`` is one that may not be on the stores yet.
        """
        self._check_open()
        refs = set[StepRef]()
        for store, intact in self._stores:
            listing = list_root(store)
            rollback = last_rollback([rollback, listing.rollback])
            present = committed_among(store, listing.refs)
            refs |= {ref for ref in present if _can_be_read(store, ref, intact)}
        return sorted({ref.step for ref in current_branch(rollback, refs)})

    @with_short_traceback
    def latest(self, rollback: Rollback | None = None) -> int | None:
        """Return the number of the newest step of the current branch, or None if there is none.

        ``rollback`` is one that may not be on the stores yet.
        """
        self._check_open()
        listings = [list_root(store) for store, _ in self._stores]
        rollback = last_rollback([rollback, *(item.rollback for item in listings)])
        # If the branch has no step any more, all steps count.
        for is_chosen in (lambda ref: bool(on_branch(rollback, [ref])), lambda _: True):
            newest = (
                _newest(store, filter(is_chosen, listing.refs), intact)
                for (store, intact), listing in zip(self._stores, listings, strict=True)
            )
            if present := [ref.step for ref in newest if ref is not None]:
                return max(present)
        return None


def _newest(store: StorageBackend, refs: Iterable[StepRef], intact: set[StepRef]) -> StepRef | None:
    """Return the first of ``refs`` that is committed and whose manifest can be read, or None."""
    return next(
        (ref for ref in refs if is_committed(store, ref) and _can_be_read(store, ref, intact)),
        None,
    )


def _can_be_read(store: StorageBackend, ref: StepRef, intact: set[StepRef]) -> bool:
    """Return True if the manifest of ``ref`` can be read. Those in ``intact`` are not read again,
    and the others are added to it.
    """
    if ref not in intact and _is_intact(store, ref):
        intact.add(ref)
    return ref in intact


def _is_intact(backend: StorageBackend, ref: StepRef) -> bool:
    """Return True if the manifest of ``ref`` can be read, or has another format."""
    try:
        read_packed(backend, ref)
    except FormatUnsupported:
        return True
    except LinkRefused:  # An ``AccessDenied`` that is about this object alone
        return False
    except (AccessDenied, TransientStorageError):
        raise
    except (IntegrityError, StorageError):
        return False
    return True


def read_manifest(
    backend: StorageBackend, ref: StepRef, *, retry: RetryPolicy = _RETRY
) -> Manifest:
    """Return the manifest of a committed step, checked, with all of its fragments filled in.

    Raises:
        ObjectNotFound: The step is not committed here, or a fragment is missing.
        ManifestCorrupt, ChecksumMismatch: The manifest or a fragment is damaged.
        FormatUnsupported: This ckpt cannot read the format of the checkpoint.
    """
    manifest, _ = read_packed(backend, ref, retry=retry)

    def read(fragment_ref: FragmentRef, file: File | None) -> Fragment:
        load = partial(load_fragment, backend, ref, manifest, fragment_ref, file)
        fragment, _ = retry.call(load)
        return fragment

    with errors_of(backend.url):
        return fill_from(manifest, read, None, key=ref.manifest)


def read_packed(
    backend: StorageBackend, ref: StepRef, *, retry: RetryPolicy = _RETRY
) -> tuple[Manifest, bytes]:
    """Return the manifest as it is stored, checked, and the bytes of its record.

    No fragment is read. Raises the errors of ``read_manifest``.
    """

    def decode(data: bytes) -> tuple[Manifest, bytes]:
        if data == TOMBSTONE:
            raise ObjectNotFound(ref.manifest, "it was removed")
        manifest = check_manifest(unpack(data, Manifest, key=ref.manifest), key=ref.manifest)
        check_place(StepRef(manifest.step, manifest.attempt), ref)
        return manifest, data

    read = partial(read_record, backend, ref.manifest, decode, limit=MAX_RECORD_BYTES)
    with errors_of(backend.url):
        return retry.call(read)


def check_place(manifest_ref: StepRef, ref: StepRef) -> None:
    """Check that a manifest is in the folder that it belongs to.

    Args:
        manifest_ref: The attempt that the manifest names.
        ref: The attempt in whose folder it was found.

    Raises:
        ManifestCorrupt: The manifest is that of another attempt.
    """
    if manifest_ref != ref:
        raise ManifestCorrupt(
            ref.manifest,
            f"it is that of step {manifest_ref.step}, attempt {manifest_ref.attempt[:40]!r}",
        )


def find(backend: StorageBackend, step: StepId | None) -> list[StepRef]:
    """Return the committed attempts at ``step``, or the attempt ``step`` (None: all attempts at any
    step), newest step first.

    Steps of the current branch come before those of abandoned branches. Of several attempts at a
    step, the one with the youngest manifest comes first. An attempt whose manifest is damaged comes
    after the others at its step.

    Raises:
        NoCheckpoint: There is no such attempt. The ``detail`` of the error describes what the store
            has instead.
    """
    listing = list_root(backend)
    all_refs, branch = listing.refs, set(listing.on_branch)
    wanted_refs = [ref for ref in all_refs if step in (None, ref.step, ref)]
    present = committed_among(backend, wanted_refs)
    refs = [ref for ref in all_refs if ref in present]
    if not refs:
        number = step.step if isinstance(step, StepRef) else step
        raise NoCheckpoint(backend.url, why_missing(backend, all_refs, number))
    attempts_at = Counter(ref.step for ref in refs)
    creation_times = {
        ref: creation_time(backend, ref) if attempts_at[ref.step] > 1 else 0.0 for ref in refs
    }
    return sorted(
        refs, key=lambda ref: (ref in branch, ref.step, creation_times[ref]), reverse=True
    )


def creation_time(backend: StorageBackend, ref: StepRef) -> float:
    """Return when the manifest of an attempt was made, in seconds since 1970.

    Return 0 if the manifest is missing, damaged, behind a link that is refused, unreadable or in an
    unsupported format. The error is raised when the manifest is read again later.

    Raises:
        AccessDenied, TransientStorageError: The store denies access or does not answer.
    """
    try:
        manifest, _ = read_packed(backend, ref)
    except LinkRefused:  # An ``AccessDenied`` that is about this object alone
        return 0.0
    except (AccessDenied, TransientStorageError):
        raise
    except (IntegrityError, StorageError):
        return 0.0
    return manifest.created_at


def _newest_steps_clause(backend: StorageBackend, refs: Collection[StepRef]) -> str:
    """Return a clause that names the newest committed steps of the current branch.

    The clause is empty if none of the newest ``_MOST_CHECKED_ATTEMPTS`` attempts of the branch in
    ``refs`` is committed.
    """
    branch = current_branch(newest_rollback(backend), refs)
    newest = dict.fromkeys(
        ref.step for ref in branch[:_MOST_CHECKED_ATTEMPTS] if is_committed(backend, ref)
    )
    if not newest:
        return ""
    numbers = list(map(str, newest))[:_MOST_NAMED_STEPS]
    return f"; the newest {'are' if len(numbers) > 1 else 'is'} {', '.join(numbers)}"


def _is_of_dcp(key: str) -> bool:
    """Return True if an object has the name of a file of torch.distributed.checkpoint."""
    name = key.rpartition("/")[2]
    return name == ".metadata" or name.endswith(".distcp")


def why_missing(backend: StorageBackend, refs: list[StepRef], step: int | None) -> str:
    """Return a text that describes what a store has instead of ``step`` (None: of any step).

    ``refs`` are all attempts on the store, and none of them that fits is committed.
    """
    if attempts := [ref for ref in refs if ref.step == step]:
        if any(ask(backend, partial(has_tombstone, backend, ref)) for ref in attempts):
            return f"step {step} was removed"
        if any(ask(backend, partial(is_being_removed, backend, ref)) for ref in attempts):
            return f"step {step} is being removed"
        return f"step {step} was begun, but never committed"
    if refs and step is not None:
        return f"step {step} is not there{_newest_steps_clause(backend, refs)}"
    if refs:
        return f"{len(refs)} save(s) were begun, none was committed"
    foreign_keys = [
        info.key for info in islice(backend.list(""), _MOST_FOREIGN_OBJECTS) if info.key != OWNER
    ]
    if not foreign_keys:
        return "it is empty, or does not exist"
    if (dcp_key := min(filter(_is_of_dcp, foreign_keys), default=None)) is not None:
        return (
            f"it holds files of torch.distributed.checkpoint, such as {dcp_key!r}: that reads them "
            "with its own FileSystemReader, and ckpt adopt makes a step of such a folder"
        )
    folders = sorted({*map(_root_of, foreign_keys)} - {""})
    if len(folders) == 1:
        return f"it holds no steps, but its folder {folders[0]!r} does: give that one"
    if folders:
        return f"it holds no steps, but its folders {few(folders)} do: give one of them"
    return (
        f"it holds no steps, but other files, such as {foreign_keys[0]!r}: is this the right place?"
    )


def _root_of(key: str) -> str:
    """Return the folder that holds the step to which an object belongs, or "" if it is of none."""
    *parents, _ = key.split("/")
    depth = next((index for index, name in enumerate(parents) if parse_folder(name)), 0)
    return "/".join(parents[:depth])

"""The inventory of a tier: its steps with their states, sizes and ages.

Only the fields of a manifest that are cheap to decode are decoded (its *outline*), and no data file
is read. But the inventory checks that each file of a manifest exists and is not shorter than the
manifest says. Otherwise retention could keep a step that has lost files as the newest step, and
remove an older step that is complete.

Each try of a job at a step is an *attempt*, which a `StepRef` names. A *fragment* is the record of
what one rank has written, and a manifest may *carry* copies of them. An *increment* is a data file
that leaves out the chunks that the file of an older step, its *base*, also has. The *outer* bases
are those in other roots, and *heirs* of a step are the steps that refer to its files. *Late*
metrics were added after the commit. A *pin* keeps a step from being removed, and is *live* until it
ends. A *rollback* is the record that the run goes on from an older step: the later ones are
*abandoned*. A removal begins with a *claim marker* in the folder, and may leave a *tombstone* in
the place of the manifest. The *staged* size of a step is that of its data files before any codec. A
file of another program, which is not in the folder of the step, has a *location*.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile
from typing import Final, Literal

import msgspec

from ckpt.catalog.foreign_files import check_locations
from ckpt.catalog.late_metrics import late_metrics, with_late
from ckpt.catalog.outer_bases import OuterBases
from ckpt.catalog.step_listing import (
    check_place,
    committed_among,
    is_committed,
    list_root,
    objects_by_one_listing,
    own_objects,
    unfinished_of,
)
from ckpt.coordination.tombstone import is_of_manifest
from ckpt.errors import (
    AccessDenied,
    FormatUnsupported,
    IntegrityError,
    LinkRefused,
    ManifestCorrupt,
    ObjectNotFound,
    StorageError,
    TransientStorageError,
    errors_of,
)
from ckpt.model.keys import BaseRef, StepRef, fragment_name, is_fragment
from ckpt.model.manifest import Encoding, Increment, Location, bases_of, refs_in_same_root
from ckpt.model.metrics import metrics_of
from ckpt.model.record_encoding import MAX_RECORD_BYTES, Record, unpack
from ckpt.model.rollback import Rollback
from ckpt.model.values import parse
from ckpt.pipeline.retry import RetryPolicy
from ckpt.pipeline.workers import Workers
from ckpt.root.claim_marker import is_removal_marker
from ckpt.root.pins import Pin, all_pins, live_pins_by_ref
from ckpt.storage.api import ObjectInfo, StorageBackend, UnfinishedWrite, read_record

_READER_THREADS: Final = 8
State = Literal["committed", "damaged", "incomplete", "unsupported"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredStep:
    """One attempt at a step, as an inventory describes it.

    The attributes from ``created_at`` to ``bases`` come from the manifest. They are empty or
    0 unless the state is "committed".

    Attributes:
        objects: The files in the folder of the step that have names of checkpoint files.
        state: A "committed" step has a manifest and all files that the manifest names. On a tier
            that holds only a part of each step, it has all files of the ranks whose fragments are
            on the tier. The bytes of the files were not read. A "damaged" step has a manifest that
            is damaged or names files that are missing or were cut, or it refers to a step that is
            gone. An "incomplete" step has no manifest. An "unsupported" step has a manifest in a
            format that this ckpt cannot read.
        reason: Why the step is "damaged" or "unsupported".
        created_at: When the manifest was made, in seconds since 1970.
        ranks: The number of ranks that saved the step.
        tensors: The number of tensors.
        codecs: The names of the codecs of the data files.
        metadata: The user's metadata, with the metrics that were added later.
        metrics: The metrics in ``metadata``.
        staged_bytes: The size of the images of all ranks.
        bases: The older steps whose files hold a part of the images. A "damaged" step has them if
            all of them are there and its outer bases are known, since these may come back.
        outer_bases: The steps in other roots whose files do. A "damaged" step has them too if it
            is damaged since one of them, or a file that it was adopted from, is gone.
        last_change: When a file of the step was last put or an unfinished write last changed, in
            seconds since 1970. None if neither the store nor a fragment has a date, or if the step
            is "committed" or "unsupported".
        unfinished_writes: The unfinished writes to files of the step. They are listed only for an
            "incomplete" or "damaged" step. If the inventory is ``for_display``, they are listed
            only for a step without ``objects``.
        is_part: Whether the step is "incomplete" on this tier, but may be a checkpoint whose
            manifest is on another node. This is so if nodes have tiers of their own, and this tier
            has the data file and the fragment of some rank, so that the rank has made its part
            durable.
        has_removal_begun: Whether the folder of an "incomplete" or "damaged" step has the claim
            marker that the removal of a checkpoint puts first. No process makes such a step a
            checkpoint again. The value is always False for other states.
        pins: The pins on the step that have not ended.
        is_abandoned: Whether a rollback on this tier has abandoned the step.
        follows_rollback: Whether the step was saved after the last rollback on this tier.
        is_adopted: Whether data files of the step are files of another program, outside of its
            folder.
    """

    ref: StepRef
    objects: tuple[ObjectInfo, ...]
    state: State
    reason: str = ""
    created_at: float = 0.0
    ranks: int = 0
    tensors: int = 0
    codecs: tuple[str, ...] = ()
    metadata: msgspec.Raw = field(default_factory=msgspec.Raw)
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    staged_bytes: int = 0
    bases: frozenset[StepRef] = frozenset()
    outer_bases: frozenset[BaseRef] = frozenset()
    last_change: float | None = None
    unfinished_writes: tuple[UnfinishedWrite, ...] = ()
    is_part: bool = False
    has_removal_begun: bool = False
    pins: tuple[Pin, ...] = ()
    is_abandoned: bool = False
    follows_rollback: bool = False
    is_adopted: bool = False

    @property
    def is_empty(self) -> bool:
        """Return True if the folder of the step has neither files nor unfinished writes, except for
        a tombstone in place of the manifest.
        """
        files = [info for info in self.objects if info.key != self.ref.manifest]
        return self.state == "incomplete" and not files and not self.unfinished_writes

    @property
    def nbytes(self) -> int:
        """Return how many bytes ``objects`` and ``unfinished_writes`` take on the tier."""
        return sum(info.size for info in self.objects) + sum(
            write.size for write in self.unfinished_writes
        )

    @property
    def stored_bytes(self) -> int:
        """Return the size of the data files on the tier, in bytes."""
        return sum(info.size for info in self.objects if _is_data(info.key))

    @property
    def finished_ranks(self) -> int:
        """Return the number of ranks whose fragments are on the tier."""
        return sum(is_fragment(info.name) for info in self.objects)


class Inventory:
    """The steps of a tier with their states, sizes and ages.

    An inventory remembers committed steps from one ``look`` to the next, since a committed step
    changes only by metrics that are added and by copies of files of other nodes. Each ``look``
    costs a listing of the root, a listing of the pins, and some requests for each attempt that it
    does not remember. Call ``confirm`` before a removal that relies on remembered steps: another
    process may have begun to remove one, whose folder is still listed.

    ``_committed_steps`` are the steps that the inventory remembers. ``_committed_refs`` are
    attempts that were found to have a manifest in a search for attempts without one.
    ``_outer_bases`` knows which steps in other roots still exist. The current *branch* has no
    abandoned steps.

    Args:
        part: Whether the tier may have only a part of each step, because each node has a tier of
            its own.
        late_metrics: Whether remembered steps are listed again, to find metrics that were added
            since. That costs one listing for each step, or on an object store one for all. With
            ``part`` they always are.
        for_display: Whether the steps are only shown to people. Then several threads read the new
            steps, and a step that cannot be read is reported as "damaged". A folder without files
            and unfinished writes is left out: it is what is left of a removed step while a process
            still reads it.

    Thread safety:
        One thread at a time.
    """

    def __init__(
        self,
        backend: StorageBackend,
        *,
        part: bool = False,
        late_metrics: bool = False,
        for_display: bool = False,
    ) -> None:
        self._backend, self._retry, self._is_partial = backend, RetryPolicy(), part
        self._outer_bases = OuterBases(backend, self._retry)
        self._wants_late_metrics, self._for_display = late_metrics, for_display
        readers = min(_READER_THREADS, backend.capabilities.max_concurrency) if for_display else 1
        self._workers = Workers("list", max(1, readers))
        self._committed_steps: dict[StepRef, StoredStep] = {}
        self._committed_refs: set[StepRef] = set()  # Those that a look for begun attempts has seen
        self._listing: dict[StepRef, tuple[ObjectInfo, ...]] = {}  # Valid within one ``look``
        self.pins: list[Pin] = []  # All pins that the last ``look`` found, including ended ones
        self.rollback: Rollback | None = None  # The one that counts, as of the last ``look``

    @property
    def metrics(self) -> list[Mapping[str, float]]:
        """Return the metrics of each committed step that the last ``look`` found."""
        return [step.metrics for step in self._committed_steps.values()]

    def look(
        self,
        *,
        without_manifest: bool = False,
        among: Container[StepRef] | None = None,
        newest: int | None = None,
    ) -> list[StoredStep]:
        """Return all attempts on the tier, newest step first.

        Args:
            without_manifest: Return only the attempts without a manifest.
            among: Return only these attempts; None for all.
            newest: Return only the attempts at so many of the newest steps, and read no others.

        Raises:
            StorageError: The tier cannot be listed, or a step cannot be read. If the inventory is
                ``for_display``, a step that cannot be read raises only if the store denies access
                or does not answer.
        """
        listing = list_root(self._backend)
        refs, self.rollback = listing.refs, listing.rollback
        if among is not None:
            refs = [ref for ref in refs if ref in among]
        if without_manifest:
            refs = self._refs_without_manifest(refs)
        lists_all = not without_manifest and newest is None
        self._listing = (
            objects_by_one_listing(self._backend, self._refs_to_list(refs)) if lists_all else {}
        )
        with errors_of(self._backend.url):
            steps: list[StoredStep] = []
            while refs and (newest is None or len({step.ref.step for step in steps}) < newest):
                count = None if newest is None else newest - len({step.ref.step for step in steps})
                next_refs, refs = _split_newest(refs, count)
                steps += (
                    self._shown_steps(next_refs)
                    if self._for_display
                    else map(self._step, next_refs)
                )
            self.pins = all_pins(self._backend)
        self._committed_steps = {step.ref: step for step in steps if step.state == "committed"}
        live_pins, present_refs = live_pins_by_ref(self.pins, listing.refs), set(listing.refs)
        absent_bases = self._outer_bases.absent(base for step in steps for base in step.outer_bases)
        steps = [
            _damaged_without_bases(step, step.bases - present_refs, step.outer_bases & absent_bases)
            if not step.bases <= present_refs or step.outer_bases & absent_bases
            else step
            for step in steps
        ]
        return [
            self._with_branch_flags(
                replace(step, pins=live_pins[step.ref]) if step.ref in live_pins else step
            )
            for step in steps
        ]

    def _with_branch_flags(self, step: StoredStep) -> StoredStep:
        """Return ``step`` with its place in the history of the run."""
        rollback = self.rollback
        if rollback is None:
            return step
        is_abandoned, follows = not rollback.keeps(step.ref), rollback.precedes(step.ref)
        return replace(step, is_abandoned=is_abandoned, follows_rollback=follows)

    def newest_begun(self, refs: Iterable[StepRef]) -> list[StoredStep]:
        """Return those of ``refs``, the attempts of the tier, that come before the first with a
        manifest.
        """
        self._listing = {}
        open_refs = list(takewhile(lambda ref: not is_committed(self._backend, ref), refs))
        with errors_of(self._backend.url):
            steps = [self._step(ref) for ref in open_refs]
            live_pins = live_pins_by_ref(all_pins(self._backend), open_refs) if steps else {}
        return [replace(step, pins=live_pins.get(step.ref, ())) for step in steps]

    def confirm(self, refs: Iterable[StepRef]) -> bool:
        """Return True if the steps among ``refs`` that the inventory remembers still have a
        manifest. It forgets those that have none.
        """
        committed_refs = [ref for ref in refs if ref in self._committed_steps]
        absent = set(committed_refs) - committed_among(self._backend, committed_refs)
        for ref in absent:
            del self._committed_steps[ref]
        return not absent

    def _refs_without_manifest(self, refs: Sequence[StepRef]) -> list[StepRef]:
        """Return those of ``refs`` that have no manifest. One that had a manifest before is not
        asked for again.
        """
        self._committed_refs.intersection_update(refs)
        unknown_refs = [ref for ref in refs if ref not in self._committed_refs]
        committed_refs = committed_among(self._backend, unknown_refs)
        self._committed_refs |= committed_refs
        return [ref for ref in unknown_refs if ref not in committed_refs]

    @property
    def _lists_again(self) -> bool:
        return self._wants_late_metrics or self._is_partial

    def _refs_to_list(self, refs: Sequence[StepRef]) -> list[StepRef]:
        """Return those of ``refs`` that a look has to list."""
        return [ref for ref in refs if self._lists_again or ref not in self._committed_steps]

    def _shown_steps(self, refs: Sequence[StepRef]) -> list[StoredStep]:
        """Return the attempts ``refs`` for people, without the empty ones. Several threads read."""
        new = [ref for ref in refs if ref not in self._committed_steps]
        read = self._workers.run_all(partial(self._shown_step, ref) for ref in new)
        by_ref = self._committed_steps | {step.ref: step for step in read if not step.is_empty}
        return [by_ref[ref] for ref in refs if ref in by_ref]

    def _shown_step(self, ref: StepRef) -> StoredStep:
        """Return one attempt with its state, which is "damaged" if it cannot be read."""
        try:
            return self._step(ref)
        except (AccessDenied, TransientStorageError):
            raise
        except StorageError as error:
            return StoredStep(ref=ref, objects=(), state="damaged", reason=_reason(error))

    def _step(self, ref: StepRef) -> StoredStep:
        """Return one attempt with its state. A remembered step is not read again."""
        if (
            ref in self._committed_steps
            and (step := self._refresh(self._committed_steps[ref])) is not None
        ):
            return step
        objects = self._listing.get(ref, ())
        # What is not a checkpoint in the listing may have become one since.
        if not (has_manifest := _has_manifest(ref, objects)):
            has_manifest = is_committed(self._backend, ref)
            objects = tuple(own_objects(self._backend, ref))
        state: State = "incomplete"
        reason = ""
        if has_manifest:
            try:
                return self._checked_step(ref, objects, self._outline(ref))
            except ObjectNotFound:  # The step was removed meanwhile
                has_manifest = False
            except FormatUnsupported as error:
                return StoredStep(
                    ref=ref, objects=objects, state="unsupported", reason=_reason(error)
                )
            except IntegrityError as error:
                # Otherwise a tombstone has taken the place of the manifest meanwhile.
                if has_manifest := is_committed(self._backend, ref):
                    state, reason = "damaged", _reason(error)
        skips_writes = self._for_display and objects
        writes = () if skips_writes else unfinished_of(self._backend, ref)
        # The size of the claim marker tells whether a removal has put it.
        has_removal_begun = any(
            info.key == ref.claim_marker and is_removal_marker(info.size) for info in objects
        )
        dates = (self._last_change(ref, objects), *(write.modified for write in writes))
        return StoredStep(
            ref=ref,
            objects=objects,
            state=state,
            reason=reason,
            last_change=max((date for date in dates if date), default=None),
            unfinished_writes=writes,
            is_part=self._is_partial
            and not has_manifest
            and not has_removal_begun
            and _has_whole_rank(objects),
            has_removal_begun=has_removal_begun,
        )

    def _checked_step(
        self, ref: StepRef, objects: tuple[ObjectInfo, ...], outline: _Outline
    ) -> StoredStep:
        """Return a step that has a manifest, after a check of its files and its metadata.

        Raises:
            IntegrityError: Files that the manifest names are missing or cut, or its metadata is
                damaged.
        """
        locations = {location.rank: location.path for location in outline.locations}
        files = self._expected_files(objects, outline)
        own_files = [file for file in files if file.rank not in locations]
        if faults := self._faults(ref, objects, outline, own_files):
            raise ManifestCorrupt(ref.manifest, _summary(faults))
        sizes = {locations[file.rank]: file.size for file in files if file.rank in locations}
        check_locations(self._backend, ref, sizes, self._retry)
        if self._is_partial and not files:
            raise ManifestCorrupt(ref.manifest, "none of its files is here")
        parse(outline.metadata, "metadata")  # Raises an error if it is damaged
        bases = bases_of(outline.increments)
        outer_bases = frozenset(base for base in bases if base.root)
        if fault := self._outer_bases.fault_of(outline.increments):
            return StoredStep(
                ref=ref,
                objects=objects,
                state="damaged",
                reason=fault,
                bases=refs_in_same_root(bases),
                outer_bases=outer_bases,
            )
        step = StoredStep(
            ref=ref,
            objects=objects,
            state="committed",
            created_at=outline.created_at,
            ranks=outline.world_size,
            tensors=len(outline.layout_of),  # One entry for each tensor
            codecs=tuple(sorted({encoding.codec for encoding in outline.encoded})),
            metadata=outline.metadata.copy(),  # A view would keep the whole manifest in memory
            staged_bytes=sum(file.size for file in files),
            is_adopted=bool(locations),
            bases=refs_in_same_root(bases),
            outer_bases=outer_bases,
        )
        return self._with_late_metrics(step, objects)

    def _refresh(self, step: StoredStep) -> StoredStep | None:
        """Return a remembered step, with the metrics and the copies of files of other nodes that
        were added since. Return None if the step was listed again, and has no manifest any more.
        """
        if not self._lists_again:
            return step
        objects = self._listing.get(step.ref) or tuple(own_objects(self._backend, step.ref))
        if not _has_manifest(step.ref, objects):
            return None
        # Compare the keys and not their number: a file, such as a claim marker, may also have gone.
        return (
            step
            if _keys(objects) == _keys(step.objects)
            else self._with_late_metrics(step, objects)
        )

    def _with_late_metrics(self, step: StoredStep, objects: tuple[ObjectInfo, ...]) -> StoredStep:
        new_metrics = late_metrics(self._backend, step.ref, [info.key for info in objects])
        metadata = with_late(step.metadata, new_metrics)
        return replace(step, objects=objects, metadata=metadata, metrics=metrics_of(metadata))

    def _faults(
        self,
        ref: StepRef,
        objects: Sequence[ObjectInfo],
        outline: _Outline,
        files: Sequence[_NamedFile],
    ) -> list[tuple[str, int | None]]:
        """Return the names of those files among ``files`` and the fragments of the step that are
        missing or shorter than the manifest says, with their sizes (None if missing).

        Fragments that the manifest carries are not needed. If the tier has only a part of each
        step, only the fragments of the ranks of ``files`` are needed. A listing may lag behind, so
        each file that is not in ``objects`` as a whole is looked up by a request of its own.
        """
        stored_sizes = {encoding.rank: encoding.size for encoding in outline.encoded}
        stored_sizes |= {increment.rank: increment.size for increment in outline.increments}
        expected_sizes = {
            ref.key(file.name): stored_sizes.get(file.rank, file.size) for file in files
        }
        if not outline.carried:
            ranks = {file.rank for file in files}
            expected_sizes |= {
                ref.key(fragment_ref.name): fragment_ref.size
                for fragment_ref in outline.fragments
                if not self._is_partial or fragment_ref.rank in ranks
            }
        sizes = {info.key: info.size for info in objects}
        # A file that is not listed counts as shorter than an empty one.
        suspect_keys = [key for key, size in expected_sizes.items() if sizes.get(key, -1) < size]
        actual_sizes = [(key, self._size_of(key)) for key in suspect_keys]
        return [
            (key.removeprefix(f"{ref.folder}/"), size)
            for key, size in actual_sizes
            if size is None or size < expected_sizes[key]
        ]

    def _expected_files(
        self, objects: Sequence[ObjectInfo], outline: _Outline
    ) -> Sequence[_NamedFile]:
        """Return the data files that the tier must have.

        These are all data files of the step. If the tier has only a part of each step, they are
        those of the ranks whose fragments are on the tier. A data file without its fragment is then
        an interrupted copy for another node, and is not needed.
        """
        if not self._is_partial:
            return outline.files
        names = {info.name for info in objects}
        return [file for file in outline.files if fragment_name(file.rank) in names]

    def _outline(self, ref: StepRef) -> _Outline:
        """Read the cheap fields of the manifest of a step.

        Raises:
            ObjectNotFound: There is no manifest.
            IntegrityError: The manifest is damaged or cannot be read.
            AccessDenied, TransientStorageError: The store denies access or does not answer. The
                checkpoint may be intact.
        """
        try:
            outline = self._read(ref.manifest, _Outline)
        except LinkRefused as error:
            raise ManifestCorrupt(ref.manifest, error.what) from None
        except (AccessDenied, ObjectNotFound, TransientStorageError):
            raise
        except StorageError as error:
            raise ManifestCorrupt(ref.manifest, f"cannot be read: {error.detail}") from None
        check_place(StepRef(outline.step, outline.attempt), ref)
        return outline

    def _read(self, key: str, kind: type[Record]) -> Record:
        decode = partial(unpack, kind=kind, key=key)
        return self._retry.call(
            partial(read_record, self._backend, key, decode, limit=MAX_RECORD_BYTES)
        )

    def _size_of(self, key: str) -> int | None:
        try:
            return self._retry.call(partial(self._backend.head, key)).size
        except (LinkRefused, ObjectNotFound):
            return None

    def _last_change(self, ref: StepRef, objects: Sequence[ObjectInfo]) -> float | None:
        """Return when the youngest of ``objects`` was put, in seconds since 1970.

        If the store lacks dates, the dates in the fragments are used. Return None if there is no
        date.
        """
        dates = [info.modified for info in objects if info.modified is not None]
        if not dates or len(dates) < len(objects):
            for info in objects:
                with suppress(ObjectNotFound, IntegrityError):
                    if info.key.endswith(".json") and info.key != ref.manifest:
                        dates.append(self._read(info.key, _CreationTime).created_at)
        return max(dates, default=None)


def heirs_of(steps: Iterable[StoredStep]) -> dict[StepRef, list[StepRef]]:
    """Return the older steps that checkpoints of ``steps`` refer to, each with the steps that refer
    to it.
    """
    heirs: dict[StepRef, list[StepRef]] = {}
    for step in steps:
        for base in step.bases:
            heirs.setdefault(base, []).append(step.ref)
    return heirs


def _damaged_without_bases(
    step: StoredStep, absent_refs: Collection[StepRef], absent_bases: Collection[BaseRef]
) -> StoredStep:
    """Return a committed step as a damaged one, since the steps ``absent_refs`` on the tier and
    ``absent_bases`` in other roots that it refers to are gone.
    """
    own_text = ", ".join(str(ref.step) for ref in sorted(absent_refs))
    texts = [own_text] if own_text else []
    texts += [f"{base.ref.step} of {base.root}" for base in sorted(absent_bases)]
    return StoredStep(
        ref=step.ref,
        objects=step.objects,
        state="damaged",
        reason=f"step {', '.join(texts)}, which holds a part of it, is gone",
        pins=step.pins,
        bases=frozenset() if absent_refs else step.bases,
        outer_bases=step.outer_bases,
    )


def _split_newest(refs: list[StepRef], count: int | None) -> tuple[list[StepRef], list[StepRef]]:
    """Split ``refs``, newest step first, into the attempts at the ``count`` newest steps (None: all
    steps) and the others.
    """
    steps = list(dict.fromkeys(ref.step for ref in refs))[:count]
    end = sum(ref.step >= steps[-1] for ref in refs) if steps else 0
    return refs[:end], refs[end:]


def _reason(error: IntegrityError | StorageError) -> str:
    return error.detail if isinstance(error, ManifestCorrupt) else str(error)


def _summary(faults: Sequence[tuple[str, int | None]]) -> str:
    """Return the text about the first of ``faults``, and how many files have the same fault."""
    (name, size), *_ = faults
    if size is None:
        count = sum(file_size is None for _, file_size in faults)
        return f"{count} of its files {'is' if count == 1 else 'are'} gone, such as {name}"
    count = sum(file_size is not None for _, file_size in faults)
    was = "was" if count == 1 else "were"
    return f"{count} of its files {was} cut, such as {name}, which has {size} bytes"


def _keys(objects: Sequence[ObjectInfo]) -> set[str]:
    return {info.key for info in objects}


def _has_manifest(ref: StepRef, objects: Sequence[ObjectInfo]) -> bool:
    return any(info.key == ref.manifest and is_of_manifest(info.size) for info in objects)


def _is_data(name: str) -> bool:
    return name.endswith((".safetensors", ".encoded"))


def _has_whole_rank(objects: Sequence[ObjectInfo]) -> bool:
    """Return True if ``objects`` has both the data file and the fragment of some rank."""
    names = {info.name for info in objects}
    data = {name.partition(".")[0] for name in names if _is_data(name)}
    return any(f"{name}.json" in names for name in data)


class _NamedFile(msgspec.Struct, array_like=True):
    """The first fields of a ``File`` or of a ``FragmentRef``. The other fields are not decoded."""

    name: str
    rank: int
    size: int


class _CreationTime(msgspec.Struct):
    """The date of a fragment, without its other fields."""

    created_at: float


class _Outline(msgspec.Struct):
    """The fields of a manifest that are cheap to decode.

    A manifest may hold a million tensors, and decoding all of them would slow the training down.
    """

    step: int
    attempt: str
    world_size: int
    created_at: float
    files: tuple[_NamedFile, ...]
    metadata: msgspec.Raw
    layout_of: tuple[int, ...]
    encoded: tuple[Encoding, ...] = ()
    increments: tuple[Increment, ...] = ()
    fragments: tuple[_NamedFile, ...] = ()
    carried: msgspec.Raw = msgspec.Raw()
    locations: tuple[Location, ...] = ()

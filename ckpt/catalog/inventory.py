"""The inventory of a tier: which steps are whole, how big they are, and since when.

Of each manifest only what is cheap to decode is read, and no data file. A manifest without its
files is no reason to remove an older step that is whole, so each file is looked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, Literal

import msgspec

from ckpt.catalog.index import attempts, check_place, is_committed, own_objects, unfinished_of
from ckpt.catalog.late_metrics import late_metrics, with_late
from ckpt.catalog.pins import Pin, all_pins, live_of
from ckpt.coordination.claim_marker import is_removal_marker
from ckpt.errors import (
    AccessDenied,
    FormatUnsupported,
    IntegrityError,
    LinkRefused,
    ManifestCorrupt,
    ObjectNotFound,
    StorageError,
    TransientStorageError,
    about,
)
from ckpt.model.encoding import MAX_RECORD_BYTES, unpack
from ckpt.model.keys import StepRef, fragment_name, is_fragment
from ckpt.model.manifest import Encoding
from ckpt.model.metrics import metrics_of
from ckpt.model.values import parse
from ckpt.pipeline.retry import RetryPolicy
from ckpt.pipeline.workers import Workers
from ckpt.storage.api import ObjectInfo, StorageBackend, Unfinished, read_object

_READERS: Final = 8
State = Literal["committed", "damaged", "incomplete", "unsupported"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredStep:
    """One attempt at a step on the tier.

    Attributes:
        objects: Our files in its folder.
        unfinished: Writes to such files that were cut off or are under way. They are listed only
            for a step that is not "committed".
        state: "committed" has a manifest and all files that it names (if other nodes have theirs:
            all that belong to the fragments here); their bytes were not read. "damaged" has a
            manifest that cannot be trusted or names missing files. "incomplete" has no manifest.
            "unsupported" has a manifest in another format.
        reason: Why it is "damaged" or "unsupported".
        created_at: When its manifest was made. This and what follows are those of a manifest, and
            empty if the step is not "committed".
        metadata: The user's metadata, with the metrics that were added later.
        metrics: The metrics in ``metadata``.
        staged_bytes: The size of its data files before any codec.
        is_part: Whether it is "incomplete" here and may be a checkpoint all the same: if nodes have
            their own tiers, another node may have put the manifest. The fragment of a data file is
            here, so a rank of this node had its part durable. Other files may be a copy that a
            restore was making when it was killed.
        is_cut: Whether its removal was begun. No process makes it a checkpoint again.
        touched: When the youngest of its files was put; None if neither the store nor a fragment
            says, or if it is "committed".
        pins: The pins that hold it.
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
    touched: float | None = None
    unfinished: tuple[Unfinished, ...] = ()
    is_part: bool = False
    is_cut: bool = False
    pins: tuple[Pin, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes that it takes, unfinished writes included."""
        return sum(info.size for info in self.objects) + sum(cut.size for cut in self.unfinished)

    @property
    def stored_bytes(self) -> int:
        """Bytes of its data files on the tier."""
        return sum(info.size for info in self.objects if _is_data(info.key))

    @property
    def finished_ranks(self) -> int:
        """How many ranks have their fragments here."""
        return sum(is_fragment(info.key.rpartition("/")[2]) for info in self.objects)


class Inventory:
    """The steps of a tier.

    It remembers committed steps. Only their metrics and the copies of other nodes' files change.
    Each look costs a listing of the root, a listing of the pins, and one request for every known
    step.

    Args:
        part: Whether other nodes may have the rest of each step.
        late_metrics: Whether known steps are looked at again for metrics that were added since,
            for a listing each. With ``part`` they always are.
        shown: Whether the steps are only shown to people. Then a known step costs no request, new
            ones are read at once, and one that cannot be read is damaged.

    Thread safety:
        One thread at a time.
    """

    def __init__(
        self,
        backend: StorageBackend,
        *,
        part: bool = False,
        late_metrics: bool = False,
        shown: bool = False,
    ) -> None:
        self._backend, self._retry, self._part = backend, RetryPolicy(), part
        self._late_metrics, self._shown = late_metrics, shown
        readers = min(_READERS, backend.capabilities.max_concurrency) if shown else 1
        self._workers = Workers("list", max(1, readers))
        self._known: dict[StepRef, StoredStep] = {}
        self.pins: list[Pin] = []  # Pins of the last look, including ended ones

    @property
    def metrics(self) -> list[Mapping[str, float]]:
        """The metrics of the committed steps of the last look."""
        return [held.metrics for held in self._known.values()]

    def look(self, *, begun: bool = False) -> list[StoredStep]:
        """Return all attempts, newest step first; or only those that were ``begun`` and never
        committed.

        Raises:
            StorageError: The tier cannot be listed, or, unless the steps are only ``shown``, one of
                its steps cannot be.
        """
        refs = attempts(self._backend)
        if begun:
            refs = [ref for ref in refs if not is_committed(self._backend, ref)]
        with about(self._backend.url):
            if self._shown:
                new = [ref for ref in refs if ref not in self._known]
                read = self._workers.run_all(partial(self._shown_step, ref) for ref in new)
                by_ref = self._known | {held.ref: held for held in read}
                found = [by_ref[ref] for ref in refs]
            else:
                found = [self._step(ref) for ref in refs]
            self.pins = all_pins(self._backend)
        self._known = {held.ref: held for held in found if held.state == "committed"}
        live = live_of(self.pins)
        return [replace(held, pins=live.get(held.ref, ())) for held in found]

    def _shown_step(self, ref: StepRef) -> StoredStep:
        try:
            return self._step(ref)
        except (AccessDenied, TransientStorageError):
            raise
        except StorageError as error:
            return StoredStep(ref=ref, objects=(), state="damaged", reason=_reason(error))

    def _step(self, ref: StepRef) -> StoredStep:
        there = is_committed(self._backend, ref)
        if there and ref in self._known:
            return self._again(self._known[ref])
        objects = tuple(own_objects(self._backend, ref))
        state: State = "incomplete"
        reason = ""
        if there:
            try:
                return self._committed(ref, objects, self._outline(ref))
            except ObjectNotFound:  # The step was removed meanwhile
                there = False
            except FormatUnsupported as error:
                return StoredStep(
                    ref=ref, objects=objects, state="unsupported", reason=_reason(error)
                )
            except IntegrityError as error:
                state, reason = "damaged", _reason(error)
        unfinished = () if self._shown else unfinished_of(self._backend, ref)
        is_cut = any(
            info.key == ref.claim_marker and is_removal_marker(info.size) for info in objects
        )
        dates = (self._touched(ref, objects), *(cut.modified for cut in unfinished))
        return StoredStep(
            ref=ref,
            objects=objects,
            state=state,
            reason=reason,
            touched=max((date for date in dates if date), default=None),
            unfinished=unfinished,
            is_part=self._part and not there and not is_cut and _has_any_rank(objects),
            is_cut=is_cut,
        )

    def _committed(
        self, ref: StepRef, objects: tuple[ObjectInfo, ...], outline: _Outline
    ) -> StoredStep:
        """Return a step with a manifest.

        Raises:
            IntegrityError: Files that the manifest names are gone, or its metadata is damaged.
        """
        files = self._here(objects, outline)
        if gone := self._missing(ref, objects, outline, files):
            raise ManifestCorrupt(
                ref.manifest, f"{len(gone)} of its files are gone, such as {gone[0]}"
            )
        if self._part and not files:
            raise ManifestCorrupt(ref.manifest, "none of its files is here")
        parse(outline.metadata, "metadata")
        held = StoredStep(
            ref=ref,
            objects=objects,
            state="committed",
            created_at=outline.created_at,
            ranks=outline.world_size,
            tensors=len(outline.layout_of),
            codecs=tuple(sorted({encoding.codec for encoding in outline.encoded})),
            metadata=outline.metadata.copy(),  # A view keeps the whole manifest in memory
            staged_bytes=sum(file.size for file in files),
        )
        return self._with_late(held, objects)

    def _again(self, held: StoredStep) -> StoredStep:
        """Return a step that is known, with the metrics and the copies of other nodes' files that
        were added since.
        """
        if not (self._late_metrics or self._part):
            return held
        objects = tuple(own_objects(self._backend, held.ref))
        return held if len(objects) == len(held.objects) else self._with_late(held, objects)

    def _with_late(self, held: StoredStep, objects: tuple[ObjectInfo, ...]) -> StoredStep:
        late = late_metrics(self._backend, held.ref, [info.key for info in objects])
        metadata = with_late(held.metadata, late)
        return replace(held, objects=objects, metadata=metadata, metrics=metrics_of(metadata))

    def _missing(
        self,
        ref: StepRef,
        objects: Sequence[ObjectInfo],
        outline: _Outline,
        files: Sequence[_NamedFile],
    ) -> list[str]:
        """Return those of ``files``, and of the fragments that a restore needs, that the tier does
        not have.

        A listing may lag behind, so each name that it lacks is asked for.
        """
        needed = list(files)
        if not outline.carried:
            here = {file.rank for file in files}
            needed += [each for each in outline.fragments if not self._part or each.rank in here]
        listed = {info.key for info in objects}
        return [
            file.name
            for file in needed
            if (key := ref.key(file.name)) not in listed and not self._is_there(key)
        ]

    def _here(self, objects: Sequence[ObjectInfo], outline: _Outline) -> Sequence[_NamedFile]:
        """Return the data files that belong here: those of the ranks whose fragments are here.

        A data file without its fragment is a copy for another node that was cut off.
        """
        if not self._part:
            return outline.files
        here = {info.key.rpartition("/")[2] for info in objects}
        return [file for file in outline.files if fragment_name(file.rank) in here]

    def _outline(self, ref: StepRef) -> _Outline:
        """Return the manifest of a step.

        Raises:
            ObjectNotFound: It is gone.
            IntegrityError: It is damaged, or cannot be read.
            AccessDenied, TransientStorageError: The store says nothing about the checkpoint.
        """
        try:
            data = self._retry.call(
                partial(read_object, self._backend, ref.manifest, limit=MAX_RECORD_BYTES)
            )
        except LinkRefused as error:
            raise ManifestCorrupt(ref.manifest, error.what) from None
        except (AccessDenied, ObjectNotFound, TransientStorageError):
            raise
        except StorageError as error:
            raise ManifestCorrupt(ref.manifest, f"cannot be read: {error.detail}") from None
        outline = unpack(data, _Outline, key=ref.manifest)
        check_place(StepRef(outline.step, outline.attempt), ref)
        return outline

    def _is_there(self, key: str) -> bool:
        try:
            self._retry.call(partial(self._backend.head, key))
        except (LinkRefused, ObjectNotFound):
            return False
        return True

    def _touched(self, ref: StepRef, objects: Sequence[ObjectInfo]) -> float | None:
        dates = [info.modified for info in objects if info.modified is not None]
        if not dates or len(dates) < len(objects):
            for info in objects:
                with suppress(ObjectNotFound, IntegrityError):
                    if info.key.endswith(".json") and info.key != ref.manifest:
                        read = partial(read_object, self._backend, info.key, limit=MAX_RECORD_BYTES)
                        data = self._retry.call(read)
                        dates.append(unpack(data, _Dated, key=info.key).created_at)
        return max(dates, default=None)


def _reason(error: IntegrityError | StorageError) -> str:
    return error.detail if isinstance(error, ManifestCorrupt) else str(error)


def _is_data(name: str) -> bool:
    return name.endswith((".safetensors", ".encoded"))


def _has_any_rank(objects: Sequence[ObjectInfo]) -> bool:
    """Return True if the data file and the fragment of some rank are here."""
    names = {info.key.rpartition("/")[2] for info in objects}
    data = {name.partition(".")[0] for name in names if _is_data(name)}
    return any(f"{name}.json" in names for name in data)


class _NamedFile(msgspec.Struct, array_like=True):
    """The first fields of a ``File`` or of a ``FragmentRef``."""

    name: str
    rank: int
    size: int


class _Dated(msgspec.Struct):
    """Of a fragment."""

    created_at: float


class _Outline(msgspec.Struct):
    """The fields of a manifest that are cheap to read.

    A manifest may hold a million tensors, and training goes on meanwhile.
    """

    step: int
    attempt: str
    world_size: int
    created_at: float
    files: tuple[_NamedFile, ...]
    metadata: msgspec.Raw
    layout_of: tuple[int, ...]
    encoded: tuple[Encoding, ...] = ()
    fragments: tuple[_NamedFile, ...] = ()
    carried: msgspec.Raw = msgspec.Raw()

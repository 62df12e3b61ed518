"""The inventory of a tier: which steps are whole, how big they are, and since when.

The index reads manifests only. A process that removes steps must know more: a manifest without its
files is no reason to remove an older step that is whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import msgspec

from ckpt.catalog.index import attempts, is_committed, own_objects, unfinished_of
from ckpt.catalog.late_metrics import late_metrics
from ckpt.catalog.pins import Pin, all_pins, live_of
from ckpt.coordination.claim_marker import is_removal_marker
from ckpt.errors import (
    AccessDenied,
    FormatUnsupported,
    IntegrityError,
    LinkRefused,
    ObjectNotFound,
    StorageError,
    TransientStorageError,
)
from ckpt.model.encoding import MAX_RECORD_BYTES, unpack
from ckpt.model.keys import StepRef, fragment_name
from ckpt.model.metrics import metrics_of
from ckpt.pipeline.retry import RetryPolicy
from ckpt.storage.api import ObjectInfo, StorageBackend, Unfinished, read_object

State = Literal["whole", "broken", "begun", "unsupported"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredStep:
    """One attempt at a step on the tier.

    Attributes:
        objects: Our files in its folder.
        unfinished: Writes to such files that were cut off or are under way. They are listed only if
            the state is "begun" or "broken".
        state: "whole" has a manifest and all files that it names (if other nodes have theirs: all
            that belong to the fragments here); their bytes were not read. "broken" has a damaged
            manifest, or a manifest that names missing files. "begun" has no manifest.
            "unsupported" has a manifest in another format.
        metrics: The metrics that were saved.
        staged_bytes: The size of its data files before any codec, as the manifest says; 0 without
            one.
        is_part: Whether it is "begun" here and may be a checkpoint all the same: if nodes have
            their own tiers, another node may have put the manifest. The fragment of a data file is
            here, so a rank of this node had its part durable. Other files may be a copy that a
            restore was making when it was killed.
        is_cut: Whether its removal was begun. No process makes it a checkpoint again.
        touched: When the youngest of its files was put; None if neither the store nor a fragment
            says.
        pins: The pins that hold it.
    """

    ref: StepRef
    objects: tuple[ObjectInfo, ...]
    state: State
    metrics: Mapping[str, float]
    touched: float | None
    staged_bytes: int = 0
    unfinished: tuple[Unfinished, ...] = ()
    is_part: bool = False
    is_cut: bool = False
    pins: tuple[Pin, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes that it takes, unfinished writes included."""
        return sum(info.size for info in self.objects) + sum(cut.size for cut in self.unfinished)

    @property
    def is_encoded(self) -> bool:
        """Whether a codec has encoded its data files."""
        return any(info.key.endswith(".encoded") for info in self.objects)


class Inventory:
    """The steps of a tier.

    It remembers whole steps. Only their metrics and the copies of other nodes' files change. Each
    look costs a listing of the root, a listing of the pins, and one request for every known
    step.

    Args:
        part: Whether other nodes may have the rest of each step.
        late_metrics: Whether known steps are looked at again for metrics that were added since,
            for a listing each. With ``part`` they always are.

    Thread safety:
        One thread at a time.
    """

    def __init__(
        self, backend: StorageBackend, *, part: bool = False, late_metrics: bool = False
    ) -> None:
        self._backend, self._retry, self._part = backend, RetryPolicy(), part
        self._late_metrics = late_metrics
        self._known: dict[StepRef, StoredStep] = {}
        self.pins: list[Pin] = []  # of the last look, also those that have ended

    @property
    def metrics(self) -> list[Mapping[str, float]]:
        """The metrics of the whole steps of the last look."""
        return [held.metrics for held in self._known.values()]

    def look(self, *, begun: bool = False) -> list[StoredStep]:
        """All attempts, newest step first; or only those that were ``begun`` and never
        committed.
        """
        refs = attempts(self._backend)
        if begun:
            refs = [ref for ref in refs if not is_committed(self._backend, ref)]
        found = [self._held(ref) for ref in refs]
        self._known = {held.ref: held for held in found if held.state == "whole"}
        self.pins = all_pins(self._backend)
        live = live_of(self.pins)
        return [replace(held, pins=live.get(held.ref, ())) for held in found]

    def _held(self, ref: StepRef) -> StoredStep:
        there = is_committed(self._backend, ref)
        if there and ref in self._known:
            return self._again(self._known[ref])
        objects = tuple(own_objects(self._backend, ref))
        try:
            outline = self._outline(ref) if there else None
        except FormatUnsupported:
            return StoredStep(
                ref=ref, objects=objects, state="unsupported", metrics={}, touched=None
            )
        whole = outline is not None and self._is_whole(ref, objects, outline)
        unfinished = () if whole else unfinished_of(self._backend, ref)
        is_cut = any(
            info.key == ref.claim_marker and is_removal_marker(info.size) for info in objects
        )
        return StoredStep(
            ref=ref,
            objects=objects,
            state="whole" if whole else "broken" if there else "begun",
            metrics={**self._late(ref, objects), **metrics_of(outline.metadata)} if outline else {},
            touched=max(
                (
                    date
                    for date in (self._touched(ref, objects), *(cut.modified for cut in unfinished))
                    if date
                ),
                default=None,
            ),
            unfinished=unfinished,
            is_part=self._part and not there and not is_cut and _has_any_rank(objects),
            is_cut=is_cut,
            staged_bytes=sum(file.size for file in self._here(objects, outline)) if outline else 0,
        )

    def _again(self, held: StoredStep) -> StoredStep:
        """Return a step that is known, with the metrics and the copies of other nodes' files that
        were added since.
        """
        if not (self._late_metrics or self._part):
            return held
        objects = tuple(own_objects(self._backend, held.ref))
        if len(objects) == len(held.objects):
            return held
        late = self._late(held.ref, objects)
        return replace(held, objects=objects, metrics={**late, **held.metrics})

    def _late(self, ref: StepRef, objects: Sequence[ObjectInfo]) -> dict[str, float]:
        return late_metrics(self._backend, ref, [info.key for info in objects])

    def _is_whole(self, ref: StepRef, objects: Sequence[ObjectInfo], outline: _Outline) -> bool:
        files = self._here(objects, outline)
        needed = [file.name for file in files]
        if not outline.carried:  # a restore needs the fragments
            here = {file.rank for file in files}
            needed += [
                each.name for each in outline.fragments if not self._part or each.rank in here
            ]
        there = all(self._is_there(ref, objects, name) for name in needed)
        return there and bool(files or not self._part)

    def _here(self, objects: Sequence[ObjectInfo], outline: _Outline) -> Sequence[_NamedFile]:
        """Return the data files that belong here: those of the ranks whose fragments are here.

        A data file without its fragment is a copy for another node that was cut off.
        """
        if not self._part:
            return outline.files
        here = {info.key.rpartition("/")[2] for info in objects}
        return [file for file in outline.files if fragment_name(file.rank) in here]

    def _outline(self, ref: StepRef) -> _Outline | None:
        """None if the manifest is damaged, or was removed just now."""
        try:
            data = self._retry.call(
                partial(read_object, self._backend, ref.manifest, limit=MAX_RECORD_BYTES)
            )
            return unpack(data, _Outline, key=ref.manifest)
        except LinkRefused:
            return None
        except (FormatUnsupported, AccessDenied, TransientStorageError):
            raise  # says nothing about the checkpoint
        except (IntegrityError, StorageError):
            return None

    def _is_there(self, ref: StepRef, objects: Sequence[ObjectInfo], name: str) -> bool:
        """A listing may lag behind, so what it lacks is asked for by name."""
        try:
            key = ref.key(name)
            if all(info.key != key for info in objects):
                self._retry.call(partial(self._backend.head, key))
        except (IntegrityError, LinkRefused, ObjectNotFound):
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


def _has_any_rank(objects: Sequence[ObjectInfo]) -> bool:
    """Return True if the data file and the fragment of some rank are here."""
    names = {info.key.rpartition("/")[2] for info in objects}
    data = {name.partition(".")[0] for name in names if name.endswith((".safetensors", ".encoded"))}
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

    files: tuple[_NamedFile, ...]
    metadata: msgspec.Raw
    fragments: tuple[_NamedFile, ...] = ()
    carried: msgspec.Raw = msgspec.Raw()

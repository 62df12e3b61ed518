"""The steps of a tier, looked at again and again.

A committed step never changes. Its manifest is read once, and of that only what is cheap to decode.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Literal

import msgspec

from ckpt.catalog.index import attempts, is_committed, own_objects
from ckpt.errors import (
    AccessDenied,
    IntegrityError,
    ObjectNotFound,
    StorageError,
    TransientStorageError,
)
from ckpt.model.encoding import MAX_RECORD_BYTES, unpack
from ckpt.model.keys import StepRef
from ckpt.model.manifest import Encoding
from ckpt.model.metrics import metrics_of
from ckpt.pipeline.retry import RetryPolicy
from ckpt.pipeline.workers import Workers
from ckpt.storage.api import StorageBackend, read_object

_RETRY: Final = RetryPolicy()
_READERS: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedStep:
    """One attempt at a step on a tier.

    Attributes:
        state: "committed" has a manifest. "damaged" has one that cannot be trusted. "incomplete"
            has none.
        nbytes: Of all data files as they were staged; of an incomplete step, of the files there.
        stored_bytes: Of all data files as they are stored.
        reason: Why it is damaged.
    """

    ref: StepRef
    state: Literal["committed", "damaged", "incomplete"]
    created_at: float = 0.0
    nbytes: int = 0
    stored_bytes: int = 0
    ranks: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    reason: str = ""


class TierListing:
    """Lists the steps of a tier.

    Thread safety: one thread at a time.
    """

    def __init__(self, backend: StorageBackend) -> None:
        self._backend = backend
        readers = max(1, min(_READERS, backend.capabilities.max_concurrency))
        self._workers = Workers("list", readers)
        self._known: dict[StepRef, ListedStep] = {}

    def look(self) -> tuple[ListedStep, ...]:
        """Return all attempts, newest step first.

        Raises:
            StorageError: The store cannot be listed.
        """
        refs = attempts(self._backend)
        new = [ref for ref in refs if ref not in self._known]
        read = self._workers.run_all(partial(self._read, ref) for ref in new)
        found = {each.ref: each for each in read} | self._known
        self._known = {ref: found[ref] for ref in refs if found[ref].state == "committed"}
        return tuple(found[ref] for ref in refs)

    def _read(self, ref: StepRef) -> ListedStep:
        try:
            if is_committed(self._backend, ref):
                return self._committed(ref)
            sizes = [info.size for info in own_objects(self._backend, ref)]
            return ListedStep(ref=ref, state="incomplete", nbytes=sum(sizes))
        except (AccessDenied, TransientStorageError):
            raise
        except ObjectNotFound:  # removed just now
            return ListedStep(ref=ref, state="incomplete")
        except (IntegrityError, StorageError) as error:
            return ListedStep(ref=ref, state="damaged", reason=str(error))

    def _committed(self, ref: StepRef) -> ListedStep:
        read = partial(read_object, self._backend, ref.manifest, limit=MAX_RECORD_BYTES)
        summary = unpack(_RETRY.call(read), _Summary, key=ref.manifest)
        encoded = {encoding.rank: encoding.size for encoding in summary.encoded}
        metrics: dict[str, float] = {}
        with suppress(IntegrityError):
            metrics = metrics_of(summary.metadata)
        return ListedStep(
            ref=ref,
            state="committed",
            created_at=summary.created_at,
            nbytes=sum(file.size for file in summary.files),
            stored_bytes=sum(encoded.get(file.rank, file.size) for file in summary.files),
            ranks=summary.world_size,
            metrics=metrics,
        )


class _NamedFile(msgspec.Struct, array_like=True):
    """The first fields of a ``File``."""

    name: str
    rank: int
    size: int


class _Summary(msgspec.Struct):
    """The fields of a manifest that are cheap to read."""

    world_size: int
    created_at: float
    files: tuple[_NamedFile, ...]
    metadata: msgspec.Raw
    encoded: tuple[Encoding, ...] = ()

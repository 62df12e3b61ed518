"""Copy a step of several stores, which may encode its files differently, to another: as it lies at the nearest whose encoding can be had whole."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ckpt.catalog.index import read_packed
from ckpt.catalog.otherwise import clear_unnamed
from ckpt.catalog.tiered_reader import OnRepair
from ckpt.catalog.transfer import FetchReport, fetch_step
from ckpt.catalog.verify import OnProgress
from ckpt.errors import FormatTooNew, IntegrityError, StorageError
from ckpt.model.keys import StepRef
from ckpt.pipeline.retry import RetryPolicy
from ckpt.pipeline.workers import Workers
from ckpt.storage.api import StorageBackend


def fetch_nearest(
    sources: Sequence[StorageBackend],
    ref: StepRef,
    destination: StorageBackend,
    *,
    workers: Workers,
    on_progress: OnProgress | None = None,
    on_repair: OnRepair = lambda _: None,
) -> FetchReport:
    """Every part from the nearest of ``sources`` that has it intact.

    Raw bytes can be had from any of them; encoded ones only from one that encodes them alike. So if the step cannot be
    had as it lies at the nearest, it is taken as it lies at the next whose manifest is another one.

    Raises:
        IntegrityError: As ``fetch_step``: what the first try met.
        StorageError: As ``fetch_step``.
    """
    fetch = partial(
        fetch_step, ref=ref, destination=destination,
        workers=workers, on_progress=on_progress, on_repair=on_repair,
    )  # fmt: skip
    try:
        return fetch(sources[0], others=sources[1:])
    except FormatTooNew:
        raise
    except IntegrityError as error:
        first = error
    tried = {_manifest(sources[0], ref)}
    for position, source in enumerate(sources[1:], 1):
        packed = _manifest(source, ref)
        if not packed or packed in tried:
            continue
        tried.add(packed)
        try:
            report = fetch(source, others=[*sources[:position], *sources[position + 1 :]])
        except IntegrityError:
            continue
        manifest, _ = read_packed(destination, ref)
        clear_unnamed(destination, ref, manifest, RetryPolicy())  # what the tries before have brought
        return report
    raise first


def _manifest(source: StorageBackend, ref: StepRef) -> bytes:
    """Empty if there is none that can be read."""
    try:
        return read_packed(source, ref)[1]
    except (IntegrityError, StorageError):
        return b""

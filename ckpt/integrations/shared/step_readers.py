"""Readers of committed steps, for integrations that load without ``CheckpointManager.restore``.

Each try of a job at a step is an *attempt*, which a ``StepRef`` names. A *candidate* is a committed
attempt that a load may choose. The *outline* of a step is its manifest as one tier has it, which
may lack the chunks of tensors. A *leaf* describes a tensor as one rank sees it, with the *boxes*
(regions) to read, and a *sink* puts the bytes of a chunk into its targets.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, TypeVar

import torch

from ckpt.catalog.candidates import Candidate, candidates
from ckpt.catalog.finalize import Finisher
from ckpt.catalog.step_listing import why_missing
from ckpt.catalog.tiered_reader import Repair, SourceManifest, TieredReader
from ckpt.config import Tier
from ckpt.errors import NoCheckpoint, StorageError
from ckpt.model.box import Box
from ckpt.model.keys import StepRef
from ckpt.model.rollback import Rollback
from ckpt.pipeline.retry import RetryPolicy
from ckpt.pipeline.workers import Workers
from ckpt.plan.leaf import Leaf
from ckpt.plan.restore import plan_restore
from ckpt.root.attempts import step_refs
from ckpt.state.match.manifest_tree import MakeTensor
from ckpt.state.match.sink import TensorSink
from ckpt.state.match.targets import read_apart
from ckpt.state.tensors.layout import empty_in_order
from ckpt.state.tensors.local_shards import TensorOrShards
from ckpt.storage.api import StorageBackend
from ckpt.storage.tiers import open_tiers

T = TypeVar("T")

_THREADS: Final = 4
_log = logging.getLogger("ckpt")


class FailedEntry:
    """An entry of a state whose ``state_dict()`` raises ``error``.

    If a rank cannot make its state, it saves this entry instead. The save then fails on all ranks,
    and no rank waits for a rank that has failed.
    """

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def state_dict(self) -> dict[str, Any]:
        raise self._error

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing. ckpt never calls this method, but objects with a state must have it."""


@contextmanager
def open_readers(
    tiers: Sequence[Tier], step: int | None = None
) -> Generator[Iterator[TieredReader]]:
    """Open all tiers, and yield an iterator over the readers of committed attempts, newest first.

    With ``step``, the iterator yields only attempts at that step. A reader takes each chunk from
    the nearest tier that has it intact. The tiers are closed at the end of the ``with`` block.
    """
    with _open_stores(tiers, step) as (_, readers):
        yield readers


@contextmanager
def opened_step(
    tiers: Sequence[Tier],
    step: int | None,
    ref: StepRef | None = None,
    *,
    finishes: bool = False,
) -> Generator[TieredReader]:
    """Open all tiers, and yield a reader of the newest committed attempt at ``step``.

    The tiers are closed at the end of the ``with`` block.

    Args:
        tiers: The tiers, nearest first.
        step: The number of the step; None for the newest.
        ref: The attempt that the reader must read; None for any attempt.
        finishes: Whether to finish the commit first, as a restore does, if a dead job has left a
            step that lacks only its manifest.

    Raises:
        NoCheckpoint: No tier has such an attempt.
        StorageError: A tier cannot be listed, and no other tier has such an attempt.
    """
    with _open_stores(tiers, step, finishes=finishes) as (stores, readers):
        reader = next((source for source in readers if ref in (None, source.ref)), None)
        if reader is None:
            reason = f"{ref.folder!r} was removed while it was loaded" if ref else ""
            urls = ", ".join(source.url for source in stores)
            raise NoCheckpoint(urls, reason or _contents_text(stores[0], step))
        yield reader


@contextmanager
def _open_stores(
    tiers: Sequence[Tier], step: int | None, *, finishes: bool = False
) -> Generator[tuple[list[StorageBackend], Iterator[TieredReader]]]:
    """Yield the stores of the tiers, nearest first, and the iterator of ``open_readers``.

    ``finishes`` is as for ``opened_step``.
    """
    tiers_in_use = open_tiers(tiers)
    stores = [tier.backend for tier in tiers_in_use]

    def reader_of(candidate: Candidate) -> TieredReader:
        sources = [stores[position] for position in candidate.reachable]
        return TieredReader(sources, candidate.ref, retry=RetryPolicy(), on_repair=_warn)

    try:
        with Workers("list", len(stores)) as listers, Workers("finish", _THREADS) as workers:
            finisher = Finisher(workers)
            finish = finisher.finish if finishes else _finish_none
            steps = candidates(stores, step, workers=listers, finish=finish)
            yield stores, map(reader_of, steps)
    finally:
        for store in stores:
            store.close()


def _contents_text(store: StorageBackend, step: int | None) -> str:
    """Return a text for an error that describes the contents of ``store``, which lacks ``step``.

    If ``step`` is None, the store has no committed step at all.
    """
    with suppress(StorageError):
        return why_missing(store, step_refs(store), step)
    return "" if step is None else f"step {step} is not there"


def fill_targets(
    reader: TieredReader,
    outline: SourceManifest,
    leaves: Sequence[Leaf],
    targets: Sequence[TensorOrShards],
) -> None:
    """Read the boxes of ``leaves`` into ``targets``. Each leaf has one target.

    Call this only in the function that ``TieredReader.try_manifests`` calls with ``outline``.

    Raises:
        RestoreError: Targets share memory, and their saved values cannot all be in this memory.
        IntegrityError, StorageError: Some bytes are intact on no tier.
    """
    manifest = reader.with_fragments(outline, leaves).manifest
    own_targets = list(targets)
    # Targets that share memory are replaced in the list, and get their values at the end.
    copy_to_shared_targets = read_apart([leaf.name for leaf in leaves], own_targets)
    with Workers("read", _THREADS) as workers:
        plan = plan_restore(manifest, leaves)
        reader.read(plan, TensorSink(leaves, own_targets), workers=workers)
    if copy_to_shared_targets is not None:
        copy_to_shared_targets()


def build_and_fill(
    reader: TieredReader,
    outline: SourceManifest,
    build: Callable[[MakeTensor], T],
    device: torch.device | str = "cpu",
) -> T:
    """Call ``build``, read the tensors that it has asked for, and return its result.

    Call this only in the function that ``TieredReader.try_manifests`` calls with ``outline``.

    Args:
        reader: The reader of the step.
        outline: The manifest of the step.
        build: A function that makes the result. Its argument is a function that returns the tensor
            with a given name. The tensors are filled only after ``build`` has returned.
        device: The device of the tensors.
    """
    tensor_map = outline.manifest.tensor_map()
    tensors: dict[str, torch.Tensor] = {}

    def make_tensor(name: str) -> torch.Tensor:
        name = tensor_map[name].name  # Tied names are one tensor
        if name not in tensors:
            shape, dimension_order = tensor_map[name].shape, tensor_map[name].order
            dtype = getattr(torch, tensor_map[name].dtype)
            tensors[name] = empty_in_order(shape, dimension_order, dtype=dtype, device=device)
        return tensors[name]

    result = build(make_tensor)
    targets = {name: target for name, target in tensors.items() if target.numel()}
    leaves = [
        Leaf(
            name,
            tensor_map[name].dtype,
            tensor_map[name].shape,
            (Box.whole(tensor_map[name].shape),),
        )
        for name in targets
    ]
    fill_targets(reader, outline, leaves, list(targets.values()))
    return result


def _finish_none(_store: StorageBackend, _ref: StepRef, _rollback: Rollback | None) -> bool:
    return False


def _warn(repair: Repair) -> None:
    _log.warning(
        "ckpt: %s does not have it intact, the next tier is asked: %s", repair.tier, repair.reason
    )

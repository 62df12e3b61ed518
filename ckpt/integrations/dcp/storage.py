"""A storage writer and a storage reader of ckpt for ``torch.distributed.checkpoint`` (DCP).

    dcp.save(state, storage_writer=CkptWriter("s3://bucket/run", step=1200))
    dcp.load(state, storage_reader=CkptReader("s3://bucket/run"))

The writer makes ordinary steps of ckpt on any tiers: each chunk has a checksum, the manifest
appears last, and values are stored without pickle. DCP still decides which rank writes each entry,
and its planner asks the reader for boxes. So a checkpoint loads onto another mesh, as with DCP's
own storage.

An *attempt* is one incarnation of a job, and a ``StepRef`` names a step of one attempt. A *token*
is a text that no other save or load has. A *leaf* describes a tensor as one rank sees it, with the
*boxes* (regions) that the rank reads. The *outline* of a step is its manifest as one tier has it,
which may leave out parts that a reader adds when they are needed.
"""

from __future__ import annotations

import dataclasses
import io
import os
import re
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Unpack

import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.staging import AsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from ckpt.config import SaveConfig, Settings, Tier
from ckpt.coordination.single import SingleCoordinator, new_attempt
from ckpt.coordination.torch_store import TorchStoreCoordinator
from ckpt.errors import (
    ConfigError,
    HistoryHidden,
    RestoreError,
    ShapeMismatch,
    StepExists,
)
from ckpt.errors.sanitize import redact
from ckpt.integrations.dcp.items import Entries, Path, gather_lists, leaves, state_of
from ckpt.integrations.shared.framework_manager import FrameworkManager
from ckpt.integrations.shared.step_readers import (
    FailedEntry,
    fill_targets,
    open_readers,
    opened_step,
)
from ckpt.model.keys import StepRef
from ckpt.state.tensors.local_shards import LocalShards
from ckpt.storage.tiers import Tiers, as_tiers, urls_of
from ckpt.storage.urls import canonical, is_same_place

State = dict[str, Any]

_STEP_NUMBER: Final = re.compile(r"(?:.*?[^0-9])?([0-9]{1,18})")
_BLOCKING_OPTIONS: Final = StagingOptions(
    use_pinned_memory=False,
    use_shared_memory=False,
    use_async_staging=False,
    use_non_blocking_copy=False,
)
_ADVICE_TO_GO_BACK: Final = (
    "To go back with DCP, load the step with a CkptReader, and save with a "
    "CkptWriter(..., after=reader)"
)
_last_token: Final[deque[str]] = deque(maxlen=1)
"""The token of the last save in this process.

If the plan of another save has this token, DCP's planner has taken that plan from its cache.
"""


@dataclass(frozen=True, slots=True)
class _SaveInstruction:
    """The data of a save that DCP's coordinator rank adds to the plan of each rank.

    Attributes:
        step: The step that is saved.
        rank: The number of the rank in the group of ranks that save.
        world_size: The number of ranks in that group.
        token: A text that no other save of the job has.
        lists_as_dicts: The paths of the lists that are stored as dicts. See
            ``dcp.items.gather_lists``.
    """

    step: int
    rank: int
    world_size: int
    token: str
    lists_as_dicts: frozenset[Path]


@dataclass(frozen=True, slots=True)
class LoadedStep:
    """A step that a `CkptReader` has loaded.

    Attributes:
        ref: The step.
        places: The canonical URLs or paths of the reader's tiers (see `_canonical_urls`).
        token: A text that no other load has.
    """

    ref: StepRef
    places: frozenset[str]
    token: str


_steps_by_load: Final[dict[str, StepRef]] = {}
"""Token of a load -> the last step that writers of this process have saved after this load. These
are the writers whose argument ``after`` was the reader with this load.
"""


class _TierStorage:
    """The base of the writer and the reader, with their tiers and the rules for a checkpoint id."""

    _tiers: tuple[Tier, ...]

    @property
    def checkpoint_id(self) -> str:
        """The URL of the first tier, without credentials."""
        return redact(self._tiers[0].url)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return True if the last part of ``checkpoint_id`` ends with the number of a step."""
        return _STEP_NUMBER.fullmatch(os.path.basename(os.fspath(checkpoint_id))) is not None


class CkptWriter(_TierStorage, AsyncStager, StorageWriter):
    """A ``StorageWriter`` that saves a step of ckpt, with its checksums, tiers and atomic commit.

    If ``dcp.save`` or ``dcp.async_save`` gets a ``checkpoint_id``, the number of the step is the
    number at its end, as in ``"step-1200"``. Otherwise it is ``step``, and without both it is one
    more than the newest step of the tiers. A writer that was given ``step`` closes itself after a
    save. A writer without ``step`` keeps its threads and memory between saves, until ``close``.

    The writer is also the stager of ``dcp.async_save``. Without ``step``, it keeps the memory of
    the staged state, so the second and later saves do not wait for new memory. With the process
    executor of DCP, the writer opens the tiers again for each save.

    Values that are no tensors must be plain, since ckpt writes no pickle. All other values raise
    ``UnsupportedValue`` with their name. If ranks have different plain values under one name, DCP
    keeps the value of one rank.

    Args:
        tiers: A folder or URL, a `Tier`, or several of these, nearest first.
        step: The number of the step that is saved.
        after: The reader that has loaded the state, from one of these tiers. Steps after the loaded
            one may then be saved again, as after ``CheckpointManager.restore``. A reader that has
            loaded nothing has no effect.
        config: How to save (`SaveConfig`). Fields may also be given as keywords.

    Raises:
        ConfigError: ``after`` has loaded from other tiers. A save also raises this error if a
            setting is wrong, or if the planner has cached its plan for another writer. Nothing was
            written.
    """

    def __init__(
        self,
        tiers: Tiers,
        *,
        step: int | None = None,
        after: CkptReader | None = None,
        config: SaveConfig | None = None,
        **settings: Unpack[Settings],
    ) -> None:
        self._tiers = as_tiers(tiers)
        self._origin = None if after is None else after.loaded
        if self._origin is not None and self._origin.places.isdisjoint(
            _canonical_urls(self._tiers)
        ):
            raise ConfigError(
                f"after= has loaded step {self._origin.ref.step} of another place than "
                f"{self.checkpoint_id}: leave it out, since a step of another run hides none here"
            )
        self._config, self._settings = config, settings
        self._step, self._is_single_use = step, step is not None
        self._requested_step: int | None = None
        self._manager: FrameworkManager | None = None
        self._world = (0, 0)  # Rank and number of ranks
        self._manager_attempt = ""  # The attempt of the manager
        self._stager: _Stager | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes for a pickled copy, which DCP's process executor uses.

        The copy opens the tiers itself, and closes itself after its save.
        """
        return {**self.__dict__, "_manager": None, "_stager": None, "_is_single_use": True}

    def close(self) -> None:
        """Wait until all tiers have the saves, and free threads and memory.

        The next save opens the tiers again.
        """
        self._stager = None
        self._close_manager()

    # -- staging, on the training thread -----------------------------------------------------------

    def stage(self, state_dict: State) -> State:
        """Return a copy of the state in host memory, for ``dcp.async_save``."""
        if self._is_single_use:
            return _stage_blocking(DefaultStager(_BLOCKING_OPTIONS), state_dict)
        if self._stager is None or self._stager.in_use:
            # The save under way still needs the memory of the other stager.
            self._stager = _Stager()
        return self._stager.stage(state_dict)

    def synchronize_staging(self) -> None:
        """Do nothing, since ``stage`` has copied the whole state when it returns."""

    # -- saving, in the order of DCP's calls -------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Take the number of the next step from ``checkpoint_id``.

        If ``checkpoint_id`` is None, the number is chosen as described for the class.
        """
        self._requested_step = (
            None if checkpoint_id is None else _step_of(checkpoint_id, self._tiers)
        )

    def set_up_storage_writer(self, *_: Any, **kwargs: Any) -> None:
        """Raise ``ConfigError`` for ``use_collectives=False``, which ckpt does not support."""
        if not kwargs.get("use_collectives", True):
            raise ConfigError(
                "use_collectives=False makes one checkpoint for each rank, and a step of ckpt is "
                "one for all: leave it out"
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Choose the step for all ranks, and give the entries of a list to one rank (see
        ``dcp.items.gather_lists``).

        Only DCP's coordinator rank calls this.
        """
        step = self._choose_step()
        new_plans, lists_as_dicts = gather_lists(plans)
        token = new_attempt()
        return [
            dataclasses.replace(
                plan, storage_data=_SaveInstruction(step, rank, len(plans), token, lists_as_dicts)
            )
            for rank, plan in enumerate(new_plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Save the items of ``plan``, wait until the step is committed on all tiers, and return a
        finished future.

        With ``on_error="warn"``, a save that fails is logged and not raised.

        Raises:
            CkptError: The save has failed on some tier. Another tier may have the step.
            ConfigError: The planner has cached its plan for another storage writer.
            Exception: The planner has raised an error while it gave the items.
        """
        instruction: object = plan.storage_data
        if not isinstance(instruction, _SaveInstruction):
            raise ConfigError(
                "the planner uses a plan that it has cached for another storage writer "
                "(enable_plan_caching=True), and it caches by the name of its class: give this "
                "writer a planner of its own, class CkptPlanner(DefaultSavePlanner): pass"
            )
        try:
            self._save(instruction, plan, planner)
        finally:
            if self._is_single_use:
                self.close()
        future: Future[list[WriteResult]] = Future()
        future.set_result([WriteResult(item.index, 0, None) for item in plan.items])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Fill in the fields of ``metadata`` about the storage. Write nothing, since the checkpoint
        is already committed.
        """
        del results
        metadata.storage_data = {}
        metadata.storage_meta = self.storage_meta()

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self.checkpoint_id)

    # -- inside ------------------------------------------------------------------------------------

    def _choose_step(self) -> int:
        if (step := self._step_of_this_rank) is not None:
            return step
        newest = _newest_step(self._tiers)
        return 0 if newest is None else newest + 1

    @property
    def _step_of_this_rank(self) -> int | None:
        """The step from the ``checkpoint_id`` or ``step`` of this rank; None if it has neither."""
        return self._requested_step if self._requested_step is not None else self._step

    def _save(self, instruction: _SaveInstruction, plan: SavePlan, planner: SavePlanner) -> None:
        """Save the entries of this rank, and wait until the step is committed on all tiers."""
        step = instruction.step
        # A plan with the token of the last save comes from the cache of DCP's planner.
        has_cached_plan = instruction.token in _last_token
        own_step = self._step_of_this_rank
        if own_step is not None and own_step != step and not has_cached_plan:
            raise ConfigError(
                f"rank {instruction.rank} was given step {own_step}, and the coordinator step "
                f"{step}: give the same one on all ranks"
            )
        if has_cached_plan and (own_step is None or self._manager is None):
            raise ConfigError(
                "the planner uses the plan of an earlier save (enable_plan_caching=True): make "
                "one CkptWriter(root), and pass it to every save with a checkpoint_id such as "
                "'step-1200'"
            )
        _last_token.append(instruction.token)
        manager = self._manager_of_ranks(instruction)
        state: State = {}
        state_error: Exception | None = None
        try:
            state = state_of(plan, planner, instruction.lists_as_dicts)
        except Exception as error:  # noqa: BLE001 - raised below, once the other ranks know
            state_error, state = error, {"state": FailedEntry(error)}
        try:
            if own_step is not None:
                step = own_step  # A cached plan has the step of an earlier save
            pending = manager.save(state, step)
            if any(pending.exception(tier=tier) is None for tier in pending.tiers):
                self._remember_saved_step(step)
        except (HistoryHidden, StepExists) as error:
            error.add_note(_ADVICE_TO_GO_BACK)
            raise
        finally:
            if self._stager is not None:
                self._stager.release(state)
            if state_error is not None:
                raise state_error

    def _manager_of_ranks(self, instruction: _SaveInstruction) -> FrameworkManager:
        """Return the manager of the ranks that save. It is kept while they stay the same."""
        world = (instruction.rank, instruction.world_size)
        if self._manager is None or self._world != world:
            self._close_manager()
            coordinator = (
                SingleCoordinator()
                if instruction.world_size == 1
                else TorchStoreCoordinator(world, f"dcp/{instruction.token}")
            )
            self._world = world
            self._manager = FrameworkManager(
                self._tiers, config=self._config, coordinator=coordinator, **self._settings
            )
            self._manager_attempt = coordinator.attempt
            if (origin := self._origin) is not None:  # The step that ``after`` has loaded
                self._manager.continue_from(_steps_by_load.get(origin.token, origin.ref))
        return self._manager

    def _remember_saved_step(self, step: int) -> None:
        """Note ``step`` as the one that the next manager with the same ``after`` continues from."""
        if self._origin is not None:
            _steps_by_load[self._origin.token] = StepRef(step, self._manager_attempt)

    def _close_manager(self) -> None:
        manager, self._manager = self._manager, None
        if manager is not None:
            manager.close()


class _Stager:
    """Copies a state into host memory, and keeps the memory for the next save.

    Only one save at a time can use the memory: ``in_use`` is True from ``stage`` to ``release``.

    Thread safety: the training thread calls ``stage``, and the thread that saves calls ``release``.
    """

    def __init__(self) -> None:
        self.in_use = False
        self._stager = DefaultStager(_BLOCKING_OPTIONS)
        self._memory: set[int] = set()

    def stage(self, state: State) -> State:
        self.in_use = True
        host_state = _stage_blocking(self._stager, state)
        self._memory = set(_addresses(host_state))
        return host_state

    def release(self, state: State) -> None:
        """Mark the memory as free if it holds ``state``, a state whose save has ended."""
        if not self._memory.isdisjoint(_addresses(state)):
            self.in_use = False


def _stage_blocking(stager: DefaultStager, state: State) -> State:
    host_state = stager.stage(state)
    assert isinstance(host_state, dict)  # DCP returns a future only with use_async_staging
    return host_state


def _addresses(state: State) -> Generator[int]:
    """Yield the address of the storage of each tensor in ``state``."""
    for value in leaves(state):
        for tensor in value.tensors if isinstance(value, LocalShards) else (value,):
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if isinstance(local, torch.Tensor) and (address := local.untyped_storage().data_ptr()):
                yield address


class CkptReader(_TierStorage, StorageReader):
    """A ``StorageReader`` for a step of ckpt, written by `CkptWriter` or a ``CheckpointManager``.

    Every chunk is read from the nearest tier that has it intact. For a module that a
    ``CheckpointManager`` has saved, DCP finds the entries of the module's ``state_dict()``. For an
    optimizer, it finds the entries of ``get_optimizer_state_dict``. If a dead job has left a step
    that lacks only its manifest, a load first finishes the commit, as ``CheckpointManager.restore``
    does.

    Args:
        tiers: A folder or URL, a `Tier`, or several of these, nearest first.
        step: The number of the step to load, unless ``dcp.load`` gets a ``checkpoint_id``, which
            must end with a number. Without both, the newest step is loaded.

    Attributes:
        loaded: The step that the last load has read, for ``CkptWriter(after=...)``. None if there
            was no load, or if the last load has failed.

    Raises:
        NoCheckpoint: A load found no step, or not the step that was asked for.
        RestoreError: In a load, ranks found different newest steps, or an entry of the step does
            not fit the state.
        ConfigError: In a load, the ``checkpoint_id`` does not end with a number, or names another
            folder than the first tier.
        IntegrityError, StorageError: In a load, some bytes were intact on no tier. Some tensors may
            already have been overwritten.
    """

    def __init__(self, tiers: Tiers, *, step: int | None = None) -> None:
        self._tiers = as_tiers(tiers)
        self._step, self._requested_step = step, step
        self._ref: StepRef | None = None
        self._entries: Entries | None = None
        self._metadata_error: Exception | None = None
        self.loaded: LoadedStep | None = None

    @property
    def step(self) -> int | None:
        """The number of the step that the last load has read.

        None if there was no load, or if the last load has failed.
        """
        return None if self.loaded is None else self.loaded.ref.step

    def latest_step(self) -> int | None:
        """Return the number of the newest committed step on any tier, or None if there is none."""
        return _newest_step(self._tiers)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Take the number of the step from ``checkpoint_id``. If it is None, use ``step``.

        Also forget the step of the last load.
        """
        number = None if checkpoint_id is None else _step_of(checkpoint_id, self._tiers)
        self._requested_step = self._step if number is None else number
        self._ref = self._entries = self.loaded = None

    def read_metadata(self, *_: Any, **kwargs: Any) -> Metadata:
        """Find the step, and return the metadata of its entries under their names in DCP. First
        finish the commit of the step if a dead job has left only that undone.

        If this call fails, DCP calls it again with ``rank=`` for the metadata of one rank, and
        turns a second error into an ``AssertionError``. So the second call returns empty metadata,
        and ``set_up_storage_reader`` raises the first error.
        """
        if "rank" in kwargs and self._metadata_error is not None:
            return Metadata({}, planner_data={})
        self._metadata_error = self.loaded = None
        try:
            return self._metadata()
        except Exception as error:
            self._metadata_error = error
            raise

    def _metadata(self) -> Metadata:
        """Read the manifest of the step, and return DCP's metadata of it."""
        with opened_step(self._tiers, self._requested_step, finishes=True) as reader:
            self._entries = reader.try_manifests(lambda outline: Entries(outline.manifest))
        self._ref = reader.ref
        metadata = self._entries.metadata()
        metadata.storage_meta = StorageMeta(checkpoint_id=self.checkpoint_id)
        return metadata

    def set_up_storage_reader(self, *_: Any) -> None:
        """Raise the error of ``read_metadata``, if it has failed."""
        if self._metadata_error is not None:
            raise self._metadata_error

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return dataclasses.replace(plan, storage_data=self._ref)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return ``plans``. Raise ``RestoreError`` if ranks have found different steps."""
        if len(refs := {plan.storage_data for plan in plans}) > 1:
            names = " and ".join(sorted(ref.folder for ref in refs if ref is not None))
            raise RestoreError(
                f"ranks found different steps to be the newest ({names}): give step=, or load "
                "while no job saves"
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of ``plan`` into the planner's tensors, and return a finished future."""
        assert self._entries is not None, "DCP reads the metadata first"
        items_and_targets = [
            (item, planner.resolve_tensor(item).detach())
            for item in plan.items
            if item.type == LoadItemType.TENSOR
        ]
        if items_and_targets:
            self._read(items_and_targets)
        for item, tensor in items_and_targets:
            planner.commit_tensor(item, tensor)
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, _torch_bytes(self._entries.value(item.storage_index.fqn)))
        assert self._ref is not None
        self.loaded = LoadedStep(self._ref, _canonical_urls(self._tiers), new_attempt())
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read(self, items_and_targets: Sequence[tuple[ReadItem, torch.Tensor]]) -> None:
        """Read the region of a tensor that each item names into its target."""
        assert self._ref is not None, "DCP reads the metadata first"
        assert self._entries is not None
        regions = [self._entries.leaf(item) for item, _ in items_and_targets]
        targets = [tensor for _, tensor in items_and_targets]
        for region, tensor in zip(regions, targets, strict=True):
            if region.boxes[0].shape != tuple(tensor.shape):
                raise ShapeMismatch(region.name, region.boxes[0].shape, tensor.shape)
        with opened_step(self._tiers, self._ref.step, self._ref) as reader:
            reader.try_manifests(lambda outline: fill_targets(reader, outline, regions, targets))


def _step_of(checkpoint_id: str | os.PathLike[str], tiers: Sequence[Tier]) -> int:
    """Return the number of the step at the end of ``checkpoint_id``.

    Raises:
        ConfigError: ``checkpoint_id`` does not end with a number, or names another folder than the
            first tier.
    """
    text = os.fspath(checkpoint_id).rstrip("/")
    root, _, name = text.rpartition("/")
    if (number := _STEP_NUMBER.fullmatch(name)) is None:
        raise ConfigError(
            f"checkpoint_id={redact(text)!r} names no step: end it with a number, as 'step-1200'"
        )
    if root and not is_same_place(root, tiers[0].url):
        raise ConfigError(
            f"checkpoint_id={redact(text)!r} is not in {redact(tiers[0].url)}: leave the folder "
            f"out ({name!r}), since the tiers belong to the writer and the reader"
        )
    return int(number[1])


def _canonical_urls(tiers: Sequence[Tier]) -> frozenset[str]:
    """Return the canonical URLs of the tiers, which do not depend on their spelling."""
    return frozenset(map(canonical, urls_of(tiers)))


def _newest_step(tiers: Sequence[Tier]) -> int | None:
    """Return the number of the newest committed step, or None if there is none."""
    with open_readers(tiers) as readers:
        return next((reader.ref.step for reader in readers), None)


def _torch_bytes(value: Any) -> io.BytesIO:
    """Return a plain value as the bytes of ``torch.save``, which a planner of DCP expects.

    ckpt stores the value itself without pickle.
    """
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return buffer

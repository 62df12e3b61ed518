"""DeepSpeed: ``engine.save_checkpoint`` and ``engine.load_checkpoint`` through the tiers of ckpt.

    engine, *_ = deepspeed.initialize(...)
    engine.checkpoint_engine = CkptEngine(engine, "checkpoints", ["/nvme/run", "s3://bucket/run"])
    engine.load_checkpoint("checkpoints")
    ...
    engine.save_checkpoint("checkpoints", client_state={"epoch": epoch})
    ...
    engine.destroy()

Each ``save_checkpoint`` saves a step of ckpt in the background. DeepSpeed looks for its files by
name before it asks for their contents. So for each file of DeepSpeed whose contents are in a step,
the folder has a small file with the same name. A step holds the partitions as DeepSpeed gives them
to each rank, so it does not restore on another number of ranks. For such restores, use
`ckpt.integrations.deepspeed.zero_state`.

The *tag* is DeepSpeed's name for a checkpoint: its files are in ``folder/TAG``. A *part* of a step
is the contents of one of these files, and has its name without ``.pt``. The file ``latest`` names
the newest tag. The *outline* of a step is its manifest as one tier has it.

This module does not import deepspeed itself. A save or a load imports deepspeed when it meets a
value that is no tensor, array, container or plain value (see ``deepspeed.values``).
"""

from __future__ import annotations

import json
import logging
import os
import threading
import uuid
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

from ckpt.catalog.tiered_reader import SourceManifest, TieredReader
from ckpt.errors import (
    ConfigError,
    EntryMissing,
    IntegrityError,
    NoCheckpoint,
    RestoreError,
    StorageError,
)
from ckpt.events import Event, SaveCommitted, SaveFailed
from ckpt.integrations.deepspeed.load_checks import check_loads, check_same_files
from ckpt.integrations.deepspeed.values import OptimizerMemory, StoredTensor, pack, unpack
from ckpt.integrations.shared.all_ranks import all_results
from ckpt.integrations.shared.once_warnings import warn_of_untested
from ckpt.integrations.shared.step_readers import FailedEntry, build_and_fill, open_readers
from ckpt.manager import CheckpointManager
from ckpt.model.keys import StepRef
from ckpt.model.values import check_structure, parse
from ckpt.pending import PendingSave
from ckpt.state.match.manifest_tree import MakeTensor, StateTree
from ckpt.storage.local_files import write_durably
from ckpt.storage.tiers import Tiers, as_tiers, urls_of

TESTED_RANGE: Final = ("0.19", "0.19")
"""The first and the last release of deepspeed that the tests ran with."""
LATEST: Final = "latest"
_TAG_ENTRY, _PARTS_ENTRY = "deepspeed", "parts"  # The two entries of a state
_PART_KEY: Final = "ckpt has the contents of this file of DeepSpeed"
_MOST_SMALL_FILE_BYTES: Final = 4096

_log = logging.getLogger("ckpt")


class CkptEngine:
    """A checkpoint engine of DeepSpeed that saves steps of ckpt.

    Every rank makes a `CkptEngine` after ``deepspeed.initialize``, and sets it as
    ``engine.checkpoint_engine``. ``engine.destroy()`` closes it, and so does the end of the
    process. As long as it is set, ``engine.load_checkpoint`` checks its argument ``tag``, and
    raises ``NoCheckpoint`` on all ranks if any rank has no folder with the name of the tag.

    The number of a step is ``engine.global_steps``, or one more than the newest step if that is
    higher. If a tag is saved a second time, it names the newer step.

    Args:
        engine: The engine that ``deepspeed.initialize`` returned.
        folder: The ``save_dir`` and ``load_dir`` of the script. It has the file ``latest`` and the
            small files. The constructor writes missing small files for the steps on the tiers, and
            writes the newest tag into ``latest``.
        tiers: As for `CheckpointManager`. If it is None, ``folder`` is used.
        settings: Further arguments of the `CheckpointManager`.

    Attributes:
        manager: The `CheckpointManager` that saves and restores.
        pending: The handle of the newest save; None before the first save.
        has_shared_error: Whether the last ``load`` failed on all ranks alike.

    Raises:
        ConfigError: The engine uses a feature that this class does not support, or the tiers have
            steps that `CkptEngine` has not saved. Nothing was written.
        RestoreError: No step is intact, or another rank could not write the small files.
    """

    name = "CkptEngine"

    def __init__(
        self,
        engine: Any,
        folder: str | os.PathLike[str],
        tiers: Tiers | None = None,
        **settings: Any,
    ) -> None:
        advice = "load a checkpoint once and compare the losses"
        warn_of_untested("deepspeed", TESTED_RANGE, advice=advice)
        _check_engine(engine)
        self.pending: PendingSave | None = None
        self.has_shared_error = False
        self._engine = engine
        self._folder = os.path.abspath(folder)
        self._tiers = as_tiers(self._folder if tiers is None else tiers)
        # One rank of each node writes ``latest``, since each node may have a folder of its own.
        self._latest_file = _LatestFile(self._folder) if int(engine.local_rank) <= 0 else None
        self._save_call: _SaveCall | None = None
        self._loaded_file: tuple[str, Any] | None = None
        observers = (
            *settings.pop("observers", ()),
            *([self._latest_file] if self._latest_file else ()),
        )
        self.manager = CheckpointManager(self._tiers, observers=observers, **settings)
        self._last_step = self._newest_step()
        all_results("cannot write the small files", self._write_small_files)
        check_loads(engine, self._folder, self, self._tags)

    # -- what DeepSpeed calls to save --------------------------------------------------------------

    def create(self, info: Any) -> None:
        """Begin to collect the files of a checkpoint.

        Raises:
            ConfigError: The folder of the tag would have the path of the file ``latest``.
        """
        if os.path.normpath(info.tag).split(os.sep)[0] == LATEST:
            raise ConfigError(
                f"a tag cannot be {LATEST!r}, which is the file that names the newest tag: choose "
                "another one"
            )
        self._loaded_file = None  # The tag may name another step from now on
        self._save_call = _SaveCall(
            os.path.abspath(info.save_dir), str(info.tag), bool(info.save_latest)
        )

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        os.makedirs(path, exist_ok=exist_ok)

    def save(self, state_dict: Any, path: str) -> None:
        """Add ``state_dict`` to the checkpoint as the contents of the file ``path``, and write a
        small file at ``path`` unless there is one.

        Nothing in ``state_dict`` may change until ``save_checkpoint`` returns. After an error, the
        save fails on all ranks. If ``path`` is not in the folder of the tag, as in
        ``save_16bit_model``, ``state_dict`` is only written to ``path`` with ``torch.save``.

        Raises:
            ConfigError: ``save_checkpoint`` was given another folder.
            UnsupportedValue: A value, perhaps of ``client_state``, is not plain.
        """
        assert self._save_call is not None, "DeepSpeed calls create first"
        if os.path.abspath(os.path.dirname(path)) != self._save_call.folder:
            torch.save(state_dict, path)  # The call is save_16bit_model: other programs read a file
            return
        call, self._save_call = self._save_call, None
        try:
            _, part = self._tag_and_part(path)
            call.parts[part] = pack(
                state_dict, f"{_PARTS_ENTRY}/{part}", OptimizerMemory.of(self._engine)
            )
            if not _is_small_file(path):
                # An fsync of each file would delay the training.
                _replace_file(path, _small_file_text(part), sync=False)
        except BaseException as error:
            with suppress(Exception):
                # The other ranks must not wait for this one.
                self._begin_save(call, FailedEntry(error))
            raise
        self._save_call = call

    def is_decoupled(self) -> bool:
        """Begin the save if all files of this rank were added. Always return True.

        DeepSpeed calls this at the end of ``save_checkpoint``. True means that the save continues
        after ``save_checkpoint`` has returned.
        """
        if self._save_call is not None and len(self._save_call.parts) == _file_count(self._engine):
            call, self._save_call = self._save_call, None
            self._begin_save(call, {"tag": call.tag, "latest": call.is_latest})
        return True

    def get_commit_info(self) -> None:
        """Return None, so that DeepSpeed does not wait for a commit before the next step."""
        return

    def set_commit_info(self, info: Any) -> None:
        """Do nothing, since DeepSpeed does not call it."""

    def commit(self, info: Any) -> bool:
        """End a call of ``save_16bit_model``, whose file is written, and return True."""
        del info
        self._save_call = None
        return True

    def cleanup(self) -> None:
        """Finish every save (`CheckpointManager.close`)."""
        self.manager.close()

    def is_data_parallel_writer(self, dp_rank: int) -> bool:
        return dp_rank == 0

    def preserves_storage_sharing(self) -> bool:
        """Return False, so that DeepSpeed does not copy tensors that are parts of larger ones."""
        return False

    # -- what DeepSpeed calls to load --------------------------------------------------------------

    def load(self, path: str, map_location: Any = None) -> Any:
        """Return the contents of the file ``path``, from the newest step with the file's tag.

        All ranks call this, each for a file of its own. This method first waits for the end of the
        newest save. Each chunk comes from the nearest tier that has it intact.

        Raises:
            NoCheckpoint: No step has the tag.
            ConfigError: ``path`` is not in the folder of a tag.
            RestoreError: DeepSpeed's own engine has written the file, the ranks load different
                steps, another rank has failed, or the state does not fit this number of ranks.
            IntegrityError, StorageError: Bytes are intact on no tier.
        """
        # The file is kept for one call only.
        (loaded_path, loaded_content), self._loaded_file = self._loaded_file or (None, None), None
        if loaded_path == path:
            # DeepSpeed loads its first file twice, and uses only one entry from the first load. So
            # the second load can return the same contents.
            return loaded_content
        device = map_location if isinstance(map_location, str | torch.device) else "cpu"
        contents: list[Any] = []  # Of this file alone

        def load_file() -> tuple[str, StepRef]:
            tag, step, content = self._load(path, torch.device(device))
            contents.append(content)
            return tag, step

        if self._is_loaded_serially(path):
            load_file()
        else:
            self.has_shared_error = True  # Until the ranks have agreed
            steps = all_results(f"cannot load {os.path.basename(path)}", load_file)
            check_same_files(steps)
            _check_same_step(steps)
            self.has_shared_error = False
        (content,) = contents
        if isinstance(content, dict) and "dp_world_size" in content:
            self._check_world(int(content["dp_world_size"]))
            self._loaded_file = (path, content)
        return content

    def _load(self, path: str, device: torch.device) -> tuple[str, StepRef, Any]:
        """Wait for the end of the newest save. Return the tag of the file ``path``, the newest step
        with this tag, and the contents of the file.
        """
        if not _is_small_file(path):
            raise RestoreError(
                f"{path} was written by another engine of DeepSpeed, and ckpt unpickles nothing: "
                "call engine.load_checkpoint before you set engine.checkpoint_engine"
            )
        tag, part = self._tag_and_part(path)
        self.manager.fence()  # A load must not change tensors that are being copied
        if self.pending is not None:
            self.pending.wait()
        with self._step_with_tag(tag) as step:
            return tag, step.reader.ref, _read_part(step, part, device)

    def _is_loaded_serially(self, path: str) -> bool:
        """Return True if the ranks of a node load the file ``path`` one after the other.

        The load of such a file must not exchange results with other ranks.
        """
        is_serial = self._engine._config.zero_config.pipeline_loading_checkpoint
        return bool(is_serial) and path.endswith("optim_states.pt")

    def export(self, tag: str, folder: str | os.PathLike[str]) -> list[str]:
        """Write the files of a tag into ``folder/tag``, and the tag into ``folder/latest``.

        The files have the form in which DeepSpeed's own engine writes them, so that
        ``zero_to_fp32.py`` and other tools can read them. Only one rank needs to call this.

        Returns:
            The paths of the files in ``folder/tag``.

        Raises:
            NoCheckpoint: No step has the tag.
        """
        paths: list[str] = []
        with self._step_with_tag(tag) as step:
            os.makedirs(os.path.join(folder, tag), exist_ok=True)
            for part in step.parts:
                paths.append(os.path.join(folder, tag, f"{part}.pt"))
                torch.save(_read_part(step, part, torch.device("cpu")), paths[-1])
        _replace_file(os.path.join(folder, LATEST), tag)
        return paths

    # -- inside ------------------------------------------------------------------------------------

    def _begin_save(self, call: _SaveCall, header: Any) -> None:
        """Begin to save the files of ``call``.

        ``header`` is the entry with the tag. If it is a `FailedEntry`, the save fails on all ranks.
        """
        self._last_step = max(self._last_step + 1, int(self._engine.global_steps))
        if call.is_latest and self._latest_file is not None:
            self._latest_file.expect(self._last_step, call.tag)
        self.pending = self.manager.save_async(
            {_TAG_ENTRY: header, _PARTS_ENTRY: call.parts}, self._last_step
        )

    def _tag_and_part(self, path: str) -> tuple[str, str]:
        """Return the tag of the file ``path``, and the name of the file without ``.pt``, which is
        the name of its part of a step.
        """
        place, name = os.path.split(os.path.abspath(path))
        tag = os.path.relpath(place, self._folder)
        if tag == os.curdir or tag.split(os.sep)[0] == os.pardir:
            raise ConfigError(
                f"{path} is not in the folder of a tag in {self._folder}: give save_checkpoint and "
                "load_checkpoint the folder that CkptEngine was given"
            )
        return tag, name.removesuffix(".pt")

    @contextmanager
    def _step_with_tag(self, tag: str) -> Generator[_TaggedStep]:
        """Yield the newest step that was saved with ``tag``.

        Raises:
            NoCheckpoint: No step has the tag.
        """
        normal_tag = os.path.normpath(tag)
        with open_readers(self._tiers) as readers:
            steps = (step for step in _steps(readers) if os.path.normpath(step.tag) == normal_tag)
            if (step := next(steps, None)) is None:
                raise NoCheckpoint(", ".join(urls_of(self._tiers)), f"no step has the tag {tag!r}")
            yield step

    def _tags(self) -> list[str]:
        """Return the tags of all steps, without repetition, the newest first."""
        with open_readers(self._tiers) as readers:
            return list(dict.fromkeys(step.tag for step in _steps(readers)))

    def _newest_step(self) -> int:
        """Return the number of the newest intact step, the same on all ranks; -1 if there is none.

        This restores the entry with the tag, so the manager continues from this step. After a
        ``ConfigError`` or ``RestoreError``, the manager is closed.

        Raises:
            ConfigError: The step has no entry with a tag, so `CkptEngine` has not saved it.
            RestoreError: No step is intact, or the entry does not fit.
        """
        state: dict[str, Any] = {_TAG_ENTRY: {"tag": "", "latest": True}}
        try:
            report = self.manager.restore(state, only=_TAG_ENTRY)
        except (ConfigError, RestoreError) as error:
            self.manager.close()
            if isinstance(error, ConfigError | EntryMissing):
                raise ConfigError(
                    f"{', '.join(urls_of(self._tiers))} has steps that CkptEngine has not saved: "
                    "give it tiers of its own, or restore with ckpt.integrations.deepspeed."
                    "zero_state if that has saved them"
                ) from error
            raise
        return -1 if report is None else report.step

    def _write_small_files(self) -> None:
        """Write the small files that the folder lacks, and write the newest tag into ``latest``.
        Only one rank of each node does so.

        A step that was saved with ``save_latest=False`` does not count for ``latest``.
        """
        if self._latest_file is None:
            return
        with open_readers(self._tiers) as readers:
            for step in _steps(readers):
                for part in step.parts:
                    path = os.path.join(self._folder, step.tag, f"{part}.pt")
                    if not os.path.exists(path) or not os.path.getsize(path):
                        os.makedirs(os.path.dirname(path), exist_ok=True)
                        _replace_file(path, _small_file_text(part), sync=False)
                if step.is_latest:
                    self._latest_file.write(step.reader.ref.step, step.tag)

    def _check_world(self, saved_ranks: int) -> None:
        """Check that the loaded ZeRO partitions were saved by as many ranks as this job has.

        Otherwise raise ``RestoreError`` under ZeRO 3. Under ZeRO 1 and 2, log a warning, since
        DeepSpeed can still load the weights.

        Args:
            saved_ranks: The number of ranks that have saved the partitions.
        """
        own_ranks, stage = (
            int(self._engine.seq_dp_world_size),
            self._engine.zero_optimization_stage(),
        )
        if saved_ranks == own_ranks or stage == 0:
            return
        text = (
            f"the checkpoint has the ZeRO partitions of {saved_ranks} rank(s), and this job has "
            f"{own_ranks}: "
            "resume with as many ranks, or save with ckpt.integrations.deepspeed.zero_state, which "
            "restores on any number"
        )
        if stage == 3:
            raise RestoreError(text)
        _log.warning("ckpt: %s; load_module_only=True loads the weights alone", text)


@dataclass(slots=True)
class _SaveCall:
    """A call of ``save_checkpoint`` under way.

    Attributes:
        save_dir: The argument ``save_dir`` as an absolute path.
        tag: The tag of the checkpoint.
        is_latest: Whether the file ``latest`` is to name the tag.
        parts: Name of each file without ``.pt`` -> its contents, as `pack` returns them.
    """

    save_dir: str
    tag: str
    is_latest: bool
    parts: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def folder(self) -> str:
        return os.path.abspath(os.path.join(self.save_dir, self.tag))


@dataclass(frozen=True, slots=True)
class _TaggedStep:
    """A step that `CkptEngine` has saved, with its tag and the names of its parts (files)."""

    reader: TieredReader
    tag: str
    is_latest: bool
    parts: tuple[str, ...]


class _LatestFile:
    """An observer that writes the file ``latest`` with the tag of the newest committed step. Until
    then, it remembers the tag of each step that ``expect`` was called with.

    Thread safety: any thread may call the methods. ``_lock`` guards all fields.
    """

    def __init__(self, folder: str) -> None:
        self._path = os.path.join(folder, LATEST)
        self._lock = threading.Lock()
        self._tags_by_step: dict[int, str] = {}
        self._written_step = -1

    def expect(self, step: int, tag: str) -> None:
        """Write ``tag`` into ``latest`` once ``step`` is committed."""
        with self._lock:
            self._tags_by_step[step] = tag

    def __call__(self, event: Event) -> None:
        if isinstance(event, SaveFailed):
            with self._lock:
                self._tags_by_step.pop(event.step, None)
        elif isinstance(event, SaveCommitted) and not event.tier.startswith("shm://"):
            # A commit on a tier in memory does not count, since the step is lost with the machine.
            with self._lock:
                tag = self._tags_by_step.pop(event.step, None)
            if tag is not None:
                self.write(event.step, tag)

    def write(self, step: int, tag: str) -> None:
        """Write ``tag``, the tag of ``step``, into ``latest``, unless this object has already
        written the tag of this step or a newer one.
        """
        with self._lock:
            if step > self._written_step:
                self._written_step = step
                if not os.path.isfile(self._path) or _read_text(self._path).strip() != tag:
                    os.makedirs(os.path.dirname(self._path), exist_ok=True)
                    _replace_file(self._path, tag)


def _steps(readers: Iterator[TieredReader]) -> Iterator[_TaggedStep]:
    """Yield the steps that `CkptEngine` has saved, newest first.

    Other steps are left out. A step with a damaged manifest is also left out, and a warning is
    logged.
    """
    for reader in readers:
        try:
            manifest = reader.manifest().manifest
        except (IntegrityError, StorageError) as error:
            _log.warning("ckpt: step %d is passed over: %s", reader.ref.step, error)
            continue
        match parse(manifest.tree):
            case {
                "deepspeed": {"tag": str(tag), "latest": bool(latest)},
                "parts": dict(parts),
            } if _are_names_inside_folder(tag, parts):
                yield _TaggedStep(reader, tag, latest, tuple(parts))
            case _:
                continue


def _check_same_step(steps: Sequence[tuple[str, StepRef]]) -> None:
    """Raise ``RestoreError`` if ranks have loaded different steps.

    This may happen, since each rank reads the file ``latest`` by itself, and the commit of a save
    may change the file between two reads.

    Args:
        steps: The tag and the step that each rank has loaded, in rank order.
    """
    tag, ref = steps[0]
    for rank, (odd_tag, odd_ref) in enumerate(steps):
        if (odd_tag, odd_ref) != (tag, ref):
            raise RestoreError(
                f"the ranks load different steps: rank 0 has read step {ref.step} with the tag "
                f"{tag!r}, and rank {rank} step {odd_ref.step} with {odd_tag!r}. A save was "
                "committed during the load: let all ranks call "
                "engine.checkpoint_engine.pending.result() and dist.barrier() first, and load again"
            )


def _are_names_inside_folder(tag: str, parts: Iterable[str]) -> bool:
    """Return True if the path ``tag/part`` of each part is below the folder of the engine."""
    folder = os.path.normpath(tag).split(os.sep)[0]
    return folder not in ("", os.curdir, os.pardir) and not any(os.sep in part for part in parts)


def _read_part(step: _TaggedStep, part: str, device: torch.device) -> Any:
    """Return the contents of the file ``part`` of a step, with its tensors on ``device``."""
    if part not in step.parts:
        raise RestoreError(
            f"the step of tag {step.tag!r} has no {part}.pt: it was saved by another number "
            "of ranks, or under another stage of ZeRO"
        )

    def read_contents(outline: SourceManifest) -> Any:
        # The nested state of the step, with a ``StoredTensor`` for each tensor
        tree = StateTree(outline.manifest, StoredTensor, (), by_name=True, safe=False).build()

        def build_contents(make_tensor: MakeTensor) -> Any:
            with check_structure("tree"):
                return unpack(tree[_PARTS_ENTRY][part], make_tensor)

        return build_and_fill(step.reader, outline, build_contents, device)

    return step.reader.try_manifests(read_contents)


def _file_count(engine: Any) -> int:
    """Return how many files ``save_checkpoint`` adds to the checkpoint on this rank."""
    return int(engine.save_non_zero_checkpoint) + int(engine.save_zero_checkpoint)


def _read_text(path: str) -> str:
    """Return the first 4096 bytes of a file as text, with replacements for invalid bytes."""
    with open(path, "rb") as file:
        return file.read(_MOST_SMALL_FILE_BYTES).decode(errors="replace")


def _is_small_file(path: str) -> bool:
    """Return True if ``path`` is a small file, whose contents a step holds."""
    return os.path.isfile(path) and _read_text(path).startswith(
        _small_file_text("")[: len(_PART_KEY)]
    )


def _small_file_text(part: str) -> str:
    """Return the text of the small file that stands for ``part`` of a step."""
    return json.dumps({_PART_KEY: part}) + "\n"


def _replace_file(path: str, text: str, *, sync: bool = True) -> None:
    """Write ``text`` to a new file, and replace the file ``path`` by the new file atomically.

    ``sync`` says whether to fsync the new file first.
    """
    new_path = f"{path}.{uuid.uuid4().hex}"
    if sync:
        write_durably(new_path, text.encode())
    else:
        Path(new_path).write_bytes(text.encode())
    os.replace(new_path, path)


def _check_engine(engine: Any) -> None:
    """Raise ``ConfigError`` if the engine uses a feature that `CkptEngine` does not support.

    DeepSpeed saves the state of these features in files that its checkpoint engine does not get.
    """
    unsupported_features = {
        "a pipeline": type(engine).__name__ == "PipelineEngine",
        "experts": engine.has_moe_layers,
        "an optimizer or parameters on NVMe": engine.zero_nvme_offload_optimizer(),
        "checkpoint.load_universal": engine.load_universal_checkpoint(),
        "checkpoint.use_node_local_storage": engine.use_node_local_storage(),
    }
    if reasons := [reason for reason, present in unsupported_features.items() if present]:
        raise ConfigError(
            f"CkptEngine cannot save an engine with {' and '.join(reasons)}: leave it out, put "
            "ckpt.integrations.deepspeed.zero_state(engine) into a state of your own, or keep "
            "DeepSpeed's own checkpoint engine"
        )

"""Finds a step in another root that the first save of a job can be an increment of (``Tier.base``).

The rank looks once, for the newest step whose data file of this rank is whole. Its chunks after the
header are compared with the image by their digests, as those of a base of the job's own. So the
states need no equal names: the frozen parameters alone must come first, in the same order.

A *fragment* describes the files of one rank. A manifest of an *adopted* step names files of another
program (its ``locations``). A *base* is a step with a file that others refer to. Its ``root`` is
the path to the root that has it, or empty for the root of the file that refers to it. A base pin
keeps a step of the other root from being removed by the other run.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Final

import msgspec

from ckpt.catalog.fragments import load_fragment
from ckpt.catalog.step_listing import list_root, read_packed
from ckpt.config import SaveConfig
from ckpt.coordination.coordinator import Coordinator
from ckpt.errors import (
    AccessDenied,
    CkptError,
    ConfigError,
    IntegrityError,
    ManifestCorrupt,
    ObjectNotFound,
)
from ckpt.model.fill_manifest import carried_fragment
from ckpt.model.keys import BaseRef, StepRef, parse_base
from ckpt.model.manifest import Encoding, Fragment, Manifest
from ckpt.pipeline.retry import RetryPolicy
from ckpt.plan.save import SavePlan, boxes_of_chunks
from ckpt.root.base_pins import pinned_bases, put_base_pin
from ckpt.root.claim_marker import is_being_removed
from ckpt.save.adopted_base import AdoptedFiles
from ckpt.save.increments import (
    BaseFile,
    WrittenFile,
    first_chunk,
    has_equal_begin,
    has_equal_layout,
    most_chunks,
)
from ckpt.save.save_request import SaveRequest
from ckpt.storage.outside_files import root_at
from ckpt.storage.tiers import OpenTier, path_to_base

_MOST_STEPS: Final = 8
"""How many steps of the other root a rank reads at most."""

_MOST_PLANS: Final = 8
"""How many save plans a rank remembers."""

_log = logging.getLogger("ckpt")


class OtherRoot:
    """The root of another run that the saves of one rank may refer to.

    Thread safety: one thread at a time.

    Args:
        tier: The tier of the saves.
        codec: The name of its codec; empty if it has none.
        coordinator: The ranks of the job.
        path: The path from the root of the tier to the other root.

    ``_base`` is the file in the other root; None until ``base_for`` has looked for it
    (``_has_looked``), and if there is none. ``_plans`` are the save plans that have got it.
    """

    def __init__(self, tier: OpenTier, codec: str, coordinator: Coordinator, path: str) -> None:
        self._backend, self._codec, self._path = tier.backend, codec, path
        self._rank, self._world_size = coordinator.rank, coordinator.world_size
        self._name = tier.tier.base
        self._has_looked = False
        self._base: BaseFile | None = None
        self._plans: list[SavePlan] = []

    @classmethod
    def of(
        cls, tier: OpenTier, codec: str, coordinator: Coordinator, config: SaveConfig
    ) -> OtherRoot | None:
        """Return the other root of a tier; None if the tier has none.

        Raises:
            ConfigError: All files of the tier are whole, or the other root is on another store.
        """
        if tier.tier.base is None:
            return None
        if not config.incremental or config.copies == "per_node":
            cause = "copies='per_node'" if config.incremental else "incremental=False"
            raise ConfigError(f"{cause} writes whole files, which need no base: leave one out")
        return cls(tier, codec, coordinator, path_to_base(tier))

    def base_for(self, request: SaveRequest) -> BaseFile | None:
        """Return a base for the image of ``request``, after a pin was put on its step.

        Only the first call looks for one. If there is none, a warning says why, and the caller
        writes a whole file. The state of an optimizer may appear after the first save, so each new
        save plan gets the base once.
        """
        is_known = any(has_equal_layout(plan, request.plan) for plan in self._plans)
        if is_known or most_chunks(request.plan) < 2 or (self._has_looked and self._base is None):
            return None
        self._has_looked = True
        self._plans = [*self._plans, request.plan][-_MOST_PLANS:]
        try:
            file = self._base or self._newest_file(request)
            if isinstance(file, BaseFile):
                put_base_pin(self._backend, BaseRef(self._path, file.ref))
                self._base = file
                return replace(file, plan=request.plan)
            self._warn(file)
        except AccessDenied as error:
            self._warn(
                f"{error}: give this job the right to read there, and to write below pins/, which "
                "keeps the step from being removed"
            )
        except CkptError as error:
            self._warn(str(error))
        return None

    def _warn(self, cause: str) -> None:
        level = logging.INFO if self._rank else logging.WARNING
        text = "ckpt: %s: the first save is written as a whole, without base=%s: %s"
        _log.log(level, text, self._backend.url, self._name, cause)

    def _newest_file(self, request: SaveRequest) -> BaseFile | str:
        """Return the data file of this rank in the newest step of the other root that has a whole
        one with the same first parameters, or why there is none. A step that this run refers to
        already comes first.

        Raises:
            CkptError: The other root cannot be read.
        """
        store, cause = root_at(self._backend, self._path), "it has no checkpoint: save one first"
        pinned_refs = [base.ref for base in pinned_bases(self._backend, self._path)]
        refs = dict.fromkeys([*pinned_refs, *list_root(store).on_branch])
        tried_refs = set[StepRef]()
        for ref in islice(refs, _MOST_STEPS):
            try:
                manifest, _ = read_packed(store, ref)
                base_step = _whole_of(manifest, self._rank)
                if base_step.root:
                    url = root_at(store, base_step.root).url
                    cause = f"step {ref.step} has its base in {url}: give that root"
                    continue
                if base_step.ref in tried_refs:
                    continue
                tried_refs.add(base_step.ref)
                # An attempt that was adopted again stays marked while a run needs it.
                if RetryPolicy().call(partial(is_being_removed, store, base_step.ref)):
                    cause = f"step {base_step.ref.step} is being removed"
                    continue
                if base_step.ref != ref:
                    manifest, _ = read_packed(store, base_step.ref)
                file = self._file_in(manifest, base_step.ref, request)
            except ObjectNotFound:
                continue
            except IntegrityError as error:
                cause = str(error)
                continue
            if isinstance(file, BaseFile):
                return file
            cause = f"step {base_step.ref.step} {file}"
        return cause

    def _file_in(self, manifest: Manifest, ref: StepRef, request: SaveRequest) -> BaseFile | str:
        """Return the data file of this rank in a step as a base for the image of ``request``, or
        why it cannot be one.
        """
        if manifest.locations:
            return self._adopted_base(manifest, ref, request)
        stored_file = manifest.stored_files().get(self._rank)
        if stored_file is None:
            return f"has no file of rank {self._rank}"
        if stored_file.increment:
            return "is no step with files of its own"
        if (stored_file.codec or "") != self._codec:
            return "has another codec"
        fragment = self._fragment(manifest, ref, self._rank)
        assert fragment.file is not None
        chunks = tuple(fragment.file.chunks)
        if not has_equal_begin(request, chunks):
            if manifest.world_size != self._world_size:
                return (
                    f"has the files of {manifest.world_size} rank(s), and this job has "
                    f"{self._world_size}: another number of ranks cuts the tensors in another way"
                )
            return f"begins with other parameters in the file of rank {self._rank}"
        file = WrittenFile(chunks, next(iter(fragment.encoded), None))
        return BaseFile(ref=ref, plan=request.plan, file=file, root=self._path)

    def _adopted_base(
        self, manifest: Manifest, ref: StepRef, request: SaveRequest
    ) -> BaseFile | str:
        """Return the files of an adopted step as a base for the image of ``request``, or why they
        cannot be one.
        """
        fragments = [
            self._fragment(manifest, ref, location.rank) for location in manifest.locations
        ]
        files = AdoptedFiles(self._backend, BaseRef(self._path, ref), manifest, fragments)
        files.recheck()
        # Chunk 0 is the header, and chunk 1 the start of the first tensor.
        if not files.has_part(first_chunk(request), *boxes_of_chunks(request.plan, 2)[1]):
            return f"has no tensor like the first frozen parameter of rank {self._rank}"
        encoding = Encoding(self._rank, self._codec, ()) if self._codec else None
        file = WrittenFile((), encoding)
        return BaseFile(ref=ref, plan=request.plan, file=file, root=self._path, adopted_files=files)

    def _fragment(self, manifest: Manifest, ref: StepRef, rank: int) -> Fragment:
        """Return the fragment of a rank of a step in the other root.

        Raises:
            IntegrityError: The fragment is damaged, or belongs to another save or file.
            StorageError: It cannot be read.
        """
        file = manifest.file_map().get(rank)
        fragment = carried_fragment(manifest, rank, key=ref.manifest)  # A copy in the manifest
        if fragment is not None:
            own_file = fragment.file and msgspec.structs.replace(fragment.file, chunks=())
            if own_file != file:
                fault = f"the fragment of rank {rank} names another file"
                raise ManifestCorrupt(ref.manifest, fault)
            return fragment
        store, fragment_ref = root_at(self._backend, self._path), manifest.fragments[rank]
        fragment, _ = RetryPolicy().call(
            partial(load_fragment, store, ref, manifest, fragment_ref, file)
        )
        return fragment


def _whole_of(manifest: Manifest, rank: int) -> BaseRef:
    """Return the step whose data file of ``rank`` is whole: that of the manifest, or its base."""
    names = (increment.base for increment in manifest.increments if increment.rank == rank)
    own = BaseRef("", StepRef(manifest.step, manifest.attempt))
    return next(map(parse_base, names), own) or own

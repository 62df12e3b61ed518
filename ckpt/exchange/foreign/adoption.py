"""Adopt the checkpoint of another program: make a step whose data files are the files of that
program, where they are.

The state is read as an import reads it, but no byte of a tensor is copied: each tensor of the state
stands for places in the foreign files. Each file becomes the data file of one rank of the step. The
adoption writes the records of the step and its *own part*. The own part is the data file of one
more rank, with the few parts that cannot be used where they are (see
``ckpt.exchange.foreign.own_part``). The records are the fragments and the manifest. The *fragment*
of a rank describes its data file and the tensors in it, and the manifest names all fragments. An
*attempt* is one adoption of a step, and a `StepFolder` is the folder of an attempt in the store.

A *leaf* describes a tensor of the state, a *box* a rectangular region of it, and a *span* a place
in a foreign file. A *locator* reads the state, and notes where the elements of its tensors are. A
*shaper* makes modules and optimizers of the state, and a *walk* collects its named tensors and its
plain values. The chunk table of a file has the length and the checksum of each of its chunks.
"""

from __future__ import annotations

import dataclasses
import os
import re
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import msgspec
import torch
from msgspec.structs import replace

from ckpt.catalog.step_listing import committed, is_committed, own_objects
from ckpt.catalog.transfer import check_files, commit_copy, write_file
from ckpt.catalog.verify import OnProgress, StepFolder
from ckpt.config import SaveConfig, Tier
from ckpt.coordination.single import new_attempt
from ckpt.coordination.step_files import delete_files
from ckpt.errors import ConfigError, StorageError
from ckpt.exchange.foreign.adoption_renewal import OldAttempt, remove_attempt, replaceable_attempt
from ckpt.exchange.foreign.foreign_file_chunks import (
    ForeignFile,
    cut_file,
    hash_files,
    real_path,
    usable_in_place,
)
from ckpt.exchange.foreign.foreign_objects import ImportReport, Shaper, digest_of
from ckpt.exchange.foreign.imports import (
    ForeignCheckpoint,
    check_root_is_apart,
    check_step_is_new,
    metadata_of,
    read_foreign,
)
from ckpt.exchange.foreign.joined_tensors import Locator
from ckpt.exchange.foreign.own_part import OwnPart, Source
from ckpt.exchange.foreign.rank_files import without_warnings
from ckpt.exchange.foreign.source_formats import check_kind
from ckpt.exchange.foreign.source_reader import kind_of
from ckpt.exchange.inert.inert_torch import Span
from ckpt.model.box import Box
from ckpt.model.checksum import checksum
from ckpt.model.fill_manifest import fill_manifest
from ckpt.model.fragment_columns import pack_fragment
from ckpt.model.keys import StepRef, data_name, fragment_name
from ckpt.model.manifest import (
    FORMAT,
    Chunk,
    File,
    Fragment,
    FragmentRef,
    Location,
    Packed,
    Shard,
    StoredFile,
    Tensor,
)
from ckpt.model.record_encoding import pack
from ckpt.model.values import dumps, to_json
from ckpt.pipeline.workers import Workers
from ckpt.plan.leaf import Leaf
from ckpt.plan.merge import merge
from ckpt.plan.save import plan_save
from ckpt.state.tensors.layout import leaf_of
from ckpt.state.walk.collect import WalkResult, collect
from ckpt.storage.api import StorageBackend
from ckpt.storage.outside_files import location_of
from ckpt.storage.registry import open_backend

_NUMBER: Final = re.compile(r"\d{1,18}")
_EMPTY_JSON: Final = msgspec.Raw(b"{}")


@dataclass(slots=True)
class AdoptionReport(ImportReport):
    """The result of an adoption.

    Attributes:
        step: The number of the step.
        files: How many foreign files the step consists of.
        nbytes: The bytes of these files.
        written_bytes: The bytes that were written to the root.
        copied_bytes: How many of these are bytes of tensors.
    """

    step: int = 0
    files: int = 0
    nbytes: int = 0
    written_bytes: int = 0
    copied_bytes: int = 0


@dataclass(slots=True)
class _Elements:
    """The tensors of a state, and where their elements are.

    Attributes:
        leaves: The tensors.
        parts_in_place: The parts that are used where they are: the index of the leaf, the box and
            the place.
        copied_parts: The parts that are copied, by the index of the leaf and the box.
    """

    leaves: list[Leaf] = field(default_factory=list[Leaf])
    parts_in_place: list[tuple[int, Box, Span]] = field(default_factory=list[tuple[int, Box, Span]])
    copied_parts: dict[tuple[int, Box], Source] = field(
        default_factory=dict[tuple[int, Box], Source]
    )


def number_in(path: str) -> int | None:
    """Return the last number in the name of a file or folder; None if there is none."""
    name = os.path.basename(os.path.abspath(path))
    numbers: list[str] = _NUMBER.findall(name)
    return int(numbers[-1]) if numbers else None


def step_in(path: str) -> int:
    """Return the last number in the name of a file or folder, which is its step by the custom of
    most trainers.

    Raises:
        ConfigError: There is no number in the name.
    """
    number = number_in(path)
    if number is None:
        raise ConfigError(f"{path} has no number in its name: give --step N")
    return number


def adopt_checkpoint(
    foreign: ForeignCheckpoint,
    tier: Tier,
    step: int | None = None,
    *,
    list_attempts: Callable[[], list[StepRef]] | None = None,
    on_progress: OnProgress | None = None,
) -> AdoptionReport:
    """Make a step of ``tier`` of the files of ``foreign``, which stay where they are.

    Every byte of the files is read once, for the checksums. An error leaves the root as it was.
    A step that was adopted before from the same path, and whose files were changed since, is
    replaced, and so is a step whose folder was moved to ``source``.

    Args:
        foreign: The checkpoint to adopt.
        tier: The tier that gets the step.
        step: The number of the step; None for the last number in the name of the source.
        list_attempts: A function that returns the committed attempts on ``tier``. The default lists
            the tier without a time limit.
        on_progress: Called as bytes of the files are read.

    Raises:
        CkptError: As for ``import_checkpoint``. A file that ends before its tensors, or that is
            written to at the same time, is an ``IntegrityError``.
    """
    source = foreign.path
    with closing(open_backend(tier.url, tier.options)) as backend:
        check_root_is_apart(source, backend.url)
        if foreign.kind:
            check_kind(source, foreign.kind)
        kind = foreign.kind or kind_of(source)
        number = step_in(source) if step is None else step
        report = AdoptionReport(kind=kind, step=number)
        refs = (list_attempts or partial(committed, backend))()
        old_attempt: OldAttempt | None = None
        if any(ref.step == number for ref in refs):
            old_attempt = replaceable_attempt(backend, number, source)
        else:
            check_step_is_new(backend.url, number, refs)
        locator = Locator()
        with without_warnings():
            state = read_foreign(foreign, report, locator)
        shaper = Shaper(report, foreign.plain, foreign.parameter_names)
        walk = collect(shaper.shape(state), rank=0)
        _Adoption(backend, StepRef(number, new_attempt()), locator, report, old_attempt).write(
            walk, shaper, os.path.abspath(source), on_progress
        )
        if old_attempt is not None:
            is_removed = remove_attempt(backend, old_attempt.ref)
            remark = "" if is_removed else f"; attempt {old_attempt.ref.attempt} stays beside it"
            change = (
                f"from {old_attempt.missing_origin}"
                if old_attempt.missing_origin
                else "and was damaged since"
            )
            report.notes.append(
                f"step {number} was adopted before, {change}: it has the files as they are now"
                f"{remark}"
            )
    return report


class _Adoption:
    """Writes the records of one adopted step.

    Args:
        backend: The store that gets the step.
        ref: The step.
        locator: The locator that has read the state, and knows where the elements of its tensors
            are.
        report: The report, which the adoption completes.
        old_attempt: The attempt that the step replaces; None if there is none.
    """

    def __init__(
        self,
        backend: StorageBackend,
        ref: StepRef,
        locator: Locator,
        report: AdoptionReport,
        old_attempt: OldAttempt | None,
    ) -> None:
        self._backend, self._ref, self._locator, self._report = backend, ref, locator, report
        self._old_attempt = old_attempt
        self._chunk_bytes = SaveConfig().chunk_bytes

    def write(
        self, walk: WalkResult, shaper: Shaper, source: str, on_progress: OnProgress | None
    ) -> None:
        """Write the step. ``source`` is the absolute path of what was adopted."""
        elements = self._find_parts(walk)
        spans_by_path: dict[str, list[Span]] = defaultdict(list)
        for _, _, span in sorted(elements.parts_in_place, key=lambda part: part[2].offset):
            spans_by_path[span.path].append(span)
        files = [
            cut_file(path, spans_by_path[path], self._chunk_bytes) for path in sorted(spans_by_path)
        ]
        chunk_tables = hash_files(files, on_progress)
        if self._old_attempt is not None:
            tables = enumerate(zip(files, chunk_tables, strict=True))
            self._old_attempt.check_files(
                File(file.path, rank, file.size, table) for rank, (file, table) in tables
            )
        checksums = _Checksums(files, chunk_tables, self._locator)
        shaper.note_equal_tensors(checksums.digest)
        metadata = {
            "imported_from": source,
            "imported_as": self._report.kind,
            **metadata_of(shaper),
        }
        own_part = self._own_part(elements, rank=len(files))
        fragments = self._fragments(walk, elements, files, chunk_tables, own_part)
        with Workers("adopt", max(1, self._backend.capabilities.max_concurrency)) as workers:
            folder = StepFolder(self._backend, self._ref, workers)
            self._write_files(folder, fragments, own_part, metadata)
        self._report.files = len(files)
        self._report.nbytes = sum(file.size for file in files)

    def _find_parts(self, walk: WalkResult) -> _Elements:
        """Find the parts of all tensors of a walk."""
        elements = _Elements()
        candidates: list[tuple[int, Box, Span]] = []
        for leaf_index, item in enumerate(walk.named_tensors):
            assert isinstance(item.tensor, torch.Tensor)
            leaf = leaf_of(item.name, item.tensor, ())  # No rank has a replica of it
            parts = self._locator.parts_of(item.tensor)
            orders = {part.source.order for part in parts if isinstance(part.source, Span)}
            if len(orders) == 1:
                # The order of the dimensions in memory
                leaf = dataclasses.replace(leaf, order=orders.pop())
            elements.leaves.append(leaf)
            for part in parts:
                if isinstance(part.source, Span):
                    candidates.append((leaf_index, part.box, part.source))
                else:
                    elements.copied_parts[leaf_index, part.box] = part.source
        # If two tensors have the same bytes, only one can use them where they are.
        usable_spans = set(usable_in_place([span for _, _, span in candidates]))
        for leaf_index, box, span in candidates:
            if span in usable_spans:
                usable_spans.remove(span)
                elements.parts_in_place.append((leaf_index, box, span))
            else:
                elements.copied_parts[leaf_index, box] = span
        return elements

    def _own_part(self, elements: _Elements, rank: int) -> OwnPart | None:
        """Return the data file of the parts that are copied, or None if there are none."""
        boxes: dict[int, list[Box]] = defaultdict(list)
        for leaf_index, box in elements.copied_parts:
            boxes[leaf_index].append(box)
        if not boxes:
            return None
        leaf_indices = sorted(boxes)
        leaves = [
            Leaf(leaf.name, leaf.dtype, leaf.shape, tuple(boxes[leaf_index]), order=leaf.order)
            for leaf_index in leaf_indices
            for leaf in [elements.leaves[leaf_index]]
        ]
        plan = plan_save(leaves, rank=rank, chunk_bytes=self._chunk_bytes)
        sources = {
            (position, box): elements.copied_parts[leaf_index, box]
            for position, leaf_index in enumerate(leaf_indices)
            for box in boxes[leaf_index]
        }
        self._report.copied_bytes = sum(leaf.nbytes for leaf in leaves)
        if self._report.copied_bytes:
            self._report.notes.append(
                f"{len(leaves)} tensor(s), such as {leaves[0].name!r}, are copied to the root "
                f"({self._report.copied_bytes} bytes), since the source has them in another "
                "order, or as other values"
            )
        return OwnPart(plan, sources)

    def _fragments(
        self,
        walk: WalkResult,
        elements: _Elements,
        files: Sequence[ForeignFile],
        chunk_tables: Sequence[tuple[Chunk, ...]],
        own_part: OwnPart | None,
    ) -> list[Fragment]:
        """Return the fragments of all ranks. The first one also has what belongs to no file."""
        rank_by_path = {file.path: rank for rank, file in enumerate(files)}
        shards: dict[tuple[int, int], list[Shard]] = defaultdict(list)
        for leaf_index, box, span in elements.parts_in_place:
            rank = rank_by_path[span.path]
            shards[rank, leaf_index].append(Shard(rank, span.offset, box.offsets, box.shape))
        world_size = len(files) + (own_part is not None)
        created_at = time.time()
        fragments: list[Fragment] = []
        for rank in range(world_size):
            is_own = rank == len(files)
            tensors = tuple(
                Tensor(
                    leaf.name, leaf.dtype, leaf.shape, tuple(shards[rank, leaf_index]), leaf.order
                )
                for leaf_index, leaf in enumerate(elements.leaves)
                if rank == 0 or (rank, leaf_index) in shards
            )
            file = None if is_own else files[rank]
            fragments.append(
                Fragment(
                    format=FORMAT,
                    step=self._ref.step,
                    attempt=self._ref.attempt,
                    rank=rank,
                    world_size=world_size,
                    created_at=created_at,
                    chunk_bytes=self._chunk_bytes,
                    file=File(data_name(rank), rank, file.size, chunk_tables[rank])
                    if file
                    else None,
                    tensors=own_part.plan.tensors if own_part and is_own else tensors,
                    tied={} if rank else walk.ties,
                    views={} if rank else walk.views,
                    tree=_EMPTY_JSON if rank else msgspec.Raw(dumps(walk.tree, "state")),
                    per_rank=_EMPTY_JSON,
                    replicas={},
                    metadata=_EMPTY_JSON,
                    locations=(Location(rank, self._location(file)),) if file else (),
                )
            )
        return fragments

    def _location(self, file: ForeignFile) -> str:
        return location_of(self._backend.url, real_path(file.path))

    def _write_files(
        self,
        folder: StepFolder,
        fragments: list[Fragment],
        own_part: OwnPart | None,
        metadata: Mapping[str, Any],
    ) -> None:
        """Write the files of the step, the manifest last. After an error, remove them again."""
        complete_fragments = [
            replace(fragments[0], metadata=msgspec.Raw(to_json("metadata", metadata))),
            *fragments[1:],
        ]
        try:
            if own_part is not None:
                complete_fragments[-1] = self._put_own_part(
                    folder, complete_fragments[-1], own_part
                )
            self._commit(folder, complete_fragments)
        except BaseException:
            with suppress(StorageError):
                if not is_committed(self._backend, self._ref):
                    keys = [info.key for info in own_objects(self._backend, self._ref)]
                    delete_files(self._backend, keys)
            raise

    def _put_own_part(self, folder: StepFolder, fragment: Fragment, own_part: OwnPart) -> Fragment:
        """Write the data file of the parts that are copied, and return its fragment."""
        image = own_part.image(fragment.rank)
        chunks: list[Chunk] = []
        end = 0
        for nbytes in image.lengths:
            chunks.append(Chunk(nbytes, checksum(image.view(end, end + nbytes))))
            end += nbytes
        file = File(data_name(fragment.rank), fragment.rank, end, tuple(chunks))
        write_file(image, StoredFile.of(self._ref, file, None), folder, on_bytes=lambda _: None)
        self._report.written_bytes += end
        return replace(fragment, file=file)

    def _commit(self, folder: StepFolder, fragments: Sequence[Fragment]) -> None:
        """Put the fragments of all ranks, and then the manifest, which makes it a checkpoint."""
        records: list[tuple[Packed, FragmentRef]] = []
        for fragment in fragments:
            packed_fragment, name = pack_fragment(fragment), fragment_name(fragment.rank)
            data = pack(packed_fragment)
            folder.retry.call(partial(self._backend.put, self._ref.key(name), [data]))
            records.append(
                (packed_fragment, FragmentRef(name, fragment.rank, len(data), checksum(data)))
            )
            self._report.written_bytes += len(data)
        manifest = merge(records)
        fragment_by_rank = {fragment.rank: fragment for fragment in fragments}
        # This raises an error for what a reader of the manifest would refuse.
        fill_manifest(manifest, fragment_by_rank, key=self._ref.manifest)
        data = pack(manifest)
        check = partial(check_files, folder, manifest, lambda: None)  # Raises if a file is missing
        commit_copy(folder, data, check=check)
        self._report.written_bytes += len(data)


class _Checksums:
    """The checksums of the parts that are used where they are.

    Args:
        files: The foreign files.
        chunk_tables: The chunk table of each file.
        locator: Knows the parts of tensors.
    """

    def __init__(
        self,
        files: Sequence[ForeignFile],
        chunk_tables: Sequence[tuple[Chunk, ...]],
        locator: Locator,
    ) -> None:
        self._locator = locator
        self._tables: dict[str, tuple[dict[int, int], tuple[Chunk, ...]]] = {}
        for file, table in zip(files, chunk_tables, strict=True):
            index_by_offset: dict[int, int] = {}
            position = 0
            for index, chunk in enumerate(table):
                index_by_offset[position] = index
                position += chunk.nbytes
            self._tables[file.path] = index_by_offset, table

    def digest(self, tensor: torch.Tensor) -> str:
        """Return a checksum of the elements of ``tensor``. Tensors with equal elements in other
        parts have other checksums.
        """
        return "; ".join(
            f"{part.box} {self._checksum_of(part.source)}"
            for part in self._locator.parts_of(tensor)
        )

    def _checksum_of(self, source: Source) -> str:
        """Return a checksum of the elements of a part; for a part that is copied, a text that no
        other part has.
        """
        if isinstance(source, torch.Tensor):
            return digest_of(source)
        index_by_offset, table = self._tables.get(source.path, ({}, ()))
        if source.offset not in index_by_offset:  # The part is copied
            return repr(source)
        index = index_by_offset[source.offset]
        checksums: list[str] = []
        nbytes = 0
        while nbytes < source.nbytes:
            checksums.append(table[index].checksum)
            nbytes, index = nbytes + table[index].nbytes, index + 1
        return " ".join(checksums)

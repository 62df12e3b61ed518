"""Writes the files of one rank to one tier: the data file, which is its image, raw or encoded, and
the fragment that describes it.

An *increment* is a data file without the first chunks of its image, which the file of another step
has: its *base*. The chunks that are then written are the *tail* of the image. Another root may
have the base of the first file. A *delta* is a file with the difference of a part of the state to
the step before. A nearer tier is the *source* of a request whose image is in files and not in
memory, and its chunks have their checksums already (``hashed_chunks``).
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import replace
from itertools import chain, repeat
from typing import Protocol

import msgspec

from ckpt.catalog.step_listing import unfinished_of
from ckpt.codec.registry import encoder_of
from ckpt.config import SaveConfig
from ckpt.coordination.coordinator import Coordinator
from ckpt.errors import AgentError, CkptError
from ckpt.model.checksum import checksum
from ckpt.model.fragment_columns import Frames, frames_of, pack_fragment
from ckpt.model.keys import StepRef, data_name, fragment_name
from ckpt.model.manifest import (
    FORMAT,
    Encoding,
    File,
    Fragment,
    FragmentRef,
    StoredFile,
)
from ckpt.model.record_encoding import pack
from ckpt.pipeline.encoded_writer import widths_of, write_encoded
from ckpt.pipeline.image_writer import ImageWrite, OnBytes, adopt_image, write_image
from ckpt.pipeline.retry import RetryPolicy
from ckpt.pipeline.stored_image import StoredImage
from ckpt.pipeline.workers import Workers
from ckpt.plan.save import SavePlan
from ckpt.retention.removal import discard
from ckpt.save.base_in_other_root import OtherRoot
from ckpt.save.delta_writer import DeltaWriter
from ckpt.save.increments import (
    BaseFile,
    Tail,
    WrittenFile,
    base_of,
    bases_after,
    tail_of,
)
from ckpt.save.job_steps import JobSteps
from ckpt.save.save_request import SaveRequest
from ckpt.storage.api import AdoptsFiles, HasRoot
from ckpt.storage.tiers import OpenTier

_log = logging.getLogger("ckpt")


class FileCopier(Protocol):
    """Lets another process, the agent, copy the data files of this rank to one tier.

    Thread safety: one thread at a time.
    """

    def copy(self, ref: StepRef, source: OpenTier, on_bytes: OnBytes) -> tuple[int, ...]:
        """Copy this rank's file of the step ``ref`` from ``source``, and return when the copy is
        durable.

        Args:
            ref: The step.
            source: The tier to copy from.
            on_bytes: Called with the number of bytes just copied. An exception that it raises ends
                the copy.

        Returns:
            The length of each chunk on the tier in bytes, if the chunks are encoded there; else an
            empty tuple.

        Raises:
            AgentError: The agent has not copied the file, and does not write to it any more.
            StorageError: The store has failed.
        """
        ...

    def close(self) -> None: ...


class Copiers(Protocol):
    """Makes the `FileCopier` for a tier, or returns None if the agent does not serve the tier."""

    def copier(self, target: OpenTier) -> FileCopier | None: ...


class _WriteCounter:
    """Counts the bytes written to a file, and takes them back if the file is begun again.

    Thread safety: ``add`` may be called from any thread.
    """

    def __init__(self, on_bytes: OnBytes) -> None:
        self._on_bytes, self._counts = on_bytes, list[int]()

    def add(self, nbytes: int) -> None:
        self._counts.append(nbytes)
        self._on_bytes(nbytes)

    def restart(self) -> None:
        self._on_bytes(-sum(self._counts))
        self._counts.clear()


class RankFiles:
    """Writes the files of one rank on one tier.

    The *frames* of a fragment are the parts that depend on the save plan alone. ``_bases`` are the
    files that the next ones may be increments of, and ``_other_root`` finds one in the root of
    another run; None if the tier names none. ``_file_from_memory`` is the last file that was
    written from memory. ``_deltas`` writes the deltas of the tier; None if it gets none.
    ``_in_manifest`` is True if the manifest holds the fragments too. After the agent has failed
    (``_has_agent_failed``), its next failure is only logged at debug level.

    Args:
        copier: Lets the agent copy the data file from a nearer tier. If that fails, this process
            copies the file. None if there is no agent.
        steps: The steps of the job. No new file refers to one that the job has abandoned.

    Attributes:
        names: The names of the fragment file and of the data file.
        has_room_for_base: Whether a step may refer to an older one, which then stays as long. False
            if the tier has too small a capacity.

    Thread safety: one save at a time. The tier writer holds a lock while it calls a method.
    """

    def __init__(
        self,
        tier: OpenTier,
        coordinator: Coordinator,
        config: SaveConfig,
        workers: Workers,
        copier: FileCopier | None,
        steps: JobSteps,
    ) -> None:
        rank = coordinator.rank
        self._backend, self._rank, self._world_size = tier.backend, rank, coordinator.world_size
        self._chunk_bytes, self._workers = config.chunk_bytes, workers
        # Let the manifest hold the fragments too. Each node has the manifest, but only the
        # fragments of its own ranks.
        self._in_manifest = config.copies == "per_node"
        self._frames: tuple[SavePlan, Frames] | None = None
        self._encoder = encoder_of(tier.tier.codec)
        self._data_name = data_name(rank, is_encoded=self._encoder is not None)
        self.names = fragment_name(rank), self._data_name
        self._file_from_memory: WrittenFile | None = None
        # Each node removes steps of its own tier alone, and an image in memory is whole.
        is_shared = not (tier.local or tier.in_memory) and not self._in_manifest
        self._takes_increments = config.incremental and is_shared
        self.has_room_for_base = True
        self._bases: list[BaseFile] = []
        codec = self._encoder.codec if self._encoder else ""
        self._other_root = OtherRoot.of(tier, codec, coordinator, config)
        self._steps = steps
        self._copier, self._has_agent_failed = copier, False
        self._deltas: DeltaWriter | None = None
        if config.deltas is not None and not tier.in_memory:
            self._deltas = DeltaWriter(config.deltas, rank, tier.backend, steps.reservation)

    def keys(self, ref: StepRef) -> list[str]:
        """Return the keys of all files of this rank for ``ref``, the fragment first."""
        keys = [ref.key(name) for name in self.names]
        return keys if self._deltas is None else [*keys, self._deltas.key(ref)]

    def stored_image(self, request: SaveRequest, retry: RetryPolicy) -> StoredImage:
        """Return the image of ``request`` as this tier stores it. ``request`` must be the last job
        that was written from memory.
        """
        file = self._file_from_memory
        assert file is not None
        image = File(self._data_name, self._rank, request.plan.size, request.hashed_chunks)
        file_on_tier = StoredFile.of(request.ref, image, file.encoding, file.increment)
        return StoredImage.of(self._backend, file_on_tier, retry)

    def set_committed(self, request: SaveRequest, file: WrittenFile) -> None:
        """Note that ``file`` belongs to a committed step. If it is whole, the files of the next
        saves may be increments of it.
        """
        if self._takes_increments:
            self._bases = bases_after(request, file, self._bases)

    def write(self, request: SaveRequest, on_bytes: OnBytes, retry: RetryPolicy) -> WrittenFile:
        """Write the data file of ``request``, and return when it is durable.

        If the image is in memory, this process writes the file once, and repeats only single
        requests. If the image is read from a nearer tier, the agent copies the file. If there is no
        agent, or the agent cannot copy the file, this process writes it. If the store still fails
        with a transient error, this process writes the whole file again from its start.

        Raises:
            ChecksumMismatch: The nearer tier has returned other bytes than were written to it.
            StorageError: The store has failed. The file is not visible.
        """
        counter = _WriteCounter(on_bytes)
        if self._deltas is not None and request.source is None:
            request = replace(request, image=self._deltas.record(request))
        tail: Tail | None = None
        if request.plan.frozen_chunks and (self._bases or self._other_root is not None):
            base = self._base_of(request)
            if base is not None:
                tail = tail_of(request, base, self._backend, self._rank)
        if request.source is None:
            self._file_from_memory = file = self._write(request, tail, counter)
            return file
        # The agent is asked at the first attempt only, and never for an increment.
        asks_agent = chain([tail is None and self._copier is not None], repeat(False))

        def attempt() -> WrittenFile:
            counter.restart()
            return (next(asks_agent) and self._copy_by_agent(request, counter)) or self._write(
                request, tail, counter
            )

        return retry.call(attempt)

    def _base_of(self, request: SaveRequest) -> BaseFile | None:
        """Return the base of the file of ``request``; None if the file must be whole."""
        base = base_of(request.plan, self._bases)
        if base is None and self._other_root is not None:
            base = self._other_root.base_for(request)
            self._bases += [base] if base else []
        if base is None or base.root:  # Another root has room for its own steps
            return base
        is_usable = self.has_room_for_base and not self._steps.has_abandoned(base.ref)
        return base if is_usable else None

    def put_fragment(
        self, request: SaveRequest, file: WrittenFile, retry: RetryPolicy
    ) -> FragmentRef:
        """Write the fragment of ``request``. Its data file must be durable.

        The delta of the rank, if there is one, is put before, so that it is there when the step is
        committed.
        """
        if self._deltas is not None:
            self._deltas.put(request, retry)
        name, _ = self.names
        columns = pack_fragment(self._fragment(request, file), self._frames_of(request.plan))
        data = pack(columns)  # The bytes of the record
        retry.call(lambda: self._backend.put(request.ref.key(name), [data]))
        return FragmentRef(name, self._rank, len(data), checksum(data))

    def discard_unfinished(self, ref: StepRef) -> None:
        """Discard the unfinished writes of this rank for ``ref``. They are not in a listing of
        objects, but they take space in the store.
        """
        own_keys = {*self.keys(ref)}
        writes = unfinished_of(self._backend, ref)
        discard(self._backend, [write for write in writes if write.key in own_keys])

    def close(self) -> None:
        """Close the copier. No write may be under way."""
        if self._copier is not None:
            self._copier.close()

    def _copy_by_agent(self, request: SaveRequest, counter: _WriteCounter) -> WrittenFile | None:
        """Let the agent copy the file, and return what ``write`` returns. Return None if this
        process must write the file.
        """
        copier, source, encoder = self._copier, request.source, self._encoder
        if copier is None or source is None or not request.plan.size:
            return None
        if isinstance(self._backend, HasRoot) and self._backend.is_replaced():
            return None  # The root was replaced, so the write of this process is refused
        try:
            lengths = copier.copy(request.ref, source, counter.add)
            if len(lengths) != (len(request.hashed_chunks) if encoder else 0):
                raise AgentError("the agent has copied another file")
        except AgentError as error:
            level = logging.DEBUG if self._has_agent_failed else logging.WARNING
            _log.log(
                level,
                "ckpt: step %d: the trainer copies its file to %s by itself, and not the agent: %s",
                request.ref.step,
                self._backend.url,
                error,
            )
            self._has_agent_failed = True
            # After a detach, the step belongs to the agent. This call then raises ``LeftToAgent``.
            counter.restart()
            with suppress(CkptError):
                self.discard_unfinished(request.ref)
            return None
        self._has_agent_failed = False
        encoding = Encoding(self._rank, encoder.codec, lengths) if encoder else None
        return WrittenFile(request.hashed_chunks, encoding)

    def _write(
        self, request: SaveRequest, tail: Tail | None, counter: _WriteCounter
    ) -> WrittenFile:
        """Write the data file by this process: the whole image, or its ``tail`` as an increment."""
        plan, hashed_chunks = request.plan, request.hashed_chunks
        source, lengths = request.image, plan.chunks
        if tail is not None:
            source, lengths, hashed_chunks = tail.part_of(request)
            counter.add(tail.start)  # These bytes are on the tier already
        write = ImageWrite(
            source=source,
            chunks=lengths,
            key=request.ref.key(self._data_name),
            workers=self._workers,
            retry=RetryPolicy(),
            on_bytes=counter.add,
            hashed_chunks=hashed_chunks,
        )
        if isinstance(self._backend, AdoptsFiles):  # In memory, where no step is an increment
            # The memory of the image becomes the file, without a copy.
            return WrittenFile(adopt_image(write, self._backend))
        encoding: Encoding | None = None
        if (encoder := self._encoder) is None:
            chunks = write_image(write, self._backend)
        else:
            # The bytes of an element of each chunk, by which the codec sorts them
            all_widths = widths_of(plan.chunks, plan.tensors)
            widths = tail.own_widths(all_widths) if tail else all_widths
            chunks, encoded_lengths = write_encoded(write, self._backend, encoder, widths)
            encoding = Encoding(self._rank, encoder.codec, encoded_lengths)
        return tail.file(self._rank, chunks, encoding) if tail else WrittenFile(chunks, encoding)

    def _fragment(self, request: SaveRequest, file: WrittenFile) -> Fragment:
        """Return the fragment that describes this rank's part of ``request``."""
        return Fragment(
            format=FORMAT,
            step=request.ref.step,
            attempt=request.ref.attempt,
            rank=self._rank,
            world_size=self._world_size,
            created_at=request.created_at,
            chunk_bytes=self._chunk_bytes,
            file=File(self._data_name, self._rank, request.plan.size, file.chunks),
            tensors=request.plan.tensors,
            tied=dict(request.tied),
            views=dict(request.views),
            tree=msgspec.Raw(request.tree),
            per_rank=msgspec.Raw(request.per_rank),
            replicas=dict(request.replicas()),
            metadata=msgspec.Raw(request.metadata),
            encoded=(file.encoding,) if file.encoding else (),
            increments=(file.increment,) if file.increment else (),
            in_manifest=self._in_manifest,
        )

    def _frames_of(self, plan: SavePlan) -> Frames:
        """Return the frames of ``plan``, the parts of a fragment that depend on the plan alone.

        If the plan is the same as for the last save, its frames are used again, since it takes some
        time to make them.
        """
        last_plan, frames = self._frames or (None, None)
        if frames is None or last_plan is not plan:
            frames = frames_of(plan.tensors, plan.chunks)
            self._frames = plan, frames
        return frames

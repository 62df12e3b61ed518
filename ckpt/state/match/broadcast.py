"""Restore with ``broadcast=True``: if several ranks want the same chunk, one of them reads
and verifies the chunk, and sends it to the other ranks over gloo.

A chunk is a part of a saved tensor. It has the same key, a number, on all ranks. The sink of a
restore writes chunks to their targets, the regions of tensors that they fill.

The restore proceeds in rounds. In each round, a rank reads its next parcels (groups of chunks)
while the parcels of the previous round are sent, some of them at once (a *flight*). The next round
begins only after all ranks have agreed that the round has succeeded. So if a rank finds damage, no
other rank waits for it in a collective. If another rank ends or hangs during a collective, the wait
for it ends after ``TIMEOUT``. Ranks verify the chunks that they receive by the same checksums as
the chunks that they read.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist

from ckpt.coordination.restore_rounds import ConnectionLost
from ckpt.errors import RestoreError
from ckpt.model.checksum import checksum
from ckpt.pipeline.chunk_reader import Sink
from ckpt.pipeline.workers import Workers
from ckpt.plan.restore import ChunkRead, RestorePlan, Target
from ckpt.plan.shared_reads import Group, Keys, Parcel, by_key, share
from ckpt.storage.api import aligned_memory

PARCEL_BYTES: Final = 32 << 20
"""The most bytes of a parcel. A larger chunk is a parcel of its own."""
FLIGHT_BYTES: Final = 128 << 20
"""The most bytes of the parcels that are sent at once. Besides its state, a rank needs memory for
these parcels. For each of its groups, it also needs memory for two parcels that it reads itself.
"""
WORTH_BYTES: Final = 1 << 20
"""The least bytes that a group of ranks shares. If ranks want fewer bytes in common, each of them
reads these bytes itself.
"""
TIMEOUT: Final = timedelta(seconds=600)
"""The time limit of a collective."""

Agree = Callable[[str, Callable[[], object]], None]
"""A function that takes a name for some work and the work. All ranks call it together. It does the
work on each rank, and raises on all ranks if the work has failed on any rank.
"""


def can_broadcast(world_size: int) -> bool:
    """Return True if there is a default process group of ``world_size`` ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() == world_size


class Broadcast:
    """Reads the chunks of one restore. All ranks of the default process group share the reading.

    All ranks make this object and call ``run`` together.

    Args:
        plan: The restore plan of this rank.
        sink: The targets of the chunks.
        read: Reads a part of ``plan`` into a sink. It is called from another thread, one call at a
            time.
        workers: The threads that verify received chunks and copy them to ``sink``.

    Attributes:
        read_bytes: The bytes that this rank has read from storage, where chunks may be encoded.
        received_bytes: The raw bytes of the chunks that other ranks have sent to this rank.

    ``_reads`` are the reads of the plan, by the keys of their chunks, and ``_own_keys`` the keys of
    the chunks that this rank does not share with others. ``_process_groups`` has each group of
    ranks that share chunks, with its process group. ``_filled_buffers`` are the parcels that this
    rank has read and not yet sent, and ``_free_memory`` is memory that can be used again.
    """

    def __init__(
        self,
        plan: RestorePlan,
        sink: Sink,
        read: Callable[[RestorePlan, Sink], None],
        *,
        workers: Workers,
    ) -> None:
        self._plan, self._sink, self._read, self._workers = plan, sink, read, workers
        self._reads = by_key(plan.reads)
        self._rank = dist.get_rank()
        self._created_groups: list[Any] = []  # Torch's stubs also allow an int as a group
        self._process_groups: list[tuple[Group, Any]] = []
        self._own_keys: frozenset[int] = frozenset()
        self._round_count = 0
        self._filled_buffers: dict[Parcel, _ParcelBuffer] = {}
        self._free_memory: list[memoryview] = []
        self._lock = threading.Lock()
        self.read_bytes = 0
        self.received_bytes = 0

    def run(self, agree: Agree) -> None:
        """Read all chunks of the plan into the sink.

        ``agree(name, work)`` does the work on every rank, and raises on all ranks if the work has
        failed on any rank.

        Raises:
            Exception: A rank has failed. The error is the one that ``agree`` raises. Some targets
                may then have been overwritten.
        """
        try:
            agree("meet", partial(self._collective, self._plan_sharing))
            with Workers("share", 1) as read_thread:
                for number in range(self._round_count + 1):
                    agree(f"round/{number}", partial(self._run_round, number, read_thread))
        finally:
            self._destroy_groups()

    def _plan_sharing(self) -> None:
        """Exchange the keys of the chunks that the ranks want, decide which ranks share which
        chunks, and make a process group for each set of ranks that share chunks.
        """
        world = dist.new_group(backend="gloo", timeout=TIMEOUT)
        self._created_groups.append(world)
        keys_by_rank = _gather_keys(np.array(list(self._reads), dtype=np.int64), world)
        sizes = {key: read.nbytes for key, read in self._reads.items()}
        # Say which rank reads which of the chunks that several ranks want, and in which rounds
        shares = share(sizes, keys_by_rank, worth_bytes=WORTH_BYTES, parcel_bytes=PARCEL_BYTES)
        round_count = torch.tensor([max(shares.rounds, 1)], device="cpu")
        dist.all_reduce(round_count, op=dist.ReduceOp.MAX, group=world)
        for group in shares.groups:
            has_all_ranks = len(group.ranks) == dist.get_world_size()
            self._process_groups.append(
                (group, world if has_all_ranks else self._new_group(group.ranks))
            )
        self._own_keys, self._round_count = shares.own_keys, int(round_count.item())

    def _new_group(self, ranks: Sequence[int]) -> Any:
        """Return a new process group of ``ranks``, which these ranks alone create."""
        group = dist.new_group(
            list(ranks), timeout=TIMEOUT, backend="gloo", use_local_synchronization=True
        )
        self._created_groups.append(group)
        return group

    def _run_round(self, number: int, read_thread: Workers) -> None:
        """Read this rank's parcels of round ``number``, and meanwhile exchange the parcels of the
        round before.
        """
        future = (
            read_thread.submit(self._read_parcels, number) if number < self._round_count else None
        )
        if number:
            self._collective(partial(self._exchange_round, number - 1))
        if future is not None:
            future.result()

    # -- reading -----------------------------------------------------------------------------------

    def _read_parcels(self, number: int) -> None:
        """Read this rank's parcels of round ``number``. In the first round, also read the chunks
        that this rank does not share with others.
        """
        if not number and self._own_keys:
            self._read_part(
                [self._reads[key] for key in self._reads if key in self._own_keys], self._sink
            )
        own_buffers = [
            self._buffer_for(parcel)
            for group, _ in self._process_groups
            if number < len(group.rounds)
            for parcel in group.rounds[number]
            if parcel.reader == self._rank
        ]
        if own_buffers:
            chunk_memories = {
                target: memory
                for buffer in own_buffers
                for target, memory in buffer.chunk_memories.items()
            }
            self._read_part(
                [read for buffer in own_buffers for read in buffer.reads],
                _BufferSink(chunk_memories),
            )
        self._filled_buffers.update({buffer.parcel: buffer for buffer in own_buffers})

    def _read_part(self, reads: Sequence[ChunkRead], sink: Sink) -> None:
        """Read ``reads``, a part of the plan, into ``sink``."""
        sorted_reads = sorted(reads, key=lambda read: read.chunk_id)
        part = replace(self._plan, reads=tuple(sorted_reads))
        self._read(part, sink)
        self.read_bytes += part.read_bytes

    # -- sending -----------------------------------------------------------------------------------

    def _exchange_round(self, number: int) -> None:
        """Exchange the parcels of round ``number``."""
        for group, process_group in self._process_groups:
            if number < len(group.rounds):
                self._exchange(group.rounds[number], process_group)

    def _exchange(self, parcels: Sequence[Parcel], process_group: Any) -> None:
        """Broadcast each of ``parcels`` from its reader in ``process_group``, and copy its chunks
        to the sink.
        """
        for flight in self._flights(parcels):
            buffers = [
                self._filled_buffers.pop(parcel)
                if parcel in self._filled_buffers
                else self._buffer_for(parcel)
                for parcel in flight
            ]
            works = [
                dist.broadcast(
                    buffer.tensor, buffer.parcel.reader, group=process_group, async_op=True
                )
                for buffer in buffers
            ]
            for buffer, work in zip(buffers, works, strict=True):
                assert work is not None
                work.wait()
                self._workers.run_all(partial(self._place, buffer, read) for read in buffer.reads)
                if buffer.parcel.reader != self._rank:
                    self.received_bytes += sum(read.nbytes for read in buffer.reads)
                if not buffer.in_place:
                    with self._lock:
                        self._free_memory.append(buffer.memory)

    def _flights(self, parcels: Sequence[Parcel]) -> Generator[list[Parcel]]:
        """Yield lists of ``parcels`` to send at once. A list with several parcels has at most
        ``FLIGHT_BYTES``.
        """
        flight: list[Parcel] = []
        nbytes = 0
        for parcel in parcels:
            size = sum(self._reads[key].nbytes for key in parcel.keys)
            if flight and nbytes + size > FLIGHT_BYTES:
                yield flight
                flight, nbytes = [], 0
            flight.append(parcel)
            nbytes += size
        yield flight

    def _place(self, buffer: _ParcelBuffer, read: ChunkRead) -> None:
        """Verify the chunk ``read`` in ``buffer`` if another rank has sent it. Copy it to the sink,
        unless ``buffer`` shares the memory of the target.
        """
        data = buffer.chunk_memories[_first_target(read)]
        if buffer.parcel.reader != self._rank and checksum(data) != read.checksum:
            raise RestoreError(
                f"what rank {buffer.parcel.reader} read of the file of rank {read.rank} has not "
                "arrived as it was sent: restore again, or with broadcast=False"
            )
        if not buffer.in_place:
            self._sink.place(read, data)

    # -- memory ------------------------------------------------------------------------------------

    def _buffer_for(self, parcel: Parcel) -> _ParcelBuffer:
        """Return ``parcel`` with memory for its chunks: the memory of the target, if the parcel has
        a single chunk and the target has contiguous host memory for it, else a buffer.
        """
        reads = [self._reads[key] for key in parcel.keys]
        target = self._sink.direct(reads[0]) if len(reads) == 1 else None
        memory = self._take_memory(sum(read.nbytes for read in reads)) if target is None else target
        return _ParcelBuffer(parcel, reads, memory, in_place=target is not None)

    def _take_memory(self, nbytes: int) -> memoryview:
        """Return a free buffer of at least ``nbytes``, or a new one."""
        with self._lock:
            for index, memory in enumerate(self._free_memory):
                if memory.nbytes >= nbytes:
                    return self._free_memory.pop(index)
        return aligned_memory(max(nbytes, PARCEL_BYTES))

    # -- the end -----------------------------------------------------------------------------------

    def _collective(self, work: Callable[[], None]) -> None:
        """Call ``work``. If it raises an error, destroy the process groups, so that no other rank
        waits for this rank in a collective. ``ConnectionLost`` replaces a ``RuntimeError``.
        """
        try:
            work()
        except Exception as error:
            # The connections of a process group end when nothing refers to it any more, and the
            # frames of the error do.
            traceback.clear_frames(error.__traceback__)
            self._destroy_groups()
            if not isinstance(error, RuntimeError):
                raise
            line = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
            raise ConnectionLost(f"it could not share with others what it read: {line}") from error

    def _destroy_groups(self) -> None:
        """Forget all parcels, and destroy the process groups."""
        self._process_groups.clear()
        self._filled_buffers.clear()
        while self._created_groups:
            dist.destroy_process_group(self._created_groups.pop())


class _ParcelBuffer:
    """A parcel and the memory in which its chunks stand one after another.

    Attributes:
        parcel: The parcel.
        reads: The reads of its chunks.
        memory: The memory, which may be longer than the parcel.
        in_place: True if the memory is that of the target.
        chunk_memories: The memory of each chunk, by the chunk's first target.
    """

    def __init__(
        self, parcel: Parcel, reads: Sequence[ChunkRead], memory: memoryview, *, in_place: bool
    ) -> None:
        self.parcel, self.reads, self.memory, self.in_place = parcel, reads, memory, in_place
        self.chunk_memories: dict[Target, memoryview] = {}
        self._nbytes = 0
        for read in reads:
            start, self._nbytes = self._nbytes, self._nbytes + read.nbytes
            self.chunk_memories[_first_target(read)] = memory[start : self._nbytes]

    @property
    def tensor(self) -> torch.Tensor:
        return torch.frombuffer(self.memory[: self._nbytes], dtype=torch.uint8)


class _BufferSink:
    """A sink that puts each chunk at its place in the memory of its parcel.

    A parcel is a group of chunks that one rank reads and broadcasts to the others.
    """

    def __init__(self, chunk_memories: Mapping[Target, memoryview]) -> None:
        self._chunk_memories = chunk_memories

    def direct(self, read: ChunkRead) -> memoryview | None:
        return self._chunk_memories[_first_target(read)]

    def place(self, read: ChunkRead, data: memoryview) -> None:
        self._chunk_memories[_first_target(read)][:] = data


def _first_target(read: ChunkRead) -> Target:
    """Return the first target of the chunk, which identifies it in this restore.

    The offset of the chunk in its file cannot identify it, since the offset depends on the codec of
    the tier.
    """
    return read.targets[0]


def _gather_keys(keys: Keys, group: Any) -> list[Keys]:
    """Return the ``keys`` of every rank, in the order of ranks."""
    # The device is given, since torch's default device may be an accelerator.
    count = torch.tensor([len(keys)], device="cpu")
    counts = [torch.zeros_like(count) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, count, group=group)
    size = max(int(length.item()) for length in counts)
    own_table = torch.zeros(size, dtype=torch.int64, device="cpu")
    own_table[: len(keys)] = torch.from_numpy(keys)
    tables = [torch.empty_like(own_table) for _ in counts]
    dist.all_gather(tables, own_table, group=group)
    return [
        table[: int(length.item())].numpy() for table, length in zip(tables, counts, strict=True)
    ]

"""Copies of a node's files on its buddies, so that a step outlives the loss of the node.

After each commit on a local tier with ``replicas``, the lowest rank of each node reads the files of
the nodes that it is a buddy of, over TCP, and stores them in its own folder beside the files of
its own ranks. A restore finds them there as it finds the files of any node.

Nodes read, and never write to each other. Each chunk is checked before the file appears.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, Self

import msgspec

from ckpt.catalog.fragments import load_fragment
from ckpt.catalog.index import is_committed, read_packed
from ckpt.catalog.transfer import copy_files
from ckpt.catalog.verify import StepFolder
from ckpt.config import SaveConfig, failure_domain
from ckpt.coordination.api import Coordinator
from ckpt.coordination.commit import LEADER
from ckpt.coordination.gather import Wait, gather, leader_decides
from ckpt.errors import CkptError, ConfigError, OutOfSpace, StorageError
from ckpt.events import NodeReplicated, Observers
from ckpt.model.keys import StepRef
from ckpt.model.manifest import Fragment, Manifest, StoredFile
from ckpt.model.readable import size
from ckpt.nodes.server import NodeServer, NodeStore, Peer, Step
from ckpt.pipeline.pace import Pace
from ckpt.pipeline.reader import ChunkReader, Sink, runs_of
from ckpt.pipeline.retry import RetryPolicy
from ckpt.pipeline.workers import Workers
from ckpt.plan.buddies import buddies
from ckpt.plan.restore import ChunkRead
from ckpt.storage.api import HasSpace
from ckpt.storage.tiers import Nodes, OpenTier

_START_SECONDS: Final = 300.0
_END_SECONDS: Final = 60.0
"""How long ``close`` waits for the buddies."""
_SUBJECT: Final = "replicas"
_MISSED: Final = 3
"""Steps in a row that a buddy does not get before a warning says so."""
_TRIES: Final = 3
"""How often a step is tried while there is no newer one. A node may learn of the commit later than
its buddy.
"""

_LOOK_SECONDS: Final = 1.0
"""How long a node waits, after each copy, to hear that the others have their first copies."""

_log = logging.getLogger("ckpt")


class _Node(msgspec.Struct, frozen=True):
    """The lowest rank of a node: how it is reached, and its failure domain."""

    peer: Peer
    domain: str


class NodeReplicas:
    """The copies that this node keeps, and the server that the others copy from.

    Args:
        tiers: The tiers with replicas on which this rank is the lowest rank of its node.
        nodes: All nodes of the job, by their lowest rank.
        server: Serves this node's files.
        coordinator: The connection to the other ranks.
        config: How to save.
        observers: They get an event for each step that was copied.

    Thread safety: ``committed`` may be called from any thread, ``close`` by the owner, once.
    ``_lock`` guards ``_newest``, ``_copied``, ``_restored`` and ``_outdate``. The other fields are
    set once, or belong to the thread that copies.
    """

    def __init__(
        self,
        tiers: Sequence[OpenTier],
        nodes: Mapping[int, _Node],
        server: NodeServer,
        coordinator: Coordinator,
        config: SaveConfig,
        observers: Observers,
    ) -> None:
        self._server, self._coordinator, self._observers = server, coordinator, observers
        self._pace = Pace(config.replicate_mb_per_s)
        self._copying = Workers("replicas", 1, nice=config.nice, cpus=config.cpus)
        self._writing = Workers("copies", 1, nice=config.nice, cpus=config.cpus)
        self._copying.start()  # Start now: a commit must not fail because no thread can be started
        self._lock = threading.Lock()
        self._newest: dict[int, StepRef] = {}
        self._copied: dict[int, StepRef] = {}
        self._restored: StepRef | None = None
        self._outdate: dict[int, Callable[[], None]] = {}
        self._tiers = {tier.index: _ring_of(tier, nodes, coordinator.rank) for tier in tiers}

    @classmethod
    def of(
        cls,
        tiers: Sequence[OpenTier],
        coordinator: Coordinator,
        config: SaveConfig,
        observers: Observers,
    ) -> Self | None:
        """Return the replicas that this rank keeps and serves; None if it does neither.

        All ranks call it, with the same tiers.

        Raises:
            ConfigError: A tier with replicas is not local.
            CommitTimeout: Some node has not posted its address in time.
        """
        wanted = [tier for tier in tiers if tier.tier.replicas]
        for tier in wanted:
            if not tier.local:
                raise ConfigError(
                    f"replicas={tier.tier.replicas} of {tier.url}: all nodes share this tier, so "
                    "its steps outlive any node: leave replicas out, or declare local=True"
                )
        apart = [(tier, tier.nodes) for tier in wanted if tier.nodes is not None]
        if not apart:
            if wanted:
                _log.info("ckpt: the job has one node: there is no other to keep copies on")
            return None
        mine = [tier for tier, nodes in apart if coordinator.rank in nodes.firsts]
        stores = {tier.index: tier.backend for tier in mine}
        server = NodeServer(stores, nice=config.nice, cpus=config.cpus) if mine else None
        try:
            nodes = _exchange([nodes for _, nodes in apart], server, coordinator)
            if server is None:
                return None
            return cls(mine, nodes, server, coordinator, config, observers)
        except BaseException:
            if server is not None:
                server.close()
            raise

    def keeps_earlier(self, tier: OpenTier) -> bool:
        """Return whether ``committed`` calls ``outdate`` for this tier."""
        return tier.index in self._tiers

    def set_restored(self, ref: StepRef) -> None:
        """Note that the job goes on from ``ref``, which stays until a step has its copies."""
        with self._lock:
            self._restored = ref

    def committed(self, tier: OpenTier, ref: StepRef, outdate: Callable[[], None]) -> None:
        """Note that ``ref`` is a checkpoint on ``tier``. Return at once.

        The other nodes may read this node's files of it from now on, and this node copies theirs.

        Args:
            outdate: Called in the background once all nodes have the copies of a step of this job.
                The steps of earlier jobs are needed until then, since the loss of a node may cost
                all steps of this one. A node that fails to copy several steps is not waited for.
        """
        if tier.index not in self._tiers:
            return
        self._server.allow(ref, tier.index)
        with self._lock:
            waits = tier.index in self._newest
            self._newest[tier.index], self._outdate[tier.index] = ref, outdate
        if not waits:
            self._copying.submit(self._copy, tier.index)

    def copied(self, tier: OpenTier) -> frozenset[StepRef]:
        """Return the newest step of a tier whose copies this node keeps, or the step that the job
        has restored, if there is one.

        Later steps may not have their copies in time. No retention rule may remove these.
        """
        with self._lock:
            found = self._copied.get(tier.index, self._restored)
        return frozenset() if found is None or tier.index not in self._tiers else frozenset({found})

    def close(self, *, wait: bool) -> None:
        """Stop.

        With ``wait``, let this node and its buddies finish the last step first, without a limit to
        the rate and for at most 60 s.
        """
        deadline = time.monotonic() + (_END_SECONDS if wait else 0.0)
        self._pace.end(now=not wait)
        if wait and not futures.wait([self._copying.submit(int)], _END_SECONDS).done:
            self._pace.end(now=True)
        self._copying.close(cancel=True)
        self._writing.close(cancel=True)
        for ring in self._tiers.values():
            ring.end(warn=wait)
        self._meet_buddies(deadline)
        self._server.close()

    def _copy(self, index: int) -> None:
        with self._lock:
            ref = self._newest.pop(index)
        ring, began = self._tiers[index], time.perf_counter()
        try:
            nbytes = self._try(ring, ref)
        except Exception as error:  # noqa: BLE001 - nothing that fails here may cost a save
            ring.missed(ref, error)
            if ring.fails and ring.unheard:
                self._say_first(ring)  # The others need not wait for this node
                ring.unheard.clear()
                self._end_earlier(index)
            return
        seconds = time.perf_counter() - began
        if nbytes is not None:
            with self._lock:
                self._copied[index] = ref
            self._observers.notify(
                NodeReplicated(step=ref.step, tier=ring.tier.url, nbytes=nbytes, seconds=seconds)
            )
            if ring.unheard and self._all_have_copied(ring):
                self._end_earlier(index)

    def _try(self, ring: _Ring, ref: StepRef) -> int | None:
        """Copy a step, and try again while there is no newer one. Raises as ``_Ring.copy`` does."""
        for _ in range(_TRIES - 1):
            try:
                return ring.copy(ref, self._writing, self._pace)
            except CkptError:
                with self._lock:
                    is_newest = ring.tier.index not in self._newest
                if self._pace.stopped or not is_newest:
                    raise
        return ring.copy(ref, self._writing, self._pace)

    def _end_earlier(self, index: int) -> None:
        with self._lock:
            outdate = self._outdate[index]
        outdate()

    def _all_have_copied(self, ring: _Ring) -> bool:
        """Return whether each node has copied a step of this job, as this one has. If one is not
        heard of now, this is asked again after the next step.
        """
        self._say_first(ring)
        deadline = time.monotonic() + _LOOK_SECONDS
        try:
            while ring.unheard and (left := deadline - time.monotonic()) > 0:
                ring.unheard -= self._coordinator.collect(
                    ring.first, set(ring.unheard), timeout=left
                ).keys()
        except CkptError as error:
            _log.debug("ckpt: whether other nodes have copied a step is unknown: %s", error)
        return not ring.unheard

    def _say_first(self, ring: _Ring) -> None:
        """Post once that this node has copied a step of this job, or that it cannot."""
        if (rank := self._coordinator.rank) in ring.unheard:
            with suppress(CkptError):
                self._coordinator.post(ring.first, b"")
                ring.unheard.discard(rank)

    def _meet_buddies(self, deadline: float) -> None:
        """Post that this node copies nothing more, and return when its buddies have posted it.

        A node that leaves the others by an exception posts it too, so that no node waits for it.
        """
        subject = f"{_SUBJECT}/done"
        keepers = {rank for ring in self._tiers.values() for rank in ring.keepers}
        try:
            self._coordinator.post(subject, b"done")
            if (left := deadline - time.monotonic()) > 0:
                gather(self._coordinator, subject, Wait(left, "the copies"), ranks=keepers)
        except CkptError as error:
            _log.warning(
                "ckpt: whether other nodes have copied the last step is unknown: %s", error
            )


@dataclass(slots=True)
class _Ring:
    """The part of one node in the copies of one tier. The thread that copies has it.

    Attributes:
        here: The number of this node.
        sources: How the nodes are reached whose files this node keeps, by their number.
        keepers: The lowest ranks of the nodes that keep this node's files.
        unheard: The lowest ranks of the nodes that are not known to have copied a step of this job.
            It is empty if the steps of earlier jobs may go.
    """

    tier: OpenTier
    nodes: Nodes
    here: int
    sources: Mapping[int, Peer]
    keepers: Sequence[int]
    unheard: set[int]
    _kept: dict[StepRef, list[str]] = field(default_factory=dict[StepRef, list[str]])
    _missed: int = 0
    _lacking: StepRef | None = None

    def copy(self, ref: StepRef, workers: Workers, pace: Pace) -> int | None:
        """Copy the other nodes' files of a committed step; return their size, or None if the step
        is not here any more.

        Raises:
            CkptError: A file cannot be read there or written here. What was copied is removed.
        """
        backend = self.tier.backend
        folder = StepFolder(backend, ref, workers, RetryPolicy(patience_seconds=0))
        kept = self._kept.setdefault(ref, [])
        try:
            manifest, _ = read_packed(backend, ref)
            nbytes = sum(
                self._copy_node(folder, manifest, node, kept, pace) for node in self.sources
            )
        except BaseException:
            self._remove(ref)
            raise
        if not is_committed(backend, ref):  # The step was removed meanwhile
            self._remove(ref)
            return None
        self._missed, self._lacking = 0, None
        for other in [other for other in self._kept if other != ref]:
            if self.tier.in_memory:
                self._remove(other)
            self._kept.pop(other, None)  # The retention of a folder removes its copies
        return nbytes

    def _copy_node(
        self, folder: StepFolder, manifest: Manifest, node: int, kept: list[str], pace: Pace
    ) -> int:
        ref, files = folder.ref, manifest.file_map()
        peer = self.sources[node]
        theirs = [part for part in manifest.fragments if self.nodes.of[part.rank] == node]
        sizes = {
            files[part.rank].name: files[part.rank].size for part in theirs if part.rank in files
        }
        announced = {self.tier.index: {ref.folder: Step(listed=True, files=sizes)}}
        store = NodeStore(
            self.tier.index, self.tier.url, [msgspec.structs.replace(peer, tiers=announced)]
        )
        parts = [
            (part.name, *load_fragment(store, ref, manifest, part, files.get(part.rank)))
            for part in theirs
        ]
        stored = [found for _, fragment, _ in parts if (found := _stored(ref, fragment))]
        self._check_room(manifest, sum(file.size for file in stored))
        kept += [file.key for file in stored]
        copy_files(_fetch(store, stored, pace), stored, folder, on_bytes=pace.spend)
        # Write fragments last: a fragment states that its file is there.
        for name, _, data in parts:
            kept.append(ref.key(name))
            folder.backend.put(ref.key(name), [data])
        return sum(file.size for file in stored)

    def _check_room(self, manifest: Manifest, nbytes: int) -> None:
        """Raise ``OutOfSpace`` if copies of ``nbytes`` would take the room of the next save."""
        backend = self.tier.backend
        own = sum(file.size for file in manifest.files if self.nodes.of[file.rank] == self.here)
        if isinstance(backend, HasSpace) and backend.free_bytes() < nbytes + own:
            raise OutOfSpace(
                self.tier.url, f"copies of {size(nbytes)} would leave no room for the next save"
            )

    @property
    def first(self) -> str:
        """The subject of the messages that a node has copied a step of this job."""
        return f"{_SUBJECT}/first{self.tier.index}"

    @property
    def fails(self) -> bool:
        """Whether the last steps were not copied."""
        return self._missed >= _MISSED

    def missed(self, ref: StepRef, error: Exception) -> None:
        """Note that a step was not copied."""
        self._missed, self._lacking = self._missed + 1, ref
        level = logging.WARNING if self._missed == _MISSED else logging.DEBUG
        _log.log(
            level,
            "ckpt: step %d on %s: the files of other nodes were not copied to this node, nor those "
            "of the %d steps before: %s. If saves come faster than copies, save less often or "
            "raise slots",
            ref.step,
            self.tier.url,
            self._missed - 1,
            error,
        )

    def end(self, *, warn: bool) -> None:
        """Remove the copies of steps that this node does not list any more.

        With ``warn``, log a warning if the last step was not copied.
        """
        for ref in list(self._kept):
            with suppress(CkptError):
                if not is_committed(self.tier.backend, ref):
                    self._remove(ref)
        if warn and self._lacking is not None:
            _log.warning(
                "ckpt: step %d on %s: the files of other nodes were not copied to this node",
                self._lacking.step,
                self.tier.url,
            )

    def _remove(self, ref: StepRef) -> None:
        # Remove fragments first: a fragment states that its file is there.
        for key in reversed(self._kept.pop(ref, [])):
            with suppress(CkptError):
                self.tier.backend.delete(key)


def _fetch(
    store: NodeStore, files: Sequence[StoredFile], pace: Pace
) -> Callable[[Sequence[ChunkRead], Sink], int]:
    """Return what reads chunks of ``files`` from another node."""
    reader, of_rank = ChunkReader(store, RetryPolicy()), {file.rank: file for file in files}

    def fetch(reads: Sequence[ChunkRead], sink: Sink) -> int:
        for run in runs_of(reads):
            if pace.stopped:
                raise StorageError("replicas", "the copying of other nodes' files has ended")
            for _, error in reader.read(run, of_rank[run.rank], sink):
                raise error
        return 0

    return fetch


def _stored(ref: StepRef, fragment: Fragment) -> StoredFile | None:
    if fragment.file is None:
        return None
    return StoredFile.of(ref, fragment.file, next(iter(fragment.encoded), None))


def _exchange(
    rings: Sequence[Nodes], server: NodeServer | None, coordinator: Coordinator
) -> dict[int, _Node]:
    """Return all nodes, by their lowest rank. All ranks call it."""
    ranks = {rank for nodes in rings for rank in nodes.firsts}
    if server is not None:
        peer = Peer(coordinator.rank, server.addresses, server.port, server.token.hex(), {})
        coordinator.post(_SUBJECT, msgspec.json.encode(_Node(peer, failure_domain())))

    def decide() -> bytes:
        wait = Wait(_START_SECONDS, "the address of its node")
        messages = gather(coordinator, _SUBJECT, wait, ranks=ranks)
        return b"[" + b",".join(messages.values()) + b"]"

    wait = Wait(_START_SECONDS + 30, "the addresses of the nodes")
    decided = leader_decides(coordinator, _SUBJECT, decide, wait)
    coordinator.forget(_SUBJECT)
    return {node.peer.rank: node for node in msgspec.json.decode(decided, type=list[_Node])}


def _ring_of(tier: OpenTier, known: Mapping[int, _Node], rank: int) -> _Ring:
    nodes = tier.nodes
    assert nodes is not None
    lowest = nodes.firsts
    chosen = buddies([known[first].domain for first in lowest], tier.tier.replicas)
    here = nodes.of[rank]
    most = max(Counter(node for keepers in chosen for node in keepers).values(), default=0)
    if most > tier.tier.replicas and rank == LEADER:
        _log.warning(
            "ckpt: the failure domains (CKPT_FAILURE_DOMAIN) are of different sizes: a node keeps "
            "the files of up to %d others on %s",
            most,
            tier.url,
        )
    return _Ring(
        tier,
        nodes,
        here,
        sources={
            node: known[lowest[node]].peer for node, keepers in enumerate(chosen) if here in keepers
        },
        keepers=[lowest[node] for node in chosen[here]],
        unheard=set(lowest) if tier.in_memory else set(),
    )

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
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from contextlib import suppress
from typing import Final, Self

import msgspec

from ckpt.config import SaveConfig, failure_domain
from ckpt.coordination.api import Coordinator
from ckpt.coordination.gather import Wait, gather, leader_decides
from ckpt.errors import CkptError, ConfigError
from ckpt.events import NodeReplicated, Observers
from ckpt.model.keys import StepRef
from ckpt.nodes.replica_fetch import Copying
from ckpt.nodes.ring import Held, Node, Ring, ring_of
from ckpt.nodes.server import NodeServer
from ckpt.nodes.wire import Peer
from ckpt.pipeline.pace import Pace
from ckpt.pipeline.workers import Workers
from ckpt.storage.tiers import Nodes, OpenTier

_START_SECONDS: Final = 300.0
_END_SECONDS: Final = 60.0
"""How long ``close`` waits for the buddies."""
_SUBJECT: Final = "replicas"
_TRIES: Final = 3
"""How often a step is tried while there is no newer one. A node may learn of the commit later than
its buddy.
"""

_LOOK_SECONDS: Final = 1.0
"""How long a node waits, after each copy, to hear that the others have their first copies."""

_log = logging.getLogger("ckpt")


class NodeReplicas:
    """The copies that this node keeps, and the server that the others copy from.

    Args:
        tiers: The tiers with replicas on which this rank is the lowest rank of its node.
        nodes: All nodes of the job, by their lowest rank.
        server: Serves this node's files.
        coordinator: The connection to the other ranks.
        config: How to save.
        observers: They get an event for each step that was copied.

    Thread safety: ``committed`` and ``copied`` may be called from any thread, ``set_restored`` by
    the owner, and ``close`` by the owner, once. ``_lock`` guards ``_restored``, ``_restores``,
    and of each ring ``newest``, ``copied`` and ``outdate``. The other fields are set once, or
    belong to the owner or to the thread that copies.
    """

    def __init__(
        self,
        tiers: Sequence[OpenTier],
        nodes: Mapping[int, Node],
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
        self._restored: StepRef | None = None
        self._restores = 0
        how = Copying(self._writing, self._pace)
        self._rings = {tier.index: ring_of(tier, nodes, coordinator.rank, how) for tier in tiers}

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
        encryption = apart[0][1].encryption
        server = (
            NodeServer(stores, nice=config.nice, cpus=config.cpus, encryption=encryption)
            if mine
            else None
        )
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
        return tier.index in self._rings

    def set_restored(self, ref: StepRef) -> None:
        """Note that the job goes on from ``ref``, which stays until a step has its copies. Return
        at once.

        All nodes call it. If they have all files of the step, those that have too few copies, as
        after the loss of a node, are copied in the background.
        """
        with self._lock:
            self._restored = ref
            self._restores += 1
            for ring in self._rings.values():
                ring.copied = None  # Later steps of this job are no part of its history any more
        for index, ring in self._rings.items():
            self._server.allow(ref, index)
            self._copying.submit(self._copy_restored, ring, ref, self._restores)

    def committed(self, tier: OpenTier, ref: StepRef, outdate: Callable[[], None]) -> None:
        """Note that ``ref`` is a checkpoint on ``tier``. Return at once.

        The other nodes may read this node's files of it from now on, and this node copies theirs.

        Args:
            outdate: Called in the background once all nodes have the copies of a step of this job.
                The steps of earlier jobs are needed until then, since the loss of a node may cost
                all steps of this one. A node that fails to copy several steps is not waited for.
        """
        if (ring := self._rings.get(tier.index)) is None:
            return
        self._server.allow(ref, tier.index)
        with self._lock:
            waits = ring.newest is not None
            ring.newest, ring.outdate = (ref, self._restores), outdate
        if not waits:
            self._copying.submit(self._copy, ring)

    def copied(self, tier: OpenTier) -> frozenset[StepRef]:
        """Return the newest step of a tier whose copies this node keeps, or the step that the job
        has restored, if there is one.

        Later steps may not have their copies in time. No retention rule may remove these.
        """
        ring = self._rings.get(tier.index)
        with self._lock:
            found = None if ring is None else ring.copied or self._restored
        return frozenset() if found is None else frozenset({found})

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
        for ring in self._rings.values():
            ring.end(warn=wait)
        self._meet_buddies(deadline)
        self._server.close()

    def _copy(self, ring: Ring) -> None:
        with self._lock:
            newest, ring.newest = ring.newest, None
        assert newest is not None
        (ref, restores), began = newest, time.perf_counter()
        try:
            nbytes = self._try(ring, ref)
        except Exception as error:  # noqa: BLE001 - nothing that fails here may cost a save
            ring.missed(ref, error)
            if ring.fails and ring.unheard:
                self._say_first(ring)  # The others need not wait for this node
                ring.unheard.clear()
                self._end_earlier(ring)
            return
        if nbytes is not None:
            with self._lock:
                if restores == self._restores:
                    ring.copied = ref
            self._report(ring, ref, nbytes, began)
            if ring.unheard and self._all_have_copied(ring):
                self._end_earlier(ring)

    def _copy_restored(self, ring: Ring, ref: StepRef, number: int) -> None:
        began = time.perf_counter()
        try:
            held = self._exchange_held(ring, ref, number)
            nbytes = ring.copy_restored(ref, held)
        except Exception as error:  # noqa: BLE001 - the job goes on without these copies
            _log.log(
                logging.DEBUG if self._pace.stopped else logging.WARNING,
                "ckpt: step %d on %s, which the job has restored, was not copied to this node: %s. "
                "If another node is lost before a later step has its copies, this step may be "
                "lost, too",
                ref.step,
                ring.tier.url,
                error,
            )
            return
        if nbytes:
            self._report(ring, ref, nbytes, began)

    def _report(self, ring: Ring, ref: StepRef, nbytes: int, began: float) -> None:
        seconds = time.perf_counter() - began
        self._observers.notify(
            NodeReplicated(step=ref.step, tier=ring.tier.url, nbytes=nbytes, seconds=seconds)
        )

    def _exchange_held(self, ring: Ring, ref: StepRef, number: int) -> dict[int, Held]:
        """Return what each node has of a step. Raises ``CommitTimeout`` if one does not say.

        A node posts this after its exchanges before. So their messages may go once all have posted.
        """
        firsts, before = ring.nodes.firsts, ring.posted
        subject = f"{_SUBJECT}/restored{ring.tier.index}/{number}"
        self._coordinator.post(subject, msgspec.json.encode(ring.held(ref)))
        before.append(subject)
        found, deadline = dict[int, bytes](), time.monotonic() + _END_SECONDS
        while missing := set(firsts) - found.keys():
            left = deadline - time.monotonic()
            if self._pace.stopped or left <= 0:
                raise Wait(_END_SECONDS, "what its node has").missed(missing)
            # A short wait, since ``close`` may end the copying.
            found |= self._coordinator.collect(subject, missing, timeout=min(left, _LOOK_SECONDS))
        for earlier in before[:-1]:
            self._coordinator.forget(earlier)
        before[:] = [subject]
        return {
            node: msgspec.json.decode(found[first], type=Held) for node, first in enumerate(firsts)
        }

    def _try(self, ring: Ring, ref: StepRef) -> int | None:
        """Copy a step, and try again while there is no newer one. Raises as ``Ring.copy`` does."""
        for _ in range(_TRIES - 1):
            try:
                return ring.copy(ref)
            except CkptError:
                with self._lock:
                    is_newest = ring.newest is None
                if self._pace.stopped or not is_newest:
                    raise
        return ring.copy(ref)

    def _end_earlier(self, ring: Ring) -> None:
        with self._lock:
            outdate = ring.outdate
        outdate()

    def _all_have_copied(self, ring: Ring) -> bool:
        """Return whether each node has copied a step of this job, as this one has. If one is not
        heard of now, this is asked again after the next step.
        """
        self._say_first(ring)
        deadline = time.monotonic() + _LOOK_SECONDS
        try:
            while ring.unheard and (left := deadline - time.monotonic()) > 0:
                ring.unheard -= self._coordinator.collect(
                    _first(ring), set(ring.unheard), timeout=left
                ).keys()
        except CkptError as error:
            _log.debug("ckpt: whether other nodes have copied a step is unknown: %s", error)
        return not ring.unheard

    def _say_first(self, ring: Ring) -> None:
        """Post once that this node has copied a step of this job, or that it cannot."""
        if (rank := self._coordinator.rank) in ring.unheard:
            with suppress(CkptError):
                self._coordinator.post(_first(ring), b"")
                ring.unheard.discard(rank)

    def _meet_buddies(self, deadline: float) -> None:
        """Post that this node copies nothing more, and return when its buddies have posted it.

        A node that leaves the others by an exception posts it too, so that no node waits for it.
        """
        subject = f"{_SUBJECT}/done"
        keepers = {rank for ring in self._rings.values() for rank in ring.keepers}
        try:
            self._coordinator.post(subject, b"done")
            if (left := deadline - time.monotonic()) > 0:
                gather(self._coordinator, subject, Wait(left, "the copies"), ranks=keepers)
        except CkptError as error:
            _log.warning(
                "ckpt: whether other nodes have copied the last step is unknown: %s", error
            )


def _exchange(
    rings: Sequence[Nodes], server: NodeServer | None, coordinator: Coordinator
) -> dict[int, Node]:
    """Return all nodes, by their lowest rank. All ranks call it."""
    ranks = {rank for nodes in rings for rank in nodes.firsts}
    if server is not None:
        peer = Peer(coordinator.rank, server.addresses, server.port, server.token.hex(), {})
        coordinator.post(_SUBJECT, msgspec.json.encode(Node(peer, failure_domain())))

    def decide() -> list[Node]:
        wait = Wait(_START_SECONDS, "the address of its node")
        messages = gather(coordinator, _SUBJECT, wait, ranks=ranks)
        return [msgspec.json.decode(message, type=Node) for message in messages.values()]

    wait = Wait(_START_SECONDS + 30, "the addresses of the nodes")
    decided = leader_decides(coordinator, _SUBJECT, decide, wait, list[Node])
    coordinator.forget(_SUBJECT)
    return {node.peer.rank: node for node in decided}


def _first(ring: Ring) -> str:
    """Return the subject of the messages that a node has copied a step of this job."""
    return f"{_SUBJECT}/first{ring.tier.index}"

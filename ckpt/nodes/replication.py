"""Copies of each node's files on its buddies, so that a step outlives the loss of a node.

A *buddy* is a node that keeps copies of the files of another node. A `BuddyTier` is one tier with
such copies, as this node sees it.

After each commit on a local tier with ``buddies``, the lowest rank of each node reads files of
other nodes over TCP. These are the nodes that have the rank's node as a buddy. The rank stores the
copies in the folder of the step on its node, beside the files of its own ranks. So a restore finds
the copies in the same way as the node's own files.

Nodes only read from each other, and never write to each other. All chunks of a file are checked
before the copy of the file becomes visible.
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
from ckpt.coordination.coordinator import Coordinator
from ckpt.coordination.exchanges import Wait, gather, leader_decides
from ckpt.errors import CkptError, ConfigError
from ckpt.events import NodeReplicated, Observers
from ckpt.model.keys import StepRef
from ckpt.nodes.buddy_tier import BuddyTier, Holding, Node, buddy_tier_of
from ckpt.nodes.server import NodeServer
from ckpt.nodes.step_copies import CopyExecutor
from ckpt.nodes.wire import Peer
from ckpt.pipeline.rate_limit import Pace
from ckpt.pipeline.workers import Workers
from ckpt.storage.tiers import Nodes, OpenTier

_START_SECONDS: Final = 300.0
_END_SECONDS: Final = 60.0
"""How long ``close`` waits until all copies of the last step are made. Also how long the nodes may
take to exchange which files of a restored step each has.
"""
_SUBJECT: Final = "replicas"
_MOST_TRIES: Final = 3
"""The most tries to copy a step. After a failure, there is no further try if a newer step waits.
The first tries may fail, since a node may learn of the commit later than its buddy, and does not
give its files before that.
"""

_LOOK_SECONDS: Final = 1.0
"""How long a node waits, after each copied step, for messages of other nodes that they have copied
a step of this job. Also the longest time that one call of ``collect`` waits.
"""

_log = logging.getLogger("ckpt")


class NodeReplicas:
    """The copies of other nodes' files that this node keeps, and the server from which other nodes
    copy the files of this node. Only the lowest rank of a node has an object of this class.

    A tier in memory has a function ``outdate``. Its call means that the steps of earlier jobs may
    be removed, since all nodes have copied a step of this job.

    ``_buddy_tiers`` has the `BuddyTier` of each tier by its index. ``_copy_thread`` makes one copy
    after another, and leaves the writes to ``_write_thread``.

    Args:
        tiers: The tiers with replicas on which this rank is the lowest rank of its node.
        nodes: All nodes of the job, by their lowest rank.
        server: The server for this node's files.
        coordinator: The connection to the other ranks.
        config: The settings of the save: the rate of copying, niceness and cores.
        observers: They get a `NodeReplicated` event for each step that was copied.

    Thread safety: any thread may call ``committed`` and ``copied_refs``. Only the owner calls
    ``set_restored`` and, once, ``close``. ``_lock`` guards ``_restored_ref`` and
    ``_restore_count``, and the fields ``newest``, ``copied_ref`` and ``outdate`` of each
    `BuddyTier`. The other fields are set once, or belong to the owner or to the thread that copies.
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
        self._copy_thread = Workers("replicas", 1, nice=config.nice, cpus=config.cpus).start()
        self._write_thread = Workers("copies", 1, nice=config.nice, cpus=config.cpus)
        self._lock = threading.Lock()
        self._restored_ref: StepRef | None = None
        self._restore_count = 0
        executor = CopyExecutor(self._write_thread, self._pace)
        self._buddy_tiers = {
            tier.index: buddy_tier_of(tier, nodes, coordinator.rank, executor) for tier in tiers
        }

    @classmethod
    def of(
        cls,
        tiers: Sequence[OpenTier],
        coordinator: Coordinator,
        config: SaveConfig,
        observers: Observers,
    ) -> Self | None:
        """Return the `NodeReplicas` of this rank. Return None if no local tier has buddies, if the
        job has one node, or if this rank is not the lowest rank of its node.

        All ranks call this with the same tiers.

        Raises:
            ConfigError: A tier with buddies is not local.
            CommitTimeout: A node has not posted its address in time.
        """
        # ``OpenTier.tier`` has the settings that the user gave.
        tiers_with_buddies = [tier for tier in tiers if tier.tier.buddies]
        for tier in tiers_with_buddies:
            if not tier.local:
                raise ConfigError(
                    f"buddies={tier.tier.buddies} of {tier.url}: all nodes share this tier, so "
                    "its steps outlive any node: leave buddies out, or declare local=True"
                )
        node_tiers = [(tier, tier.nodes) for tier in tiers_with_buddies if tier.nodes is not None]
        if not node_tiers:
            if tiers_with_buddies:
                _log.info("ckpt: the job has one node: there is no other to keep copies on")
            return None
        own_tiers = [tier for tier, nodes in node_tiers if coordinator.rank in nodes.lowest_ranks]
        stores = {tier.index: tier.backend for tier in own_tiers}
        encryption = node_tiers[0][1].encryption
        server = (
            NodeServer(stores, nice=config.nice, cpus=config.cpus, encryption=encryption)
            if own_tiers
            else None
        )
        try:
            nodes = _exchange_addresses([nodes for _, nodes in node_tiers], server, coordinator)
            if server is None:
                return None
            return cls(own_tiers, nodes, server, coordinator, config, observers)
        except BaseException:
            if server is not None:
                server.close()
            raise

    def keeps_copies_on(self, tier: OpenTier) -> bool:
        """Return True if this node keeps copies on ``tier``. On a tier in memory, the steps of
        earlier jobs must then stay until the function ``outdate`` is called, which the caller
        passes to ``committed``.
        """
        return tier.index in self._buddy_tiers

    def set_restored(self, ref: StepRef) -> None:
        """Note that the job has restored ``ref`` and continues from it. Return at once.

        ``copied_refs`` returns this step until the copies of a later step are made. All nodes call
        this. After the loss of a node, some files of the step may have too few copies. They are
        copied in the background, if the nodes together have all files of the step.
        """
        with self._lock:
            self._restored_ref = ref
            self._restore_count += 1
            for buddy_tier in self._buddy_tiers.values():
                # The job may have gone back, so a step that was copied before may be abandoned.
                buddy_tier.copied_ref = None
        for index, buddy_tier in self._buddy_tiers.items():
            self._server.allow(ref, index)
            self._copy_thread.submit(self._copy_restored, buddy_tier, ref, self._restore_count)

    def committed(self, tier: OpenTier, ref: StepRef, outdate: Callable[[], None]) -> None:
        """Note that ``ref`` is a checkpoint on ``tier``. Return at once.

        From now on, other nodes may read this node's files of the step. In the background, this
        node copies the files of the nodes that have it as a buddy. If a newer step is committed
        before the copying of a step begins, the older step is not copied.

        Args:
            tier: The tier. On a tier without copies on this node, nothing happens.
            ref: The step.
            outdate: Called without arguments from a background thread, once, and only for a tier in
                memory. The call means that the steps of earlier jobs may be removed, because all
                nodes have copied a step of this job. Before that, the loss of a node may cost all
                steps of this job. A node that fails to copy several steps in a row counts as done.
                On such a node, ``outdate`` is called without waiting for the other nodes.
        """
        if (buddy_tier := self._buddy_tiers.get(tier.index)) is None:
            return
        self._server.allow(ref, tier.index)
        with self._lock:
            is_queued = buddy_tier.newest is not None
            buddy_tier.newest, buddy_tier.outdate = (ref, self._restore_count), outdate
        if not is_queued:
            self._copy_thread.submit(self._copy, buddy_tier)

    def copied_refs(self, tier: OpenTier) -> frozenset[StepRef]:
        """Return the step that retention must keep on ``tier``, since later steps may not have
        their copies yet.

        Returns:
            The newest step whose files this node has copied since the last restore. If there is
            none, the step that the job has restored. Empty if there is neither, or if this node
            keeps no copies on ``tier``.
        """
        buddy_tier = self._buddy_tiers.get(tier.index)
        with self._lock:
            ref = None if buddy_tier is None else buddy_tier.copied_ref or self._restored_ref
        return frozenset() if ref is None else frozenset({ref})

    def close(self, *, wait: bool) -> None:
        """Stop the copying and the server.

        Args:
            wait: Whether to finish the copies of the last step first, on this node and on its
                buddies. This takes at most 60 s, and the rate is not limited.
        """
        deadline = time.monotonic() + (_END_SECONDS if wait else 0.0)
        self._pace.end(at_once=not wait)
        # The call of ``int`` runs once the thread has made all copies that were queued before.
        if wait and not futures.wait([self._copy_thread.submit(int)], _END_SECONDS).done:
            self._pace.end(at_once=True)
        self._copy_thread.close(cancel=True)
        self._write_thread.close(cancel=True)
        for buddy_tier in self._buddy_tiers.values():
            buddy_tier.end(warn=wait)
        self._wait_for_buddies(deadline)
        self._server.close()

    def _copy(self, buddy_tier: BuddyTier) -> None:
        """Copy the newest step that waits, and report it. Call ``outdate`` once all nodes have
        posted that they have copied a step of this job. If this node fails to copy several steps in
        a row, call ``outdate`` without waiting for the other nodes.
        """
        with self._lock:
            newest, buddy_tier.newest = buddy_tier.newest, None
        assert newest is not None
        (ref, restore_count), began = newest, time.perf_counter()
        try:
            nbytes = self._copy_with_retries(buddy_tier, ref)
        except Exception as error:  # noqa: BLE001 - nothing that fails here may cost a save
            buddy_tier.note_failure(ref, error)
            if buddy_tier.fails and buddy_tier.ranks_without_copy:
                # Other nodes need not wait for this node any more.
                self._post_first_copy(buddy_tier)
                buddy_tier.ranks_without_copy.clear()
                self._outdate_earlier_steps(buddy_tier)
            return
        if nbytes is not None:
            with self._lock:
                if restore_count == self._restore_count:  # The job has not restored a step since
                    buddy_tier.copied_ref = ref
            self._report(buddy_tier, ref, nbytes, began)
            if buddy_tier.ranks_without_copy and self._all_have_copied(buddy_tier):
                self._outdate_earlier_steps(buddy_tier)

    def _copy_restored(self, buddy_tier: BuddyTier, ref: StepRef, restore_number: int) -> None:
        """Exchange with the other nodes which files of a restored step each has, and copy the files
        that this node must have. ``restore_number`` counts the restores of this job.
        """
        began = time.perf_counter()
        try:
            holdings = self._exchange_holdings(buddy_tier, ref, restore_number)
            nbytes = buddy_tier.copy_restored(ref, holdings)
        except Exception as error:  # noqa: BLE001 - the job goes on without these copies
            _log.log(
                logging.DEBUG if self._pace.is_stopped else logging.WARNING,
                "ckpt: step %d on %s, which the job has restored, was not copied to this node: %s. "
                "If another node is lost before a later step has its copies, this step may be "
                "lost, too",
                ref.step,
                buddy_tier.tier.url,
                error,
            )
            return
        if nbytes:
            self._report(buddy_tier, ref, nbytes, began)

    def _report(self, buddy_tier: BuddyTier, ref: StepRef, nbytes: int, began: float) -> None:
        seconds = time.perf_counter() - began
        self._observers.notify(
            NodeReplicated(step=ref.step, tier=buddy_tier.tier.url, nbytes=nbytes, seconds=seconds)
        )

    def _exchange_holdings(
        self, buddy_tier: BuddyTier, ref: StepRef, restore_number: int
    ) -> dict[int, Holding]:
        """Post which files of a step this node has. Return which files each node has, by the number
        of the node.

        All nodes make the exchanges in the same order. Once all nodes have posted in this exchange,
        no node needs the messages of earlier exchanges, so this node removes its earlier messages.

        Raises:
            CommitTimeout: A node has not posted in time, or the copying was stopped.
        """
        ranks, subjects = buddy_tier.nodes.lowest_ranks, buddy_tier.posted_subjects
        subject = f"{_SUBJECT}/restored{buddy_tier.tier.index}/{restore_number}"
        self._coordinator.post(subject, msgspec.json.encode(buddy_tier.holding(ref)))
        subjects.append(subject)
        messages, deadline = dict[int, bytes](), time.monotonic() + _END_SECONDS
        while missing := set(ranks) - messages.keys():
            seconds_left = deadline - time.monotonic()
            if self._pace.is_stopped or seconds_left <= 0:
                raise Wait(_END_SECONDS, "what its node has").timeout_error(missing)
            # The wait is short, so that the loop notices when ``close`` stops the copying.
            messages |= self._coordinator.collect(
                subject, missing, timeout=min(seconds_left, _LOOK_SECONDS)
            )
        for old_subject in subjects[:-1]:
            self._coordinator.forget(old_subject)
        subjects[:] = [subject]
        return {
            node: msgspec.json.decode(messages[rank], type=Holding)
            for node, rank in enumerate(ranks)
        }

    def _copy_with_retries(self, buddy_tier: BuddyTier, ref: StepRef) -> int | None:
        """Return the result of ``buddy_tier.copy(ref)``. After a ``CkptError``, call it again, at
        most ``_MOST_TRIES`` times in all. Raise the error if a newer step waits or the copying was
        stopped.
        """
        for _ in range(_MOST_TRIES - 1):
            try:
                return buddy_tier.copy(ref)
            except CkptError:
                with self._lock:
                    is_newest = buddy_tier.newest is None
                if self._pace.is_stopped or not is_newest:
                    raise
        return buddy_tier.copy(ref)

    def _outdate_earlier_steps(self, buddy_tier: BuddyTier) -> None:
        """Call the ``outdate`` of ``buddy_tier``, which says that the steps of earlier jobs are not
        needed any more.
        """
        with self._lock:
            outdate = buddy_tier.outdate
        outdate()

    def _all_have_copied(self, buddy_tier: BuddyTier) -> bool:
        """Post that this node has copied a step of this job. Return True if all nodes have posted
        the same within ``_LOOK_SECONDS``. If not, the caller asks again after the next copied step.
        """
        self._post_first_copy(buddy_tier)
        deadline = time.monotonic() + _LOOK_SECONDS
        try:
            while (
                buddy_tier.ranks_without_copy and (seconds_left := deadline - time.monotonic()) > 0
            ):
                buddy_tier.ranks_without_copy -= self._coordinator.collect(
                    _subject_of_first_copy(buddy_tier),
                    set(buddy_tier.ranks_without_copy),
                    timeout=seconds_left,
                ).keys()
        except CkptError as error:
            _log.debug("ckpt: whether other nodes have copied a step is unknown: %s", error)
        return not buddy_tier.ranks_without_copy

    def _post_first_copy(self, buddy_tier: BuddyTier) -> None:
        """Post that this node has copied a step of this job, or has failed to copy several steps in
        a row. The message is the same in both cases. Do nothing if this node has posted it before.
        """
        if (rank := self._coordinator.rank) in buddy_tier.ranks_without_copy:
            with suppress(CkptError):
                self._coordinator.post(_subject_of_first_copy(buddy_tier), b"")
                buddy_tier.ranks_without_copy.discard(rank)

    def _wait_for_buddies(self, deadline: float) -> None:
        """Post that this node copies nothing more. Then wait, at most until ``deadline``, until its
        buddies have posted the same, since they read from this node's server.

        A node that closes because of an exception posts this too, so that no node waits in vain.
        """
        subject = f"{_SUBJECT}/done"
        keepers = {rank for buddy_tier in self._buddy_tiers.values() for rank in buddy_tier.keepers}
        try:
            self._coordinator.post(subject, b"done")
            if (seconds_left := deadline - time.monotonic()) > 0:
                gather(self._coordinator, subject, Wait(seconds_left, "the copies"), ranks=keepers)
        except CkptError as error:
            _log.warning(
                "ckpt: whether other nodes have copied the last step is unknown: %s", error
            )


def _exchange_addresses(
    nodes_by_tier: Sequence[Nodes], server: NodeServer | None, coordinator: Coordinator
) -> dict[int, Node]:
    """Exchange the addresses of the nodes' servers. All ranks call this.

    Args:
        nodes_by_tier: The nodes of each tier with replicas.
        server: The server of this node, on a rank that has one.
        coordinator: The connection to the other ranks.

    Returns:
        All nodes, by their lowest rank.
    """
    ranks = {rank for nodes in nodes_by_tier for rank in nodes.lowest_ranks}
    if server is not None:
        peer = Peer(coordinator.rank, server.addresses, server.port, server.token.hex(), {})
        coordinator.post(_SUBJECT, msgspec.json.encode(Node(peer, failure_domain())))

    def decide() -> list[Node]:
        wait = Wait(_START_SECONDS, "the address of its node")
        messages = gather(coordinator, _SUBJECT, wait, ranks=ranks)
        return [msgspec.json.decode(message, type=Node) for message in messages.values()]

    # The ranks wait longer than the leader, so that its error comes first.
    wait = Wait(_START_SECONDS + 30, "the addresses of the nodes")
    all_nodes = leader_decides(coordinator, _SUBJECT, decide, wait, list[Node])
    coordinator.forget(_SUBJECT)
    return {node.peer.rank: node for node in all_nodes}


def _subject_of_first_copy(buddy_tier: BuddyTier) -> str:
    """Return the subject of the messages by which nodes post that they have copied a step of this
    job on the tier of ``buddy_tier``.
    """
    return f"{_SUBJECT}/first{buddy_tier.tier.index}"

"""The copies of other nodes' files that one node keeps on one tier, as their buddy.

Nodes of one *failure domain*, such as a rack, may be lost together, so buddies are in different
domains where that is possible. A *fragment* describes the data file of one rank in a step.

This module decides which files are copied, and which copies are removed. ``step_copies`` makes the
copies of one step.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import msgspec

from ckpt.catalog.step_listing import is_committed, own_objects, read_packed
from ckpt.coordination.coordinator import LEADER
from ckpt.coordination.step_files import put_manifest
from ckpt.errors import CkptError
from ckpt.model.keys import MANIFEST, StepRef, whole_ranks
from ckpt.model.manifest import Manifest
from ckpt.nodes.step_copies import CopyExecutor, StepCopies, peer_store, remove
from ckpt.nodes.wire import Peer
from ckpt.plan.buddies import buddies, missing_copies
from ckpt.storage.tiers import Nodes, OpenTier

_WARNING_COUNT: Final = 3
"""A warning is logged once the copying of this many steps in a row has failed."""

_log = logging.getLogger("ckpt")


class Node(msgspec.Struct, frozen=True):
    """A node of the job.

    Attributes:
        peer: The server of the node, which its lowest rank runs.
        domain: The failure domain of the node; empty if none was set.
    """

    peer: Peer
    domain: str


class Holding(msgspec.Struct, frozen=True):
    """The files of a step that a node has on a tier.

    Attributes:
        has_manifest: Whether the node has the manifest.
        ranks: The ranks whose data file and fragment the node has, in ascending order.
    """

    has_manifest: bool
    ranks: tuple[int, ...]


@dataclass(slots=True)
class BuddyTier:
    """One tier with replicas as one node sees it: the other nodes, and the copies of their files
    that this node keeps. Nodes are named by their numbers in ``nodes``.

    ``_copied_keys`` has the files that this node has copied, by their step. ``_failure_count``
    copies have failed since the last one that has succeeded, and ``_failed_ref`` is the step of the
    last failure.

    Attributes:
        tier: The tier.
        nodes: The nodes that share the tier.
        own_node: The number of this node.
        peers: The server of each node, by the number of the node.
        domains: The failure domain of each node, by the number of the node.
        sources: The numbers of the nodes whose files this node keeps.
        keepers: The lowest ranks of the nodes that keep this node's files: its buddies.
        ranks_without_copy: For a tier in memory, the lowest ranks of the nodes that have not yet
            posted that they have copied a step of this job. Once it is empty, the steps of earlier
            jobs are not needed any more. For other tiers it is always empty.
        executor: The threads that make the copies, and their rate.
        newest: The step to be copied next, and how many restores came before it; None if no step
            waits.
        copied_ref: The newest step that was copied since the last restore.
        outdate: Called once when the steps of earlier jobs are not needed any more (see
            ``NodeReplicas.committed``).
        posted_subjects: The subjects of messages about restored steps that other nodes may still
            need.

    Thread safety: the thread that copies. ``NodeReplicas`` guards ``newest``, ``copied_ref`` and
    ``outdate`` with its lock.
    """

    tier: OpenTier
    nodes: Nodes
    own_node: int
    peers: Sequence[Peer]
    domains: Sequence[str]
    sources: Sequence[int]
    keepers: Sequence[int]
    ranks_without_copy: set[int]
    executor: CopyExecutor
    newest: tuple[StepRef, int] | None = None
    copied_ref: StepRef | None = None
    outdate: Callable[[], None] = lambda: None
    posted_subjects: list[str] = field(default_factory=list[str])
    _copied_keys: dict[StepRef, list[str]] = field(default_factory=dict[StepRef, list[str]])
    _failure_count: int = 0
    _failed_ref: StepRef | None = None

    def copy(self, ref: StepRef) -> int | None:
        """Copy the files of a step, which is committed on this node, from each node in ``sources``.
        On a tier in memory, the copies of older steps are removed afterwards.

        Returns:
            The size of the copied data files in bytes. None if the step was removed meanwhile; then
            its copies are removed too.

        Raises:
            CkptError: A file cannot be read from another node, or cannot be written on this node.
                The copies of the step are removed.
        """
        backend = self.tier.backend
        written_keys = self._copied_keys.setdefault(ref, [])
        try:
            manifest, _ = read_packed(backend, ref)
            copies = self._copies(manifest, written_keys)
            nbytes = sum(
                copies.fetch(self.peers[node], self._ranks_of(manifest, node))
                for node in self.sources
            )
        except BaseException:
            self._remove(ref)
            raise
        if not is_committed(backend, ref):  # The step was removed meanwhile
            self._remove(ref)
            return None
        self._failure_count, self._failed_ref = 0, None
        for old_ref in [old_ref for old_ref in self._copied_keys if old_ref != ref]:
            if self.tier.in_memory:
                self._remove(old_ref)
            # In a folder, the copies of older steps stay until retention removes the steps.
            self._copied_keys.pop(old_ref, None)
        return nbytes

    def copy_restored(self, ref: StepRef, holdings: Mapping[int, Holding]) -> int:
        """Copy files of a restored step to this node, so that each file is on enough nodes. If this
        node lacks the manifest of the step, put the manifest, too.

        Args:
            ref: The step.
            holdings: The files of the step that each node has, by the number of the node.

        Returns:
            The size of the copied data files in bytes. 0 if this node needs no more files, if the
            manifest or some file of the step is on no node, or if the step was removed meanwhile.

        Raises:
            CkptError: A file cannot be read from another node, or cannot be written on this node.
                The copies that this call has made are removed.
        """
        backend, has_manifest = self.tier.backend, holdings[self.own_node].has_manifest
        manifest_nodes = [node for node, holding in holdings.items() if holding.has_manifest]
        if not manifest_nodes:
            return 0
        peer, pace = self.peers[manifest_nodes[0]], self.executor.pace
        store = backend if has_manifest else peer_store(self.tier, peer, ref, files={}, pace=pace)
        manifest, data = read_packed(store, ref)
        holders = {
            file.rank: [node for node, holding in holdings.items() if file.rank in holding.ranks]
            for file in manifest.files
        }
        if not all(holders.values()):
            return 0
        homes = {rank: self._home(rank) for rank in holders}
        missing_nodes = missing_copies(holders, homes, self.domains, self.tier.tier.buddies)
        ranks_by_source: dict[int, set[int]] = defaultdict(set)
        for rank, nodes in missing_nodes.items():
            if self.own_node in nodes:
                # The numbers of the ranks distribute the reads over the nodes that have the files.
                ranks_by_source[holders[rank][rank % len(holders[rank])]].add(rank)
        copies = self._copies(manifest, [])
        try:
            nbytes = sum(
                copies.fetch(self.peers[node], frozenset(ranks))
                for node, ranks in ranks_by_source.items()
            )
            if not has_manifest:
                put_manifest(backend, ref.manifest, data)
        except BaseException:
            copies.remove()
            raise
        if nbytes and not is_committed(backend, ref):  # The step was removed meanwhile
            copies.remove()
            return 0
        return nbytes

    def holding(self, ref: StepRef) -> Holding:
        """Return the files of a step that this node has. A data file without its fragment does not
        count.
        """
        names = {info.name for info in own_objects(self.tier.backend, ref)}
        return Holding(MANIFEST in names, tuple(sorted(whole_ranks(names))))

    def _copies(self, manifest: Manifest, written_keys: list[str]) -> StepCopies:
        """Return an object that makes the copies of a step. It appends the key of each object that
        it writes to ``written_keys``.
        """
        own_ranks = self._ranks_of(manifest, self.own_node)
        nbytes = sum(file.size for file in manifest.files if file.rank in own_ranks)
        return StepCopies(self.tier, manifest, nbytes, self.executor, written_keys)

    def _ranks_of(self, manifest: Manifest, node: int) -> frozenset[int]:
        """Return the ranks of ``node`` that have a fragment in the step."""
        return frozenset(part.rank for part in manifest.fragments if self._home(part.rank) == node)

    def _home(self, rank: int) -> int:
        """Return the number of the node of ``rank``. A restored step may have more ranks than the
        job. The files of the additional ranks are distributed over the nodes.
        """
        return self.nodes.of[rank % len(self.nodes.of)]

    @property
    def fails(self) -> bool:
        """Whether the copying of at least ``_WARNING_COUNT`` steps in a row has failed."""
        return self._failure_count >= _WARNING_COUNT

    def note_failure(self, ref: StepRef, error: Exception) -> None:
        """Note and log that a step was not copied because of ``error``."""
        self._failure_count, self._failed_ref = self._failure_count + 1, ref
        level = logging.WARNING if self._failure_count == _WARNING_COUNT else logging.DEBUG
        _log.log(
            level,
            "ckpt: step %d on %s: the files of other nodes were not copied to this node, nor those "
            "of the %d steps before: %s. If saves come faster than copies, save less often or "
            "raise slots",
            ref.step,
            self.tier.url,
            self._failure_count - 1,
            error,
        )

    def end(self, *, warn: bool) -> None:
        """Remove the copies of steps that are not committed on this node any more.

        Args:
            warn: Whether to log a warning if the last step was not copied.
        """
        for ref in list(self._copied_keys):
            with suppress(CkptError):
                if not is_committed(self.tier.backend, ref):
                    self._remove(ref)
        if warn and self._failed_ref is not None:
            _log.warning(
                "ckpt: step %d on %s: the files of other nodes were not copied to this node",
                self._failed_ref.step,
                self.tier.url,
            )

    def _remove(self, ref: StepRef) -> None:
        remove(self.tier.backend, self._copied_keys.pop(ref, []))


def buddy_tier_of(
    tier: OpenTier, nodes_by_rank: Mapping[int, Node], rank: int, executor: CopyExecutor
) -> BuddyTier:
    """Return the `BuddyTier` of the node of ``rank`` for a local tier with replicas.

    Args:
        tier: The tier. Its field ``tier`` has the settings that the user gave.
        nodes_by_rank: All nodes of the job, by their lowest rank.
        rank: The lowest rank of this node.
        executor: The threads that make the copies, and their rate.
    """
    nodes = tier.nodes
    assert nodes is not None
    lowest_ranks = nodes.lowest_ranks
    domains = [nodes_by_rank[lowest_rank].domain for lowest_rank in lowest_ranks]
    keepers_by_node = buddies(domains, tier.tier.buddies)
    own_node = nodes.of[rank]
    max_sources = max(
        Counter(node for keepers in keepers_by_node for node in keepers).values(), default=0
    )
    if max_sources > tier.tier.buddies and rank == LEADER:
        _log.warning(
            "ckpt: the failure domains (CKPT_FAILURE_DOMAIN) are of different sizes: a node keeps "
            "the files of up to %d others on %s",
            max_sources,
            tier.url,
        )
    return BuddyTier(
        tier,
        nodes,
        own_node,
        peers=[nodes_by_rank[lowest_rank].peer for lowest_rank in lowest_ranks],
        domains=domains,
        sources=[node for node, keepers in enumerate(keepers_by_node) if own_node in keepers],
        keepers=[lowest_ranks[node] for node in keepers_by_node[own_node]],
        ranks_without_copy=set(lowest_ranks) if tier.in_memory else set(),
        executor=executor,
    )

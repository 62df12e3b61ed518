"""Commits on local tiers of several nodes, where no rank sees all files of a step.

The configuration does not name the nodes. Each rank posts once the identities of its local tiers
(machine, device and inode of the root), and ranks with equal identities share a node. Two ranks may
share a tier and still count as two nodes, for example if they run in two containers. Some work is
then done twice, and the result is still correct.

On a local tier, each rank writes its file and its fragment on its own node. The ranks send their
fragments as messages to the rank that merges them. That rank puts the manifest on its own node,
which makes the checkpoint, since the files of all nodes are durable by then. It then sends the
manifest to the other nodes, where the lowest rank of each node puts the same bytes. The save has
succeeded when all nodes have the manifest.

A *subject* is the name of an exchange: each rank may post one message on it, and one *verdict* is
set for all ranks. ``nodes.of`` has the number of the node of each rank. ``leader_decides`` gives
the leader's decision to all ranks.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final

import msgspec

from ckpt.config import Tls
from ckpt.coordination.committer import SharedStore
from ckpt.coordination.coordinator import LEADER, Coordinator
from ckpt.coordination.exchanges import Wait, encode_json, gather, leader_decides
from ckpt.coordination.long_message import drop, receive, send
from ckpt.errors import CkptError, CommitError, ConfigError, TransientStorageError
from ckpt.model.checksum import checksum
from ckpt.model.keys import StepRef
from ckpt.model.manifest import FragmentRef
from ckpt.processes import boot_identity
from ckpt.storage.api import HasRoot, StorageBackend
from ckpt.storage.tiers import Nodes, OpenTier
from ckpt.tls import encryption_of

_START_SECONDS: Final = 300.0
"""How many seconds the leader waits until all ranks have posted their local tiers."""
_PUT_SECONDS: Final = 20.0
"""How many seconds the other nodes may need to put a manifest."""
_ARRIVAL_SECONDS: Final = 10.0
"""How many seconds a message may need to arrive after its sender has announced it."""
_LOOK_SECONDS: Final = 1.0


class _RankMessage(msgspec.Struct, frozen=True):
    """The message that each rank posts at its start.

    Attributes:
        tiers: The identities of the rank's local tiers.
        tls: Whether the rank has the setting ``tls``.
        fault: Why the rank cannot use its TLS files; empty if it can, or has none.
    """

    tiers: list[str]
    tls: bool
    fault: str


class _Decision(msgspec.Struct, frozen=True):
    """The leader's decision for all ranks.

    Attributes:
        nodes: For each local tier the node of each rank.
        fault: Why the tiers or the settings ``tls`` of the ranks do not fit together; empty if they
            do.
    """

    nodes: list[tuple[int, ...]]
    fault: str


def agree(
    tiers: Sequence[OpenTier], coordinator: Coordinator, tls: Tls | None = None
) -> tuple[OpenTier, ...]:
    """Find out which ranks share a node, and return ``tiers`` with the result.

    If the job has several nodes, ``nodes`` of each local tier names the node of each rank.
    Otherwise ``nodes`` is None. All ranks must call this once, with the same tiers. The files of
    ``tls`` may differ.

    Raises:
        ConfigError: The numbers of local tiers differ, only some ranks have ``tls``, or a rank
            cannot use the files of its ``tls``. All ranks raise this error.
        CommitTimeout: A rank has not posted its tiers in time, for example because it has no local
            tier, or the leader has not answered.
    """
    local = [tier for tier in tiers if tier.local]
    if coordinator.world_size == 1 or not local:
        encryption_of(tls)
        return tuple(tiers)
    encryption, fault = None, ""
    try:
        encryption = encryption_of(tls)
    except ConfigError as error:  # All ranks raise the error below, so post it first
        fault = str(error)
    own_message = _RankMessage([_identity(tier.backend) for tier in local], tls is not None, fault)
    coordinator.post("nodes", encode_json(own_message))
    # The ranks wait longer than the leader, so that its error comes first.
    wait = Wait(_START_SECONDS + 30, "which ranks share a node")
    decision = leader_decides(
        coordinator, "nodes", lambda: _decide(_rank_messages(coordinator)), wait, _Decision
    )
    coordinator.forget("nodes")
    if decision.fault:
        raise ConfigError(decision.fault)
    nodes_by_tier = {
        # Nodes are numbered from 0, so with one node all numbers are 0.
        tier.index: Nodes(node_by_rank, encryption) if max(node_by_rank) else None
        for tier, node_by_rank in zip(local, decision.nodes, strict=True)
    }
    return tuple(replace(tier, nodes=nodes_by_tier.get(tier.index)) for tier in tiers)


def _rank_messages(coordinator: Coordinator) -> list[_RankMessage]:
    """Return the messages of all ranks, by rank."""
    messages = gather(coordinator, "nodes", Wait(_START_SECONDS, "the manager"))
    return [msgspec.json.decode(message, type=_RankMessage) for message in messages.values()]


def _decide(messages: Sequence[_RankMessage]) -> _Decision:
    if fault := _mismatch(messages):
        return _Decision([], fault)
    return _Decision(_number_nodes([message.tiers for message in messages]), "")


def _mismatch(messages: Sequence[_RankMessage]) -> str:
    """Return why the tiers or the settings ``tls`` of the ranks do not fit together.

    The text is empty if they do. ``messages`` are those of all ranks, by rank.
    """
    counts = [len(message.tiers) for message in messages]
    if mismatches := [rank for rank, count in enumerate(counts) if count != counts[LEADER]]:
        return (
            f"rank(s) {_rank_list(mismatches)} were given another number of local tiers than rank "
            f"{LEADER}: give all ranks the same tiers"
        )
    with_tls = [rank for rank, message in enumerate(messages) if message.tls]
    without_tls = [rank for rank, message in enumerate(messages) if not message.tls]
    if with_tls and without_tls:
        return (
            f"tls is set on rank(s) {_rank_list(with_tls)} and not on rank(s) "
            f"{_rank_list(without_tls)}: set it on all ranks, or on none"
        )
    # Ranks of one node have the same files, so the fault of the first rank is enough.
    faulty = [rank for rank, message in enumerate(messages) if message.fault]
    return f"{messages[faulty[0]].fault} (on rank(s) {_rank_list(faulty)})" if faulty else ""


def _rank_list(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:16])) + (" ..." if len(ranks) > 16 else "")


def _number_nodes(identities: Sequence[Sequence[str]]) -> list[tuple[int, ...]]:
    """Return, for each tier, the node of each rank. Ranks whose tier has the same identity get the
    same number.

    Args:
        identities: For each rank the identities of its local tiers.
    """
    tier_numbers: list[tuple[int, ...]] = []
    for tier_identities in zip(*identities, strict=True):
        numbers: dict[str, int] = {}
        tier_numbers.append(
            tuple(numbers.setdefault(identity, len(numbers)) for identity in tier_identities)
        )
    return tier_numbers


def _identity(backend: StorageBackend) -> str:
    """Return a text that two ranks have in common only if they share this root."""
    root = backend.url
    if isinstance(backend, HasRoot):
        with suppress(CkptError):  # The first save reports this error of the tier
            root = backend.identity()
    place = f"{socket.gethostname()} {boot_identity()} {root}"
    return checksum(place.encode(errors="surrogateescape"))[:16]


def on_node(coordinator: Coordinator, nodes: Nodes | None) -> Coordinator:
    """Return a coordinator for the ranks of this node alone, which it numbers from 0.

    If ``nodes`` is None, the job has one node, so return ``coordinator`` itself.
    """
    return coordinator if nodes is None else _NodeCoordinator(coordinator, nodes)


class _NodeCoordinator:
    """A coordinator for the ranks of one node, over that of all ranks. The subjects of each node
    have a prefix of their own.
    """

    def __init__(self, coordinator: Coordinator, nodes: Nodes) -> None:
        self._inner, self._nodes = coordinator, nodes
        self._node_ranks = nodes.mates(coordinator.rank)
        self._prefix = f"node{nodes.of[coordinator.rank]}/"
        self.rank, self.world_size = self._node_ranks.index(coordinator.rank), len(self._node_ranks)
        self.attempt = coordinator.attempt

    def post(self, subject: str, message: bytes) -> None:
        self._inner.post(self._prefix + subject, message)

    def collect(self, subject: str, ranks: set[int], *, timeout: float) -> dict[int, bytes]:
        messages = self._inner.collect(
            self._prefix + subject, {self._node_ranks[rank] for rank in ranks}, timeout=timeout
        )
        return {self._node_ranks.index(rank): message for rank, message in messages.items()}

    def set_once(self, subject: str, verdict: bytes) -> bytes:
        return self._inner.set_once(self._prefix + subject, verdict)

    def verdict(self, subject: str, *, timeout: float) -> bytes | None:
        return self._inner.verdict(self._prefix + subject, timeout=timeout)

    def forget(self, subject: str) -> None:
        self._inner.forget(self._prefix + subject)

    def clone(self) -> _NodeCoordinator:
        return _NodeCoordinator(self._inner.clone(), self._nodes)

    def close(self) -> None:
        self._inner.close()


class _MergeNotice(msgspec.Struct, frozen=True):
    """The announcement that ``rank`` has sent the manifest, with the size and the checksum of the
    manifest.
    """

    rank: int
    size: int
    checksum: str


_notice_decoder: Final = msgspec.json.Decoder(_MergeNotice)


class NodeLocalStore:
    """The `CommitStore` of a tier that is local to each node. Ranks send the fragments to each
    other, and the manifest is put on all nodes.

    ``_has_done_put`` is True once this rank need not put the manifest any more. Then it has put the
    manifest, or is not the lowest rank of its node. ``_fragment_pieces`` are the messages that
    carry this rank's fragment.

    Args:
        store: The tier on this node.
        coordinator: The connection to the other ranks.
        nodes: The node of each rank.
        name: The name of the committer, which distinguishes its subjects.

    Thread safety:
        The same as for `Committer`.
    """

    def __init__(
        self,
        store: SharedStore,
        coordinator: Coordinator,
        nodes: Nodes,
        *,
        name: str,
    ) -> None:
        self._store, self._coordinator, self._nodes = store, coordinator, nodes
        self._name = name
        self._fragment_pieces = 0
        # Only the lowest rank of a node puts the manifest there.
        self._has_done_put = coordinator.rank not in nodes.lowest_ranks

    @property
    def url(self) -> str:
        return self._store.url

    def offer(self, ref: StepRef, fragment: FragmentRef) -> None:
        """Send the fragment of this rank to the other ranks. Call this before the rank votes."""
        self._fragment_pieces = send(
            self._coordinator, self._subject(ref, "fragment"), self._store.read(ref, fragment)
        )

    def read(self, ref: StepRef, fragment: FragmentRef) -> bytes:
        """Return the fragment of a rank that has voted. Each rank sends its fragment before it
        votes.

        Raises:
            TransientStorageError: The fragment has not arrived.
        """
        return self._receive(ref, "fragment", fragment.rank, fragment.size)

    def confirm(self) -> None:
        """Confirm that the job owns the root on this node.

        The other nodes check their own roots before they put the manifest.
        """
        self._store.confirm()

    def keep(self, bases: Collection[StepRef]) -> None:
        self._store.keep(bases)

    def put(self, ref: StepRef, manifest: bytes) -> None:
        """Put the manifest on this node, send it to the other nodes, and wait until they put it.

        If the put on this node fails, the call raises the errors of ``SharedStore.put``. No other
        node has got the manifest then.

        Raises:
            CommitError: The manifest is on this node, but is not known to be on all nodes.
        """
        self._store.put(ref, manifest)
        self._has_done_put = True
        # If this rank dies after this point, the rank that goes on waits for this message.
        if self._coordinator.rank in self._nodes.lowest_ranks:
            self._coordinator.post(self._subject(ref, "put"), b"")
        pieces = send(self._coordinator, self._subject(ref, "manifest"), manifest)
        notice = _MergeNotice(self._coordinator.rank, len(manifest), checksum(manifest))
        self._coordinator.set_once(self._subject(ref, "merged"), msgspec.json.encode(notice))
        faults = self._put_failures(ref)
        drop(self._coordinator, self._subject(ref, "manifest"), pieces)
        if faults:
            text = "; ".join(
                f"on the node of rank {rank}: {reason}" for rank, reason in sorted(faults.items())
            )
            raise CommitError(f"the manifest was put on one node, but not on all: {text}")

    def is_absent(self, ref: StepRef) -> bool:
        """Return True if the manifest is absent on this node.

        No other node has then got the manifest from this rank, which sends the manifest only after
        it has put it on its own node.
        """
        return self._store.is_absent(ref)

    def attend(self, ref: StepRef, deadline: float) -> None:
        """Wait for another rank to send the manifest, and put the manifest on this node.

        The wait ends when the manifest was sent, when the save has an outcome, or at the time
        ``deadline``. A put that has begun by then is completed. Only the lowest rank of each node
        waits, and the other ranks return at once.
        """
        while not self._has_done_put and (seconds := deadline - time.monotonic()) > 0:
            if self._coordinator.verdict(f"{self._name}/{ref.folder}", timeout=0) is not None:
                return
            data = self._coordinator.verdict(
                self._subject(ref, "merged"), timeout=min(_LOOK_SECONDS, seconds)
            )
            if data is not None:
                self._has_done_put = True
                notice = _notice_decoder.decode(data)
                if self._nodes.of[notice.rank] != self._nodes.of[self._coordinator.rank]:
                    message = self._put_on_this_node(ref, notice)
                    self._coordinator.post(self._subject(ref, "put"), message.encode())

    def forget(self, ref: StepRef) -> None:
        """Remove the messages of this rank about the save ``ref``, whose outcome is known."""
        drop(self._coordinator, self._subject(ref, "fragment"), self._fragment_pieces)
        self._coordinator.forget(self._subject(ref, "put"))

    def _put_failures(self, ref: StepRef) -> dict[int, str]:
        """Return why other nodes have not put the manifest: lowest rank of the node -> reason.

        Wait up to ``_PUT_SECONDS`` for the nodes. The result is empty if all have put it.
        """
        node = self._nodes.of[self._coordinator.rank]
        missing = {rank for rank in self._nodes.lowest_ranks if self._nodes.of[rank] != node}
        faults: dict[int, str] = {}
        deadline = time.monotonic() + _PUT_SECONDS
        while missing and (seconds := deadline - time.monotonic()) > 0:
            messages = self._coordinator.collect(
                self._subject(ref, "put"), missing, timeout=seconds
            )
            faults |= {rank: message.decode() for rank, message in messages.items() if message}
            missing -= messages.keys()
        return faults | dict.fromkeys(missing, f"no answer within {_PUT_SECONDS:.0f} s")

    def _put_on_this_node(self, ref: StepRef, notice: _MergeNotice) -> str:
        """Put the manifest on this node. Return the reason if this fails, else an empty string."""
        try:
            data = self._receive(ref, "manifest", notice.rank, notice.size)
            if checksum(data) != notice.checksum:
                return f"it is not what rank {notice.rank} has merged"
            self._store.put(ref, data)
        except Exception as error:  # noqa: BLE001 - the rank that commits waits for an answer
            return str(error) or repr(error)
        return ""

    def _receive(self, ref: StepRef, topic: str, rank: int, nbytes: int) -> bytes:
        """Return a message of at most ``nbytes`` bytes that ``rank`` has sent about a save."""
        try:
            return receive(
                self._coordinator,
                self._subject(ref, topic),
                rank,
                limit=nbytes,
                timeout=_ARRIVAL_SECONDS,
            )
        except CommitError as error:  # Another rank may have received the message
            raise TransientStorageError(ref.folder, str(error)) from None

    def _subject(self, ref: StepRef, topic: str) -> str:
        return f"{self._name}/{ref.folder}/{topic}"

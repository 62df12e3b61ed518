"""FOLDER SCENE: four ranks on four nodes, each with a root of its own and copies on a buddy."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bench.rank_exit import exit_rank
from ckpt import CheckpointManager, Tier, Tls
from ckpt.catalog.inventory import Inventory
from ckpt.errors import ConfigError, NoCheckpoint, OutOfSpace, TransientStorageError
from ckpt.events import Event, NodeReplicated
from ckpt.model.keys import StepRef
from ckpt.nodes.buddy_tier import BuddyTier
from ckpt.nodes.peer_store import NodeStore
from ckpt.nodes.replication import NodeReplicas
from ckpt.nodes.server import NodeServer
from ckpt.nodes.step_copies import StepCopies
from ckpt.nodes.wire import Peer
from ckpt.storage.api import Upload
from ckpt.storage.tiers import OpenTier, open_tiers
from ckpt_backends.folder.posix import PosixBackend
from tests.distributed.workers import nets
from tests.distributed.workers.nets import assert_same, shards, step
from tests.kit.certificates import Authority

STEPS = (1, 2, 3)


def tiers(root: Path, **settings: Any) -> list[Tier]:
    return [Tier(str(root / f"node{dist.get_rank()}"), local=True, keep_last=2, **settings)]


@cache
def trained(number: int) -> dict[str, torch.Tensor]:
    """Return what this rank has of the model and the optimizer after this many steps."""
    model, optimizer = nets.build("fsdp", 0, nets.SGD)
    for each in range(1, number + 1):
        step(model, optimizer, each)
    return shards(model, optimizer)


def save(
    manager: CheckpointManager,
    steps: Sequence[int] = STEPS,
    after: Callable[[], object] = dist.barrier,
) -> None:
    model, optimizer = nets.build("fsdp", 0, nets.SGD)
    for number in steps:
        step(model, optimizer, number)
        manager.save({"model": model, "optimizer": optimizer, "step": number})
        after()


def restored(places: Sequence[Tier], tls: Tls | None = None) -> int | None:
    """Return the step that is restored, after a check of its values, or None."""
    model, optimizer = nets.build("fsdp", 1, nets.SGD)
    step(model, optimizer, 99)
    state = {"model": model, "optimizer": optimizer, "step": -1}
    with CheckpointManager(places, tls=tls) as manager:
        try:
            report = manager.restore(state)
        except NoCheckpoint:
            return None
    assert report is not None
    assert report.repaired == (), report
    assert_same(shards(model, optimizer), trained(report.step))
    return report.step


def alone(work: Callable[[], object]) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        work()
    dist.barrier()


def without(base: Path, *nodes: int) -> Path:
    """Copy the folders, as they are after ``nodes`` were lost."""
    other = base.parent / f"{base.name}-{'-'.join(map(str, nodes))}"

    def make() -> None:
        shutil.copytree(base, other)
        for node in nodes:
            shutil.rmtree(other / f"node{node}")

    alone(make)
    return other


def files(base: Path, number: int, pattern: str = "*.safetensors") -> list[list[int]]:
    """Return the ranks whose files of a step each node has."""
    return [
        sorted(
            int(path.name[5:10])
            for path in (base / f"node{node}").glob(f"step-{number:09d}.*/{pattern}")
        )
        for node in range(4)
    ]


def on_disk(root: Path) -> None:
    base, copied = root / "disk", threading.Semaphore(0)

    def observe(event: Event) -> None:
        if isinstance(event, NodeReplicated):
            copied.release()

    def await_copies() -> None:  # Until then, retention keeps the previous step
        assert copied.acquire(timeout=60)
        dist.barrier()

    with CheckpointManager(
        tiers(base, buddies=1), observers=[observe], chunk_size=1 << 14
    ) as manager:
        save(manager, after=await_copies)
    dist.barrier()
    assert files(base, 3) == [[0, 3], [0, 1], [1, 2], [2, 3]]
    assert files(base, 3, "rank-*.json") == files(base, 3)
    assert files(base, 1) == [[], [], [], []], files(
        base, 1
    )  # a node's retention removes the copies too
    dist.barrier()
    cut = without(base, 1)  # node 0 was killed while it copied
    alone(lambda: next((cut / "node0").glob("step-000000003.*/rank-00003.json")).unlink())
    (near,) = open_tiers([Tier(str(cut / "node0"))])
    found = Inventory(near.backend, part=True).look()
    assert [held.state for held in found] == ["committed", "committed"], found
    alone(lambda: shutil.rmtree(cut))
    for node in (1, 3):
        assert restored(tiers(without(base, node))) == 3
    assert restored(tiers(without(base, 0, 2))) == 3
    assert restored(tiers(without(base, 0, 1))) is None  # without a node and its buddy


def in_racks(root: Path) -> None:
    """Ranks 0 and 1 are in one rack, 2 and 3 in another."""
    os.environ["CKPT_FAILURE_DOMAIN"] = "ab"[dist.get_rank() // 2]
    base = root / "racks"
    with CheckpointManager(tiers(base, buddies=1), replicate_mb_per_s=50) as manager:
        save(manager, (1,))
    for lost in ((0, 1), (2, 3)):
        assert restored(tiers(without(base, *lost))) == 1
    del os.environ["CKPT_FAILURE_DOMAIN"]


def on_two_buddies(root: Path) -> None:
    base = root / "two"
    with CheckpointManager(
        tiers(base, buddies=2, codec="zstd"), copies="per_node", chunk_size=1 << 14
    ) as manager:
        save(manager, (1, 2))
    for lost in ((0, 1), (1, 2), (0, 3)):
        assert restored(tiers(without(base, *lost))) == 2


def logged() -> list[str]:
    """Return a list to which the log messages of ckpt are added from now on."""
    messages: list[str] = []
    handler = logging.Handler()

    def emit(record: logging.LogRecord) -> None:
        messages.append(record.getMessage())

    handler.emit = emit  # type: ignore[method-assign]
    logging.getLogger("ckpt").addHandler(handler)
    return messages


def unfaithful(root: Path) -> None:
    """The node of rank 1 sends wrong bytes, then nothing, and then has another token.

    Its buddy keeps nothing of it, says so, and no save fails.
    """
    serve, rank = NodeServer._answer, dist.get_rank()
    sent: list[int] = []

    def corrupt(self: NodeServer, connection: socket.socket, request: bytearray) -> None:
        class Wrong:
            def sendall(self, data: memoryview) -> None:
                sent.append(len(data))
                whole = bytes(data)
                wrong = len(whole) > 4096
                connection.sendall(bytes([whole[0] ^ 1]) + whole[1:] if wrong else whole)

        serve(self, Wrong(), request)  # type: ignore[arg-type]

    def silent(self: NodeServer, connection: socket.socket, request: bytearray) -> None:
        del self, connection, request

    def strange(self: NodeServer, sent: bytearray) -> bool:
        del self, sent
        return False

    base, events = root / "unfaithful", list[Event]()
    failures, note_failure = threading.Semaphore(0), BuddyTier.note_failure

    def note(self: BuddyTier, ref: StepRef, error: Exception) -> None:
        note_failure(self, ref, error)
        failures.release()

    BuddyTier.note_failure = note  # type: ignore[method-assign]
    messages = logged()
    for number, (name, wrong) in enumerate(
        [("_answer", corrupt), ("_answer", silent), ("_knows_token", strange)], 1
    ):
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(NodeServer, name, wrong)
            with CheckpointManager(
                tiers(base / str(number), buddies=1), observers=[events.append]
            ) as manager:
                save(manager, after=lambda: rank != 2 or failures.acquire(timeout=60))
        dist.barrier()
        kept = files(base / str(number), 3)
        assert kept == [[0, 3], [0, 1], [2], [2, 3]], (name, kept)
        assert restored(tiers(without(base / str(number), 2))) == 3
        assert restored(tiers(without(base / str(number), 1))) is None
    assert bool(sent) == (rank == 1)
    copied = [event for event in events if isinstance(event, NodeReplicated)]
    assert bool(copied) == (rank != 2), copied
    warned = [message for message in messages if "were not copied to this node" in message]
    assert bool(warned) == (rank == 2), messages


def full_disk(root: Path) -> None:
    """The disk of rank 2's node has no room for copies."""
    if dist.get_rank() == 2:
        put = PosixBackend.upload

        def upload(self: PosixBackend, key: str, size: int) -> Upload:
            if "rank-00001" in key:
                raise OutOfSpace(key, "no space left on device")
            return put(self, key, size)

        PosixBackend.upload = upload  # type: ignore[method-assign]
    base = root / "full"
    with CheckpointManager(tiers(base, buddies=1)) as manager:
        save(manager)
    dist.barrier()
    assert files(base, 3) == [[0, 3], [0, 1], [2], [2, 3]]
    assert restored(tiers(base)) == 3


def no_room(root: Path) -> None:
    """Copies would take the room of the next save on rank 2's node."""
    messages = logged()
    base = root / "room"
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 2:
            patch.setattr(PosixBackend, "free_bytes", lambda _: 1000)
        with CheckpointManager(tiers(base, buddies=1)) as manager:
            save(manager)
    dist.barrier()
    assert files(base, 3) == [[0, 3], [0, 1], [2], [2, 3]]
    said = any("were not copied to this node" in message for message in messages)
    assert said == (dist.get_rank() == 2), messages


def behind(root: Path) -> None:
    """Copies of later steps do not come in time. The last step that has its copies stays."""
    base, copied, copy = root / "behind", threading.Semaphore(0), BuddyTier.copy

    def failing(self: BuddyTier, ref: StepRef, *how: Any) -> int | None:
        if ref.step > 1:
            raise TransientStorageError(ref.folder, "the buddy is slow")
        return copy(self, ref, *how)

    def observe(event: Event) -> None:
        if isinstance(event, NodeReplicated):
            copied.release()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BuddyTier, "copy", failing)
        with CheckpointManager(tiers(base, buddies=1), observers=[observe]) as manager:
            save(manager, (1,))
            assert copied.acquire(timeout=60)
            dist.barrier()
            save(manager, (2, 3, 4, 5))
    dist.barrier()
    there = {path.name[:14] for path in (base / f"node{dist.get_rank()}").glob("step-*")}
    assert there == {"step-000000001", "step-000000004", "step-000000005"}
    assert restored(tiers(without(base, 1))) == 1


def restored_stays(root: Path) -> None:
    """The step that a job goes on from stays while no later step has its copies."""
    base = root / "restored"
    with CheckpointManager(tiers(base, buddies=1)) as manager:
        save(manager)
    model, optimizer = nets.build("fsdp", 1, nets.SGD)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BuddyTier, "copy", without_copies)
        with CheckpointManager(tiers(base, buddies=1)) as manager:
            report = manager.restore({"model": model, "optimizer": optimizer, "step": -1})
            assert report is not None
            assert report.step == 3
            save(manager, (4, 5, 6))
    dist.barrier()
    assert restored(tiers(without(base, 1))) == 3


def restored_again(root: Path) -> None:
    """A node is lost, and comes back empty; when its files are there again, another one is lost."""
    base = root / "again"
    with CheckpointManager(tiers(base, buddies=1)) as manager:
        save(manager)
    for first, second in ((1, 2), (3, 0), (2, 3), (0, 2)):
        cut = without(base, first)
        restore_and_wait(CheckpointManager(tiers(cut, buddies=1))).close()
        dist.barrier()
        assert files(cut, 3) == files(base, 3), (first, files(cut, 3))
        assert len(list(cut.glob("node*/step-000000003.*/manifest.json"))) == 4
        assert restored(tiers(without(cut, second))) == 3
    cut = without(base, 1, 3)
    with CheckpointManager(tiers(cut, buddies=1)) as manager:
        restore_and_wait(manager)
        save(manager, (4, 5, 6))
    dist.barrier()
    assert files(cut, 3) == [[], [], [], []], files(cut, 3)  # They go when newer ones replace them


def restored_goes(root: Path) -> None:
    """A step that is restored is removed on one node while that node copies files of it."""
    base = root / "goes"
    with CheckpointManager(tiers(base, buddies=1)) as manager:
        save(manager)
    dist.barrier()
    alone(lambda: [path.unlink() for path in base.glob("node2/step-000000003.*/rank-00001.*")])
    fetch = StepCopies.fetch

    def removed(self: StepCopies, *args: Any) -> int:
        shutil.rmtree(base / f"node{dist.get_rank()}" / self.ref.folder)
        return fetch(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepCopies, "fetch", removed)
        restore_and_wait(CheckpointManager(tiers(base, buddies=1))).close()
    dist.barrier()
    assert files(base, 3) == [[0, 3], [0, 1], [], [2, 3]], files(base, 3)
    assert not list(base.glob("node2/step-000000003.*/*"))


def saved(root: Path) -> None:
    with CheckpointManager(tiers(root, buddies=1)) as manager:
        save(manager)


def on_fewer(root: Path) -> None:
    """Node 1 of four is lost, and three ranks go on. Then each file is on two nodes again."""
    here = (0, 2, 3)[dist.get_rank()]
    place = Tier(str(root / f"node{here}"), local=True, keep_last=2, buddies=1)
    restore_and_wait(CheckpointManager(place)).close()
    dist.barrier()
    having = files(root, 3)
    assert all(sum(rank in node for node in having) >= 2 for rank in range(4)), having
    for other in (0, 2, 3):
        left = [rank for node in range(4) if node != other for rank in having[node]]
        assert set(left) == {0, 1, 2, 3}, (other, having)


def restore_and_wait(manager: CheckpointManager) -> CheckpointManager:
    """Go on from the last step, and wait until a node that lacked files of it has them."""
    model, optimizer = nets.build("fsdp", 1, nets.SGD)
    report = manager.restore({"model": model, "optimizer": optimizer, "step": -1})
    assert report is not None
    assert report.step == STEPS[-1]
    assert manager._saver._replicas is not None
    assert futures.wait([manager._saver._replicas._copy_thread.submit(int)], 60).done
    dist.barrier()
    return manager


def without_copies(buddy_tier: BuddyTier, ref: StepRef, *how: Any) -> int | None:
    del buddy_tier, how
    raise TransientStorageError(ref.folder, "the buddy is slow")


def slow_to_hear(root: Path) -> None:
    """Rank 1 learns of a commit later than its buddy requests the files."""
    patched, waits = NodeReplicas.committed, [threading.Timer(0, int)]

    def later(
        self: NodeReplicas, tier: OpenTier, ref: StepRef, outdate: Callable[[], None]
    ) -> None:
        waits[0] = threading.Timer(7, patched, (self, tier, ref, outdate))
        waits[0].start()

    base = root / "slow"
    with CheckpointManager(tiers(base, buddies=1)) as manager:
        if dist.get_rank() == 1:
            NodeReplicas.committed = later  # type: ignore[method-assign]
        save(manager, (1,))
        if dist.get_rank() == 1:
            waits[0].join()
    dist.barrier()
    assert files(base, 1) == [[0, 3], [0, 1], [1, 2], [2, 3]]


def leaves(root: Path) -> None:
    """Rank 3 leaves by an exception; the others do not wait for its copies."""
    base, began = root / "leaves", 0.0
    try:
        with CheckpointManager(tiers(base, buddies=1), commit_timeout_seconds=300) as manager:
            save(manager, (1,))
            began = time.monotonic()
            if dist.get_rank() == 3:
                raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    assert time.monotonic() - began < 50  # it waits for 60 s if no message comes


def certificate(root: Path) -> Tls:
    """The files of this node. Rank 0 makes the authority of all nodes, which issues them."""

    def issue() -> None:
        authority = Authority(root)
        for node in range(4):
            authority.issue(f"node{node}")

    alone(issue)
    stem = str(root / f"authority-node{dist.get_rank()}")
    return Tls(f"{stem}.pem", f"{stem}.key", root / "authority.pem")


def encrypted(root: Path) -> None:
    """With TLS a step outlives a node as it does without TLS, and no connection is plain."""
    tls, base = certificate(root), root / "encrypted"
    messages, opened = logged(), list[type]()
    answer, connect = NodeServer._answer, NodeStore._connect

    def answered(self: NodeServer, connection: socket.socket, request: bytearray) -> None:
        opened.append(type(connection))
        answer(self, connection, request)

    def connected(self: NodeStore, peer: Peer) -> socket.socket:
        opened.append(type(found := connect(self, peer)))
        return found

    NodeServer._answer = answered  # type: ignore[method-assign]
    NodeStore._connect = connected  # type: ignore[method-assign]
    with CheckpointManager(tiers(base, buddies=1), tls=tls, chunk_size=1 << 14) as manager:
        save(manager)
    dist.barrier()
    assert files(base, 3) == [[0, 3], [0, 1], [1, 2], [2, 3]]
    copied = len(opened)
    assert restored(tiers(without(base, 0)), tls=tls) == 3
    assert 0 < copied < len(opened)
    cut = without(base, 2)  # The node comes back empty
    restore_and_wait(CheckpointManager(tiers(cut, buddies=1), tls=tls)).close()
    dist.barrier()
    assert files(cut, 3) == files(base, 3)
    assert {*opened} == {ssl.SSLSocket}
    assert not [message for message in messages if "refused" in message], messages


def strange_certificate(root: Path) -> None:
    """The node of rank 1 has a certificate of another authority.

    No other node copies from it, and it copies from no other node. No save fails, and a restore
    takes the shared tier.
    """
    rank, shared = dist.get_rank(), Tier(str(root / "shared"))
    tls = certificate(root)
    messages, base = logged(), root / "strange"
    if rank == 1:
        tls = Authority(root, "other").issue("node")
    places = [*tiers(base, buddies=1), shared]
    with CheckpointManager(places, tls=tls) as manager:
        save(manager)
    dist.barrier()
    assert files(base, 3) == [[0, 3], [1], [2], [2, 3]]
    there = without(base, 1)
    assert restored([*tiers(there), shared], tls=tls) == 3
    dist.barrier()
    if rank in (1, 2):
        assert (
            f"ckpt: the node of rank {rank - 1} does not give its files: its certificate is "
            "refused: self-signed certificate in certificate chain"
        ) in messages, messages
    assert any("was refused: it refuses the connection: unknown ca" in text for text in messages)


def tls_on_some(root: Path) -> None:
    """All ranks raise one error, and write nothing."""
    tls = certificate(root)
    with pytest.raises(ConfigError) as found:
        CheckpointManager(
            tiers(root / "some", buddies=1), tls=tls if dist.get_rank() in (0, 3) else None
        )
    assert "tls is set on rank(s) 0, 3 and not on rank(s) 1, 2" in str(found.value)
    with pytest.raises(ConfigError, match=r"nowhere/key cannot be read: .* \(on rank\(s\) 2\)"):
        CheckpointManager(
            tiers(root / "some"),
            tls=replace(tls, key="/nowhere/key") if dist.get_rank() == 2 else tls,
        )
    assert not list((root / "some").glob("node*/step-*"))


def not_local(root: Path) -> None:
    with pytest.raises(ConfigError, match=r"buddies=1 of .*leave buddies out"):
        CheckpointManager(Tier(str(root / "shared"), buddies=1))
    dist.barrier()  # Rank 0 serves the job's store, which the other ranks need until here


def in_memory(root: Path) -> list[Tier]:
    """Use a tier in memory for each node, and no other."""
    return [Tier(f"shm://{root.name}-{dist.get_rank()}", buddies=1)]


def die_in_memory(root: Path) -> None:
    """Save three steps only to memory, and end as a killed process does."""
    copied = threading.Semaphore(0)

    def observe(event: Event) -> None:
        if isinstance(event, NodeReplicated) and event.step == STEPS[-1]:
            copied.release()

    manager = CheckpointManager(in_memory(root), observers=[observe])
    save(manager)
    assert copied.acquire(timeout=60)
    dist.barrier()
    os._exit(0)


def die_after_restore(root: Path) -> None:
    """Go on from the last step, get the copies of it again, and die."""
    restore_and_wait(CheckpointManager(in_memory(root)))
    os._exit(0)


def die_without_copies(root: Path) -> None:
    """Go on from the last step, save another one that gets no copies, and die."""
    go_on_without_copies(CheckpointManager(in_memory(root)))
    os._exit(0)


def leave_without_copies(root: Path) -> None:
    """Go on from the last step, save another one that gets no copies, and end by an exception."""
    with suppress(ZeroDivisionError), CheckpointManager(in_memory(root)) as manager:
        go_on_without_copies(manager)
        raise ZeroDivisionError


def go_on_without_copies(manager: CheckpointManager) -> None:
    BuddyTier.copy = without_copies  # type: ignore[assignment,method-assign]
    model, optimizer = nets.build("fsdp", 1, nets.SGD)
    report = manager.restore({"model": model, "optimizer": optimizer, "step": -1})
    assert report is not None
    assert report.step == STEPS[-1]
    save(manager, (STEPS[-1] + 1,))


def come_back(root: Path) -> None:
    assert restored(in_memory(root)) == STEPS[-1]
    with CheckpointManager(in_memory(root)) as manager:
        save(manager, (7,))  # the steps of the previous job are removed
    dist.barrier()
    found = list(Path("/dev/shm").glob(f"ckpt-memory-*-{root.name}-*/step-*/*"))
    assert {path.parent.name[:14] for path in found} <= {"step-000000007"}, found


def go_on(root: Path) -> None:
    """Go on from the last step in one job. What it left on each node is removed, on new
    nodes too.
    """
    with CheckpointManager(in_memory(root)) as manager:
        restore_and_wait(manager)
        save(manager, (7,))
    dist.barrier()
    found = list(Path("/dev/shm").glob(f"ckpt-memory-*-{root.name}-*/step-*/*"))
    assert {path.parent.name[:14] for path in found} == {"step-000000007"}, found


def main() -> None:
    dist.init_process_group("gloo")
    root, scene = Path(sys.argv[1]), sys.argv[2]
    globals()[scene](root)
    print("ALL WELL", flush=True)
    exit_rank()


main()

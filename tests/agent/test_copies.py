"""Files go to farther tiers through a worker of the agent, and through the trainer without one."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from bench.proxy import Proxy
from ckpt import CheckpointManager, Tier
from ckpt.agent.client import Connection, connect, reach, status
from ckpt.agent.copy_worker import copy_files
from ckpt.agent.folder import AgentFolder
from ckpt.agent.messages import (
    AskWorker,
    CopyFile,
    FileCopied,
    FileFailed,
    Job,
    Lent,
    Welcome,
    encode,
    fields_of,
)
from ckpt.agent.worker_messages import Order
from ckpt.catalog.step_listing import read_manifest, unfinished_of
from ckpt.config import AgentMode
from ckpt.coordination.coordinator import Coordinator
from ckpt.errors import AgentError, CkptError, LeftToAgent, OutOfSpace, RootLost
from ckpt.model.keys import StepRef, data_name
from ckpt.model.manifest import Manifest
from ckpt.pending import PendingSave
from ckpt.pipeline.workers import Workers
from ckpt.root.attempts import step_refs
from ckpt.storage.registry import open_backend
from tests.agent.conftest import await_state, holders, job
from tests.coordination.world import World
from tests.kit.disks import mount
from tests.kit.marks import torture
from tests.kit.stores import Gated, gated, whole
from tests.kit.waiting import until
from tests.kit.worlds import run_code
from tests.processes import ended
from tests.servers import KEY, SECRET, Server

__all__ = ["gated", "mount"]
ELEMENTS = 6 << 20
"""24 MiB: two chunks, and three parts of an upload."""
ITSELF = "copies its file to"


def state(step: int, elements: int = ELEMENTS) -> dict[str, torch.Tensor]:
    large = torch.arange(elements, dtype=torch.int32) % 1000 + step
    return {"x": large, "y": torch.full((7,), step / 3)}


def save(manager: CheckpointManager, *steps: int, elements: int = ELEMENTS) -> list[PendingSave]:
    saves = [manager.save_async(state(step, elements), step) for step in steps]
    for each in saves:
        each.result(100)
    return saves


def files_of(root: Path) -> dict[str, bytes]:
    """Return the data files of each step, without the attempts."""
    found = [path for path in root.rglob("rank-*") if path.suffix != ".json"]
    return {f"{path.parent.name[:14]} {path.name}": path.read_bytes() for path in found}


def manifest_of(root: Path) -> Manifest:
    """Return the newest manifest of a tier, without what differs in any two runs."""
    backend = open_backend(str(root))
    found = read_manifest(backend, step_refs(backend)[0])
    parts = [msgspec.structs.replace(part, size=0, checksum="") for part in found.fragments]
    return msgspec.structs.replace(found, attempt="", created_at=0.0, fragments=tuple(parts))


@pytest.fixture
def wire(moto_server: Server) -> Iterator[Proxy]:
    with Proxy(moto_server.port) as proxy:
        yield proxy


def bucket(wire: Proxy, path: Path, read_timeout: int = 5, **how: Any) -> Tier:
    options = {"key": KEY, "secret": SECRET, "region": "us-east-1", "endpoint_url": wire.url}
    limits = {"connect_timeout": 1, "read_timeout": read_timeout}
    hasty = {"retries": {"max_attempts": 1}, **limits}
    return Tier(f"s3://bucket/{path.name}", {**options, "config_kwargs": hasty}, **how)


def listed(tier: Tier) -> list[int]:
    """Return the steps of a tier, after a check that each of them restores."""
    with CheckpointManager(tier) as manager:
        steps = manager.steps()
        for step in steps:
            found = state(0)
            manager.restore(found, step, rollback=False)
            assert torch.equal(found["x"], state(step)["x"])
    return sorted(steps)


def unfinished(tier: Tier) -> list[str]:
    """Return the uploads that a store charges for, and does not list."""
    store = open_backend(tier.url, tier.options)
    return [one.name for ref in step_refs(store) for one in unfinished_of(store, ref)]


def lent(place: AgentFolder) -> list[int]:
    """Return the workers of the agent."""
    agents = holders(place, "listen")
    return [pid for pid in holders(place, "work") if pid not in agents]


# -- as without an agent ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("near", "far"),
    [
        ("none", "none"),
        ("none", "zstd:9"),
        ("zstd", "zstd"),
        *torture(("none", "zstd"), ("zstd", "none"), ("zstd", "zstd:9")),
    ],
)
def test_the_far_tier_gets_the_same_bytes_as_from_the_trainer(
    place: AgentFolder, tmp_path: Path, caplog, near: str, far: str
) -> None:
    modes: tuple[AgentMode, ...] = ("off", "required")
    for mode in modes:
        tiers = [
            Tier(str(tmp_path / mode / "near"), codec=near),
            Tier(str(tmp_path / mode / "far"), codec=far),
        ]
        with CheckpointManager(tiers, agent=mode) as manager:
            save(manager, 1, 2, 3, elements=100_000)
            assert len(lent(place)) == (mode == "required")
        assert whole(tiers[1].url) == [1, 2, 3]
    assert ITSELF not in caplog.text
    ours, theirs = (files_of(tmp_path / mode / "far") for mode in modes)
    assert len(ours) == 3
    assert ours == theirs
    manifests = [manifest_of(tmp_path / mode / "far") for mode in modes]
    assert manifests[0] == manifests[1]


def test_the_trainer_uploads_no_data_file(place: AgentFolder, tmp_path: Path, gated: Gated) -> None:
    """The trainer's own upload would not end."""
    with CheckpointManager([tmp_path / "near", tmp_path / "far"], agent="required") as manager:
        [one] = save(manager, 1)
        assert one.progress == 1.0
    assert not gated.began
    assert whole(tmp_path / "far") == [1]


@pytest.mark.torture
def test_closing_waits_until_the_far_tier_has_all(
    place: AgentFolder, tmp_path: Path, wire: Proxy, caplog
) -> None:
    far = bucket(wire, tmp_path, every=2, keep_last=2)
    near = Tier(str(tmp_path / "near"), keep_last=1)
    with CheckpointManager([near, far], agent="required", backlog=10) as manager:
        for step in range(1, 8):
            manager.save_async(state(step), step).result(100, tier=near.url)
    assert listed(far) == [4, 6]
    assert whole(near.url) == [7]
    assert ITSELF not in caplog.text
    assert until(lambda: not lent(place))


def test_each_rank_has_its_own_worker(place: AgentFolder, tmp_path: Path, caplog) -> None:
    farther = Tier(str(tmp_path / "farther"), codec="zstd")
    tiers: list[str | Path | Tier] = [tmp_path / "near", tmp_path / "far", farther]

    def train(coordinator: Coordinator) -> int:
        with CheckpointManager(tiers, coordinator=coordinator, agent="required") as manager:
            for step in (1, 2, 3):
                mine = {f"x{coordinator.rank}": torch.full((50_000,), step)}
                manager.save_async(mine, step).result(100)
            return len(lent(place))

    counts = World(2, patience=120).run(train)
    assert max(counts.values()) == 4, counts
    assert ITSELF not in caplog.text
    assert whole(tmp_path / "far") == whole(tmp_path / "farther") == [1, 2, 3]


def test_an_empty_state_is_copied(place: AgentFolder, tmp_path: Path) -> None:
    with CheckpointManager(
        [tmp_path / "near", Tier(str(tmp_path / "far"), codec="zstd")], agent="required"
    ) as manager:
        manager.save({"step": 1}, 1)
    assert whole(tmp_path / "far") == [1]


def test_a_step_that_the_near_tier_does_not_take_goes_from_memory(
    place: AgentFolder, tmp_path: Path
) -> None:
    """It goes from the far tier to the one behind it too, since its nearest file is there."""
    tiers = [
        Tier(str(tmp_path / "near"), every=2),
        Tier(str(tmp_path / "far")),
        Tier(str(tmp_path / "farther")),
    ]
    with CheckpointManager(tiers, agent="required") as manager:
        save(manager, 1, 3)
        assert len(lent(place)) == 1
    assert whole(tmp_path / "far") == whole(tmp_path / "farther") == [1, 3]


# -- when the worker cannot ------------------------------------------------------------------------


def begun(
    place: AgentFolder, wire: Proxy, tiers: list[Tier]
) -> tuple[CheckpointManager, PendingSave]:
    """A save whose file is on its way to the far tier, through a worker."""
    manager = CheckpointManager(tiers, agent="required")
    save(manager, 1)
    wire.bytes_per_second = 4e6
    going = manager.save_async(state(2), 2)
    going.result(100, tier=tiers[0].url)
    assert until(lambda: 0.5 < going.progress < 1)
    return manager, going


def kill_agent(place: AgentFolder) -> None:
    for pid in holders(place, "listen"):
        os.kill(pid, signal.SIGKILL)


def kill_worker(place: AgentFolder) -> None:
    for pid in lent(place):
        os.kill(pid, signal.SIGKILL)


def stop_agent(place: AgentFolder) -> None:
    found = connect(place)
    assert found is not None
    found.close()
    os.kill(found.welcome.pid, signal.SIGTERM)


@pytest.mark.server
@pytest.mark.parametrize("end", [kill_worker, *torture(kill_agent, stop_agent)])
def test_the_trainer_finishes_what_its_worker_has_begun(
    place: AgentFolder, tmp_path: Path, wire: Proxy, caplog, end: Callable[[AgentFolder], None]
) -> None:
    far = bucket(wire, tmp_path)
    manager, going = begun(place, wire, [Tier(str(tmp_path / "near")), far])
    end(place)
    assert until(lambda: ITSELF in caplog.text)
    wire.bytes_per_second = 0.0
    going.result(100)
    assert going.progress == 1.0
    assert until(lambda: (found := status(place)) and found.jobs)
    save(manager, 3)
    manager.close()
    assert caplog.text.count(ITSELF) == 1
    assert listed(far) == [1, 2, 3]
    assert not unfinished(far)


@pytest.mark.torture
@pytest.mark.server
def test_a_worker_that_is_silent_is_ended(
    place: AgentFolder, tmp_path: Path, wire: Proxy, caplog, monkeypatch
) -> None:
    """Otherwise it would continue to write later."""
    far = bucket(wire, tmp_path, read_timeout=100)
    manager, going = begun(place, wire, [Tier(str(tmp_path / "near")), far])
    wire.bytes_per_second = 2e5  # The rest of the file takes longer than the next lines
    [worker] = lent(place)
    # From here on, since a busy machine may take longer to lend a worker. The next report of the
    # worker begins the first wait of one second.
    monkeypatch.setattr("ckpt.agent.copy_client._SILENCE_SECONDS", 1.0)
    monkeypatch.setattr("ckpt.agent.copy_client._END_SECONDS", 0.5)
    next_answer, short_waits = Connection.next_answer, threading.Event()

    def observed(connection: Connection, timeout: float) -> Any:
        short_waits.set()
        return next_answer(connection, timeout)

    monkeypatch.setattr(Connection, "next_answer", observed)
    assert short_waits.wait(100)
    with contextlib.suppress(ProcessLookupError):  # It has ended: it was silent under load
        os.kill(worker, signal.SIGSTOP)
    wire.bytes_per_second = 0.0
    going.result(100)
    assert "TimeoutError" in caplog.text
    assert until(lambda: not lent(place))  # The kernel may take a while on a busy machine
    manager.close()
    assert listed(far) == [1, 2]


@pytest.mark.server
def test_without_an_agent_for_a_while_the_trainer_says_so_once(
    place: AgentFolder, tmp_path: Path, caplog
) -> None:
    with CheckpointManager([tmp_path / "near", tmp_path / "far"], agent="required") as manager:
        save(manager, 1)
        os.chmod(place.path, 0o755)
        kill_agent(place)
        assert until(lambda: not lent(place))
        save(manager, 2, 3)
        os.chmod(place.path, 0o700)
    assert caplog.text.count(ITSELF) == 1
    assert "is open to other users" in caplog.text
    assert whole(tmp_path / "far") == [1, 2, 3]


@pytest.mark.torture  # tests/test_far_tier.py has a store that is down
@pytest.mark.server
def test_a_store_that_is_down_for_a_while_gets_everything_in_the_end(
    place: AgentFolder, tmp_path: Path, wire: Proxy
) -> None:
    far = bucket(wire, tmp_path)
    with CheckpointManager([tmp_path / "near", far], agent="required") as manager:
        save(manager, 1)
        wire.down = True
        going = manager.save_async(state(2), 2)
        going.result(100, tier=str(tmp_path / "near"))
        time.sleep(1)  # the length of the outage
        assert not going.done()
        wire.down = False
        going.result(100)
    assert listed(far) == [1, 2]


# -- a store that refuses --------------------------------------------------------------------------


def error_of(tiers: list[Tier], mode: AgentMode, elements: int) -> CkptError:
    """Return the error of a save that the far tier refuses."""
    manager = CheckpointManager(tiers, agent=mode, coordinator=World(1).coordinator(0))
    pending = manager.save_async(state(1, elements), 1)
    error = pending.exception(100)
    assert error is not None
    with contextlib.suppress(CkptError):
        manager.close()
    return error


def test_a_name_that_is_taken_is_the_error_that_it_is_without_an_agent(
    place: AgentFolder, tmp_path: Path
) -> None:
    found = []
    modes: tuple[AgentMode, ...] = ("off", "required")
    for mode in modes:
        near, far = tmp_path / mode / "near", tmp_path / "far"
        taken = (
            far
            / StepRef(1, World(1).coordinator(0).attempt).folder
            / data_name(0, is_encoded=False)
        )
        taken.mkdir(parents=True)
        (taken / "file").touch()
        found.append(error_of([Tier(str(near)), Tier(str(far))], mode, 1000))
        assert whole(near) == [1]
        shutil.rmtree(far)
    assert type(found[0]) is type(found[1])
    assert str(found[0]) == str(found[1])


def test_a_full_disk_is_the_error_that_it_is_without_an_agent(
    place: AgentFolder, tmp_path: Path, mount: Callable[[str], Path], caplog
) -> None:
    far = mount("size=1m")
    modes: tuple[AgentMode, ...] = ("off", "required")
    for mode in modes:
        near = Tier(str(tmp_path / mode))
        error = error_of([near, Tier(str(far / "run"))], mode, 1_000_000)
        assert isinstance(error, OutOfSpace), error
        assert str(far) in str(error)
        assert whole(near.url) == [1]
        assert not [path for path in far.rglob("rank-*") if path.is_file()]
    assert ITSELF not in caplog.text


def test_nothing_is_written_below_a_root_that_was_moved_away(
    place: AgentFolder, tmp_path: Path
) -> None:
    far = tmp_path / "far"
    with CheckpointManager([tmp_path / "near", far], agent="required", on_error="warn") as manager:
        save(manager, 1, elements=1000)
        far.rename(tmp_path / "moved")
        pending = manager.save_async(state(2, 1000), 2)
        assert isinstance(pending.exception(100), RootLost)
        assert not far.exists()


# -- when the trainer ends -------------------------------------------------------------------------

TRAINER = """
import os, sys, torch, json
from ckpt import CheckpointManager, Tier
from tests.agent.test_copies import state
near, url, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
manager = CheckpointManager([near, Tier(url, options)], agent="required")
save = manager.save_async(state(1), 1)
save.result(100, tier=near)
child = os.fork()  # it holds the connection of the worker too
if not child:
    import time
    time.sleep(1000)
print(child, flush=True)
while not 0.5 < save.progress < 1:
    pass
os.kill(os.getpid(), 9)
"""


@pytest.mark.server
def test_nothing_torn_is_listed_when_the_trainer_is_killed_in_mid_copy(
    place: AgentFolder, tmp_path: Path, wire: Proxy
) -> None:
    far = bucket(wire, tmp_path)
    wire.bytes_per_second = 4e6
    reported = run_code(
        TRAINER, tmp_path / "near", far.url, json.dumps(far.options), status=-signal.SIGKILL
    )
    try:
        wire.bytes_per_second = 0.0
        await_state(place, "done")
        assert listed(far) == [1]
        assert until(lambda: not lent(place))
        assert not unfinished(far)
    finally:
        os.kill(int(reported), signal.SIGKILL)


@pytest.mark.torture  # tests/agent/test_finish_worker.py detaches without a worker
@pytest.mark.server
def test_a_detach_ends_the_copy_and_leaves_it_to_the_agent(
    place: AgentFolder, tmp_path: Path, wire: Proxy
) -> None:
    far = bucket(wire, tmp_path)
    manager, going = begun(place, wire, [Tier(str(tmp_path / "near")), far])
    began = time.perf_counter()
    manager.close(detach=True)
    assert time.perf_counter() - began < 5
    assert isinstance(going.exception(100, tier=far.url), LeftToAgent)
    wire.bytes_per_second = 0.0
    await_state(place, "done")
    assert listed(far) == [1, 2]
    assert until(lambda: not unfinished(far))


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # The end of the process closes its socket
def test_a_worker_goes_on_if_the_event_of_a_finished_copy_comes_late(
    place: AgentFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An event that came after the answer once ended the wait for the next request, and
    the worker.
    """
    answered, write = threading.Event(), os.eventfd_write

    def late(descriptor: int, value: int) -> None:
        answered.wait(0.5)
        write(descriptor, value)

    monkeypatch.setattr("ckpt.agent.copy_worker.os.eventfd_write", late)
    with CheckpointManager(tmp_path / "near") as manager:
        save(manager, 1, elements=1000)
    (tmp_path / "far").mkdir()  # The trainer makes the roots
    ours, theirs = socket.socketpair()
    theirs.sendall(encode(Welcome("1", os.getpid())))
    order = Order(of_tiers(tmp_path, "near", "far"), "copy", connection=theirs.detach())
    with Workers("test", 1) as workers, contextlib.closing(Connection(ours)) as trainer:
        serving = workers.submit(copy_files, order)
        assert isinstance(trainer.next_answer(60), Lent)
        for _ in range(2):
            trainer.send(request(tmp_path))
            while not isinstance(trainer.next_answer(60), FileCopied):
                pass
            answered.set()
            assert not trainer.has_ended(1)
            assert not serving.done()
    del serving
    gc.collect()


# -- invalid requests ------------------------------------------------------------------------------


@pytest.fixture
def worker(place: AgentFolder, tmp_path: Path) -> Iterator[Connection]:
    """A worker that was lent to this process, for a job with one step on "near"."""
    with CheckpointManager(tmp_path / "near") as manager:
        save(manager, 1)
    (tmp_path / "far").mkdir()  # The trainer makes the roots
    found = reach(place)
    assert isinstance(found.ask(AskWorker(of_tiers(tmp_path, "near", "far")), 30), Lent)
    yield found
    found.close()


def of_tiers(folder: Path, *names: str) -> Job:
    tiers = [Tier(str(folder / name)) for name in names]
    return msgspec.structs.replace(job(), tiers=tuple(fields_of(tier, tier.url) for tier in tiers))


def request(root: Path, **how: Any) -> CopyFile:
    [step] = [path.name for path in (root / "near").glob("step-*")]
    asked: dict[str, Any] = {
        "folder": step,
        "rank": 0,
        "source": 0,
        "target": 1,
        "threads": 1,
        **how,
    }
    return CopyFile(**asked)


@pytest.mark.parametrize(
    "odd",
    [{"folder": "../near"}, {"folder": ""}, {"rank": 7}, {"source": 9}, {"target": 2}],
    ids=str,
)
def test_a_request_that_makes_no_sense_fails_and_the_worker_goes_on(
    worker: Connection, tmp_path: Path, odd: dict[str, Any]
) -> None:
    worker.send(request(tmp_path, **odd))
    while not isinstance(last := worker.next_answer(30), FileFailed):
        pass
    assert last.reason.reason
    assert not list((tmp_path / "far").iterdir())
    worker.send(request(tmp_path))
    while not isinstance(worker.next_answer(30), FileCopied):
        pass
    assert files_of(tmp_path / "far") == files_of(tmp_path / "near")


@pytest.mark.parametrize("odd", [{"threads": 0}, {"nice": 20}, {"rank": -1}], ids=str)
def test_a_request_that_cannot_be_read_ends_the_worker_alone(
    place: AgentFolder, worker: Connection, tmp_path: Path, odd: dict[str, Any]
) -> None:
    worker.send(request(tmp_path, **odd))
    with pytest.raises(AgentError, match="does not answer"):
        worker.next_answer(30)
    assert until(lambda: "a request of a trainer cannot be read" in Path(place.log).read_text())
    assert status(place) is not None


@pytest.mark.parametrize(
    ("odd", "why"),
    [
        ({"processes": ()}, "different process namespaces"),
        ({"tiers": ({"url": 5},)}, "a tier needs a folder"),
        ({"environment": {"LONG": "x" * (1 << 18)}}, "Argument list too long"),
    ],
    ids=["process", "tier", "environment"],
)
def test_no_worker_is_lent_to_a_job_that_makes_no_sense(
    place: AgentFolder, tmp_path: Path, odd: dict[str, Any], why: str
) -> None:
    found = reach(place)
    with pytest.raises(AgentError, match=why):
        found.ask(AskWorker(msgspec.structs.replace(of_tiers(tmp_path, "near"), **odd)))
    found.close()
    assert status(place) is not None


AGENT_WITH_TWO_WORKERS = """
import sys
import ckpt.agent.server as server
from ckpt.agent.__main__ import main
server._MOST_LENT_WORKERS = 2
sys.exit(main(["run"]))
"""


def test_no_more_workers_are_lent_than_the_agent_has(place: AgentFolder, tmp_path: Path) -> None:
    with ended(subprocess.Popen([sys.executable, "-c", AGENT_WITH_TWO_WORKERS])) as agent:
        assert until(lambda: holders(place, "listen") == [agent.pid] and status(place))
        asks = AskWorker(of_tiers(tmp_path, "near", "far"))
        held = [reach(place), reach(place)]
        for each in held:
            each.send(asks)
        one = reach(place)
        with pytest.raises(AgentError, match="2 of its workers copy for trainers already"):
            one.ask(asks)
        for each in (*held, one):
            each.close()
        assert until(lambda: not lent(place))


def test_what_follows_a_request_for_a_worker_is_not_answered_by_the_agent(
    place: AgentFolder, tmp_path: Path
) -> None:
    reach(place).close()
    asks = encode(AskWorker(of_tiers(tmp_path, "near", "far")))
    with socket.socket(socket.AF_UNIX) as odd:
        odd.connect(place.socket)
        odd.sendall(asks + asks)
        found = Connection(odd)
        assert isinstance(found.next_answer(30), Lent)
    assert until(lambda: not lent(place))

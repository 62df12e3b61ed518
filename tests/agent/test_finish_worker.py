"""What a trainer leaves when it dies or detaches becomes durable, without a restart."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from ckpt import CheckpointManager, Tier
from ckpt.agent import client
from ckpt.agent.client import status
from ckpt.agent.finish_worker import Finish, _Root
from ckpt.agent.folder import AgentFolder, Lock
from ckpt.agent.job_branch import JobBranch
from ckpt.agent.messages import Job
from ckpt.catalog.inventory import Inventory
from ckpt.catalog.rollbacks import newest_rollback, put_rollback
from ckpt.catalog.step_listing import committed
from ckpt.errors import AgentError, ConfigError, LeftToAgent, RootInUse, RootLost
from ckpt.model.keys import OWNER, StepRef
from ckpt.model.rollback import roll_back
from ckpt.pipeline.workers import Workers
from ckpt.processes import Process, boot_identity
from ckpt.root.attempts import attempts_of
from ckpt.root.claim import Claim
from ckpt.root.owner import Owner, read_owner
from ckpt.storage.registry import open_backend
from ckpt.storage.tiers import OpenTier
from ckpt_backends.folder.posix import PosixBackend
from tests.agent.conftest import await_state, holders, job_of, memory_folder
from tests.checkpoints import DEAD, own, write_checkpoint
from tests.cli.conftest import ARRAYS, Cli, cli
from tests.kit.states import restored
from tests.kit.stores import whole
from tests.kit.waiting import until
from tests.kit.worlds import run_code
from tests.processes import ended
from tests.servers import Server

__all__ = ["cli"]
TRAINER = """
import os, sys, json, torch
from ckpt import CheckpointManager, Tier
tiers = [Tier(**fields) for fields in json.loads(sys.argv[1])]
first, last = int(sys.argv[2]), int(sys.argv[3])
end = sys.argv[4]
manager = CheckpointManager(tiers, agent="required")
state = {"x": torch.zeros(200_000, dtype=torch.int64)}
if "restore" in end:
    print("from", getattr(manager.restore(state), "step", None), flush=True)
for step in range(first, last + 1):
    state["x"].fill_(step)
    save = manager.save_async(state, step)
    if "nearest" in end:  # the commit on the first tier is all that is waited for
        save.result(60, tier=manager._tiers[0].url)
    else:
        save.result(60)
if "kill" in end:
    os.kill(os.getpid(), 9)
manager.close(detach="detach" in end)
print("closed", flush=True)
if "stay" in end:
    sys.stdin.read()
"""


def train(tiers: list[dict[str, object]], first: int, last: int, end: str) -> str:
    code = -signal.SIGKILL if "kill" in end else 0
    return run_code(TRAINER, msgspec.json.encode(tiers).decode(), first, last, end, status=code)


def holds(root: Path | str, step: int, **options: object) -> bool:
    """Return whether ``step`` restores from ``root`` alone, with its content."""
    state = {"x": torch.zeros(200_000, dtype=torch.int64)}
    with CheckpointManager(Tier(str(root), options)) as manager:
        report = manager.restore(state, step, rollback=False)
    return report is not None and state["x"].unique().tolist() == [step]


@pytest.fixture(autouse=True)
def tiers(tmp_path: Path) -> Iterator[list[dict[str, object]]]:
    """Return memory, a disk that takes each 100th step, and a far folder.

    What a test leaves in memory is removed after its agent has ended, since this is set up first.
    """
    found: list[dict[str, object]] = [
        {"url": "memory"},
        {"url": str(tmp_path / "disk"), "every": 100},
        {"url": str(tmp_path / "far")},
    ]
    yield found
    shutil.rmtree(memory_of(found), ignore_errors=True)


def memory_of(tiers: list[dict[str, object]]) -> Path:
    return memory_folder(*(Tier(**fields) for fields in tiers))  # type: ignore[arg-type]


def no_traces(tiers: list[dict[str, object]]) -> bool:
    """Return whether nothing of the job is in /dev/shm."""
    return not memory_of(tiers).exists()


def test_a_step_in_memory_alone_becomes_durable_on_two_tiers_without_a_restart(
    place: AgentFolder, tmp_path: Path, tiers
) -> None:
    train(tiers, 1, 3, "kill nearest")
    job = await_state(place, "done")
    assert job.error == ""
    assert whole(tmp_path / "disk") == [3]
    assert whole(tmp_path / "far")[-1] == 3
    assert holds(tmp_path / "disk", 3)
    assert holds(tmp_path / "far", 3)
    assert no_traces(tiers)


@pytest.mark.parametrize("roots", [["far"], ["disk", "far"]])
def test_a_root_that_a_job_of_another_machine_has_left_is_no_obstacle(
    place: AgentFolder, tmp_path: Path, tiers, roots
) -> None:
    """Its node was replaced, or has started again."""
    earlier = Owner("feedbeefzzzz", "other", "another boot/1", pid=1, started=1)
    for name in roots:
        (tmp_path / name).mkdir()
        (tmp_path / name / OWNER).write_bytes(msgspec.json.encode(earlier))
    tiers[2]["every"] = 100
    train(tiers, 1, 3, "kill nearest")
    assert await_state(place, "done", "superseded").state == "done"
    assert whole(tmp_path / "disk") == [3]
    assert no_traces(tiers)


@pytest.mark.server
def test_a_step_in_memory_alone_reaches_an_object_store(
    place: AgentFolder, tmp_path: Path, tiers, moto_server: Server
) -> None:
    """Its credentials go over the socket, and are in no file and no command line."""
    secret = "S3CRET-of-the-test"
    options = {"endpoint_url": moto_server.url, "key": "AKIDTEST", "secret": secret}
    url = f"s3://bucket/agent-{os.getpid()}"
    tiers[1:] = [{"url": str(tmp_path / "disk")}, {"url": url, "options": options}]
    train(tiers, 1, 1, "kill nearest")
    await_state(place, "done")
    assert holds(url, 1, **options)
    for path in Path(place.path).iterdir():
        if path.is_file():
            assert secret not in path.read_text()
    reported = status(place)
    assert reported is not None
    assert secret not in msgspec.json.encode(reported).decode()
    assert no_traces(tiers)


def test_retention_is_applied_as_by_the_trainer(place: AgentFolder, tmp_path: Path, tiers) -> None:
    tiers[1:] = [
        {"url": str(tmp_path / "disk"), "keep_last": 1},
        {"url": str(tmp_path / "far"), "keep_last": 2, "codec": "zstd"},
    ]
    train(tiers, 1, 4, "kill")
    await_state(place, "done")
    assert whole(tmp_path / "disk") == [4]
    assert whole(tmp_path / "far") == [3, 4]


def test_a_step_that_an_earlier_job_could_not_copy_is_copied_and_stays_near_until_then(
    tmp_path: Path,
) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    for steps in ([100], [110, 120]):
        with CheckpointManager(near) as manager:
            manager.restore({"x": torch.zeros(3, dtype=torch.int64)})
            for step in steps:
                manager.save({"x": torch.full((3,), step)}, step)
    backend = open_backend(str(near))
    newest = committed(backend)[0]
    me = Owner(newest.job, "here", boot_identity(), pid=1 << 30, started=1)
    me = msgspec.structs.replace(me, ended=(committed(backend)[-1].job,))
    backend.put(OWNER, [msgspec.json.encode(me)])
    tiers = ({"url": str(near), "keep_last": 1}, {"url": str(far), "every": 100})
    job = Job(me, (Process(me.pid, 1),), ranks=1, tiers=tiers, backlog=4, environment={})
    far.write_text("no folder")
    with Workers("test", 2) as workers, Finish(job, workers, lambda _: None) as finishing:
        assert finishing.run().outcome == "failed"
    assert whole(near) == [100, 110, 120], "what the far tier lacks is unknown"
    far.unlink()
    far.mkdir()
    with Workers("test", 2) as workers, Finish(job, workers, lambda _: None) as finishing:
        assert finishing.run().error == ""
    assert (whole(near), whole(far)) == ([120], [100])


def test_a_far_tier_gets_the_steps_of_the_branch(tmp_path: Path) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    far.mkdir()
    state = {"x": torch.zeros(3, dtype=torch.int64)}
    with CheckpointManager(near) as manager:
        for step in (1, 2, 3):
            state["x"].fill_(step)
            manager.save(state, step)
        restored(manager, state, step=1)
        state["x"].fill_(20)
        manager.save(state, 2)
    backend = open_backend(str(near))
    me = Owner(committed(backend)[0].job, "here", boot_identity(), pid=1 << 30, started=1)
    backend.put(OWNER, [msgspec.json.encode(me)])
    tiers = ({"url": str(near)}, {"url": str(far), "keep_last": 1})
    job = Job(me, (Process(me.pid, 1),), ranks=1, tiers=tiers, backlog=4, environment={})
    with Workers("test", 2) as workers, Finish(job, workers, lambda _: None) as finishing:
        assert finishing.run().error == ""
    assert whole(far) == [2], "step 3 is abandoned"
    assert committed(open_backend(str(far))) == committed(backend)[:1]


def branched_job(near: Path, far: Path, *, record_on: Path) -> Job:
    """Return the job of a trainer that was killed after it went back from step 9 to step 1, and
    then saved step 2. The far tier has the abandoned steps 8 and 9, and is full.
    """
    stores = {root: open_backend(str(root)) for root in (near, far)}
    for root, steps in ((near, (1,)), (far, (8, 9))):
        for step in steps:
            write_checkpoint(stores[root], step, ARRAYS)
    heads = [StepRef(9, DEAD.attempt)]
    rollback = roll_back([], StepRef(1, DEAD.attempt), heads, trials={DEAD.attempt: 1})
    assert rollback is not None
    put_rollback(stores[record_on], rollback)
    write_checkpoint(stores[near], 2, ARRAYS, attempt=StepRef(2, DEAD.attempt).retry(1).attempt)
    own(stores[near], DEAD)
    tiers = ({"url": str(near)}, {"url": str(far), "keep_last": 1})
    return Job(DEAD, (Process(DEAD.pid, 1),), ranks=1, tiers=tiers, backlog=4, environment={})


def finished(job: Job) -> str:
    with Workers("test", 2) as workers, Finish(job, workers, lambda _: None) as finishing:
        return finishing.run().error


@pytest.mark.parametrize("record", ["near", "far"])
def test_a_tier_that_was_away_at_the_rollback_gets_it_from_the_agent(
    tmp_path: Path, record: str
) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    assert finished(branched_job(near, far, record_on=tmp_path / record)) == ""
    for root in (near, far):
        store = open_backend(str(root))
        assert newest_rollback(store) is not None
        assert committed(store)[0].step == 2
    assert whole(far) == [2], "the abandoned steps went first"


def test_the_agent_finishes_the_newest_step_of_the_branch_that_has_all_files(
    tmp_path: Path,
) -> None:
    """The abandoned step 9 lacks its manifest too. The last try at step 3 lacks its files, and so
    does step 4 of a rank that is not the leader.
    """
    near, far = tmp_path / "near", tmp_path / "far"
    job = branched_job(near, far, record_on=near)
    store = open_backend(str(near))
    write_checkpoint(store, 9, ARRAYS, commit=False)
    ref = StepRef(3, DEAD.attempt).retry(1)
    write_checkpoint(store, 3, ARRAYS, attempt=ref.attempt, commit=False)
    write_checkpoint(
        store, 4, ARRAYS, world_size=2, attempt=StepRef(4, DEAD.attempt).retry(1).attempt,
        commit=False,
    )  # fmt: skip
    for file in near.glob("step-000000004.*/rank-00000.*"):
        file.unlink()
    assert finished(job) == ""
    assert committed(store)[0] == ref
    assert StepRef(9, DEAD.attempt) not in committed(store)


def test_of_several_tries_at_a_step_the_last_one_comes_first(tmp_path: Path) -> None:
    store, ref = open_backend(str(tmp_path)), StepRef(3, "abcxyz")
    for trial in (1, 9, 10):
        write_checkpoint(store, 3, ARRAYS, attempt=ref.retry(trial).attempt)
    assert [attempt.trial for attempt in attempts_of(store, "abcxyz")] == [10, 9, 1]


def test_the_agent_reads_a_manifest_once_to_plan_and_once_to_remove(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far, farther = (tmp_path / name for name in ("near", "far", "farther"))
    far.mkdir()
    farther.mkdir()
    with CheckpointManager(near) as manager:
        for step in (1, 2, 3):
            manager.save({"x": torch.full((3,), step)}, step)
    backend = open_backend(str(near))
    me = Owner(committed(backend)[0].job, "here", boot_identity(), pid=1 << 30, started=1)
    backend.put(OWNER, [msgspec.json.encode(me)])
    tiers = ({"url": str(near), "keep_last": 1}, {"url": str(far)}, {"url": str(farther)})
    job = Job(me, (Process(me.pid, 1),), ranks=1, tiers=tiers, backlog=4, environment={})
    reads = Counter[tuple[str, int]]()
    outline = Inventory._outline

    def counted(inventory: Inventory, ref: StepRef) -> object:
        reads[Path(inventory._backend.url).name, ref.step] += 1
        return outline(inventory, ref)

    monkeypatch.setattr(Inventory, "_outline", counted)
    with Workers("test", 2) as workers, Finish(job, workers, lambda _: None) as finishing:
        assert finishing.run().error == ""
    assert (whole(near), whole(far), whole(farther)) == ([3], [1, 2, 3], [1, 2, 3])
    assert {count for (name, _), count in reads.items() if name == "near"} == {2}
    assert {count for (name, _), count in reads.items() if name == "far"} <= {1, 2}
    assert not any(name == "farther" for name, _ in reads)


UNMOUNTED = """
import os, sys, torch
from ckpt import CheckpointManager, Tier
disk, away, end = sys.argv[1:]
tiers = ["memory", disk + "/run"]
manager = CheckpointManager(tiers, agent="required", on_error="warn", commit_timeout_seconds=10)
state = {"x": torch.zeros(200_000, dtype=torch.int64)}
for step in range(1, 6):
    state["x"].fill_(step)
    manager.save_async(state, step).exception(60)
    if step == 2:
        os.rename(disk, away)
        os.makedirs(disk if end == "mount point" else disk + "/run")
manager.close(detach=True)
"""


@pytest.mark.parametrize("left", ["mount point", "root"])
def test_steps_stay_in_memory_while_the_disk_of_the_root_is_unmounted(
    place: AgentFolder, tmp_path: Path, tiers, left
) -> None:
    """Without its disk, the path is an empty folder, or an empty folder in the mount point."""
    disk, away = tmp_path / "mount", tmp_path / "disk"
    disk.mkdir()
    tiers[1:] = [{"url": str(disk / "run")}]
    run_code(UNMOUNTED, disk, away, left)
    assert until(lambda: (found := job_of(place)) is not None and "root is gone" in found.error)
    assert [*disk.rglob("*")] == ([] if left == "mount point" else [disk / "run"])
    shutil.rmtree(disk)
    away.rename(disk)
    assert whole(disk / "run") == [1, 2]
    assert "from 5" in train(tiers, 6, 6, "restore")
    assert whole(disk / "run") == [1, 2, 6]


def test_an_agent_finishes_a_job_when_its_disk_is_there_again(tmp_path: Path) -> None:
    near, far, away = tmp_path / "near", tmp_path / "far", tmp_path / "away"
    with CheckpointManager(near) as manager:
        manager.save({"x": torch.zeros(3)}, 1)
    backend, other = (
        PosixBackend(str(near), is_shared=False),
        PosixBackend(str(far), is_shared=False),
    )
    me = Owner(committed(backend)[0].job, "here", boot_identity(), pid=1 << 30, started=1)
    backend.put(OWNER, [msgspec.json.encode(me)])
    tiers = ({"url": str(near)}, {"url": str(far)})
    marks = (backend.mark(), other.mark())
    job = Job(me, (Process(me.pid, 1),), 1, tiers, backlog=4, environment={}, marks=marks)
    assert far.is_dir(), "the trainer makes the root"

    def finish() -> str:
        with Workers("test", 2) as workers, Finish(job, workers, lambda _: None) as finishing:
            return finishing.run().error

    far.rename(away)
    assert "root is gone" in finish()
    far.mkdir()
    assert "root is gone" in finish()
    assert not list(far.iterdir())
    far.rmdir()
    away.rename(far)
    assert finish() == ""
    assert whole(far) == [1]


def test_a_root_that_is_lost_during_the_work_is_no_root_of_another_job(tmp_path: Path) -> None:
    backend = PosixBackend(str(tmp_path / "root"), is_shared=False)
    backend.mark()
    tier = OpenTier(0, Tier(backend.url), backend)
    root = _Root(
        tier, None, Claim(backend, Owner.of_this_process("abcabcabcabc")), Inventory(backend)
    )
    finishing = finish_of(
        Owner.of_this_process("abcabcabcabc"), _memory_roots=[], _node_roots=[], _durable_roots=[]
    )
    finishing._confirm(root)
    (tmp_path / "root").rmdir()
    with pytest.raises(RootLost):
        finishing._confirm(root)


def version(place: AgentFolder) -> str:
    found = client.connect(place)
    if found is None:
        return ""
    with closing(found):
        return found.welcome.version


def test_memory_is_kept_for_a_trainer_that_starts_again_soon(
    place: AgentFolder, tmp_path: Path, tiers, monkeypatch
) -> None:
    monkeypatch.setenv("CKPT_AGENT_MEMORY_SECONDS", "3600")
    train(tiers, 1, 2, "kill nearest")
    assert await_state(place, "kept").next_at
    assert holds(tmp_path / "disk", 2)
    tiers[0] = {"url": "memory"}
    assert "from 2" in train(tiers, 3, 3, "restore")


@pytest.mark.parametrize("how", ["command", "signal"])
def test_memory_that_was_kept_is_freed_when_the_agent_stops(
    place: AgentFolder, tmp_path: Path, tiers, monkeypatch, cli: Cli, how
) -> None:
    monkeypatch.setenv("CKPT_AGENT_MEMORY_SECONDS", "3600")
    train(tiers, 1, 2, "kill nearest")
    await_state(place, "kept")
    if how == "command":
        assert cli("agent", "stop").code == 0
    else:
        [pid] = holders(place, "listen")
        os.kill(pid, signal.SIGTERM)
        assert until(lambda: not holders(place, "work"))
    assert no_traces(tiers)
    assert holds(tmp_path / "disk", 2)


AGENT = """
import sys
import ckpt.agent.connections as callers, ckpt.agent.server as server
from ckpt.agent.__main__ import main
callers.VERSION = server.VERSION = sys.argv[1]
sys.exit(main(["run"]))
"""


@pytest.mark.parametrize("seconds", [2, 3600])
def test_memory_that_was_kept_outlives_the_version_of_the_agent(
    place: AgentFolder, tmp_path: Path, tiers, monkeypatch, seconds
) -> None:
    """It is freed in time although the newer agent may work, or at a signal."""
    monkeypatch.setenv("CKPT_AGENT_MEMORY_SECONDS", str(seconds))
    train(tiers, 1, 2, "kill nearest")
    await_state(place, "kept", "done")
    [older] = holders(place, "listen")
    with ExitStack() as stack:

        def start(*_: object) -> None:
            newer = subprocess.Popen([sys.executable, "-c", AGENT, "999.0.0-1"])
            stack.enter_context(ended(newer))
            assert until(lambda: holders(place, "listen") == [newer.pid] and version(place))

        monkeypatch.setattr(client, "VERSION", "999.0.0-1")
        monkeypatch.setattr(client, "start", start)
        client.reach(place).close()
        lock = Lock(place, "work")
        stack.callback(lock.close)
        assert until(lock.take)  # the newer agent takes it
        if seconds == 3600:
            assert older in holders(place, "work")
            assert not no_traces(tiers)
            os.kill(older, signal.SIGTERM)
        assert until(lambda: older not in holders(place, "work"))
        assert no_traces(tiers)
        assert holds(tmp_path / "disk", 2)


def test_a_signal_right_after_the_death_of_the_trainer_finishes_its_steps(
    place: AgentFolder, tmp_path: Path, tiers
) -> None:
    """Kubernetes ends a sidecar like this when the trainer has ended."""
    train(tiers, 1, 3, "kill nearest")
    [pid] = holders(place, "listen")
    os.kill(pid, signal.SIGTERM)
    assert until(lambda: not holders(place, "work"))
    assert holds(tmp_path / "far", 3)
    assert no_traces(tiers)


@pytest.mark.parametrize("words", [[], ["--now"]])
def test_a_job_that_stop_gives_up_is_named_with_the_memory_that_it_takes(
    place: AgentFolder, tmp_path: Path, tiers, cli: Cli, words
) -> None:
    (tmp_path / "disk").write_text("no folder")
    (tmp_path / "far").write_text("no folder")
    del tiers[1]["every"]
    tiers[1]["url"], tiers[2]["url"] = str(tmp_path / "disk" / "a"), str(tmp_path / "far" / "b")
    train(tiers, 1, 1, "kill nearest")
    assert until(lambda: (job := job_of(place)) and job.state == "waiting" and job.error)
    job = job_of(place)
    assert job is not None
    stopped = cli("agent", "stop", *words)
    assert stopped.code == AgentError.exit_code
    assert job.attempt in stopped.err
    assert f"ckpt ls {job.tiers[0]}" in stopped.err
    assert not no_traces(tiers)
    assert f"job {job.attempt} is over: given up" in Path(place.log).read_text()


def test_nothing_is_touched_while_the_trainer_lives(
    place: AgentFolder, tmp_path: Path, tiers
) -> None:
    script = TRAINER.replace(
        "manager.close(", "print(os.getpid(), file=open(sys.argv[5], 'w')); signal.pause()\n#"
    )
    pid = tmp_path / "pid"
    words = (msgspec.json.encode(tiers).decode(), 1, 2, "nearest", pid)
    with ThreadPoolExecutor(1) as pool:
        trainer = pool.submit(run_code, f"import signal{script}", *words, status=-signal.SIGKILL)
        assert until(lambda: trainer.done() or (pid.exists() and pid.read_text().endswith("\n")))
        try:
            assert await_state(place, "running").step == -1
            assert not list((tmp_path / "disk").iterdir()), "the trainer has made the root"
        finally:
            os.kill(int(pid.read_text()), signal.SIGKILL)
        trainer.result()
    assert until(lambda: holds_if_there(tmp_path / "disk", 2))


def holds_if_there(root: Path, step: int) -> bool:
    return root.exists() and step in [ref.step for ref in committed(open_backend(str(root)))]


def test_closing_with_detach_leaves_the_far_tier_to_the_agent(
    place: AgentFolder, tmp_path: Path
) -> None:
    tiers = [Tier(str(tmp_path / "disk")), Tier(str(tmp_path / "far"))]
    manager = CheckpointManager(tiers, agent="required")
    saves = [manager.save_async({"x": torch.full((200_000,), step)}, step) for step in (1, 2, 3)]
    manager.close(detach=True)
    assert whole(tmp_path / "disk") == [1, 2, 3]
    for save in saves:
        error = save.exception(30)
        assert error is None or isinstance(error, LeftToAgent)
    await_state(place, "done")
    assert whole(tmp_path / "far") == [1, 2, 3]
    for root in ("disk", "far"):
        assert read_owner(open_backend(str(tmp_path / root))) is None
    with CheckpointManager(tiers, agent="required") as manager:  # a trainer of the same process
        assert restored(manager, {"x": torch.zeros(200_000, dtype=torch.int64)}).step == 3
        manager.save({"x": torch.full((200_000,), 4)}, 4)
    assert whole(tmp_path / "far") == [1, 2, 3, 4]


def test_detach_makes_durable_what_memory_alone_has(
    place: AgentFolder, tmp_path: Path, tiers
) -> None:
    tiers[2]["every"] = 100  # otherwise the trainer itself may bring the step there
    assert "closed" in train(tiers, 1, 3, "detach nearest")
    await_state(place, "done")
    assert holds(tmp_path / "disk", 3)
    assert no_traces(tiers)


def test_a_step_on_its_way_to_a_far_tier_at_the_detach_is_durable_on_some_tier(
    place: AgentFolder, tmp_path: Path, tiers
) -> None:
    """The trainer ends that write, and may free the memory of the step before the agent looks."""
    assert "closed" in train(tiers, 1, 3, "detach nearest")
    await_state(place, "done")
    assert holds(tmp_path / "far", 3)
    assert no_traces(tiers)


def test_detach_needs_an_agent(place: AgentFolder, tmp_path: Path, monkeypatch, caplog) -> None:
    manager = CheckpointManager(str(tmp_path / "a"))
    with pytest.raises(ConfigError, match='agent="off"'):
        manager.close(detach=True)
    manager.save({"x": torch.ones(1)}, 1)  # it is still open
    manager.close()
    os.chmod(place.path, 0o755)
    with pytest.raises(AgentError, match=r'open to other users.*agent="required"'):
        CheckpointManager(str(tmp_path / "b"), agent="required")
    manager = CheckpointManager(str(tmp_path / "c"), agent="auto")
    assert "this job has no agent" in caplog.text
    with pytest.raises(AgentError, match="this job has no agent"):
        manager.close(detach=True)
    manager.save({"x": torch.ones(1)}, 1)
    manager.close()
    manager.close(detach=True)  # a second call does nothing
    os.chmod(place.path, 0o700)


def test_a_wrong_mode_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="agent="):
        CheckpointManager(str(tmp_path), agent="on")  # type: ignore[arg-type]


def test_a_trainer_that_closes_in_order_leaves_nothing_to_do(
    place: AgentFolder, tmp_path: Path
) -> None:
    with CheckpointManager(str(tmp_path), agent="required") as manager:
        manager.save({"x": torch.ones(1)}, 1)
    assert await_state(place, "closed").copied == ()


def test_an_agent_that_dies_is_started_again_by_the_trainer(
    place: AgentFolder, tmp_path: Path
) -> None:
    with CheckpointManager(str(tmp_path), agent="required"):
        [first] = holders(place, "listen")
        os.kill(first, signal.SIGKILL)
        assert until(lambda: (job := job_of(place)) and job.state == "running")
        assert holders(place, "listen") != [first]


def finish_of(owner: Owner, **fields: Any) -> Any:
    """Return a `Finish` of a job without tiers, with ``fields`` set."""
    found = object.__new__(Finish)
    default = {"_owner": owner, "_is_superseded": False, "_errors": [], "_branch": JobBranch()}
    for name, value in (default | fields).items():
        setattr(found, name, value)
    return found


def test_a_root_that_another_job_takes_during_a_commit_ends_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = open_backend(str(tmp_path))
    written = write_checkpoint(backend, 3, {"x": np.ones(4)}, commit=False)
    owner = Owner(written.ref.attempt, "here", "this boot/1", pid=1, started=1)

    def finalize(*_: object, **__: object) -> None:
        raise RootInUse(str(tmp_path), "another job")

    monkeypatch.setattr("ckpt.agent.finish_worker.finalize", finalize)
    root = SimpleNamespace(tier=SimpleNamespace(backend=backend, url=str(tmp_path)))
    finish = finish_of(owner, _workers=None)
    finish._run_task(partial(finish._finish_commit, root))
    assert finish._is_superseded


@pytest.mark.parametrize("is_pinned", [True, False])
def test_a_tier_in_memory_keeps_its_owner_as_long_as_a_step_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_pinned: bool
) -> None:
    backend = open_backend(str(tmp_path))
    written = write_checkpoint(backend, 3, {"x": np.ones(4)}, commit=False)
    backend.put(OWNER, [b"{}"])
    owner = Owner(written.ref.attempt, "here", "this boot/1", pid=1, started=1)
    monkeypatch.setattr("ckpt.agent.finish_worker.remove", lambda *_: not is_pinned)
    monkeypatch.setattr(Finish, "_confirm", lambda *_: None)
    root = SimpleNamespace(tier=SimpleNamespace(backend=backend), claim=None)
    finish_of(owner, _durable_roots=[], _job=SimpleNamespace(node_ranks=()))._free_root(root)
    assert (tmp_path / OWNER).exists() == is_pinned


def test_a_root_of_another_job_is_left_alone(place: AgentFolder, tmp_path: Path, tiers) -> None:
    """The other job is on another machine, whose processes are not visible, and may be alive."""
    tiers[1] = {"url": str(tmp_path / "disk")}
    (tmp_path / "disk").mkdir()
    other = Owner(attempt="feedbeefzzzz", host="far", machine="elsewhere", pid=1, started=1)
    script = TRAINER.replace(
        'if "kill" in end:',
        f"open({str(tmp_path / 'disk' / OWNER)!r}, 'wb')"
        f'.write({msgspec.json.encode(other)!r})\nif "kill" in end:',
    )
    words = (msgspec.json.encode(tiers).decode(), 1, 1, "kill")
    run_code(script, *words, status=-signal.SIGKILL)
    (tmp_path / "far" / OWNER).unlink(missing_ok=True)
    await_state(place, "superseded")
    found = read_owner(open_backend(str(tmp_path / "disk")))
    assert found == other

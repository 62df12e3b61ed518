"""Another user of the machine can neither plant a state in the memory tier nor stop its job."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ckpt import CheckpointManager, Tier
from ckpt.errors import StorageError
from ckpt.processes import Process, namespace
from ckpt.staging import slot_files
from ckpt.staging.slot_pool import SlotPool
from ckpt.storage.tiers import urls_of
from ckpt_backends.folder.shm import open_shm, stores
from tests.users import ATTACKER, act_as, begin_as, fresh_user, only_root

pytestmark = only_root
VICTIM = fresh_user()


def state(value: float) -> dict[str, torch.Tensor]:
    return {"x": torch.full((4,), value)}


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that every user may enter and write to."""
    folder = Path(tempfile.mkdtemp(prefix="ckpt-test-", dir="/tmp"))
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def tiers(place: Path) -> list[Tier]:
    return [Tier("memory"), Tier(str(place / "disk"))]


@pytest.fixture
def memory(tiers: list[Tier]):
    """Return where the victim's tier in memory is."""
    folder = Path(f"/dev/shm/ckpt-memory-{VICTIM}-{urls_of(tiers)[0].removeprefix('shm://')}")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def planted(place: Path) -> Path:
    """A whole checkpoint of step 99, as an attacker makes it in a folder of its own."""
    with CheckpointManager(str(place / "planted")) as manager:
        manager.save(state(666.0), 99)
    subprocess.run(["chmod", "-R", "a+rX", place / "planted"], check=True)
    return place / "planted"


def plant(planted: Path, folder: Path) -> None:
    """Plant it as the attacker. The victim may read it all."""
    old = os.umask(0)
    shutil.copytree(planted, folder)
    os.chmod(folder, 0o755)
    os.umask(old)


def resume(manager: CheckpointManager) -> list[object]:
    found = state(0.0)
    report = manager.restore(found)
    return [report and report.step, found["x"].tolist()[0]]


def test_a_state_that_was_planted_before_the_job_is_not_restored_and_the_job_goes_on(
    tiers: list[Tier], memory: Path, planted: Path
) -> None:
    act_as(ATTACKER, lambda: plant(planted, memory))

    def job() -> list[object]:
        with CheckpointManager(tiers) as manager:
            before = resume(manager)
            manager.save(state(7.0), 7)
            return [before, resume(manager), manager.steps()]

    assert act_as(VICTIM, job) == [[None, 0.0], [7, 7.0], [7]]


def test_a_state_that_is_planted_while_the_job_runs_is_not_restored(
    tiers: list[Tier], memory: Path, planted: Path
) -> None:
    """The folder is removed, as programs do that clean /dev/shm, and another user replaces it."""
    gone, there = os.pipe(), os.pipe()

    def attack() -> None:
        os.read(gone[0], 1)
        plant(planted, memory)
        os.write(there[1], b"1")

    def job() -> list[object]:
        with CheckpointManager(tiers) as manager:
            shutil.rmtree(memory, ignore_errors=True)
            os.write(gone[1], b"1")
            os.read(there[0], 1)
            first = resume(manager)
            manager.save(state(8.0), 8)
            return [first, resume(manager), manager.steps()]

    attacked = begin_as(ATTACKER, attack)
    assert act_as(VICTIM, job) == [[None, 0.0], [8, 8.0], [8]]
    attacked()


def test_while_a_job_runs_nobody_else_can_take_the_place_of_its_memory(
    tiers: list[Tier], memory: Path, planted: Path
) -> None:
    def job() -> object:
        with CheckpointManager(tiers):
            return act_as_attacker()

    begun, ended = os.pipe(), os.pipe()

    def act_as_attacker() -> object:
        os.write(begun[1], b"1")
        return os.read(ended[0], 1).decode()

    def attack() -> None:
        os.read(begun[0], 1)
        try:
            plant(planted, memory)
        except FileExistsError:
            os.write(ended[1], b"0")
        else:
            os.write(ended[1], b"1")

    attacked = begin_as(ATTACKER, attack)
    assert act_as(VICTIM, job) == "0"
    attacked()


def test_a_file_of_another_user_is_not_read_though_it_lies_in_the_own_folder(place: Path) -> None:
    """This can happen if the folder was open to all for a while."""
    url = f"shm://test-users-{os.getpid()}"
    folder = Path(f"/dev/shm/ckpt-memory-{VICTIM}-{url.removeprefix('shm://')}")

    def write() -> None:
        backend = open_shm(url, {})
        backend.put("step/own", [b"own"])
        folder.chmod(0o777)
        (folder / "step").chmod(0o777)

    def read() -> list[str]:
        folder.chmod(0o700)
        backend = open_shm(url, {})
        reported = []
        for key in ("step/own", "step/planted", "other/planted"):
            out = memoryview(bytearray(3))
            try:
                backend.read_into(key, 0, out)
                reported.append(bytes(out).decode())
            except StorageError as error:
                reported.append(type(error).__name__)
        return reported

    def attack() -> None:
        (folder / "step" / "planted").write_bytes(b"bad")
        (folder / "other").mkdir()
        (folder / "other" / "planted").write_bytes(b"bad")
        os.chmod(folder / "step" / "planted", 0o644)

    try:
        act_as(VICTIM, write)
        act_as(ATTACKER, attack)
        assert act_as(VICTIM, read) == ["own", "AccessDenied", "AccessDenied"]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_a_folder_of_another_user_is_no_store_of_this_one_and_ls_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    name = f"test-users-{os.getpid()}"
    folder = Path(f"/dev/shm/ckpt-memory-{VICTIM}-{name}")

    def stands() -> list[object]:
        with caplog.at_level("WARNING", logger="ckpt"):
            return [f"shm://{name}" in stores(), caplog.text]

    try:
        act_as(ATTACKER, lambda: folder.mkdir(mode=0o755))
        there, reported = act_as(VICTIM, stands)
        assert not there
        assert "not a folder of this user alone" in reported
    finally:
        folder.rmdir()


def test_a_slot_that_another_user_pretends_to_have_is_not_counted() -> None:
    """The name of a slot gives a process. The file's owner shows which user it belongs to."""

    def pretend() -> str:
        path = f"/dev/shm/ckpt-slot-{os.getppid()}-{Process.of(os.getppid()).start_time}-9-{namespace()}.abc"  # noqa: E501
        Path(path).write_bytes(b"x" * 4096)
        return path

    path = act_as(ATTACKER, pretend)
    try:
        assert os.path.basename(path) not in [
            name for name, _ in slot_files._files(slot_files.PREFIX)
        ]
    finally:
        os.unlink(path)


def test_a_file_of_another_user_that_looks_like_a_dead_slot_is_left_alone() -> None:
    path = f"/dev/shm/ckpt-slot-{os.getpid()}-1-9-{namespace()}.abc"
    act_as(ATTACKER, lambda: Path(path).touch())
    try:
        SlotPool(1).close()
        assert os.path.exists(path)
    finally:
        os.unlink(path)

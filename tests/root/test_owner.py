from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from ckpt.errors import RootInUse, StorageError
from ckpt.model.keys import OWNER
from ckpt.root.owner import Owner, attend, await_others, claim, confirm, read_owner, release
from ckpt.storage.api import StorageBackend, read_object
from ckpt.storage.testing import FaultyBackend, Raise, Rule
from ckpt.storage.urls import place_of
from ckpt_backends.memory import forget_memory, open_memory


@pytest.fixture
def store():
    name = f"{uuid.uuid4().hex}/run"
    yield open_memory(f"memory://{name}", {})
    forget_memory(name)


def me() -> Owner:
    """Return the owner that this process is. The file may have been imported in another one."""
    return Owner.of_this_process("minezz")


def noted(store: StorageBackend, owner: Owner | None = None, /, **changes: Any) -> Owner:
    """Return the record of ``owner``, by default of this process, as ``claim`` writes it."""
    return replace(owner or me(), root=f"{store.url}/", **changes)


@dataclass
class Neighbour:
    process: subprocess.Popen
    owner: Owner


@pytest.fixture
def neighbour():
    """Start another process of this machine, and return what it would write as owner."""
    process = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE
    )
    with open(f"/proc/{process.pid}/stat") as file:
        started = int(file.read().rpartition(")")[2].split()[19])
    yield Neighbour(process, replace(me(), attempt="otherz", pid=process.pid, started=started))
    process.kill()
    process.communicate()


def test_a_claim_is_confirmed_until_it_is_released(store):
    claim(store, me())
    assert read_owner(store) == noted(store)
    confirm(store, me())
    claim(store, me())
    release(store, me())
    assert read_owner(store) is None
    assert list(store.list("")) == []


def test_this_process_is_alive_and_says_who_it_is():
    assert me().alive
    assert (me().pid, me().attempt) == (os.getpid(), "minezz")
    assert f"attempt minezz, process {os.getpid()} on {me().host}" == str(me())


def test_a_live_owner_on_this_machine_keeps_its_root(store, neighbour):
    claim(store, neighbour.owner)
    with pytest.raises(RootInUse, match="attempt otherz") as caught:
        claim(store, me())
    assert caught.value.root == store.url
    assert read_owner(store) == noted(store, neighbour.owner)


def test_a_dead_owner_is_taken_over_even_if_nobody_has_reaped_it(store, neighbour):
    claim(store, neighbour.owner)
    neighbour.process.kill()
    os.waitid(os.P_PID, neighbour.process.pid, os.WEXITED | os.WNOWAIT)  # a zombie from here on
    assert not neighbour.owner.alive
    claim(store, me())
    neighbour.process.wait()
    assert read_owner(store) == noted(store, ended=("otherz",))


@pytest.mark.parametrize(
    "change",
    [{"started": 1}, {"machine": "another boot"}, {"pid": 2**22 + 1}, {"pid": -1}, {"machine": ""}],
)
def test_who_cannot_be_known_to_live_is_taken_over(store, change):
    other = replace(me(), attempt="otherz", **change)
    assert not other.alive
    claim(store, other)
    claim(store, me())
    known = {"unseen" if other.is_unknown else "ended": ("otherz",)}
    assert read_owner(store) == noted(store, **known)
    claim(store, replace(me(), started=2))  # again, as if the answer of the first try was lost
    assert read_owner(store) == noted(store, started=2, **known)


def test_another_attempt_of_this_very_process_is_alive(store):
    claim(store, me())
    with pytest.raises(RootInUse):
        claim(store, replace(me(), attempt="second"))


@dataclass
class Saves:
    is_idle: bool
    places: dict[str, str] = field(default_factory=dict)
    waits: int = 0
    at_end: Callable[[], object] = int

    def wait_kept(self, urls: Collection[str]) -> None:
        assert urls
        self.waits += 1

    def wait_idle(self) -> None:
        self.waits += 1
        self.at_end()


@dataclass
class Manager:
    """An object that can be garbage collected."""


def test_a_manager_of_this_process_keeps_its_root_while_it_saves_and_then_gives_it_up(store):
    saves, manager, second = Saves(is_idle=False), Manager(), replace(me(), attempt="second")
    first = replace(me(), attempt="busyzzz")
    attend(first.attempt, manager, saves)
    claim(store, first)
    with pytest.raises(RootInUse):  # It has waited in vain
        claim(store, second)
    assert saves.waits == 1
    saves.is_idle = True
    assert claim(store, second).unseen == (first.attempt,)  # Its next save gets the error
    with pytest.raises(RootInUse):
        confirm(store, first)


def test_a_job_that_takes_the_root_during_the_wait_for_another_manager_keeps_it(store, neighbour):
    saves, manager, first = Saves(is_idle=False), Manager(), replace(me(), attempt="leaving")
    attend(first.attempt, manager, saves)
    claim(store, first)

    def hand_on() -> None:
        release(store, first)
        claim(store, neighbour.owner)

    saves.at_end = hand_on
    with pytest.raises(RootInUse, match="attempt otherz"):
        claim(store, replace(me(), attempt="second"))
    assert read_owner(store) == noted(store, neighbour.owner)


def test_a_manager_waits_for_the_saves_of_another_one_to_its_root_in_any_spelling(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "runs")
    (tmp_path / "runs").mkdir()
    others = [str(tmp_path / "runs"), "sftp://node:22/run", "abfss://c@account/run"]
    saves = Saves(is_idle=False, places={place_of(url): url for url in others})
    manager = Manager()
    attend("otherzz", manager, saves)
    own = [str(tmp_path / "link"), "ssh://node/run", "abfs://c/run", str(tmp_path / "apart")]
    waits = []
    for url in own:
        own_saves = Saves(is_idle=True, places={place_of(url): url})
        attend("second", manager, own_saves)
        await_others("second")
        waits.append(saves.waits)
    assert waits == [1, 2, 3, 3]


def test_a_fork_waits_for_no_save_of_its_parent(store):
    places = {place_of(store.url): store.url}
    saves, own, manager = Saves(is_idle=False, places=places), Saves(True, places), Manager()
    attend("parentz", manager, saves)
    attend("second", manager, own)
    await_others("second")
    assert saves.waits == 1
    if (pid := os.fork()) == 0:
        try:
            await_others("second")
        finally:
            os._exit(saves.waits)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1


def test_a_manager_of_this_process_that_was_collected_has_ended(store):
    saves, manager, second = Saves(is_idle=False), Manager(), replace(me(), attempt="second")
    first = replace(me(), attempt="firstzz")
    attend(first.attempt, manager, saves)
    claim(store, first)
    assert first.alive
    del manager
    assert not first.alive
    assert claim(store, second).ended == (first.attempt,)


def test_an_earlier_program_of_this_process_has_ended(store):
    """``os.execv`` keeps the process id and the time of the start."""
    claim(store, replace(me(), attempt="earlier", program="0badc0de"))
    assert claim(store, me()).ended == ("earlier",)


def test_another_process_cannot_know_the_program_of_an_owner(store, neighbour):
    claim(store, replace(neighbour.owner, program="0badc0de"))
    with pytest.raises(RootInUse):
        claim(store, me())


def test_the_first_notices_that_it_was_taken_over_and_leaves_the_new_owner_alone(store):
    first = replace(me(), attempt="firstz", machine="far away")
    claim(store, first)
    claim(store, me())
    with pytest.raises(RootInUse, match="attempt minezz"):
        confirm(store, first)
    release(store, first)
    assert read_owner(store) == noted(store, unseen=("firstz",))
    confirm(store, me())


def test_a_root_without_owner_is_confirmed(store):
    confirm(store, me())
    release(store, me())


@pytest.mark.parametrize(
    "data",
    [b"", b"garbage", b"\xff\xfe", b"[]", b'{"attempt":1}', b"[" * 60_000, b'{"attempt":"x"}'],
)
def test_nonsense_guards_nothing(store, data):
    store.put(OWNER, [data])
    assert read_owner(store) is None
    claim(store, me())
    assert read_owner(store) == noted(store)


def test_a_later_ckpt_may_say_more_of_itself(store):
    store.put(OWNER, [msgspec.json.encode({**msgspec.to_builtins(me()), "mood": "fine"})])
    assert read_owner(store) == me()


def test_a_store_that_does_not_answer_is_not_taken_for_free(store):
    claim(store, me())
    faulty = FaultyBackend(
        store, [Rule(verb="head", fault=Raise(lambda key: StorageError(key, "down")))]
    )
    for verb in (claim, confirm, release):
        with pytest.raises(StorageError, match="down"):
            verb(faulty, replace(me(), attempt="otherz"))
    assert read_owner(store) == noted(store)


@pytest.fixture
def copy(store):
    """Return a store with another name. The test copies the record of ``store`` to it."""
    yield open_memory(f"{store.url}-copy", {})
    forget_memory(store.url.removeprefix("memory://") + "-copy")


def test_a_copied_root_has_no_owner_while_the_owner_of_its_original_lives(store, copy, neighbour):
    claim(store, neighbour.owner)
    copy.put(OWNER, [read_object(store, OWNER, limit=1 << 20)])
    assert read_owner(copy) is None
    claim(copy, me())
    confirm(copy, me())
    assert read_owner(copy) == noted(copy)
    with pytest.raises(RootInUse):
        claim(store, me())


def test_a_job_that_has_moved_to_a_copy_of_its_root_takes_it_again(store, copy):
    claim(store, me())
    copy.put(OWNER, [read_object(store, OWNER, limit=1 << 20)])
    assert not confirm(copy, me())
    claim(copy, me())
    assert confirm(copy, me())


@pytest.mark.parametrize("kind", ["mount", "no", "later", "host", "case"])
def test_a_record_that_may_name_this_root_counts(store, neighbour, kind):
    """A folder may be a mount of the store, a later release may tell the root in its way, a server
    may have several names, and names may ignore the case.
    """
    root = {
        "mount": "/mnt/bucket/run/",
        "no": "",
        "later": "1:2:3:4:5",
        "host": "memory://other/run/",
        "case": f"{store.url.removesuffix('run')}RUN/",
    }[kind]
    store.put(OWNER, [msgspec.json.encode(replace(neighbour.owner, root=root))])
    with pytest.raises(RootInUse):
        claim(store, me())


def test_the_record_of_another_machine_counts_wherever_it_was_copied_from(store, copy):
    """The same root may have another name and other numbers there."""
    far = replace(me(), attempt="farzzz", machine="far away")
    claim(store, far)
    copy.put(OWNER, [read_object(store, OWNER, limit=1 << 20)])
    claim(copy, me())
    assert read_owner(copy) == noted(copy, unseen=("farzzz",))

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from dataclasses import dataclass

import msgspec
import pytest
from msgspec.structs import replace

from ckpt.coordination.owner import Owner, claim, confirm, read_owner, release
from ckpt.errors import RootInUse, StorageError
from ckpt.model.keys import OWNER
from ckpt.storage.testing import FaultyBackend, Raise, Rule
from ckpt_backends.memory import forget_memory, open_memory


@pytest.fixture
def store():
    name = uuid.uuid4().hex
    yield open_memory(f"memory://{name}", {})
    forget_memory(name)


ME = Owner.here("minezz")


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
    yield Neighbour(process, replace(ME, attempt="otherz", pid=process.pid, started=started))
    process.kill()
    process.communicate()


def test_a_claim_is_confirmed_until_it_is_released(store):
    claim(store, ME)
    assert read_owner(store) == ME
    confirm(store, ME)
    claim(store, ME)
    release(store, ME)
    assert read_owner(store) is None
    assert list(store.list("")) == []


def test_this_process_is_alive_and_says_who_it_is():
    assert ME.alive
    assert (ME.pid, ME.attempt) == (os.getpid(), "minezz")
    assert f"attempt minezz, process {os.getpid()} on {ME.host}" == str(ME)


def test_a_live_owner_on_this_machine_keeps_its_root(store, neighbour):
    claim(store, neighbour.owner)
    with pytest.raises(RootInUse, match="attempt otherz") as caught:
        claim(store, ME)
    assert caught.value.root == store.url
    assert read_owner(store) == neighbour.owner


def test_a_dead_owner_is_taken_over_even_if_nobody_has_reaped_it(store, neighbour):
    claim(store, neighbour.owner)
    neighbour.process.kill()
    os.waitid(os.P_PID, neighbour.process.pid, os.WEXITED | os.WNOWAIT)  # a zombie from here on
    assert not neighbour.owner.alive
    claim(store, ME)
    neighbour.process.wait()
    assert read_owner(store) == replace(ME, ended=("otherz",))


@pytest.mark.parametrize(
    "change",
    [{"started": 1}, {"machine": "another boot"}, {"pid": 2**22 + 1}, {"pid": -1}, {"machine": ""}],
)
def test_who_cannot_be_known_to_live_is_taken_over(store, change):
    other = replace(ME, attempt="otherz", **change)
    assert not other.alive
    claim(store, other)
    claim(store, ME)
    known = {"unseen" if other.is_unknown else "ended": ("otherz",)}
    assert read_owner(store) == replace(ME, **known)
    claim(store, replace(ME, started=2))  # again, as if the answer of the first try was lost
    assert read_owner(store) == replace(ME, started=2, **known)


def test_another_attempt_of_this_very_process_is_alive(store):
    claim(store, ME)
    with pytest.raises(RootInUse):
        claim(store, replace(ME, attempt="second"))


def test_the_first_notices_that_it_was_taken_over_and_leaves_the_new_owner_alone(store):
    first = replace(ME, attempt="firstz", machine="far away")
    claim(store, first)
    claim(store, ME)
    with pytest.raises(RootInUse, match="attempt minezz"):
        confirm(store, first)
    release(store, first)
    assert read_owner(store) == replace(ME, unseen=("firstz",))
    confirm(store, ME)


def test_a_root_without_owner_is_confirmed(store):
    confirm(store, ME)
    release(store, ME)


@pytest.mark.parametrize(
    "data",
    [b"", b"garbage", b"\xff\xfe", b"[]", b'{"attempt":1}', b"[" * 60_000, b'{"attempt":"x"}'],
)
def test_nonsense_guards_nothing(store, data):
    store.put(OWNER, [data])
    assert read_owner(store) is None
    claim(store, ME)
    assert read_owner(store) == ME


def test_a_later_ckpt_may_say_more_of_itself(store):
    store.put(OWNER, [msgspec.json.encode({**msgspec.to_builtins(ME), "mood": "fine"})])
    assert read_owner(store) == ME


def test_a_store_that_does_not_answer_is_not_taken_for_free(store):
    claim(store, ME)
    faulty = FaultyBackend(
        store, [Rule(verb="head", fault=Raise(lambda key: StorageError(key, "down")))]
    )
    for verb in (claim, confirm, release):
        with pytest.raises(StorageError, match="down"):
            verb(faulty, replace(ME, attempt="otherz"))
    assert read_owner(store) == ME

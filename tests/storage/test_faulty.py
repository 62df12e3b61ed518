from __future__ import annotations

import time
import uuid

import pytest

from ckpt.errors import ObjectNotFound, OutOfSpace, TransientStorageError
from ckpt.storage.testing import (
    BackendConformance,
    Call,
    Crash,
    Delay,
    FaultyBackend,
    LoseReply,
    Raise,
    Rule,
    SimulatedCrash,
    Truncate,
    flip_byte,
)
from ckpt.storage.testing.conformance import at_once, fetch, payload, store
from ckpt_backends.memory import forget_memory, open_memory


@pytest.fixture
def memory():
    name = uuid.uuid4().hex
    yield open_memory(f"memory://{name}", {})
    forget_memory(name)


class TestWithoutRules(BackendConformance):
    @pytest.fixture
    def open_root(self):
        name = uuid.uuid4().hex
        yield lambda root: FaultyBackend(open_memory(f"memory://{name}/{root}", {}))
        forget_memory(name)


def test_the_nth_call_that_matches_fails_and_no_other(memory):
    faulty = FaultyBackend(memory, [Rule(verb="put", key="json$", nth=2, fault=Raise(OutOfSpace))])
    faulty.put("a.json", [b"1"])
    faulty.put("b.bin", [b"2"])
    with pytest.raises(OutOfSpace) as caught:
        faulty.put("c.json", [b"3"])
    assert caught.value.key == "c.json"
    faulty.put("c.json", [b"3"])
    assert [call.key for call in faulty.calls] == ["a.json", "b.bin", "c.json", "c.json"]
    assert faulty.calls[0] == Call(verb="put", key="a.json", nbytes=1)


def test_without_a_number_every_call_fails(memory):
    error = TransientStorageError("k", "told")
    faulty = FaultyBackend(memory, [Rule(verb="head", fault=Raise(error))])
    for _ in range(3):
        with pytest.raises(TransientStorageError, match="told"):
            faulty.head("k")


def test_verbs_of_an_upload_are_hit_too(memory):
    faulty = FaultyBackend(memory, [Rule(verb="write", nth=2, fault=Raise(TransientStorageError))])
    upload = faulty.upload("k", 3 * (8 << 20))
    data = memoryview(payload(3 * (8 << 20)))
    upload.write(0, data[: 8 << 20])
    with pytest.raises(TransientStorageError):
        upload.write(8 << 20, data[8 << 20 : 16 << 20])
    upload.write(8 << 20, data[8 << 20 : 16 << 20])
    upload.write(16 << 20, data[16 << 20 :])
    upload.finish()
    assert fetch(memory, "k") == data


def test_a_lost_reply_leaves_the_work_done(memory):
    faulty = FaultyBackend(memory, [Rule(verb="put", fault=LoseReply(TransientStorageError))])
    with pytest.raises(TransientStorageError):
        faulty.put("k", [b"done"])
    assert fetch(memory, "k") == b"done"


def test_a_truncated_object_was_reported_whole(memory):
    rules = [Rule(verb="put", fault=Truncate(3)), Rule(verb="finish", fault=Truncate(10))]
    faulty = FaultyBackend(memory, rules)
    assert faulty.put("small", [b"123456"]).size == 6
    store(faulty, "large", payload(5000))
    assert memory.head("small").size == 3
    assert fetch(memory, "large") == payload(5000)[:10]
    with pytest.raises(ValueError, match="Truncate"):
        Rule(verb="head", fault=Truncate(1))


def test_a_delay_takes_time(memory):
    faulty = FaultyBackend(memory, [Rule(verb="list", fault=Delay(0.1))])
    started = time.monotonic()
    assert list(faulty.list("")) == []
    assert time.monotonic() - started >= 0.1


@pytest.mark.parametrize(("when", "there"), [("before", False), ("after", True)])
def test_after_a_crash_nothing_works_any_more(memory, when, there):
    faulty = FaultyBackend(memory, [Rule(verb="put", key="manifest", fault=Crash(when))])
    upload = faulty.upload("large", 5)
    with pytest.raises(SimulatedCrash):
        faulty.put("manifest", [b"x"])
    assert faulty.has_crashed
    for verb in (
        lambda: faulty.head("x"),
        lambda: list(faulty.list("")),
        upload.finish,
        upload.abort,
    ):
        with pytest.raises(SimulatedCrash):
            verb()
    assert [info.key for info in memory.list("")] == (["manifest"] if there else [])


def test_a_crash_is_no_exception_that_a_handler_swallows(memory):
    assert not issubclass(SimulatedCrash, Exception)


def test_an_abort_swallows_errors_as_it_must(memory):
    faulty = FaultyBackend(memory, [Rule(verb="abort", fault=Raise(TransientStorageError))])
    faulty.upload("k", 5).abort()


def test_counting_is_exact_with_many_threads(memory):
    faulty = FaultyBackend(memory, [Rule(verb="put", nth=50, fault=Raise(OutOfSpace))])

    def work(number: int) -> int:
        failed = 0
        for turn in range(10):
            try:
                faulty.put(f"{number}-{turn}", [b""])
            except OutOfSpace:
                failed += 1
        return failed

    assert sum(at_once(work, 8)) == 1
    assert len(faulty.calls) == 80


def test_flip_byte_changes_one_byte(memory):
    memory.put("k", [payload(100)])
    flip_byte(memory, "k", 50)
    flip_byte(memory, "k", -1)
    damaged = fetch(memory, "k")
    assert [n for n in range(100) if damaged[n] != payload(100)[n]] == [50, 99]
    with pytest.raises(ObjectNotFound):
        flip_byte(memory, "missing", 0)


def test_a_verb_with_a_typo_is_refused():
    with pytest.raises(ValueError, match="none of"):
        Rule(verb="putt", fault=Delay(0))  # type: ignore[arg-type]

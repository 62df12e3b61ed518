from __future__ import annotations

import threading
import time

import pytest

from ckpt.errors import (
    AccessDenied,
    ChecksumMismatch,
    ObjectNotFound,
    OutOfSpace,
    TransientStorageError,
)
from ckpt.pipeline.retry import RetryPolicy

QUICK = RetryPolicy(attempts=4, first_seconds=0.001, most_seconds=0.002)


class Flaky:
    """A call that raises the given errors one after another, and then succeeds."""

    def __init__(self, *errors: Exception) -> None:
        self.errors, self.calls = list(errors), 0

    def __call__(self) -> str:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return "done"


def transient(number: int) -> TransientStorageError:
    return TransientStorageError("k", str(number))


@pytest.mark.parametrize("failures", [0, 1, 3])
def test_transient_errors_are_tried_again_until_it_works(failures):
    work = Flaky(*map(transient, range(failures)))
    assert QUICK.call(work) == "done"
    assert work.calls == failures + 1


def test_the_last_error_is_raised_as_it_is():
    errors = [transient(number) for number in range(10)]
    work = Flaky(*errors)
    with pytest.raises(TransientStorageError) as caught:
        QUICK.call(work)
    assert caught.value is errors[3]
    assert work.calls == 4


@pytest.mark.parametrize(
    "error",
    [
        ObjectNotFound("k"),
        AccessDenied("k"),
        OutOfSpace("k"),
        ChecksumMismatch("k", 0, 1),
        ValueError("x"),
        OSError(5, "io"),
    ],
)
def test_lasting_errors_are_not_tried_again(error):
    work = Flaky(error)
    with pytest.raises(type(error)) as caught:
        QUICK.call(work)
    assert (caught.value, work.calls) == (error, 1)


def test_a_lasting_error_after_a_transient_one_ends_it():
    work = Flaky(transient(0), OutOfSpace("k"), transient(1))
    with pytest.raises(OutOfSpace):
        QUICK.call(work)
    assert work.calls == 2


def test_an_interrupt_is_not_held_up():
    work = Flaky(transient(0))

    def interrupted() -> None:
        work()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        QUICK.call(interrupted)


def test_waits_grow_and_stay_below_the_bound():
    policy = RetryPolicy(attempts=5, first_seconds=0.02, most_seconds=0.05)
    began = time.monotonic()
    with pytest.raises(TransientStorageError):
        policy.call(Flaky(*map(transient, range(9))))
    assert 0.02 + 0.04 + 0.05 + 0.05 <= time.monotonic() - began < 4 * 0.05 + 1


def test_patience_goes_on_beyond_the_attempts_until_its_time_is_up():
    patient = RetryPolicy(attempts=2, first_seconds=0.001, most_seconds=0.01, patience_seconds=0.3)
    assert patient.call(Flaky(*map(transient, range(12)))) == "done"
    began = time.monotonic()
    with pytest.raises(TransientStorageError):
        patient.call(Flaky(*map(transient, range(1000))))
    assert 0.2 < time.monotonic() - began < 5


def test_who_must_hurry_has_its_attempts_and_no_more():
    hurry = threading.Event()
    patient = RetryPolicy(
        attempts=3, first_seconds=0.001, most_seconds=60, patience_seconds=600, hurry=hurry
    )
    work = Flaky(*map(transient, range(100)))
    threading.Timer(0.2, hurry.set).start()
    began = time.monotonic()
    with pytest.raises(TransientStorageError):
        patient.call(work)
    assert time.monotonic() - began < 10
    assert work.calls >= 3
    late = Flaky(*map(transient, range(100)))
    with pytest.raises(TransientStorageError):
        patient.call(late)
    assert late.calls == 3

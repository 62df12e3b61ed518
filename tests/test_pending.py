from __future__ import annotations

import math
import os
import threading
import time
import uuid
from typing import Any

import pytest
import torch

import ckpt.storage.tiers
from ckpt import CheckpointManager
from ckpt.errors import AccessDenied, ConfigError, StepsMissing
from ckpt.pending import SaveRecord, missing_at_the_end
from ckpt.storage.registry import open_backend
from ckpt.storage.testing import FaultyBackend, Raise, Rule
from tests.kit.stores import Wrapped, wrap_stores


class Gate(Wrapped):
    """A store whose uploads finish when the test allows it."""

    def __init__(self, inner: Any, opened: threading.Event) -> None:
        super().__init__(inner)
        self._opened = opened

    def upload(self, key: str, size: int) -> Any:
        assert self._opened.wait(30)
        return self.inner.upload(key, size)


@pytest.fixture
def memory() -> str:
    return f"memory://{uuid.uuid4().hex}"


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    opened = threading.Event()
    wrap_stores(monkeypatch, lambda url, store: Gate(store, opened))
    return opened


@pytest.mark.parametrize("timeout", [math.inf, 1e12, math.nan, "5"])
def test_a_wait_that_python_cannot_do_is_refused(
    memory: str, gate: threading.Event, timeout: Any
) -> None:
    with CheckpointManager(memory) as manager:
        pending = manager.save_async({"x": torch.ones(1000)}, 3)
        for wait in (pending.wait_staged, pending.result, pending.exception, manager.close):
            with pytest.raises(ConfigError, match="give seconds, or None to wait without a limit"):
                wait(timeout)
        gate.set()
        assert pending.result() is pending


def test_a_save_is_staged_first_and_durable_later(memory: str, gate: threading.Event) -> None:
    with CheckpointManager(memory) as manager:
        pending = manager.save_async({"x": torch.ones(1000)}, 3)
        pending.wait_staged(10)
        assert not pending.done()
        assert pending.durable_seconds is None
        assert pending.progress == 0.0
        for wait in (pending.result, pending.exception):
            with pytest.raises(TimeoutError, match="step 3"):
                wait(0.01)
        assert manager.steps() == []
        assert repr(pending) == "<PendingSave step=3 0%>"
        gate.set()
        assert pending.result(30) is pending
        assert pending.done()
        assert pending.exception() is None
        assert pending.progress == 1.0
        assert pending.durable_seconds is not None
        assert pending.durable_seconds >= pending.stall_seconds > 0
        assert pending.nbytes == 4096 + 4000
        assert repr(pending) == "<PendingSave step=3 committed>"
        assert manager.steps() == [3]


def test_a_time_out_is_no_end_and_may_be_asked_again(memory: str, gate: threading.Event) -> None:
    with CheckpointManager(memory) as manager:
        pending = manager.save_async({"x": 1})
        with pytest.raises(TimeoutError):
            pending.result(0)
        gate.set()
        pending.result(30)


def test_a_failed_save_says_so_to_everyone_who_asks(
    memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    denied = [Rule(verb="upload", fault=Raise(AccessDenied))]
    monkeypatch.setattr(
        ckpt.storage.tiers,
        "open_backend",
        lambda url, options: FaultyBackend(open_backend(url, options), denied),
    )
    with CheckpointManager(memory) as manager:
        pending = manager.save_async({"x": torch.ones(3)})
        error = pending.exception(30)
        assert isinstance(error, AccessDenied)
        for _ in range(2):
            with pytest.raises(AccessDenied):
                pending.result()
        pending.wait_staged()  # the copy itself succeeded
        assert repr(pending) == "<PendingSave step=0 failed>"


def test_many_threads_may_wait_for_one_save(memory: str, gate: threading.Event) -> None:
    with CheckpointManager(memory) as manager:
        pending = manager.save_async({"x": 1})
        heard: list[object] = []
        threads = [
            threading.Thread(target=lambda: heard.append(pending.result(30))) for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        assert heard == []
        gate.set()
        for thread in threads:
            thread.join(30)
        assert heard == [pending] * 8


def test_a_fork_is_told_at_once_that_it_will_never_hear() -> None:
    pending = SaveRecord(3, 8, None, began=time.perf_counter(), tiers={"memory://a": "memory://a"})
    pid = os.fork()
    if not pid:
        code = 2
        try:
            pending.result(timeout=60)
        except ConfigError as error:
            code = 0 if "step 3 is saved by process" in str(error) else 1
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_save_that_close_gave_up_and_that_was_committed_after_all_has_succeeded() -> None:
    pending = SaveRecord(1, 3, None, began=0.0, tiers={"/a": "/a"})
    assert isinstance(missing_at_the_end([pending], 0.1), StepsMissing)
    assert pending.end_on("/a", None) is None
    pending.finish(None)
    assert pending.result(0) is pending

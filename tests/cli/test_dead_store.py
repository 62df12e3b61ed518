"""No command waits for a dead store silently or for ever."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt.storage.api import ObjectInfo, StorageBackend
from ckpt.storage.registry import open_backend
from ckpt.storage.testing.faulty import FaultyBackend
from tests.checkpoints import Written
from tests.cli.conftest import Cli, Ran, data_file
from tests.kit.stores import wrap_stores
from tests.servers import free_port

CONFIG = """
[[tiers]]
url = "runs"
[[tiers]]
url = "s3://bucket/run"
[tiers.options]
endpoint_url = "http://127.0.0.1:{port}"
key = "a"
secret = "b"
config_kwargs = {{ read_timeout = 4, connect_timeout = 4, retries = {{ max_attempts = 0 }} }}
"""
DEAD = "s3://bucket/run"
WAITED = f"{DEAD} has not answered yet; it is given up after 1.5 s (--timeout)"
GIVEN_UP = f"'{DEAD}' (no answer within 1.5 s (--timeout)"


@pytest.fixture(params=["silent", "refused"])
def dead(
    request: pytest.FixtureRequest, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """Make a ``ckpt.toml`` whose second tier accepts connections and sends nothing, or accepts
    none.
    """
    monkeypatch.setattr("ckpt.cli.watched_store.SILENT_SECONDS", 0.1)
    with contextlib.ExitStack() as stack:
        port = free_port()
        if request.param == "silent":
            silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            port = silent.getsockname()[1]
        Path("ckpt.toml").write_text(CONFIG.format(port=port))
        yield str(request.param)


@pytest.mark.parametrize(
    "call",
    ["ls", "show", "verify", "restore", f"copy {DEAD} there", "copy runs " + DEAD, "diff runs", "finalize", "prune --keep-last 1", f"export {DEAD} x.pt", "import gpt.pt --step 400"],  # noqa: E501
)  # fmt: skip
def test_a_dead_store_is_told_and_then_given_up(
    cli: Cli, steps: dict[int, Written], dead: str, call: str
) -> None:
    import torch

    torch.save({"model": {"w": torch.ones(2)}}, "gpt.pt")
    words = call.split()
    ran = cli(*words, *([] if DEAD in words else [DEAD]), "--timeout", "1.5")
    assert ran.code == 3, ran.err
    if dead == "refused" and "Could not connect" in ran.err:
        return  # a request that is not repeated reports the refusal itself, before the time is over
    assert WAITED in ran.err
    assert GIVEN_UP in ran.err


@pytest.mark.parametrize("call", ["ls", "verify", "restore"])
def test_a_dead_second_tier_is_told_and_the_first_serves(
    cli: Cli, steps: dict[int, Written], dead: str, call: str
) -> None:
    ran = cli(call, "--config", "ckpt.toml", "--timeout", "1.5")
    assert ran.code == (3 if call == "verify" else 0), ran.err
    assert "300" in ran.out
    assert WAITED in ran.err
    assert GIVEN_UP in ran.err + ran.out


def test_prune_keeps_what_a_dead_farther_tier_may_lack(
    cli: Cli, steps: dict[int, Written], dead: str, backend: StorageBackend
) -> None:
    backend.put(
        "writer.json",
        [b'{"attempt": "bbbbbbbbbbbb", "host": "node7", "machine": "m/1", "pid": 5, "started": 1}'],
    )
    ran = cli("prune", "--config", "ckpt.toml", "--keep-last", 1, "--timeout", "1.5", "--json")
    assert (ran.code, ran.json["pruned"]) == (0, [])
    assert WAITED in ran.err
    assert GIVEN_UP in ran.err


class Hanging(FaultyBackend):
    """A store whose listings do not return until ``over`` is set."""

    def __init__(self, inner: StorageBackend, over: threading.Event) -> None:
        super().__init__(inner)
        self._over = over

    def folders(self, prefix: str) -> Iterator[str]:
        self._over.wait()
        return super().folders(prefix)


def test_restore_ends_though_a_store_that_was_given_up_has_still_not_answered(
    cli: Cli, steps: dict[int, Written], monkeypatch: pytest.MonkeyPatch
) -> None:
    over = threading.Event()
    wrap_stores(
        monkeypatch, lambda url, store: Hanging(store, over) if url.endswith("far") else store
    )
    try:
        ran = cli("restore", "runs", "far", "--timeout", "1.5")
    finally:
        over.set()
    assert ran.code == 0
    assert "step 300 is intact" in ran.out


def test_a_folder_on_a_dead_server_is_given_up_while_it_is_opened(
    cli: Cli, steps: dict[int, Written], monkeypatch: pytest.MonkeyPatch
) -> None:
    over, ran = threading.Event(), list[Ran]()

    def kind_of(path: str) -> str:
        if path.endswith("far"):
            over.wait()
        return "ext4"

    monkeypatch.setattr("ckpt_backends.folder.posix.kind_of", kind_of)
    monkeypatch.setattr("ckpt.cli.watched_store.SILENT_SECONDS", 0.1)
    far = Path("far").absolute()
    command = threading.Thread(
        target=lambda: ran.append(cli("ls", "runs", far, "--timeout", "1.5")), daemon=True
    )
    command.start()
    try:
        command.join(60)
        assert ran, "the command still waits"
    finally:
        over.set()
        command.join()
    assert ran[0].code == 0
    assert "300" in ran[0].out
    assert WAITED.replace(DEAD, str(far)) in ran[0].err
    assert GIVEN_UP.replace(DEAD, str(far)) in ran[0].err


@pytest.mark.parametrize("call", ["verify", "copy runs there", "restore --to there"])
def test_data_that_does_not_come_is_told_and_waited_for(
    cli: Cli, steps: dict[int, Written], monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    from ckpt.cli import watched_store

    monkeypatch.setattr(watched_store, "SILENT_SECONDS", 0.1)
    reported = threading.Event()
    warn = watched_store.WatchedStore.warn_if_silent

    def heard(store: watched_store.WatchedStore, text: str = "") -> None:
        warn(store, text)
        if store._warned_at is not None:
            reported.set()

    monkeypatch.setattr(watched_store.WatchedStore, "warn_if_silent", heard)

    class Slow(FaultyBackend):
        def read_into(self, key: str, offset: int, out: memoryview) -> None:
            if key.endswith(".safetensors"):
                reported.wait()
            super().read_into(key, offset, out)

    for module in ("ckpt.storage.tiers", "ckpt.cli.watched_store"):
        monkeypatch.setattr(
            f"{module}.open_backend", lambda url, options: Slow(open_backend(url, options))
        )
    ran = cli(*call.split(), "--timeout", "60")
    assert ran.code == 0, ran.err
    assert re.search(rf"{Path('runs').absolute()} has not answered for \d+ s", ran.err)
    assert data_file(steps[300]).exists()


def test_an_answer_after_a_while_starts_the_time_again(cli: Cli, steps: dict[int, Written]) -> None:
    from ckpt.cli.watched_store import watch

    store = watch(open_backend("runs"), 10.0)
    assert store.silent_seconds == 0
    assert {info.key for info in store.list("")} == {
        info.key for info in open_backend("runs").list("")
    }
    assert store.silent_seconds == 0
    assert isinstance(store.head(f"{steps[100].ref.manifest}"), ObjectInfo)


@pytest.mark.parametrize("verb", ["list", "folders"])
def test_a_try_that_fails_is_no_answer(cli: Cli, verb: str) -> None:
    """The error of a generator comes with its first item. It must not restart the time."""
    from ckpt.cli.watched_store import watch
    from ckpt.errors import TransientStorageError

    class Refusing(FaultyBackend):
        def list(self, prefix: str) -> Iterator[ObjectInfo]:
            raise TransientStorageError("", "refused")
            yield

        def folders(self, prefix: str) -> Iterator[str]:
            raise TransientStorageError("", "refused")
            yield

    store = watch(Refusing(open_backend("runs")), 10.0)
    with pytest.raises(TransientStorageError):
        next(getattr(store, verb)(""))
    failed_at = time.monotonic()
    for _ in range(2):
        with pytest.raises(TransientStorageError):
            next(getattr(store, verb)(""))
    assert time.monotonic() - store.silent_seconds <= failed_at


@pytest.mark.parametrize("given", ["-1", "nan", "soon"])
def test_a_timeout_that_is_none_is_told(cli: Cli, steps: dict[int, Written], given: str) -> None:
    ran = cli("ls", "--timeout", given)
    assert ran.code == 2
    assert "--timeout" in ran.err


def test_a_timeout_may_have_no_end(cli: Cli, steps: dict[int, Written]) -> None:
    assert cli("ls", "--timeout", "inf").code == 0

"""The fixture that looks for leaks after every test of a fault finds them."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import fsspec.asyn
import pytest

from tests.faults.conftest import held, lasting


def left(before: set[str]) -> set[str]:
    return {name for name in held() - before if lasting(name)}


def test_connections_are_told_by_both_ends() -> None:
    fsspec.asyn.get_loop()
    before = held()
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = server.getsockname()[1]
        with (
            closing(socket.create_connection(("127.0.0.1", port))) as one,
            closing(server.accept()[0]),
        ):
            names = left(before)
            assert len(names) == 3
            assert sum(f"to 127.0.0.1:{port}" in name for name in names) == 1
            assert one.fileno() > 0
    assert left(before) == set()


@pytest.mark.parametrize("kind", ["file", "pipe", "pair", "thread"])
def test_whatever_is_kept_is_seen(tmp_path: Path, kind: str) -> None:
    before = held()
    ends: list[Callable[[], object]] = []
    if kind == "file":
        ends.append((tmp_path / "f").open("w").close)
    elif kind == "pipe":
        ends += [lambda number=number: os.close(number) for number in os.pipe()]  # type: ignore[misc]
    elif kind == "pair":
        ends += [one.close for one in socket.socketpair()]
    else:
        over = threading.Event()
        thread = threading.Thread(target=over.wait)
        thread.start()
        ends += [over.set, thread.join]
    seen = left(before)
    for end in ends:
        end()
    assert seen
    assert left(before) == set()


def test_the_loop_of_fsspec_is_nobodys_leak() -> None:
    fsspec.asyn.get_loop()
    assert not {name for name in held() if "fsspecIO" in name and lasting(name)}
    assert any("socket of fsspecIO" in name for name in held())

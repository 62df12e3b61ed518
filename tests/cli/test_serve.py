"""What ``ckpt serve`` refuses, and how it starts and ends."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Cli, Written


def needs_packages() -> None:
    for name in ("starlette", "uvicorn"):
        pytest.importorskip(name, reason="pip install 'ckpt-stream[serve]'")


@pytest.mark.parametrize("package", ["starlette", "uvicorn", "jinja2"])
def test_a_missing_package_is_named_with_its_extra(
    cli: Cli, steps: dict[int, Written], package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if package != "starlette":
        needs_packages()
    monkeypatch.setitem(sys.modules, package, None)
    ran = cli("serve")
    assert ran.code == 2
    assert f"needs the package {package}" in ran.err
    assert "pip install 'ckpt-stream[serve]'" in ran.err


def test_a_port_that_is_taken_is_an_error(cli: Cli, steps: dict[int, Written]) -> None:
    needs_packages()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ran = cli("serve", "--port", taken.getsockname()[1])
    assert ran.code == 2
    assert "give another --host or --port" in ran.err


@pytest.mark.parametrize(
    "words",
    [
        ("--host", "no.such.host.invalid"),
        ("--port", "70000"),
        ("--interval", "0"),
        ("--token-file", "none"),
        ("--token-file", "short"),
        ("--config", "none.toml"),
        ("--config", "empty.toml"),
        ("runs", "--root", "runs"),
        ("short",),
    ],
)
def test_a_wrong_call_serves_nothing(
    cli: Cli, steps: dict[int, Written], words: tuple[str, ...]
) -> None:
    needs_packages()
    Path("short").write_text("1234")
    Path("empty.toml").write_text("")
    ran = cli("serve", *words)
    assert ran.code == 2, ran
    assert ran.out == ""
    assert "Traceback" not in ran.err


def start(*words: str) -> tuple[subprocess.Popen[str], str]:
    """Start ``ckpt serve runs``, and return the process and its address."""
    command = [sys.executable, "-m", "ckpt.cli.main", "serve", "runs", "--port", "0", *words]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert server.stdout
    return server, server.stdout.readline().split()[-1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_until_it_is_stopped(
    cli: Cli, steps: dict[int, Written], number: signal.Signals
) -> None:
    needs_packages()
    server, address = start()
    try:
        page = urllib.request.urlopen(f"{address}run/0", timeout=60).read().decode()
        assert "300" in page
        live: Any = urllib.request.urlopen(f"{address}live", timeout=60)
        assert live.readline() == b"data: 1\n"
        server.send_signal(number)
        out, err = server.communicate(timeout=60)
        assert (server.returncode, out, err) == (0, "", "")
        live.close()
    finally:
        server.kill()
        server.communicate()


def test_another_address_needs_a_token(cli: Cli, steps: dict[int, Written]) -> None:
    needs_packages()
    server, _ = start("--host", "0.0.0.0")
    try:
        assert server.stdout
        found = re.search(r":(\d+)/\?token=(\S+)", server.stdout.readline())
        assert found
        port, token = found.groups()
        assert len(token) >= 24
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=60)
        opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        page = opener.open(f"http://127.0.0.1:{port}/run/0?token={token}", timeout=60)
        assert b"300" in page.read()
    finally:
        server.kill()
        server.communicate()


def test_the_token_of_a_file_is_not_printed(cli: Cli, steps: dict[int, Written]) -> None:
    needs_packages()
    Path("token").write_text("correct-horse-battery")
    server, address = start("--host", "0.0.0.0", "--token-file", "token")
    try:
        port = address.rstrip("/").rpartition(":")[2]
        url = f"http://127.0.0.1:{port}/"
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(url, timeout=60)
    finally:
        server.send_signal(signal.SIGTERM)
        out, err = server.communicate(timeout=60)
    assert "token" not in out + err
    assert "correct-horse-battery" not in out + err


def test_it_starts_without_torch(cli: Cli, steps: dict[int, Written]) -> None:
    needs_packages()
    code = (
        "import sys, ckpt.page.app, ckpt.page.server, ckpt.observe; print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=True
    )
    assert done.stdout.strip() == "False"


def test_a_check_is_noted_in_the_journal(cli: Cli, steps: dict[int, Written]) -> None:
    Path("runs.journal").mkdir()
    assert cli("verify", "runs", "--all").code == 0
    text = Path("runs.journal", "verify.jsonl").read_text()
    assert text.count('"event":"Verified"') == 3

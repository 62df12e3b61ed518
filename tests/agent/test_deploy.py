"""The programs that read the files in ``deploy`` that start an agent accept them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ckpt.agent.client import connect, status
from ckpt.agent.folder import AgentFolder
from tests.kit.waiting import until
from tests.processes import ended

UNIT = Path(__file__).resolve().parents[2] / "deploy" / "systemd" / "ckpt-agent.service"


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    command = tmp_path / ".venv" / "bin" / "ckpt"
    command.parent.mkdir(parents=True)
    command.write_text("#!/bin/sh\n")
    command.chmod(0o755)
    done = subprocess.run(
        ["systemd-analyze", "--user", "verify", UNIT],
        env={**os.environ, "HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


def test_the_commands_of_the_unit_run_an_agent_and_end_it(place: AgentFolder) -> None:
    lines = [line for line in UNIT.read_text().splitlines() if line.startswith("Exec")]
    words = {name: text.split()[1:] for name, _, text in (line.partition("=") for line in lines)}
    main = [sys.executable, "-m", "ckpt.cli.main"]
    with ended(subprocess.Popen([*main, *words["ExecStart"]])) as agent:
        assert until(lambda: connect_and_close(place))
        found = status(place)
        assert found is not None
        assert found.pid == agent.pid
        assert found.idle_seconds == 1e9
        subprocess.run([*main, *words["ExecStop"]], check=True, timeout=60)
        assert agent.wait(30) == 0


def connect_and_close(place: AgentFolder) -> bool:
    found = connect(place)
    if found is not None:
        found.close()
    return found is not None

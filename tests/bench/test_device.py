"""The bench of the device path, with the CPU if there is no device.

No test here is about speed.
"""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from bench import report
from bench.measure import Spread
from bench.runner import Bench
from bench.scenarios import device


@pytest.mark.torture
def test_saves_are_measured_compared_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "NAMES", ("ckpt.device",))
    options = replace(device.QUICK, size_mib=(2,))
    with Bench("device", str(tmp_path / "disk"), (), 120, Console(quiet=True), quick=True) as bench:
        report.write(device.run(bench, options), str(tmp_path))
    result = report.read(str(tmp_path))["device"]
    assert result.failures == []
    line = result.find("2 MiB", "ckpt.device")
    assert line is not None
    for key in ("stall_seconds", "call_cpu_seconds", "durable_seconds", "copied_bytes_per_second"):
        value = line.numbers[key]
        assert isinstance(value, Spread)
        assert value.low > 0
    assert (line.numbers["saves"], line.numbers["equal"]) == (2, 1)
    assert result.find("2 MiB", "floor.plain") is not None
    assert (tmp_path / "device.png").exists()
    assert "GPT of 2 layers with AdamW in bf16" in (tmp_path / "device.md").read_text()


def test_a_contender_that_gives_back_something_else_has_no_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Done:
        returncode, stderr = 0, ""
        stdout = 'torch says something\n{"saves": [], "equal": false}\n'

    monkeypatch.setattr(device, "NAMES", ("ckpt.device",))
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: Done)
    with Bench("device", str(tmp_path / "disk"), (), 120, Console(quiet=True)) as bench:
        result = device.run(bench, replace(device.QUICK, size_mib=(2,)))
    assert [(one.name, one.reason) for one in result.failures] == [
        ("ckpt.device", "what was loaded back is not what was saved")
    ]
    assert result.lines == []


def test_when_the_time_is_up_the_rest_is_named(tmp_path: Path) -> None:
    with Bench("device", str(tmp_path / "disk"), (), -1, Console(quiet=True)) as bench:
        result = device.run(bench, replace(device.QUICK, size_mib=(2,)))
    assert {one.reason for one in result.skipped} >= {"the time was up"}
    assert result.lines == []

"""Run the exports of a job in this process, since a new one takes seconds to import torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import pytest

from ckpt.cli.main import main


class _Process:
    """What ``subprocess.Popen`` gives, of a command that has ended."""

    pid = -1

    def __init__(self, command: Sequence[str], **_: Any) -> None:
        assert command[:3] == [sys.executable, "-m", "ckpt.cli.main"]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["ckpt", *command[3:]])
            self.returncode = main()

    def communicate(self) -> tuple[str, str]:
        return "", "no output"


def export_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpt.exchange.exports.hf_export_observer.subprocess.Popen", _Process)

"""A release of vLLM that lacks what ckpt needs starts as it does without ckpt."""

from __future__ import annotations

import logging
import pkgutil
import sys
import tomllib

import pytest

from tests.kit.worlds import ROOT


def test_vllm_starts_although_it_has_no_such_engines(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "vllm.distributed.weight_transfer", None)
    monkeypatch.delitem(sys.modules, "ckpt.integrations.vllm", raising=False)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    plugin = pkgutil.resolve_name(project["entry-points"]["vllm.general_plugins"]["ckpt"])
    with caplog.at_level(logging.INFO, "ckpt"):
        plugin()
    assert "load_format='ckpt' is not there in this release of vLLM" in caplog.text

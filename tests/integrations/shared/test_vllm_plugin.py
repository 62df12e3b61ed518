"""A release of vLLM that lacks what ckpt needs starts as it does without ckpt."""

from __future__ import annotations

import logging
import pkgutil
import sys
import tomllib
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from tests.kit.worlds import ROOT


@pytest.fixture
def plugin() -> Callable[[], None]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    name = project["entry-points"]["vllm.general_plugins"]["ckpt"]
    register: Callable[[], None] = pkgutil.resolve_name(name)
    return register


def test_vllm_starts_although_it_has_no_such_engines(
    plugin: Callable[[], None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "vllm.distributed.weight_transfer", None)
    monkeypatch.delitem(sys.modules, "ckpt.integrations.vllm", raising=False)
    with caplog.at_level(logging.INFO, "ckpt"):
        plugin()
    assert "load_format='ckpt' is not there in this release of vLLM" in caplog.text


def test_vllm_starts_although_its_classes_are_others(
    plugin: Callable[[], None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM ends if the function of a plugin raises an error."""

    def register() -> None:
        raise TypeError("cannot inherit from a frozen dataclass")

    door = SimpleNamespace(register=register)
    monkeypatch.setitem(sys.modules, "ckpt.integrations.vllm", door)
    plugin()
    assert "cannot inherit from a frozen dataclass" in caplog.text
    assert "VLLM_PLUGINS" in caplog.text

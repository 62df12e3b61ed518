"""The plugin costs a process of vLLM that does not use ckpt nothing, and breaks no release."""

from __future__ import annotations

import logging
import pkgutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.kit.worlds import ENVIRONMENT, ROOT

Plugin = Callable[[], None]


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Plugin:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    name = project["entry-points"]["vllm.general_plugins"]["ckpt"]
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    register: Plugin = pkgutil.resolve_name(name).__wrapped__
    return register


ENGINES = "vllm.distributed.weight_transfer"
LOADERS = "vllm.model_executor.model_loader"


def test_vllm_starts_although_it_has_no_such_engines(
    plugin: Plugin, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, ENGINES, None)
    with caplog.at_level(logging.INFO, "ckpt"):
        plugin()
    assert "backend='ckpt' is not there in this release of vLLM" in caplog.text


def test_vllm_starts_although_its_classes_are_others(
    plugin: Plugin, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM ends if the function of a plugin raises an error."""

    def register_model_loader(_: str) -> None:
        raise TypeError("cannot inherit from a frozen dataclass")

    door = SimpleNamespace(CkptModelLoader=None)
    monkeypatch.setitem(sys.modules, "ckpt.integrations.vllm.loader", door)
    monkeypatch.setitem(sys.modules, "ckpt.integrations.vllm", SimpleNamespace(loader=door))
    loaders = SimpleNamespace(register_model_loader=register_model_loader)
    monkeypatch.setitem(sys.modules, LOADERS, loaders)
    plugin()
    assert "load_format='ckpt' is not there" in caplog.text
    assert "cannot inherit from a frozen dataclass" in caplog.text
    assert "VLLM_PLUGINS" in caplog.text


SCRIPT = """
import logging
import sys
from ckpt.integrations.shared.vllm_plugin import register
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
register()
register()
imported = {"torch", "vllm.model_executor", "ckpt.integrations.vllm", "ckpt.exchange"}
print(sorted(imported & sys.modules.keys()))
import vllm.model_executor.model_loader as loaders
print(loaders.SIZE)
"""


SEARCH = """
import importlib.util
import logging
import os
import sys
from ckpt.integrations.shared.vllm_plugin import register
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
before = [*sys.meta_path]
register()
size = os.environ.pop("SIZE")
print(importlib.util.find_spec("vllm.model_executor.model_loader").name)
try:
    import vllm.model_executor.model_loader
except KeyError as error:
    print(error)
os.environ["SIZE"] = size
import vllm.model_executor.model_loader as loaders
print(loaders.SIZE, sys.meta_path == before)
"""


def run_beside_vllm(folder: Path, script: str) -> list[str]:
    """Return the lines that ``script`` prints. The packages that are made in ``folder`` stand for
    vLLM, whose own take seconds to import.
    """
    for name, text in {
        "vllm": "",
        "vllm/distributed": "",
        "vllm/distributed/weight_transfer": "class WeightTransferEngineFactory:\n"
        "    def register_engine(*words): print(*words)\n",
        "vllm/model_executor": "",
        "vllm/model_executor/model_loader": "import os\nSIZE = os.environ['SIZE']\n",
    }.items():
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(text)
    path = f"{folder}:{ENVIRONMENT['PYTHONPATH']}"
    ran = subprocess.run(
        [sys.executable, "-c", script],
        env=ENVIRONMENT | {"PYTHONPATH": path, "SIZE": "7"},
        capture_output=True,
        text=True,
        check=True,
    )
    return ran.stdout.splitlines()


def test_only_a_process_that_loads_a_model_imports_the_loader(tmp_path: Path) -> None:
    engine, before, attempt, size = run_beside_vllm(tmp_path, SCRIPT)
    assert engine == "ckpt ckpt.integrations.vllm.updates CkptWeightTransferEngine"
    assert before == "[]"
    assert attempt.startswith("ckpt: load_format='ckpt' is not there in this release of vLLM")
    assert size == "7"


def test_a_search_and_an_import_that_fails_leave_the_loader_to_the_next_import(
    tmp_path: Path,
) -> None:
    _, name, failure, attempt, end = run_beside_vllm(tmp_path, SEARCH)
    assert name == LOADERS
    assert failure == "'SIZE'"
    assert attempt.startswith("ckpt: load_format='ckpt' is not there in this release of vLLM")
    assert end == "7 True"

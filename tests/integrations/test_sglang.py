"""SGLang on the CPU takes versions of a run while it serves.

The package pins builds for CUDA. An environment with torch for the CPU, ``pip install --no-deps
sglang`` and what its imports need runs these tests.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckpt
from ckpt import CheckpointManager
from ckpt.errors import ConfigError, RestoreError
from ckpt.exchange.weights.follow import Version
from tests import processes

ROOT = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).parent / "workers" / "sglang_serve.py"
PATHS = os.pathsep.join([str(ROOT), str(ROOT / "backends")])
BOUND = 400

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.timeout(BOUND + 40),
    pytest.mark.skipif(find_spec("sglang") is None, reason="SGLang is not installed"),
]


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return what an engine has generated, and what was refused."""
    ended = processes.run(
        [sys.executable, WORKER, tmp_path_factory.mktemp("sglang")],
        env={**os.environ, "PYTHONPATH": PATHS},
        timeout=BOUND,
    )
    assert ended.returncode == 0, ended.stdout[-6000:]
    (line,) = [line for line in ended.stdout.splitlines() if line.startswith("FACTS ")]
    return json.loads(line.removeprefix("FACTS "))


def test_the_engine_generates_with_each_version(facts: Any) -> None:
    expected = facts["expected"]
    assert facts["start"] == expected["1"]
    assert facts["first"] == ["", expected["2"]]
    assert facts["second"] == ["", expected["3"]]
    assert len({tuple(tokens) for tokens in expected.values()}) == 4


@pytest.mark.parametrize(
    ("event", "words"),
    [
        ("damaged", "NoCheckpoint: "),
        ("lacks", "RestoreError: step 5 lacks 'transformer.ln_f.weight'"),
        ("another shape", "step 6 has other shapes than the model for 'transformer.ln_f"),
        ("beside", "step 7 has 'transformer.head.weight', which the model lacks"),
        ("no tensor", "step 8 has 'steps', which the model lacks"),
    ],
)
def test_a_version_that_cannot_be_taken_leaves_the_weights(
    event: str, words: str, facts: Any
) -> None:
    error, tokens = facts[event]
    assert words in error
    assert tokens == facts["expected"]["3"]


def test_a_version_costs_what_has_changed(facts: Any) -> None:
    read_bytes, all_bytes = facts["read"]
    assert read_bytes < all_bytes / 20


def test_the_engine_takes_a_folder_of_hugging_face(facts: Any) -> None:
    assert facts["folder"] == [True, facts["expected"]["4"]]


class Receiver:
    """An engine that reads what it is given as SGLang does, and keeps it or refuses it."""

    def __init__(self, folder: Path, *, refuses: bool = False) -> None:
        self.server_args = SimpleNamespace(model_path=str(folder), tp_size=2)
        self.refuses = refuses
        self.calls: list[str] = []
        self.weights: dict[str, torch.Tensor] = {}

    def begin_weight_update(self) -> tuple[bool, str]:
        self.calls.append("begin")
        return True, ""

    def end_weight_update(self) -> tuple[bool, str]:
        self.calls.append("end")
        return True, ""

    def update_weights_from_tensor(
        self, payloads: list[bytes], load_format: str, *, flush_cache: bool
    ) -> tuple[bool, str]:
        from sglang.srt.utils import MultiprocessingSerializer
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

        assert load_format == "flattened_bucket"
        for payload in payloads:  # One for each worker
            content = MultiprocessingSerializer.deserialize(payload)
            for name, value in FlattenedTensorBucket(**content).reconstruct_tensors():
                self.weights[name] = value.clone()
        self.calls.append("flush" if flush_cache else "load")
        return not self.refuses, "no room"


WEIGHTS = {
    "odd": torch.arange(3).bfloat16(),
    "wide": torch.arange(5.0),
    "scalar": torch.tensor(7.0, dtype=torch.float64),
    "last": torch.arange(70).bfloat16(),
}


@pytest.fixture
def version(tmp_path: Path) -> Version:
    save_file(WEIGHTS, (tmp_path / "model.safetensors"))
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save({"model": WEIGHTS}, step=3)
    with ckpt.follow(tmp_path / "run") as versions:
        return next(versions)


def test_tensors_of_several_widths_arrive_as_they_are(tmp_path: Path, version: Version) -> None:
    from ckpt.integrations.sglang import SglangWeights

    engine = Receiver(tmp_path)
    SglangWeights(engine, bucket_bytes=64).update(version)
    assert engine.calls == ["begin", "load", "flush", "end"]
    assert engine.weights.keys() == WEIGHTS.keys()
    assert all(torch.equal(engine.weights[name], value) for name, value in WEIGHTS.items())


def test_a_refusal_ends_the_update_with_an_error(tmp_path: Path, version: Version) -> None:
    from ckpt.integrations.sglang import SglangWeights

    engine = Receiver(tmp_path, refuses=True)
    with pytest.raises(RestoreError, match=r"refused step 3 in update_weights.*: no room\."):
        SglangWeights(engine).update(version)
    assert engine.calls == ["begin", "flush", "end"]


def test_a_model_without_files_is_refused_at_once(tmp_path: Path) -> None:
    from ckpt.integrations.sglang import SglangWeights

    with pytest.raises(ConfigError, match="gpt2 is not a folder: give SglangWeights"):
        SglangWeights(Receiver(Path("gpt2")))
    with pytest.raises(ConfigError, match="has no safetensors files"):
        SglangWeights(Receiver(tmp_path))

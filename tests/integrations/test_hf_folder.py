"""``from_pretrained`` of an exported folder gives the model that was saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[hf]'")

import transformers
from safetensors import safe_open
from typer.testing import CliRunner

from ckpt import CheckpointManager
from ckpt.cli.main import app
from tests.kit.worlds import world

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip
CONFIGS: dict[str, Any] = {
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32
    ),
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "llama-tied": lambda: transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "mixtral": lambda: transformers.MixtralConfig(
        **SIZES, num_local_experts=4, num_experts_per_tok=2
    ),
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(
        **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8
    ),
}
INPUT = torch.arange(12).reshape(2, 6)


def export(root: Path, out: Path, *words: str) -> None:
    command = ["export", str(root), str(out), "--format", "hf", *words]
    outcome = CliRunner().invoke(app, command)
    assert outcome.exit_code == 0, outcome.output


@pytest.mark.integration
@pytest.mark.parametrize("names", [(), ("--names", "transformers")], ids=["plain", "transformers"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_logits_are_equal(kind: str, names: tuple[str, ...], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[kind]()).eval()
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(tmp_path / "config")
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save({"model": model}, 1)
    words = ("--config", str(tmp_path / "config"), "--max-shard-size", "20KB", *names)
    export(tmp_path / "run", tmp_path / "out", *words)
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    with torch.no_grad():
        assert torch.equal(loaded.eval()(INPUT).logits, model(INPUT).logits)
    if names:
        model.save_pretrained(tmp_path / "own")
        assert tensors_of(tmp_path / "out") == tensors_of(tmp_path / "own")


@pytest.mark.integration
def test_a_configuration_without_an_architecture_is_refused_with_what_to_add(
    tmp_path: Path,
) -> None:
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS["llama"]())
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save({"model": model}, 1)
    model.config.save_pretrained(tmp_path / "config")
    words = ["export", str(tmp_path / "run"), str(tmp_path / "out"), "--format", "hf"]
    words += ["--config", str(tmp_path / "config"), "--names", "transformers"]
    outcome = CliRunner().invoke(app, words)
    assert outcome.exit_code != 0
    assert '"architectures": ["GPT2LMHeadModel"]' in str(outcome.exception)
    model.save_pretrained(tmp_path / "config")
    assert CliRunner().invoke(app, words).exit_code == 0


@pytest.mark.integration
@pytest.mark.distributed
@pytest.mark.parametrize("layout", ["fsdp2", "tp"])
@pytest.mark.parametrize("names", [(), ("--names", "transformers")], ids=["plain", "transformers"])
def test_shards_of_two_ranks_are_one_model(
    layout: str, names: tuple[str, ...], tmp_path: Path
) -> None:
    config = CONFIGS["llama"]()
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path / "config")
    script = Path(__file__).with_name("workers") / "hf_shards.py"
    world(2, script, tmp_path / "run", tmp_path / "config", layout, imports=["transformers"])
    export(tmp_path / "run", tmp_path / "out", "--config", str(tmp_path / "config"), *names)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        assert torch.equal(loaded(INPUT).logits, model(INPUT).logits)


def tensors_of(folder: Path) -> dict[str, list[int]]:
    """Return the shape of each tensor in the files of a folder."""
    shapes: dict[str, list[int]] = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            shapes |= {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    return shapes

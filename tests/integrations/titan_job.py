"""torchtitan's debug model, trained on a CPU.

torchtitan trains only on accelerators. This module replaces what it needs of one: the device, its
memory, an attention that has a backward pass on CPUs, and a sum instead of a scaled one, which gloo
lacks.
"""

# ruff: noqa: E402 - the device is set before it is imported by name
from __future__ import annotations

import json
import types
from pathlib import Path
from typing import Any

import torch
from torchtitan.tools import utils

utils.device_type = "cpu"
utils.device_module = types.SimpleNamespace(
    current_device=lambda: 0,
    device_count=lambda: 1,
    empty_cache=lambda: None,
    get_device_name=lambda _=None: "cpu",
    get_device_properties=lambda _=None: types.SimpleNamespace(total_memory=1 << 34),
    memory_stats=lambda _=None: {},
    reset_peak_memory_stats=lambda: None,
    set_device=lambda _: None,
    synchronize=lambda *_: None,
)
if not hasattr(torch.distributed, "set_timeout"):  # a public name from torch 2.14 on
    torch.distributed.set_timeout = (  # type: ignore[attr-defined]
        torch.distributed.distributed_c10d._set_pg_timeout
    )

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.distributed.fsdp import FSDPModule
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

Decoder.get_attention_masks = lambda _self, positions: None  # causal, across documents too

TEXTS = Path(__file__).resolve().parents[2] / "docs"


def assets(folder: Path) -> None:
    """Write a tokenizer and a data set, made of the pages of the documentation."""
    texts = [part for page in sorted(TEXTS.glob("*.md")) for part in page.read_text().split("\n\n")]
    (folder / "data").mkdir(parents=True)
    lines = (json.dumps({"text": text}) for text in texts)
    (folder / "data" / "texts.json").write_text("\n".join(lines))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|begin|>", "<|end|>"]
    trainer = trainers.BpeTrainer(vocab_size=2000, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    (folder / "tokenizer").mkdir()
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    begin, end = special
    settings = {"bos_token": begin, "eos_token": end}
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(settings))


def config(folder: Path, checkpoint: Any, *, steps: int) -> Any:
    """Return the configuration of the debug model on the data of ``folder``."""
    found = llama3_debugmodel()
    inner = found.model_spec.model.traverse(FlexAttention.Config)
    for _, _, parent, name in list(inner):
        setattr(parent, name, ScaledDotProductAttention.Config())
    found.hf_assets_path = str(folder / "tokenizer")
    found.dataloader.dataset_path = str(folder / "data")
    found.dump_folder = str(folder)
    found.training.seq_len, found.training.local_batch_size = 64, 2
    found.training.steps, found.lr_scheduler.total_steps = steps, 20
    found.training.disable_cuda_graphs = True
    found.validator.enable = False
    found.debug.seed, found.debug.deterministic = 1, True
    found.parallelism.spmd_backend = "partial_dtensor"
    found.checkpoint = checkpoint
    return found


def trainer(configured: Any) -> Trainer:
    """Return the trainer, before it trains."""
    made = configured.build()
    for part in made.model_parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
    return made


def losses(made: Trainer) -> dict[str, float]:
    """Train, and return the loss of each step."""
    found: dict[str, float] = {}
    log = made.metrics_processor.log

    def keep(step: int, loss: float, *rest: Any, **more: Any) -> None:
        found[str(step)] = loss
        log(step, loss, *rest, **more)

    made.metrics_processor.log = keep
    made.train()
    return found

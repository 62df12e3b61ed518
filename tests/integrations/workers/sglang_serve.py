"""A rollout with SGLang on the CPU: it takes versions of a run, and folders of Hugging Face.

The argument is an empty folder. Prints JSON: what the engine generates after each event, and the
errors that are raised. The model is GPT-2 and there is one worker, since a rotary embedding and the
communication of several workers need packages that are built for CUDA.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import sglang
import torch
import transformers

import ckpt
from ckpt import CheckpointManager, HfFolders
from ckpt.errors import CkptError
from ckpt.integrations.sglang import SglangWeights
from tests.kit.damage import files, flip

PROMPT = [1, 2, 3, 4]
LENGTH = 8
CONFIG = transformers.GPT2Config(
    vocab_size=128,
    n_embd=128,
    n_layer=2,
    n_head=2,
    n_positions=64,
    bos_token_id=0,
    eos_token_id=0,
    initializer_range=0.4,
    architectures=["GPT2LMHeadModel"],
    dtype="float32",
)
NORM = "transformer.ln_f.weight"


def model(seed: int) -> Any:
    """Return a model in bfloat16. The third differs from the second in few words."""
    torch.manual_seed(2 if seed == 3 else seed)
    model = transformers.GPT2LMHeadModel(CONFIG).bfloat16().eval()
    if seed == 3:
        model.transformer.ln_f.weight.data = torch.randn(128).bfloat16()
    return model


def expected(seed: int) -> list[int]:
    with torch.no_grad():
        tokens = (
            model(seed)
            .float()
            .generate(
                torch.tensor([PROMPT]), max_new_tokens=LENGTH, do_sample=False, eos_token_id=None
            )
        )
    return tokens[0, len(PROMPT) :].tolist()


class Rollout:
    """An engine that has started with the weights in a folder."""

    def __init__(self, folder: Path) -> None:
        self.engine = sglang.Engine(
            model_path=str(folder),
            skip_tokenizer_init=True,
            device="cpu",
            dtype="float32",
            attention_backend="torch_native",
            sampling_backend="pytorch",
            disable_cuda_graph=True,
            disable_overlap_schedule=True,
            context_length=32,
            max_total_tokens=256,
            log_level="error",
        )
        self.weights = SglangWeights(self.engine, bucket_bytes=200_000)  # Several, with one alone

    def tokens(self) -> list[int]:
        sampling = {"temperature": 0, "max_new_tokens": LENGTH, "ignore_eos": True}
        (answer,) = self.engine.generate(input_ids=[PROMPT], sampling_params=sampling)
        return list(answer["output_ids"])

    def update(self, versions: Any) -> tuple[str, list[int]]:
        """Take the next version. Return the error, or nothing, and what the engine generates."""
        try:
            self.version = next(versions)
            self.weights.update(self.version)
        except CkptError as error:
            return f"{type(error).__name__}: {error}", self.tokens()
        return "", self.tokens()


def main(folder: Path) -> None:
    root, start, export = folder / "run", folder / "start", folder / "hf"
    model(1).save_pretrained(start)
    facts: dict[str, Any] = {"expected": {seed: expected(seed) for seed in (1, 2, 3, 4)}}
    rollout = Rollout(start)
    facts["start"] = rollout.tokens()
    folders = HfFolders(export, start)
    with (
        CheckpointManager(root, deltas="model") as manager,
        ckpt.follow(root, timeout_seconds=2) as versions,
    ):
        manager.save({"model": model(2)}, step=2)
        facts["first"] = rollout.update(versions)
        manager.save({"model": model(3)}, step=3)
        facts["second"] = rollout.update(versions)
        facts["read"] = rollout.version.read_bytes, rollout.version.nbytes
        manager.save({"model": model(4)}, step=4)
        data = files(root, 4)["data"]
        flip(data, data.stat().st_size // 2)
        facts["damaged"] = rollout.update(versions)
        state = model(4).state_dict()
        strange = {
            "lacks": {name: value for name, value in state.items() if name != NORM},
            "another shape": state | {NORM: torch.ones(64)},
            "beside": state | {"transformer.head.weight": torch.ones(3)},
            "no tensor": state | {"steps": 3},
        }
        for step, (event, weights) in enumerate(strange.items(), 5):
            manager.save({"model": weights}, step=step)
            facts[event] = rollout.update(versions)
    with CheckpointManager(root, observers=[folders]) as manager, folders:
        manager.save({"model": model(4)}, step=9)
    answer = rollout.engine.update_weights_from_disk(str(export / "step-000000009"))
    facts["folder"] = answer[0], rollout.tokens()
    rollout.engine.shutdown()
    print("FACTS", json.dumps(facts))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

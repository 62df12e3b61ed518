"""Updates by verl's own actor, which trains a small model with FSDP2 on two ranks on the CPU.

The arguments are the root and an empty folder. Prints JSON: for each update, whether each rollout
has the weights of the actor, and whether a step of the optimizer has changed them. At last, whether
the weights are again those of the step that verl has saved and loaded.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
import torch
import transformers
from hydra import compose, initialize_config_module
from tensordict import TensorDict
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from verl.checkpoint_engine import CheckpointEngineManager
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils import tensordict_utils
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.engine_workers import ActorRolloutRefWorker

from tests.integrations.workers.verl_cpu import join_group
from tests.integrations.workers.verl_update import CPUS, MODULE, Replica, Rollout, group

SEQUENCES, PROMPT, ANSWER, WORDS = 4, 3, 5, 128


class Actor(ActorRolloutRefWorker):  # type: ignore[misc, unused-ignore]
    def __init__(self, config: Any) -> None:
        join_group()
        super().__init__(config, "actor")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def weights(self) -> dict[str, torch.Tensor]:
        tensors, _ = self.actor.engine.get_per_tensor_param()
        return {name: tensor.cpu().clone() for name, tensor in tensors}


def save_model(folder: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer = Tokenizer(WordLevel({"a": 0, "end": 1}, "a"))
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="end", pad_token="end"
    ).save_pretrained(folder)


def settings(model: Path, root: str) -> Any:
    """Return the configuration of verl's trainer, for the actor and the rollouts."""
    values: dict[str, Any] = {
        "model.path": model,
        "model.use_remove_padding": False,
        "+model.override_config.attn_implementation": "eager",
        "actor.strategy": "fsdp2",
        "actor.optim.lr": 0.01,
        "actor.ppo_mini_batch_size": SEQUENCES,
        "actor.ppo_micro_batch_size_per_gpu": 1,
        "actor.fsdp_config.use_torch_compile": False,
        "rollout.name": "vllm",
        "rollout.log_prob_micro_batch_size_per_gpu": 1,
        "rollout.checkpoint_engine.backend": "ckpt",
        "rollout.checkpoint_engine.custom_backend_module": MODULE,
        "+rollout.checkpoint_engine.engine_kwargs.ckpt.root": root,
    }
    overrides = [
        f"{name[: name.startswith('+')]}actor_rollout_ref.{name.removeprefix('+')}={value}"
        for name, value in values.items()
    ]
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides).actor_rollout_ref


def batch(seed: int) -> TensorDict:
    """Return answers with their advantages, as the trainer of verl gives them to the actor."""
    generator = torch.Generator().manual_seed(seed)

    def nested(length: int, make: Any) -> torch.Tensor:
        rows = [make(length) for _ in range(SEQUENCES)]
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

    def words(length: int) -> torch.Tensor:
        return torch.randint(2, WORDS, (length,), generator=generator)

    tensors = {
        "input_ids": nested(PROMPT + ANSWER, words),
        "position_ids": nested(PROMPT + ANSWER, torch.arange),
        "prompts": nested(PROMPT, words),
        "responses": nested(ANSWER, words),
        "response_mask": nested(ANSWER, torch.ones),
        "loss_mask": nested(ANSWER, torch.ones),
        "old_log_probs": nested(ANSWER, lambda length: torch.full((length,), -5.0)),
        "advantages": nested(ANSWER, lambda length: torch.randn(length, generator=generator)),
    }
    data = TensorDict(tensors, batch_size=SEQUENCES)
    tensordict_utils.assign_non_tensor(
        data,
        temperature=1.0,
        global_batch_size=SEQUENCES,
        mini_batch_size=SEQUENCES,
        epochs=1,
        seed=seed,
        compute_loss=True,
    )
    return data


def same(weights: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return weights.keys() == other.keys() and all(
        torch.equal(value, other[name]) for name, value in weights.items()
    )


def main(root: str, folder: Path) -> None:
    save_model(folder)
    config = settings(folder, root)
    ray.init(num_cpus=CPUS, include_dashboard=False)
    actors = group("actors", Actor, config)
    actors.init_model()
    engine = omega_conf_to_dataclass(config.rollout.checkpoint_engine)
    rollouts = group(
        "rollouts", Rollout, SimpleNamespace(name="vllm", mode="async", checkpoint_engine=engine)
    )
    manager = CheckpointEngineManager(engine, actors, [Replica(rollouts.workers)])
    facts: list[list[bool]] = []

    def update(step: int) -> dict[str, torch.Tensor]:
        weights: dict[str, torch.Tensor] = actors.weights()[0]
        manager.update_weights(global_steps=step)
        facts.append([same(weights, other) for other in rollouts.weights()])
        return weights

    history = [update(0)]
    for step in (1, 2):
        actors.update_actor(batch(step))
        history.append(update(step))
        facts[-1].append(not same(history[-1], history[-2]))
        if step == 1:
            actors.save_checkpoint(str(folder / "save"), global_step=step)
    actors.load_checkpoint(str(folder / "save"))
    facts.append([same(update(1), history[1])])
    print("FACTS", json.dumps(facts))
    ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))

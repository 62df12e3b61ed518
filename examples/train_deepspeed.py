"""Teach a small network to read scikit-learn's digits with DeepSpeed's ZeRO 2; kill it, and the
next run goes on.

    DS_ACCELERATOR=cpu torchrun --standalone --nproc-per-node=2 examples/train_deepspeed.py

It keeps ``engine.save_checkpoint`` and ``engine.load_checkpoint``, through which `CkptEngine` saves
and loads. The position in the data is in the ``client_state``.
"""

import argparse
import hashlib
from typing import Any

import deepspeed
import torch
from torch import distributed as dist
from torch import nn
from torch.utils.data import DataLoader
from train_digits import digits

from ckpt.data import ElasticSampler
from ckpt.integrations.deepspeed import CkptEngine


def network() -> nn.Module:
    """Return a network from (batch, 1, 8, 8) to ten logits."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 10)
    )


def configuration(batch: int) -> dict[str, Any]:
    """Return DeepSpeed's configuration for so many images per rank."""
    return {
        "train_micro_batch_size_per_gpu": batch,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-3, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 20}},
    }


def main() -> None:
    """Continue from the newest checkpoint, train, and print the accuracy."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--root", default="runs/deepspeed", help="folder of the checkpoints")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=32, help="images per rank")
    parser.add_argument("--save-every", type=int, default=10, help="steps")
    args = parser.parse_args()
    torch.use_deterministic_algorithms(True)
    deepspeed.utils.set_log_level_from_string("error")
    deepspeed.init_distributed()

    train_set, test_images, test_labels = digits()
    sampler = ElasticSampler(train_set, seed=1)
    loader = DataLoader(train_set, args.batch, sampler=sampler, drop_last=True)
    torch.manual_seed(1)
    model = network()
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=configuration(args.batch)
    )
    engine.checkpoint_engine = CkptEngine(engine, args.root)
    folder, client_state = engine.load_checkpoint(args.root)
    if folder is not None:
        sampler.load_state_dict(client_state["data"])
        if dist.get_rank() == 0:
            print(f"resumed from step {engine.global_steps}: epoch {sampler.epoch}", flush=True)

    criterion = nn.CrossEntropyLoss()
    while sampler.epoch < args.epochs:
        for images, labels in sampler.batches(loader):
            logits = engine(images.to(engine.device, torch.bfloat16))
            loss = criterion(logits.float(), labels.to(engine.device))
            engine.backward(loss)
            engine.step()
            if dist.get_rank() == 0:
                print(f"step {engine.global_steps:4d}  loss {loss.item():.9f}", flush=True)
            if engine.global_steps % args.save_every == 0:
                engine.save_checkpoint(args.root, client_state={"data": sampler.state_dict()})

    with torch.no_grad():
        logits = engine.module(test_images.to(engine.device, torch.bfloat16))
    right = (logits.argmax(1).cpu() == test_labels).sum().item()
    weights = b"".join(
        value.float().cpu().numpy().tobytes() for value in engine.module.state_dict().values()
    )
    fingerprint = hashlib.sha256(weights).hexdigest()[:16]
    if dist.get_rank() == 0:
        print(f"accuracy {right / len(test_labels):.4f}  weights {fingerprint}", flush=True)
    engine.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

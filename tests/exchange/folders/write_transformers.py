"""Write a model of transformers with ``save_pretrained`` into OUT/state."""

from __future__ import annotations

import os
import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from tests.exchange.folders.net import write_truth


def main(out: str) -> None:
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2,
        n_embd=8,
        n_head=2,
        vocab_size=16,
        n_positions=8,
        tie_word_embeddings=False,
    )
    net = GPT2LMHeadModel(config)
    net.save_pretrained(os.path.join(out, "state"), max_shard_size="2KB")
    write_truth(out, net, None)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""A small model with all that is awkward under ZeRO.

It has uneven sizes, a tied weight, a part that is not trained, a parameter of a single element, a
buffer that differs between ranks, and three parameter groups.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import cross_entropy

WORDS, WIDTH, BATCH = 11, 7, 12  # the batch divides among 1, 2 and 3 ranks


class Net(nn.Module):
    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.up = nn.Linear(WIDTH, 13)
        self.fixed = nn.Linear(13, 13).requires_grad_(False)
        self.down = nn.Linear(13, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.cube = nn.Parameter(torch.randn(3, 5, 2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        self.seen += words.float().mean()
        inner = self.embed(words) * self.gain
        inner = inner + self.down(self.fixed(torch.tanh(self.up(inner))))
        return self.head(self.norm(inner)) + self.cube.mean()


def build(seed: int, **options: object) -> tuple[Net, torch.optim.AdamW]:
    """Return weights by ``seed``, and an optimizer that decays only matrices."""
    torch.manual_seed(seed)
    net = Net()
    free = [p for p in net.parameters() if p.requires_grad]
    decayed = [p for p in free if p.ndim > 1]
    others = [p for p in free if p.ndim < 2 and p is not net.gain]
    groups = [
        {"params": decayed, "weight_decay": 0.1},
        # all ranks but one have only padding of it
        {"params": [net.gain], "weight_decay": 0.01},
        {"params": others, "weight_decay": 0.0},
    ]
    return net, torch.optim.AdamW(groups, lr=0.01, **options)  # type: ignore[arg-type]


def batch(step: int, rank: int, world: int) -> torch.Tensor:
    """Return this rank's part of one batch for all."""
    words = torch.randint(0, WORDS, (BATCH, 5), generator=torch.Generator().manual_seed(step))
    return words[rank * BATCH // world : (rank + 1) * BATCH // world]


def loss_of(output: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    return cross_entropy(output.float().flatten(0, 1), words.flatten())

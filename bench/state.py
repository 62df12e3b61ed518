"""What is saved: a small GPT under AdamW, sized by the bytes of its state, or bare tensors; and
how a copy of it is compared.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

VOCABULARY: Final = 256
HEAD_WIDTH: Final = 32
CONTEXT: Final = 32
_BYTES_PER_PARAMETER: Final = 12  # float32: the weight and AdamW's two moments
_SPOILED: Final = -7


class Subject(Protocol):
    """What is saved. Its tensors can be asked for without any contender's code."""

    step: int

    def objects(self) -> dict[str, Any]:
        """The live objects under their names, as a training script holds them."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Nested dicts of live tensors and plain values with canonical names.

        Each call makes a new one, so the cost is part of the save.
        """
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put what was loaded, of the form of ``state_dict()``, into the live objects."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor of the state, sorted by name, without a copy."""
        ...

    def values(self) -> Any:
        """Everything in the state that is no tensor, as JSON would give it back."""
        ...

    def spoil(self) -> None:
        """Overwrite everything with what was never saved, so that a load that skips something is
        found out.
        """
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        ...


@dataclass
class Raw:
    """Tensors and a step, nothing else: the form of a state without the rest of a training."""

    named: dict[str, Tensor]
    step: int = 0

    @classmethod
    def make(cls, size_bytes: int, count: int, seed: int, prefix: str = "tensor") -> Raw:
        """``count`` float32 tensors of together ``size_bytes``, no two alike.

        Ranks that hold each their own take different prefixes.
        """
        base, larger = divmod(size_bytes // 4, count)
        random = torch.rand(base + 1, generator=torch.Generator().manual_seed(seed)) + 1
        return cls(
            {f"{prefix}.{n:05}": random[: base + (n < larger)] * (n + 1) for n in range(count)}
        )

    def objects(self) -> dict[str, Any]:
        return {"tensors": self.named, "step": self.step}

    def state_dict(self) -> dict[str, Any]:
        return {"tensors": dict(self.named), "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, tensor in self.named.items():
            if (loaded := state["tensors"][name]) is not tensor:
                tensor.copy_(loaded)
        self.step = state["step"]

    def tensors(self) -> dict[str, Tensor]:
        return dict(sorted(self.named.items()))

    def values(self) -> Any:
        return {"step": self.step}

    def spoil(self) -> None:
        for tensor in self.named.values():
            tensor.fill_(_SPOILED)
        self.step = _SPOILED

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.named.values())


class Block(nn.Module):
    """Causal self-attention and an MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            self.qkv(self.attention_norm(x))
            .unflatten(-1, (3, -1, HEAD_WIDTH))
            .transpose(1, 3)
            .unbind(2)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).flatten(2))
        return cast(Tensor, x + self.down(F.gelu(self.up(self.mlp_norm(x)))))


class GPT(nn.Module):
    """A decoder-only transformer over bytes with a tied head; returns the loss."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, text: Tensor) -> Tensor:
        inputs, targets = text[:, :-1], text[:, 1:]
        x = self.tokens(inputs) + self.positions(torch.arange(inputs.shape[1]).to(inputs.device))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def width_for(size_bytes: int, layers: int) -> int:
    """The width, a multiple of the head's, at which the AdamW state comes nearest to
    ``size_bytes``.
    """
    a, b = 12 * layers, 13 * layers + VOCABULARY + CONTEXT + 2
    width = (math.sqrt(b * b + 4 * a * size_bytes / _BYTES_PER_PARAMETER) - b) / (2 * a)
    return max(1, round(width / HEAD_WIDTH)) * HEAD_WIDTH


@dataclass
class Training:
    """A model, its optimizer and a step counter: the state that every contender saves.

    One torch thread computes.
    """

    model: GPT
    optimizer: torch.optim.AdamW
    batch: int
    step: int = 0
    generator: torch.Generator = field(default_factory=torch.Generator)

    @classmethod
    def make(cls, size_bytes: int, layers: int, batch: int, seed: int) -> Training:
        torch.manual_seed(seed)
        model = GPT(layers, width_for(size_bytes, layers))
        training = cls(model, torch.optim.AdamW(model.parameters(), lr=1e-4), batch)
        training.generator.manual_seed(seed)
        training.forward_backward()
        training.optimizer_step()
        return training

    def forward_backward(self) -> None:
        text = torch.randint(VOCABULARY, (self.batch, CONTEXT + 1), generator=self.generator)
        self.model(text).backward()

    def optimizer_step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1

    def objects(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "step": self.step}

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.step = state["step"]

    def tensors(self) -> dict[str, Tensor]:
        """Asks torch's own attributes only, no contender's adapters."""
        found: dict[str, Tensor] = {f"model.{k}": v for k, v in self.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state[parameter].items():
                found[f"optimizer.{name}.{key}"] = value
        return dict(sorted(found.items()))

    def values(self) -> Any:
        groups = [
            {k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups
        ]
        return json.loads(json.dumps({"groups": groups, "step": self.step}))

    def spoil(self) -> None:
        with torch.no_grad():
            for tensor in self.tensors().values():
                tensor.fill_(_SPOILED)
        for group in self.optimizer.param_groups:
            group["lr"] = float(_SPOILED)
        self.step = _SPOILED

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors().values())


class Reference:
    """The state at the moment of the save, in shared memory: written by the process that saves,
    compared by the one that loads.

    One file serves all contenders, as only one of them runs at a time.
    """

    def __init__(self, path: str, nbytes: int) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, nbytes)
            self._memory = torch.frombuffer(mmap.mmap(descriptor, nbytes), dtype=torch.uint8)
        finally:
            os.close(descriptor)

    def take(self, subject: Subject) -> None:
        for tensor, kept in self._pairs(subject):
            kept.copy_(tensor.detach().reshape(-1).view(torch.uint8))

    def differences(self, subject: Subject) -> list[str]:
        """Names of the tensors that are not, bit for bit, what was taken."""
        names = list(subject.tensors())
        pairs = self._pairs(subject)
        return [
            name
            for name, (tensor, kept) in zip(names, pairs, strict=True)
            if not torch.equal(tensor.detach().reshape(-1).view(torch.uint8), kept)
        ]

    def _pairs(self, subject: Subject) -> list[tuple[Tensor, Tensor]]:
        pairs, start = [], 0
        for tensor in subject.tensors().values():
            pairs.append((tensor, self._memory[start : start + tensor.nbytes]))
            start += tensor.nbytes
        return pairs

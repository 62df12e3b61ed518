"""Wrappers as quantisation libraries make them, and an optimizer that keeps its state in them."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

BLOCK = 4
_aten = torch.ops.aten


class Dispatching(torch.Tensor):
    """A tensor whose operations all pass through ``__torch_dispatch__``."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError(f"{func} of a {cls.__name__}")


class Blocks(Dispatching):
    """Codes of 8 bits, a scale for each block of ``BLOCK`` elements, and a table for all.

    Operations see floats. ``x[a:b]`` cuts at the boundaries of blocks.
    """

    @staticmethod
    def __new__(
        cls, codes: torch.Tensor, scale: torch.Tensor, table: torch.Tensor, signed: Any = True
    ) -> Blocks:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(
        self, codes: torch.Tensor, scale: torch.Tensor, table: torch.Tensor, signed: Any = True
    ) -> None:
        self.codes, self.scale, self.table, self.signed = codes, scale, table, signed

    @classmethod
    def of(cls, values: torch.Tensor, signed: Any = True) -> Blocks:
        made = cls.zeros(tuple(values.shape), signed)
        made.set_values(values)
        return made

    @classmethod
    def zeros(cls, shape: tuple[int, ...], signed: Any = True) -> Blocks:
        codes = torch.zeros(shape, dtype=torch.int8)
        return cls(codes, torch.ones(codes.numel() // BLOCK), torch.arange(4.0), signed)

    def set_values(self, values: torch.Tensor) -> None:
        blocks = values.reshape(-1, BLOCK)
        scale = blocks.abs().amax(1).clamp(min=1e-6) / 127
        self.codes.copy_((blocks / scale[:, None]).round().reshape(self.codes.shape))
        self.scale.copy_(scale)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Blocks({self.codes}, {self.scale})"

    def floats(self) -> torch.Tensor:
        blocks = self.codes.reshape(-1, BLOCK).float() * self.scale[:, None]
        return blocks.reshape(self.codes.shape)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale", "table"], {"signed": self.signed, "shape": self.codes.shape}

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        first = args[0]
        match func:
            case _aten.detach.default | _aten.alias.default:
                return cls(first.codes, first.scale, first.table, first.signed)
            case _aten.view.default:
                return cls(first.codes.view(args[1]), first.scale, first.table, first.signed)
            case _aten.slice.Tensor:
                _, dim, start, end = args[:4]
                row = first[0].numel() if first.ndim == 1 else first.codes[0].numel()
                if dim or start * row % BLOCK or end * row % BLOCK:
                    raise ValueError("not at the boundary of a block")
                scale = first.scale[start * row // BLOCK : end * row // BLOCK]
                return cls(first.codes[start:end], scale, first.table.clone(), first.signed)
            case _aten.copy_.default if isinstance(first, cls):
                source = args[1]
                first.set_values(source.floats() if isinstance(source, cls) else source)
                return first
            case _:
                seen = [each.floats() if isinstance(each, cls) else each for each in args]
                out = func(*seen, **(kwargs or {}))
                if func._schema.is_mutable and isinstance(first, cls):
                    first.set_values(out)
                    return first
                return out


class Quantised(Optimizer):
    """An optimizer with momentum in ``Blocks``. With ``replaces`` a step puts new tensors into
    them.
    """

    def __init__(self, parameters: Any, lr: float = 0.1, *, replaces: bool = False) -> None:
        super().__init__(parameters, {"lr": lr})
        self.replaces = replaces

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state["moment"] = Blocks.zeros(tuple(parameter.shape))
                state["step"] += 1
                moment = state["moment"]
                now = moment.floats() * 0.9 + parameter.grad
                if self.replaces:
                    moment.codes, moment.scale = moment.codes.clone(), moment.scale.clone()
                moment.copy_(now)
                parameter.sub_(now, alpha=group["lr"])

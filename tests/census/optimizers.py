"""The optimizers of the census, and how each of them is built."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, Final

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

Params = Iterable[Any]
Build = Callable[[Params], Optimizer]

PACKAGES: Final = (
    "torch.optim",
    "pytorch_optimizer",
    "schedulefree",
    "timm",
    "bitsandbytes",
    "heavyball",
    "torchao",
)
BASES: Final = {"torchao": ("_AdamW",), "heavyball": ("PSGDBase", "SOAPBase", "SplitOpt")}
"""Classes that are no optimizers by themselves."""


@dataclass(frozen=True)
class Entry:
    """An optimizer, and the function that builds it over parameters."""

    package: str
    name: str
    build: Build


def entries(package: str) -> list[Entry]:
    """Return the optimizers of an installed package, by name."""
    builds = {"pytorch_optimizer": _pytorch_optimizer, "timm": _timm}.get(package)
    named = builds() if builds else _classes(package)
    return [Entry(package, name, build) for name, build in sorted(named)]


def _classes(package: str) -> Iterator[tuple[str, Build]]:
    module = "torchao.optim" if package == "torchao" else package
    module = "bitsandbytes.optim" if package == "bitsandbytes" else module
    for name, value in vars(_imported(module)).items():
        if _is_optimizer(value) and name not in BASES.get(package, ()):
            yield name, partial(_made, value)


def _imported(name: str) -> Any:
    found = import_module(name)
    if name == "heavyball":
        found.utils.compile_mode = None  # The census runs without a compiler
    return found


def _pytorch_optimizer() -> Iterator[tuple[str, Build]]:
    package = import_module("pytorch_optimizer")
    for name in package.get_supported_optimizers():
        if not name.startswith("bnb"):
            yield (cls := package.load_optimizer(name)).__name__, partial(_made, cls)
    for name in ("Lookahead", "OrthoGrad", "ScheduleFreeWrapper", "TRAC"):
        yield f"{name}(AdamW)", partial(_around, getattr(package, name))
    for name in ("FriendlySAM", "GSAM", "LookSAM", "SAM", "WSAM"):
        yield f"{name}(AdamW)", partial(_based, getattr(package, name))


def _timm() -> Iterator[tuple[str, Build]]:
    """timm imports torchvision for its models. The build of torchvision on the index is for CUDA,
    and lacks its operators on a machine without it.
    """
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    with suppress(ImportError):
        import_module("torchvision")
    timm = import_module("timm.optim")
    sys.modules["tests.census.library"] = library  # type: ignore[assignment] # It must not end
    for name in timm.list_optimizers():
        yield name, partial(timm.create_optimizer_v2, opt=name, lr=1e-3)


def _is_optimizer(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, Optimizer) and value is not Optimizer


def _made(cls: Any, params: Params) -> Optimizer:
    takes_lr = "lr" in inspect.signature(cls).parameters
    made: Optimizer = cls(params, lr=1e-3) if takes_lr else cls(params)
    return made


def _around(cls: Any, params: Params) -> Optimizer:
    made: Optimizer = cls(AdamW(params, lr=1e-3))
    return made


def _based(cls: Any, params: Params) -> Optimizer:
    made: Optimizer = cls(params, base_optimizer=AdamW, lr=1e-3)
    return made


# -- what an optimizer takes -----------------------------------------------------------------------


def whole(model: nn.Module) -> Params:
    """Return all parameters."""
    return list(model.parameters())


def by_use(model: nn.Module) -> Params:
    """Return two groups, as Muon of many packages takes them."""
    return [
        {"params": [p for p in model.parameters() if (p.ndim == 2) is uses], "use_muon": uses}
        for uses in (True, False)
    ]


def matrices(model: nn.Module) -> Params:
    """Return the parameters of two dimensions."""
    return [p for p in model.parameters() if p.ndim == 2]


def itself(model: nn.Module) -> Params:
    """Return the model, as some optimizers take it."""
    return model  # type: ignore[return-value]


TAKEN: Final = {"all": whole, "groups": by_use, "matrices": matrices, "model": itself}

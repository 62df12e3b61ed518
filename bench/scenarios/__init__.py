"""What is measured, one file each.

A scenario is a module with ``Options``, ``QUICK``, ``run`` and ``plot``, and one row of ``ALL``.
"""

from __future__ import annotations

import importlib
from dataclasses import field
from typing import Any, Final, Protocol, cast

from bench.result import Result
from bench.runner import Bench


class Scenario(Protocol):
    """The module of a scenario.

    ``Options`` is a frozen dataclass whose fields become words of the command line; ``QUICK`` one
    of a smoke run.
    """

    Options: Any
    QUICK: Any

    def run(self, bench: Bench, options: Any) -> Result: ...
    def plot(self, result: Result, path: str) -> None: ...


ALL: Final[dict[str, str]] = {
    "raw": "bare tensors of 1 and 4 GiB, nothing overlaps: until safe to change, until durable",
    "small": "thousands of small tensors: what each of them costs",
    "train": "a training loop: stall, drag, durable, memory",
    "restore": "load a checkpoint into live tensors, cold and warm",
    "ranks": "2 and 4 ranks under torchrun, FSDP2 shards",
    "replicas": "2 and 4 ranks restore the same state: each reads all, or one reads for all",
    "growth": "64 MiB to 8 GiB: how each grows",
    "soak": "200 saves: memory, descriptors, threads",
    "codec": "a trained model's weights and moments through a codec: how much shorter, how fast",
    "every": "a save every step: how much slower training is",
    "objects": "a real S3 server: our client and others",
    "far": "a far tier that is slow, or down for a minute: what the near one notices",
    "timeline": "one save as a picture: what each thread does, and when",
    "device": "a bf16 training on an accelerator: copies, CPU time, stall and drag",
    "scale": "simulated worlds of up to 16,384 ranks: plans, fragments, merge, manifest, words",
}

ALONE: Final = frozenset({"device", "timeline"})
"""Not part of ``all``: `device` needs a machine of its own, and `timeline` compares nothing."""


def load(name: str) -> Scenario:
    return cast(Scenario, importlib.import_module(f"bench.scenarios.{name}"))


def option(default: Any, words: str) -> Any:
    """A field of ``Options`` with its line of help."""
    return field(default=default, metadata={"help": words})

"""Measure how long the call of ``save_async`` takes, and what of it is waiting for memory.

    python -m bench.save_call [--layers 12] [--width 128] [--rounds 21]

The state is a GPT under AdamW: about 12 parameters for each layer, and four tensors for each
parameter. Each contender saves in turn. In one kind of round a training step and a pass over 64 MiB
come before the call, so that the processor's caches hold nothing of the state's objects. In the
other kind a save of the same state comes right before. The difference is the time for which the
call waits for memory. The copies of parameters and optimizer state are no part of the call.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Mapping
from typing import Final

import torch

from bench.contenders import Contender
from bench.contenders.ours import CkptSaveAsync
from bench.contenders.torch_checkpointing import TorchCheckpointing
from bench.state import GPT, Training

_SWEEP_BYTES: Final = 64 << 20
_KINDS: Final = ("after a training step", "after a save")


def main() -> None:
    """Save in turn, and print the medians, the lowest and the highest."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=21, help="calls of each kind")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("ckpt").setLevel(logging.ERROR)  # It warns that nothing was trained meanwhile
    model = GPT(args.layers, args.width)
    training = Training(model, torch.optim.AdamW(model.parameters(), lr=1e-4), batch=2)
    _train(training)
    parameters = len(list(model.parameters()))
    print(f"{parameters} parameters, {4 * parameters} tensors, load {os.getloadavg()[0]:.1f}")
    contenders: Mapping[str, Contender] = {
        "ckpt save_async": CkptSaveAsync(),
        "torch_checkpointing": TorchCheckpointing(),
    }
    with tempfile.TemporaryDirectory(dir=".") as folder:
        seconds = _measure(contenders, training, folder, args.rounds)
    for (name, kind), found in seconds.items():
        middle, low, high = (1e3 * each for each in (statistics.median(found), found[0], found[-1]))
        print(f"{name:20} {kind:22} {middle:6.2f} ms ({low:.2f} to {high:.2f})")


def _train(training: Training) -> None:
    training.forward_backward()
    training.optimizer_step()


def _measure(
    contenders: Mapping[str, Contender], training: Training, folder: str, rounds: int
) -> dict[tuple[str, str], list[float]]:
    """Return the sorted seconds of the calls, by contender and kind. First calls do not count."""
    sweep = torch.zeros(_SWEEP_BYTES, dtype=torch.uint8)
    found = {(name, kind): list[float]() for name in contenders for kind in _KINDS}
    for name, contender in contenders.items():
        contender.prepare(training, os.path.join(folder, name))
    for round_ in range(rounds + 1):
        for name, contender in contenders.items():
            for number, kind in enumerate(_KINDS):
                if number == 0:
                    _train(training)
                    sweep += 1
                began = time.perf_counter()
                handle = contender.save(len(_KINDS) * round_ + number)
                seconds = time.perf_counter() - began
                contender.wait_safe(handle)
                contender.wait_durable(handle)
                if round_:
                    found[name, kind].append(seconds)
    for contender in contenders.values():
        contender.close()
    return {key: sorted(values) for key, values in found.items()}


if __name__ == "__main__":
    main()

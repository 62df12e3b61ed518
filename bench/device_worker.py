"""One contender on an accelerator, in a process of its own: ``python -m bench.device_worker
'{...}'`` prints one line of JSON.

Every step ends when the device has done it, so that what the device waits for is in the step's
time. Without an accelerator the CPU takes its place: then the numbers mean nothing, but every line
has been run.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from bench import contenders
from bench.contenders import Contender, Handle
from bench.state import CONTEXT, GPT, VOCABULARY, Training, width_for

_WARM_STEPS = 3
_IDLE_SAVES = 2


def place() -> torch.device:
    found = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cpu") if found is None else torch.device(found.type, 0)


def wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


class DeviceTraining(Training):
    """In bfloat16 throughout, weights and moments."""

    @classmethod
    def make(cls, size_bytes: int, layers: int, batch: int, seed: int) -> DeviceTraining:
        torch.manual_seed(seed)
        device = place()
        with torch.device(device):
            model = GPT(layers, width_for(2 * size_bytes, layers)).to(torch.bfloat16)
        # other accelerators need not have the kernels that step all parameters at once
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=device.type == "cuda")
        training = cls(model, optimizer, batch)
        training.generator.manual_seed(seed)
        for _ in range(_WARM_STEPS):
            training.whole_step()
        return training

    def forward_backward(self) -> None:
        # a simulated one has few kernels
        if place().type == torch._C._get_privateuse1_backend_name():
            for parameter in self.model.parameters():
                parameter.grad = torch.ones_like(parameter)
            return
        text = torch.randint(VOCABULARY, (self.batch, CONTEXT + 1), generator=self.generator)
        self.model(text.to(place())).backward()

    def whole_step(self) -> float:
        began = time.perf_counter()
        self.forward_backward()
        self.optimizer_step()
        wait(place())
        return time.perf_counter() - began


class Clock:
    """Wall and CPU seconds of one call on this thread."""

    def __init__(self, call: Callable[[], Any]) -> None:
        began, worked = time.perf_counter(), time.thread_time()
        self.result = call()
        self.seconds, self.cpu_seconds = time.perf_counter() - began, time.thread_time() - worked


def one_save(
    training: DeviceTraining, contender: Contender, step: int, clean: int
) -> dict[str, Any]:
    """A save in the training loop. The steps until it is durable are beside it."""
    alone = [training.whole_step() for _ in range(clean)]
    training.forward_backward()
    alone_step = Clock(training.optimizer_step)
    wait(place())
    began = time.perf_counter()
    call = Clock(lambda: contender.save(step))
    handle: Handle = call.result
    ended: list[float] = []

    def finish() -> None:
        contender.wait_durable(handle)
        ended.append(time.perf_counter())

    finisher = threading.Thread(target=finish)
    finisher.start()
    first = time.perf_counter()
    training.forward_backward()
    safe = Clock(lambda: contender.wait_safe(handle))
    hook = Clock(training.optimizer_step)
    wait(place())
    beside = [time.perf_counter() - first - safe.seconds]
    while finisher.is_alive():
        beside.append(training.whole_step())
    finisher.join()
    if not ended:
        raise RuntimeError(f"step {step} did not become durable")
    return {
        "stall_seconds": call.seconds + safe.seconds,
        "drag_seconds": sum(beside) - len(beside) * median(alone),
        "call_seconds": call.seconds,
        "call_cpu_seconds": call.cpu_seconds,
        "hook_cpu_seconds": hook.cpu_seconds - alone_step.cpu_seconds,
        "hook_seconds": hook.seconds - alone_step.seconds,
        "durable_seconds": ended[0] - began,
        "clean_step_seconds": median(alone),
        "first_step_seconds": beside[0],
        "path": handle.path,
    }


def idle_save(contender: Contender, step: int) -> dict[str, Any]:
    """Nothing else runs: how long until the state may change."""
    wait(place())
    began = time.perf_counter()
    handle = contender.save(step)
    contender.wait_safe(handle)
    if (payload := handle.payload) is not None and hasattr(payload, "wait_staged"):
        payload.wait_staged()
    safe = time.perf_counter() - began
    contender.wait_durable(handle)
    return {"idle_safe_seconds": safe, "path": handle.path}


def plain_copies(nbytes: int, count: int) -> list[float]:
    """Bytes per second of a copy from the device into page-locked memory, as large as memory
    allows without a fuss.
    """
    device = place()
    size = min(nbytes, 2 << 30)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    rates = []
    for _ in range(count + 1):
        wait(device)
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        wait(device)
        rates.append(size / (time.perf_counter() - began))
    return rates[1:]


def is_equal(training: DeviceTraining, contender: Contender, path: str) -> bool:
    """Whether the checkpoint gives back what the state is now, bit for bit."""
    expected = {name: tensor.detach().clone() for name, tensor in training.tensors().items()}
    values = training.values()
    training.spoil()
    contender.load_back(path, training)
    wait(place())
    found = training.tensors()
    same = [torch.equal(_bits(found[name]), _bits(tensor)) for name, tensor in expected.items()]
    return all(same) and training.values() == values


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().reshape(-1).view(torch.uint8)


def measure(plan: dict[str, Any]) -> dict[str, Any]:
    until = time.monotonic() + plan["seconds"]
    training = DeviceTraining.make(plan["size"], plan["layers"], plan["batch"], seed=1)
    rates = plain_copies(training.nbytes, 3)
    contender = contenders.make(plan["name"])
    contender.prepare(training, plan["folder"])
    saves: list[dict[str, Any]] = []
    idle: list[dict[str, Any]] = []
    try:
        for number in range(plan["repeats"] + 1):
            if number > 1 and time.monotonic() > until:
                break
            saves.append(one_save(training, contender, number + 1, plan["clean"]))
            _remove(saves[-1]["path"])
        for number in range(_IDLE_SAVES):
            training.whole_step()
            idle.append(idle_save(contender, 1000 + number))
            if number < _IDLE_SAVES - 1:
                _remove(idle[-1]["path"])
        equal = is_equal(training, contender, idle[-1]["path"])
    finally:
        contender.close()
    return {
        "saves": saves,
        "idle": idle,
        "plain_bytes_per_second": rates,
        "nbytes": training.nbytes,
        "tensors": len(training.tensors()),
        "equal": equal,
        "device": _name(),
    }


def _remove(path: str) -> None:
    """A peer's checkpoint; ours is removed with the folder, since a manager knows its steps."""
    if os.path.basename(path).startswith("step-"):
        shutil.rmtree(path, ignore_errors=True)


def _name() -> str:
    device = place()
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type}, no GPU"


def main() -> None:
    if module := os.environ.get("CKPT_TEST_DEVICE_MODULE"):
        importlib.import_module(module)
    print(json.dumps(measure(json.loads(sys.argv[1]))), flush=True)


if __name__ == "__main__":
    main()

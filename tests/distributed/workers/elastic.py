"""FOLDER STEPS [PLAN [reference]]: one rank of a job that dies and comes back.

PLAN is JSON: for each life (torchrun's count of restarts), which rank ends in which way. With
``reference`` the rank trains the same once more at the end, uninterrupted.

Every rank notes what it sees in FOLDER/notes-RANK.jsonl, which outlives it.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ckpt import CheckpointManager, PerRank
from ckpt.coordination.torch_store import TorchStoreCoordinator
from ckpt.errors import CommitTimeout
from ckpt.storage.testing import FaultyBackend, LoseReply, Raise, Rule
from tests.kit.signals import stop_this_process
from tests.kit.stores import wrap_stores

SAVE_EVERY = 2
SETTINGS: dict[str, Any] = {"chunk_size": 1 << 14, "commit_timeout_seconds": 60}


class Trainer:
    """Two networks, one under FSDP2 and one under DDP, that are trained side by side.

    All that they do depends only on the step.
    """

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.sharded, inner = make_net(), make_net()
        fully_shard(self.sharded)
        self.replicated = DistributedDataParallel(inner)
        self.nets: dict[str, nn.Module] = {"fsdp2": self.sharded, "ddp": inner}
        self.optimizers = {
            name: torch.optim.AdamW(net.parameters(), lr=1e-2) for name, net in self.nets.items()
        }
        self.step = 0

    @property
    def state(self) -> dict[str, Any]:
        mine = PerRank(
            [self.step, dist.get_rank()], on_resize=lambda rank, world, saved: rank % saved
        )
        return {
            "nets": dict(self.nets),
            "optimizers": dict(self.optimizers),
            "step": self.step,
            "mine": mine,
        }

    def restore(self, manager: CheckpointManager) -> Any:
        state = self.state
        report = manager.restore(state)
        self.step = state["step"]
        if report is not None:
            saved = [report.step, dist.get_rank() % report.saved_world_size]
            assert state["mine"].value == saved, (state["mine"].value, saved)
            assert report.step == self.step
        return report

    def train(self) -> list[str]:
        """Take one step, and return the exact losses."""
        self.step += 1
        losses: list[str] = []
        for (name, optimizer), net in zip(
            self.optimizers.items(), (self.sharded, self.replicated), strict=True
        ):
            torch.manual_seed(self.step * 10 + len(name))
            optimizer.zero_grad()
            loss = net(torch.randn(4, 24)).square().mean()
            loss.backward()
            optimizer.step()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            losses.append((mean / dist.get_world_size()).item().hex())
        return losses

    def digest(self) -> str:
        """Return a digest of every whole tensor of the training. All ranks must call it."""
        found = hashlib.sha256()
        for name, net in self.nets.items():
            for key, parameter in net.named_parameters():
                for _, value in sorted(
                    {"": parameter, **self.optimizers[name].state[parameter]}.items()
                ):
                    whole = value.full_tensor() if isinstance(value, DTensor) else value
                    found.update(key.encode() + whole.detach().contiguous().numpy().tobytes())
        return found.hexdigest()[:16]


def make_net() -> nn.Module:
    return nn.Sequential(nn.Linear(24, 301), nn.ReLU(), nn.Linear(301, 97), nn.Linear(97, 3))


class Notes:
    def __init__(self, folder: Path) -> None:
        self.life = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        self.start = int(os.environ.get("TORMENT", "1"))
        self._file = os.open(
            folder / f"notes-{dist.get_rank()}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND
        )

    def __call__(self, **what: Any) -> None:
        os.write(
            self._file,
            json.dumps({"start": self.start, "life": self.life, "at": time.time(), **what}).encode()
            + b"\n",
        )


def die(key: str = "") -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError(key)


def arm(end: str) -> Callable[[int], None]:
    """Prepare what happens on this rank in this life.

    It happens during the save of a step or during a restore. What is returned happens within a
    step.
    """
    what, _, when = end.partition(" ")
    rules = []
    if what == "save":  # its bytes are written, but its file is not finished
        rules = [Rule(verb="write", key=rf"step-0*{when}\.", fault=LoseReply(die))]
    elif what == "restore":
        rules = [Rule(verb="read_into", key="safetensors", nth=2, fault=Raise(die))]
    wrap_stores(pytest.MonkeyPatch(), lambda url, store: FaultyBackend(store, rules))

    def within(step: int) -> None:
        if what == "step" and step == int(when):
            die()
        if what == "signal" and step == int(when):
            os.kill(os.getpid(), signal.SIGUSR1)

    return within


def one_rank_is_stopped(folder: Path, note: Notes) -> None:
    """Stop the last rank (SIGSTOP) until the save has failed on all others with its name.

    The others train on meanwhile, and the next save works.
    """
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    state = {"x": torch.arange(1000.0), "mine": PerRank(rank)}
    failed = [folder / f"failed-{other}" for other in range(last)]
    # The others wait this long for the stopped rank, and for no other one on a busy machine.
    with CheckpointManager(folder / "stopped", commit_timeout_seconds=5) as manager:
        manager.save(state, 1, timeout=60)
        dist.barrier()
        if rank == last:
            if os.fork() == 0:
                deadline = time.monotonic() + 60
                while not all(map(Path.exists, failed)) and time.monotonic() < deadline:
                    time.sleep(0.01)
                os.kill(os.getppid(), signal.SIGCONT)
                os._exit(0)
            stop_this_process()
            assert all(map(Path.exists, failed))
        turns = 0
        pending = manager.save_async(state, 2)
        while not pending.done():
            time.sleep(0.01)  # a step that needs no other rank
            turns += 1
        error = pending.exception()
        assert isinstance(error, CommitTimeout), error
        assert error.missing == (last,), error
        if rank != last:
            assert turns > 20, turns
            failed[rank].touch()
        dist.barrier()
        manager.save(state, 3, timeout=60)
        dist.barrier()
        assert manager.steps() == [1, 3]
    note(stopped=str(error))


def rank_0_leaves_last(folder: Path) -> None:
    """The job's store may end with it, and a slower rank does not know the verdict yet."""
    last = dist.get_rank() == dist.get_world_size() - 1
    dist.barrier()
    began = time.monotonic()
    with CheckpointManager(folder / "slow", coordinator=SlowToHear() if last else None) as manager:
        manager.save_async({"x": torch.arange(1000.0)}, 1)
    assert time.monotonic() - began > 0.9 or dist.get_rank() not in (0, dist.get_world_size() - 1)


class SlowToHear(TorchStoreCoordinator):
    def verdict(self, subject: str, *, timeout: float) -> bytes | None:
        if subject.startswith("save/"):
            time.sleep(1)
        return super().verdict(subject, timeout=timeout)


def main() -> None:
    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    plan: dict[str, list[Any]] = json.loads(sys.argv[3]) if len(sys.argv) > 3 else {}
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    note = Notes(folder)
    victim, end = plan.get(str(note.life), [-1, ""])
    within = arm(end if rank == victim else "")
    trainer = Trainer()
    with CheckpointManager(folder / "run", **SETTINGS) as manager:
        # torchrun ends the survivors of a death with SIGTERM. They look for the dead for half of
        # the grace time.
        stop = manager.on_signals(grace_seconds=20 if end.startswith("signal") else 2)
        report = trainer.restore(manager)
        note(
            restored=trainer.step,
            skipped=report.skipped if report else [],
            digest=trainer.digest() if report else "",
        )
        pending = None
        while trainer.step < steps:
            losses = trainer.train()
            note(step=trainer.step, losses=losses, world=dist.get_world_size())
            if pending is not None and trainer.step % SAVE_EVERY:
                pending.result(60)  # the test needs to know what a death costs
            within(trainer.step)
            last = stop.requested(trainer.step)
            if last or trainer.step % SAVE_EVERY == 0:
                if pending is not None:
                    pending.result(60)
                note(saving=trainer.step, digest=trainer.digest())
                pending = manager.save_async(trainer.state, trainer.step)
            if last:
                note(stops=trainer.step)
                break
    if end == "stop":
        one_rank_is_stopped(folder, note)
        rank_0_leaves_last(folder)
    if "reference" in sys.argv:
        reference = Trainer()
        for _ in range(steps):
            losses = reference.train()
            note(reference=reference.step, losses=losses)
        assert reference.digest() == trainer.digest()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

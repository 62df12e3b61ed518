"""A rank that saves its own tensors with one contender after the other, and compares.

It does so together with the other rank.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

from bench import contenders
from bench.rank_exit import exit_rank
from bench.state import Raw, Reference


def main(root: str, names: list[str]) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for name in names:
        subject = Raw.make(100_000, 3, seed=rank, prefix=f"rank{rank}")
        reference = Reference(os.path.join(root, f"reference-{name}-{rank}"), subject.nbytes)
        folder = os.path.join(root, name)
        os.makedirs(folder, exist_ok=True)
        contender = contenders.make(name)
        contender.prepare(subject, folder)
        for step in (1, 2):
            reference.take(subject)
            handle = contender.save(step)
            contender.wait_safe(handle)
            with torch.no_grad():
                for tensor in subject.tensors().values():
                    tensor.add_(1)
            contender.wait_durable(handle)
            dist.barrier()  # each rank checks what it has written itself
            subject.spoil()
            contender.load_back(handle.path, subject)
            assert reference.differences(subject) == [], name
            dist.barrier()
        contender.close()
        sys.stdout.write(f"{name} on rank {rank}: as saved\n")
        sys.stdout.flush()
    exit_rank()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])

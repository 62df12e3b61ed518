"""Teach a small ConvNet to read scikit-learn's digits, on two processes; kill it, and the next run
goes on.

    python examples/train_digits.py --root runs/digits

It shows what a script with epochs has to keep: the epoch, the position within it, BatchNorm's
statistics.
"""

import argparse
import hashlib
import os
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributed import TCPStore
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ckpt import CheckpointManager, PerRank, RngState

TEST_IMAGES = 360  # the last fifth of the 1797


def convnet() -> nn.Module:
    """Return a network from (batch, 1, 8, 8) to ten logits, with BatchNorm and dropout."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1, stride=2),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(64 * 4 * 4, 10),
    )


def digits() -> tuple[TensorDataset, Tensor, Tensor]:
    """Return the training set, the test images and the test labels."""
    bunch = load_digits()
    images = torch.from_numpy(bunch.images).float().unsqueeze(1) / 16
    labels = torch.from_numpy(bunch.target)
    train_set = TensorDataset(images[:-TEST_IMAGES], labels[:-TEST_IMAGES])
    return train_set, images[-TEST_IMAGES:], labels[-TEST_IMAGES:]


def train(rank: int, world: int, port: int, args: argparse.Namespace) -> None:
    """Be one of `world` ranks: go on from the newest checkpoint, train, tell the accuracy."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("gloo", store=TCPStore("127.0.0.1", port), rank=rank, world_size=world)
    train_set, test_images, test_labels = digits()
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(train_set, seed=1)
    # With a generator of its own the loader leaves the global one alone: else every iter() of it
    # draws a number there, and an epoch resumed half-way would draw once more than one that was
    # not.
    loader = DataLoader(train_set, args.batch, sampler=sampler, generator=torch.Generator())

    torch.manual_seed(1 + rank)
    model = DistributedDataParallel(convnet())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 0.1, total_steps=args.epochs * len(loader)
    )
    criterion = nn.CrossEntropyLoss()
    state: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "rng": PerRank(RngState(), on_resize="same_rank"),
        "epoch": 0,
        # of this epoch: the sampler's order follows from the epoch, this is the place in it
        "batches": 0,
    }
    with CheckpointManager(args.root) as manager:
        report = manager.restore(state)
        if report is not None and rank == 0:
            place = f"epoch {state['epoch']}, batch {state['batches']}"
            print(f"resumed from step {report.step}: {place}", flush=True)

        for epoch in range(state["epoch"], args.epochs):
            sampler.set_epoch(epoch)
            first = state["batches"]
            for batch, (images, labels) in enumerate(islice(loader, first, None), first + 1):
                loss = criterion(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                scheduler.step()
                step = epoch * len(loader) + batch
                if rank == 0 and step % 10 == 0:
                    print(f"step {step:4d}  loss {loss.item():.4f}", flush=True)
                if step % args.save_every == 0 or batch == len(loader):
                    state |= {"epoch": epoch, "batches": batch}
                    manager.save_async(state, step=step)
            state["batches"] = 0

    if rank == 0:
        model.eval()
        with torch.no_grad():
            right = (model.module(test_images).argmax(1) == test_labels).sum().item()
        weights = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
        fingerprint = hashlib.sha256(weights).hexdigest()[:16]
        print(f"accuracy {right / len(test_labels):.4f}  weights {fingerprint}", flush=True)
    dist.destroy_process_group()


def main() -> None:
    """Start the ranks and wait for them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--root", default="runs/digits", help="folder or URL of the checkpoints")
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=32, help="images per rank")
    parser.add_argument("--save-every", type=int, default=10, help="steps")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # The parent serves the rendezvous on a port of the system's choice: no port to guess, none to
    # collide with.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.spawn(train, (args.world, store.port, args), args.world)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()

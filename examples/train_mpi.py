"""Teach NumPy to read scikit-learn's digits on MPI ranks, without torch.distributed; kill it, and
the next run goes on.

    mpirun -n 2 python examples/train_mpi.py --root runs/mpi
"""

import argparse
from typing import Any

import numpy as np
from mpi4py import MPI
from sklearn.datasets import load_digits

import ckpt
from ckpt.integrations.arrays import state_of

HIDDEN = 64
Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]


def loss_and_gradients(weights: Arrays, images: Array, labels: Array) -> tuple[float, Arrays]:
    """Return the cross entropy of a network with one hidden layer, and its gradients."""
    hidden = np.tanh(images @ weights["w1"] + weights["b1"])
    logits = hidden @ weights["w2"] + weights["b2"]
    odds = np.exp(logits - logits.max(1, keepdims=True))
    odds /= odds.sum(1, keepdims=True)
    rows = np.arange(len(labels))
    loss = float(-np.log(odds[rows, labels]).mean())
    odds[rows, labels] -= 1
    odds /= len(labels)
    inner = (odds @ weights["w2"].T) * (1 - hidden**2)
    return loss, {
        "w1": images.T @ inner,
        "b1": inner.sum(0),
        "w2": hidden.T @ odds,
        "b2": odds.sum(0),
    }


def main() -> None:
    """Continue from the newest checkpoint, train, and print the loss of each step."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--root", default="runs/mpi", help="folder or URL of the checkpoints")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=10, help="steps")
    args = parser.parse_args()
    comm = MPI.COMM_WORLD
    rank, size = comm.Get_rank(), comm.Get_size()

    digits = load_digits()
    images, labels = digits.data[rank::size] / 16, digits.target[rank::size]
    start = np.random.default_rng(1)  # the same on all ranks
    weights = {
        "w1": start.normal(0, 0.1, (64, HIDDEN)),
        "b1": np.zeros(HIDDEN),
        "w2": start.normal(0, 0.1, (HIDDEN, 10)),
        "b2": np.zeros(10),
    }
    momentum = {name: np.zeros_like(value) for name, value in weights.items()}
    np.random.seed(100 + rank)  # each rank draws batches of its own

    everyone = range(size)
    state: dict[str, Any] = {
        "weights": state_of(weights, replicas=everyone),
        "momentum": state_of(momentum, replicas=everyone),
        "rng": ckpt.PerRank(ckpt.RngState()),
        "step": 0,
    }
    with ckpt.CheckpointManager(args.root, coordinator=ckpt.join_mpi(comm)) as manager:
        if manager.restore(state) is not None and rank == 0:
            print(f"resumed from step {state['step']}", flush=True)
        for step in range(state["step"] + 1, args.steps + 1):
            batch = np.random.randint(0, len(labels), 32)
            loss, gradients = loss_and_gradients(weights, images[batch], labels[batch])
            for name, gradient in gradients.items():
                comm.Allreduce(MPI.IN_PLACE, gradient)
                momentum[name] *= 0.9
                momentum[name] += gradient / size
                weights[name] -= 0.05 * momentum[name]
            loss = comm.allreduce(loss) / size
            if rank == 0:
                print(f"step {step} loss {loss!r}", flush=True)
            if step % args.save_every == 0:
                manager.save_async(state | {"step": step})


if __name__ == "__main__":
    main()

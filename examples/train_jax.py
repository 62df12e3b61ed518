"""Teach JAX to read scikit-learn's digits; kill it, and the next run goes on.

python examples/train_jax.py --root runs/jax
"""

import argparse
from typing import Any

import jax
import jax.numpy as jnp
from sklearn.datasets import load_digits

from ckpt import CheckpointManager
from ckpt.integrations.arrays import state_of

HIDDEN = 64


def fresh(key: Any) -> dict[str, Any]:
    """Return the weights, in bfloat16, their momentum, and the key of the batches."""
    first, second, batches = jax.random.split(key, 3)
    weights = {
        "w1": 0.1 * jax.random.normal(first, (64, HIDDEN), jnp.bfloat16),
        "w2": 0.1 * jax.random.normal(second, (HIDDEN, 10), jnp.bfloat16),
    }
    return {"weights": weights, "momentum": jax.tree.map(jnp.zeros_like, weights), "key": batches}


def loss_of(weights: Any, images: Any, labels: Any) -> Any:
    """Return the cross entropy of a network with one hidden layer."""
    logits = jnp.tanh(images @ weights["w1"]) @ weights["w2"]
    odds = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.take_along_axis(odds, labels[:, None], axis=1).mean()


def after_a_step(train: Any, images: Any, labels: Any) -> tuple[Any, Any]:
    """Return what one step makes of ``train``, and its loss."""
    key, draw = jax.random.split(train["key"])
    batch = jax.random.randint(draw, (64,), 0, len(labels))
    loss, gradients = jax.value_and_grad(loss_of)(train["weights"], images[batch], labels[batch])
    momentum = jax.tree.map(lambda old, new: 0.9 * old + new, train["momentum"], gradients)
    weights = jax.tree.map(lambda old, change: old - 0.05 * change, train["weights"], momentum)
    return {"weights": weights, "momentum": momentum, "key": key}, loss


update = jax.jit(after_a_step)


def main() -> None:
    """Continue from the newest checkpoint, train, and print the loss of each step."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--root", default="runs/jax", help="folder or URL of the checkpoints")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=10, help="steps")
    args = parser.parse_args()

    digits = load_digits()
    images, labels = jnp.asarray(digits.data / 16, jnp.bfloat16), jnp.asarray(digits.target)
    train = state_of(fresh(jax.random.key(1)))
    state: dict[str, Any] = {"train": train, "step": 0}
    with CheckpointManager(args.root) as manager:
        if manager.restore(state) is not None:
            print(f"resumed from step {state['step']}", flush=True)
        for step in range(state["step"] + 1, args.steps + 1):
            train.value, loss = update(train.value, images, labels)
            print(f"step {step} loss {float(loss)!r}", flush=True)
            if step % args.save_every == 0:
                manager.save_async({"train": train, "step": step})


if __name__ == "__main__":
    main()

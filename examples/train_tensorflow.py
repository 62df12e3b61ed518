"""Teach a Keras model to read scikit-learn's digits with TensorFlow, on the workers of a
MultiWorkerMirroredStrategy or on one process; kill it, and the next run goes on.

    python examples/train_tensorflow.py --root runs/tensorflow
    TF_CONFIG='{"cluster": {"worker": ["node1:2222", "node2:2222"]}, "task": {"type": "worker",
    "index": 0}}' python examples/train_tensorflow.py --address node1:29500
"""

import argparse
import json
import os
from typing import Any

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

import ckpt
from ckpt.integrations.arrays import state_of


def main() -> None:
    """Continue from the newest checkpoint, train, and print the loss of each step."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--root", default="runs/tensorflow", help="folder or URL of checkpoints")
    parser.add_argument("--address", default="localhost:29500", help="of ckpt, on worker 0")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=10, help="steps")
    args = parser.parse_args()
    config = json.loads(os.environ.get("TF_CONFIG", "{}"))
    rank = config["task"]["index"] if config else 0
    size = len(config["cluster"]["worker"]) if config else 1
    strategy = (
        tf.distribute.MultiWorkerMirroredStrategy() if config else tf.distribute.get_strategy()
    )

    keras.utils.set_random_seed(1)
    digits = load_digits()
    images = tf.constant(digits.data[rank::size] / 16, tf.float32)
    labels = tf.constant(digits.target[rank::size])
    with strategy.scope():
        layers = keras.layers
        model = keras.Sequential(
            [
                keras.Input((64,)),
                layers.Dense(64, activation="tanh"),
                layers.Dropout(0.1),
                layers.Dense(10),
            ]
        )
        optimizer = keras.optimizers.Adam(1e-2)
        optimizer.build(model.trainable_variables)

    def loss_of(draw: Any) -> Any:
        batch = tf.random.stateless_uniform([32], [rank, draw], 0, len(labels), tf.int32)
        with tf.GradientTape() as tape:
            logits = model(tf.gather(images, batch), training=True)
            losses = keras.losses.sparse_categorical_crossentropy(
                tf.gather(labels, batch), logits, from_logits=True
            )
            loss = tf.reduce_mean(losses)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    def everywhere(draw: Any) -> Any:
        losses = strategy.run(loss_of, (draw,))
        return strategy.reduce(tf.distribute.ReduceOp.MEAN, losses, axis=None)

    train = tf.function(everywhere)

    everyone = range(size)
    state: dict[str, Any] = {
        "model": state_of(model, replicas=everyone),
        "optimizer": state_of(optimizer, replicas=everyone),
        "step": 0,
    }
    coordinator = ckpt.join(rank, size, args.address)
    with ckpt.CheckpointManager(args.root, coordinator=coordinator) as manager:
        if manager.restore(state) is not None and rank == 0:
            print(f"resumed from step {state['step']}", flush=True)
        for step in range(state["step"] + 1, args.steps + 1):
            loss = float(train(tf.constant(step)))
            if rank == 0:
                print(f"step {step} loss {loss!r}", flush=True)
            if step % args.save_every == 0:
                manager.save_async(state | {"step": step})


if __name__ == "__main__":
    main()

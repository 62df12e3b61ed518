"""Write a checkpoint of Orbax into OUT/state. There is no torch here."""

from __future__ import annotations

import os
import sys

import jax.numpy as jnp
import orbax.checkpoint as ocp


def main(out: str) -> None:
    tree = {"params": {"first": {"kernel": jnp.arange(8.0).reshape(2, 4)}}, "step": 2}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(os.path.abspath(os.path.join(out, "state")), tree)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Do what ``increments.py`` does, with an adopted step in another root as the base."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import save_file

from ckpt import Tier
from ckpt.exchange.foreign.adoption import adopt_checkpoint
from ckpt.exchange.foreign.imports import ForeignCheckpoint
from ckpt.retention.policy import Retention
from ckpt.retention.pruner import prune
from ckpt.storage.registry import open_backend
from tests.crash.increments import base_of, main, model_at


def adopt_base(root: Path, step: int) -> None:
    """Adopt a file as a step of the root that is the base of ``root``, and remove the others that
    no run needs.
    """
    folder = root.with_name(f"{root.name}-hf-{step}")
    folder.mkdir(exist_ok=True)
    save_file(model_at(1).state_dict(), folder / "model.safetensors")
    adopt_checkpoint(ForeignCheckpoint(path=str(folder)), Tier(str(base_of(root))), step)
    prune(open_backend(str(base_of(root))), Retention(keep_last=1))


if __name__ == "__main__":
    main(adopt_base)

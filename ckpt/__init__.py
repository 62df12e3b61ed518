"""Asynchronous distributed checkpointing for PyTorch.

A save holds up the training for milliseconds and writes in the background. A checkpoint is listed
only when all of its files are complete, and a restore verifies every chunk that it reads. The
public names are imported on first use, so that ``import ckpt`` and most commands do not import
torch.
"""

from __future__ import annotations

import logging
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ckpt.errors.sanitize import CleanLog
from ckpt.version import __version__

if TYPE_CHECKING:
    from ckpt.catalog.watching import watch
    from ckpt.config import SaveConfig, Tier, Tls
    from ckpt.coordination.join import join, join_horovod, join_mpi
    from ckpt.errors import CkptError
    from ckpt.exchange.exports.hf_export_observer import HfFolders
    from ckpt.exchange.weights.follow import follow
    from ckpt.exchange.weights.load import load

    # Other modules, such as gzip, have an ``open`` too.
    from ckpt.exchange.weights.open_checkpoint import open_checkpoint as open  # noqa: A004
    from ckpt.manager import CheckpointManager
    from ckpt.pending import PendingSave
    from ckpt.restore.report import RestoreReport
    from ckpt.state.tensors.declared import declare_part
    from ckpt.state.tensors.local_shards import LocalShards
    from ckpt.state.tensors.per_rank import PerRank, RngState
    from ckpt.state.walk.trainable import trainable

if sys.platform != "linux":
    raise ImportError(
        f"ckpt needs Linux, and this is {sys.platform}: run it in a container, or read the files "
        "of a checkpoint (rank-*.safetensors) with the safetensors package"
    )

logging.getLogger("ckpt").addFilter(CleanLog())

_HOMES = {
    "CheckpointManager": "ckpt.manager",
    "CkptError": "ckpt.errors",
    "HfFolders": "ckpt.exchange.exports.hf_export_observer",
    "LocalShards": "ckpt.state.tensors.local_shards",
    "PendingSave": "ckpt.pending",
    "PerRank": "ckpt.state.tensors.per_rank",
    "RestoreReport": "ckpt.restore.report",
    "RngState": "ckpt.state.tensors.per_rank",
    "SaveConfig": "ckpt.config",
    "Tier": "ckpt.config",
    "Tls": "ckpt.config",
    "declare_part": "ckpt.state.tensors.declared",
    "follow": "ckpt.exchange.weights.follow",
    "join": "ckpt.coordination.join",
    "join_horovod": "ckpt.coordination.join",
    "join_mpi": "ckpt.coordination.join",
    "load": "ckpt.exchange.weights.load",
    "open": "ckpt.exchange.weights.open_checkpoint",
    "trainable": "ckpt.state.walk.trainable",
    "watch": "ckpt.catalog.watching",
}
# In its own module, a function with the name ``open`` would hide the built-in function.
_ALIASES = {"open": "open_checkpoint"}

__all__ = [
    "CheckpointManager",
    "CkptError",
    "HfFolders",
    "LocalShards",
    "PendingSave",
    "PerRank",
    "RestoreReport",
    "RngState",
    "SaveConfig",
    "Tier",
    "Tls",
    "__version__",
    "declare_part",
    "follow",
    "join",
    "join_horovod",
    "join_mpi",
    "load",
    "open",
    "trainable",
    "watch",
]


def __getattr__(name: str) -> Any:
    if (home := _HOMES.get(name)) is None:
        raise AttributeError(f"module 'ckpt' has no attribute {name!r}")
    return getattr(import_module(home), _ALIASES.get(name, name))


def __dir__() -> list[str]:
    return __all__

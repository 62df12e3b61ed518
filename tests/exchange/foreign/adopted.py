"""Write folders of DCP, adopt them, and compare what is restored with what was saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

from ckpt import CheckpointManager, Tier
from ckpt.exchange.foreign.adoption import AdoptionReport, adopt_checkpoint
from ckpt.exchange.foreign.imports import ForeignCheckpoint
from tests.exchange.states import Net, same, trained


def save_dcp(folder: Path, **others: Any) -> None:
    net, optimizer = trained()
    model, moments = get_state_dict(net, optimizer)
    dcp.save({"model": model, "optimizer": moments, **others}, checkpoint_id=folder, no_dist=True)


def adopted(folder: Path, root: Path, step: int | None = 7) -> AdoptionReport:
    return adopt_checkpoint(ForeignCheckpoint(path=str(folder)), Tier(str(root)), step)


def content(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {
        path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in sorted(folder.iterdir())
    }


def restored(root: Path, **others: Any) -> tuple[Net, torch.optim.Optimizer]:
    net, optimizer = trained(seed=1, steps=1)
    with CheckpointManager(str(root)) as manager:
        report = manager.restore({"model": net, "optimizer": optimizer, **others})
    assert report is not None
    return net, optimizer


def check(root: Path, **others: Any) -> None:
    net, optimizer = restored(root, **others)
    true_net, true_optimizer = trained()
    assert same(dict(net.state_dict()), dict(true_net.state_dict()))
    assert same(optimizer.state_dict()["state"], true_optimizer.state_dict()["state"])

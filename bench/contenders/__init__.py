"""The contenders that are measured, behind one small protocol. Each is one row of ``ALL``."""

from __future__ import annotations

import importlib
import importlib.util
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

if TYPE_CHECKING:  # the parent reads the table below and needs no torch
    from bench.state import Subject


@dataclass(frozen=True)
class Handle:
    """A save under way, or all done if ``durable`` already. ``payload`` is the contender's own."""

    step: int
    path: str
    payload: Any = None
    durable: bool = False


class Contender(Protocol):
    """One way of saving, used as its documentation says.

    The training thread calls ``save`` and ``wait_safe``; any thread calls ``wait_durable``. Files
    and folders of a checkpoint in ``folder`` are named ``step-*``.
    """

    def prepare(self, subject: Subject, folder: str) -> None:
        """Get ready to save ``subject`` below ``folder``; not on the clock, as it is done once
        per job.
        """

    def save(self, step: int) -> Handle:
        """Save the state as ``step``, and return as soon as the contender lets go of the caller."""
        ...

    def wait_safe(self, handle: Handle) -> None:
        """Return when the state may be changed."""

    def wait_durable(self, handle: Handle) -> None:
        """Return when the checkpoint is complete and would survive a power cut."""

    def load_back(self, path: str, into: Subject) -> None:
        """Load the checkpoint at ``path`` into live objects, as a resumed job would."""

    def close(self) -> None:
        """Finish and let go of everything, processes included."""


@dataclass(frozen=True)
class Row:
    """How a contender is named in reports and where its code is.

    ``fsync`` names the code that makes its files durable; ``needs`` is the package to import, "" if
    torch or the bench brings it; ``distributed`` is true if ranks can save one checkpoint together;
    ``everywhere`` is false for one that a scenario brings in by itself.
    """

    label: str
    module: str
    kind: str
    fsync: str
    needs: str = ""
    distributed: bool = True
    everywhere: bool = True


ALL: Final[dict[str, Row]] = {
    "torch.save": Row("torch.save", "torch_save", "TorchSave", "bench"),
    "safetensors": Row("safetensors", "safetensors", "SafetensorsSave", "bench", "safetensors"),
    "dcp.save": Row("DCP save", "dcp", "DcpSave", "itself, folders bench"),
    "dcp.async_save": Row("DCP async_save", "dcp", "DcpAsyncSave", "itself, folders bench"),
    "dcp.best": Row("DCP async_save, at its best", "dcp_best", "DcpBest", "itself, folders bench"),
    "torch_checkpointing": Row(
        "torch_checkpointing",
        "torch_checkpointing",
        "TorchCheckpointing",
        "bench",
        "torch_checkpointing",
    ),
    "torchsnapshot.take": Row(
        "torchsnapshot take", "torchsnapshot", "SnapshotTake", "bench", "torchsnapshot"
    ),
    "torchsnapshot.async_take": Row(
        "torchsnapshot async_take", "torchsnapshot", "SnapshotAsyncTake", "bench", "torchsnapshot"
    ),
    "moonclip": Row("moonclip", "moonclip", "Moonclip", "itself", "moonclip", distributed=False),
    "nvrx": Row("nvrx fork (CUDA sync stubbed)", "nvrx", "Nvrx", "bench", "nvidia_resiliency_ext"),
    "ckpt.save": Row("ckpt save", "ours", "CkptSave", "itself"),
    "ckpt.save_async": Row("ckpt save_async", "ours", "CkptSaveAsync", "itself"),
    "ckpt.memory": Row(
        "ckpt, memory tier", "ours", "CkptSaveAsync", "nobody", distributed=False, everywhere=False
    ),
    "ckpt.device": Row(
        "ckpt save_async, fenced by its hook",
        "on_device",
        "CkptOnDevice",
        "itself",
        everywhere=False,
    ),
    "dcp.thread": Row("DCP async_save, thread", "dcp", "DcpAsyncSave", "itself", everywhere=False),
    "dcp.process": Row(
        "DCP async_save, process", "dcp_best", "DcpBest", "itself", everywhere=False
    ),
    "dcp.pinned": Row(
        "DCP async_save, process, pinned", "on_device", "DcpPinned", "itself", everywhere=False
    ),
    "torch_checkpointing.pinned": Row(
        "torch_checkpointing, pinned",
        "torch_checkpointing",
        "TorchCheckpointingPinned",
        "bench",
        "torch_checkpointing",
        everywhere=False,
    ),
}
ASKED: Final = [name for name, row in ALL.items() if row.everywhere]
"""Those that can be asked for by name."""


def available() -> list[str]:
    """Names of those whose package is installed."""
    return [name for name in ALL if name not in missing()]


def missing() -> dict[str, str]:
    """The other names, each with the reason. Nothing is imported to find out."""
    return {
        name: f"{row.needs} is not installed"
        for name, row in ALL.items()
        if row.needs and importlib.util.find_spec(row.needs) is None
    }


def make(name: str) -> Contender:
    """A new contender; imports its library."""
    row = ALL[name]
    return cast(
        Contender, getattr(importlib.import_module(f"bench.contenders.{row.module}"), row.kind)()
    )


def fsync_tree(path: str) -> None:
    """Flush a file, or all files and folders below ``path``, and the folder that names it: what
    peers leave to the kernel.
    """
    paths = [path, os.path.dirname(path)]
    for folder, folders, files in os.walk(path):
        paths += [os.path.join(folder, name) for name in (*folders, *files)]
    fsync(*paths)


def fsync(*paths: str) -> None:
    """Flush these files and folders."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

"""Recognize folders of other programs that ``ckpt import`` cannot read, by the names in them.

The weights of such a folder are in files of a kind that only its own program can load, or in pieces
that only its own program can put together. An error says how to get them.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final

Paths = Collection[str]

_ZERO_RANK_FILE: Final = re.compile(
    r"(?:.*/)?(?:bf16_|fp16_)?zero_pp_rank_\d+_mp_rank_\d+.*_states\.pt"
)
_ENGINE_FILE: Final = re.compile(r"(?:zero_pp_rank_\d+_)?mp_rank_(\d+)_model_states\.pt")
_COMMON_FILE: Final = "zero/optimizer_state.pt"
_MODEL_FILE: Final = re.compile(
    r"[^/]+/(?:bf16_)?(?:zero_pp_rank_\d+_)?mp_rank_\d+_model_states\.pt"
)


@dataclass(frozen=True, slots=True)
class FolderKind:
    """A kind of folder that an import refuses.

    Attributes:
        description: What the folder is, such as "a checkpoint of Orbax".
        way: How to import what is in it. ``{folder}`` and ``{parent}`` stand for the paths of the
            folder and of the folder above it, and ``{name}`` for its name.
    """

    description: str
    way: str

    def text(self, folder: str) -> str:
        """Return a text for an error about the folder at the path ``folder``."""
        parent, name = os.path.split(os.path.abspath(folder))
        way = self.way.format(
            folder=shlex.quote(folder), parent=shlex.quote(parent), name=shlex.quote(name)
        )
        return f"{folder} is {self.description}: {way}"


_FP32_ADVICE: Final = "the whole weights, and ckpt import fp32 ROOT --step N takes them{more}"
_KEEP_OPTIMIZER: Final = (
    "; to keep the optimizer too, convert the step with python -m "
    "deepspeed.checkpoint.ds_to_universal, and adopt or import what it writes, or load it with "
    "engine.load_checkpoint(), and save zero_state(engine) of ckpt.integrations.deepspeed"
)


def refused_kind(paths: Paths) -> FolderKind | None:
    """Return the kind of a folder with these relative paths in it, if an import refuses it.

    Args:
        paths: The paths of the folder's files and of those in its subfolders.
    """
    if is_universal(paths):
        return None
    return next((kind for is_of_kind, kind in _KINDS if is_of_kind(paths)), None)


def is_universal(paths: Paths) -> bool:
    """Return True if these are the relative paths of a universal checkpoint of DeepSpeed whose
    module is whole, and not in the parts of tensor or pipeline parallelism.
    """
    parts = {match[1] for path in paths if (match := _ENGINE_FILE.fullmatch(path))}
    has_stages = any(path.startswith("layer_") for path in paths)
    return _COMMON_FILE in paths and parts == {"00"} and not has_stages


def engine_file(names: Paths) -> str:
    """Return the first of the files of the engine among the names in a universal checkpoint."""
    return min(filter(_ENGINE_FILE.fullmatch, names))


def zero_step_text(path: str) -> str:
    """Return the text of an error about a step of DeepSpeed's ZeRO: its folder, or a file in it."""
    path = os.path.abspath(path)
    return _ZERO_STEP.text(path if os.path.isdir(path) else os.path.dirname(path))


def refused_file_text(path: str) -> str | None:
    """Return a text for an error if ``path`` is a file that an import refuses."""
    folder, name = os.path.split(path)
    if name.endswith(".distcp"):
        return f"{path} is one file of torch.distributed.checkpoint: name {folder or '.'}"
    if not _ZERO_RANK_FILE.fullmatch(name):
        return None
    if "zero" in os.listdir(folder or "."):
        return f"{path} is one file of a universal checkpoint of DeepSpeed: name {folder or '.'}"
    return f"{path} has the part of one rank: {zero_step_text(path)}"


def folder_notes(paths: Paths) -> list[str]:
    """Return notes for the user about a folder that an import takes, with these paths in it."""
    if {".metadata", "metadata.json", "common.pt"} <= {*paths}:
        return [
            "the folder is of Megatron-core: all layers are stacked in one tensor of each kind, "
            "under Megatron's names, and common.pt has the iteration and the settings; to get a "
            "model of Hugging Face, export the folder with Megatron Bridge, and import the result"
        ]
    return []


def state_folders(paths: Paths) -> list[str]:
    """Return the subfolders that are folders of ``torch.distributed.checkpoint``."""
    return sorted(path.removesuffix("/.metadata") for path in paths if path.endswith("/.metadata"))


def _contains(*names: str) -> Callable[[Paths], bool]:
    """Return a function that tells whether a folder or one of its subfolders has these names."""
    return lambda paths: any(path.rpartition("/")[2] in names for path in paths)


def _is_zero_tag(paths: Paths) -> bool:
    return any("/" not in path and _ZERO_RANK_FILE.fullmatch(path) for path in paths)


def _is_deepspeed_run(paths: Paths) -> bool:
    return any(map(_MODEL_FILE.fullmatch, paths))


_ZERO_STEP: Final = FolderKind(
    "one step of DeepSpeed's ZeRO, whose ranks have the weights in pieces",
    "python {parent}/zero_to_fp32.py {parent} fp32 --tag {name} writes "
    + _FP32_ADVICE.format(more=_KEEP_OPTIMIZER),
)

_KINDS: Final[tuple[tuple[Callable[[Paths], bool], FolderKind], ...]] = (
    (
        lambda paths: any(path.endswith("/.snapshot_metadata") for path in paths),
        FolderKind(
            "a folder with snapshots of torchsnapshot in it",
            "name one of them, such as {folder}/NAME",
        ),
    ),
    (
        _contains("_CHECKPOINT_METADATA", "manifest.ocdbt"),
        FolderKind(
            "a checkpoint of Orbax",
            "load it with orbax.checkpoint.StandardCheckpointer().restore(), and save the arrays "
            "with CheckpointManager(ROOT).save(ckpt.integrations.arrays.state_of(tree), step=N)",
        ),
    ),
    (
        lambda paths: _COMMON_FILE in paths,
        FolderKind(
            "a universal checkpoint of DeepSpeed whose module is in parts, of tensor or pipeline "
            "parallelism",
            "load it with engine.load_checkpoint(), and save engine.module on all ranks, with "
            "ckpt.declare_part for the parts that a rank has",
        ),
    ),
    (_is_zero_tag, _ZERO_STEP),
    (
        _is_deepspeed_run,
        FolderKind(
            "the folder of a DeepSpeed run",
            "python {folder}/zero_to_fp32.py {folder} fp32 writes "
            + _FP32_ADVICE.format(more=_KEEP_OPTIMIZER),
        ),
    ),
)

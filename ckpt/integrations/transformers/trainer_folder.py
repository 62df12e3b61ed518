"""The folders ``checkpoint-N`` that stand for committed steps in the ``output_dir`` of a Trainer.

Each folder has ``trainer_state.json`` and a pointer, ``ckpt.json``, with the number of the step. A
new folder appears with both files or not at all. This module removes only folders with a pointer,
since a folder without one is a checkpoint that transformers itself has written.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final, Self, cast

from ckpt.errors import ConfigError, NoCheckpoint
from ckpt.errors.base import few
from ckpt.storage.local_files import write_durably

POINTER: Final = "ckpt.json"
STATE: Final = "trainer_state.json"
_NAME: Final = re.compile(r"checkpoint-([0-9]+)")


@dataclass(frozen=True, slots=True)
class SaveLimit:
    """The rule of ``save_total_limit``: it keeps the newest steps and the best step.

    Attributes:
        step_count: The number of steps that are kept; None for all. The newest step and the best
            step are kept even if ``step_count`` is 1.
        has_best: Whether the Trainer has a best step.
    """

    step_count: int | None
    has_best: bool

    @classmethod
    def of(cls, limit: int | None, *, has_best: bool) -> Self:
        """Return the rule for a ``save_total_limit``. As in transformers, 0 means no limit."""
        return cls(None if limit is None or limit <= 0 else limit, has_best)

    def apply(self, output_dir: str, step: int, best: str | None) -> None:
        """Remove the folders beyond the limit, after ``step`` was committed.

        ``best`` is the folder of the best step, if there is one.
        """
        if self.step_count is not None:
            steps, best_step = sorted(_folders(output_dir)), best and step_named(best)
            best_is_older = best_step is not None and best_step in steps[: -self.step_count]
            # A best step that is older takes the place of one of the newest.
            newest = steps[-max(1, self.step_count - best_is_older) :]
            remove_folders(output_dir, keep={*newest, step, best_step})


def folder_of(output_dir: str, step: int) -> str:
    """Return the path of the folder for ``step``."""
    return os.path.normpath(os.path.join(output_dir, f"checkpoint-{step}"))


def step_named(folder: str) -> int | None:
    """Return N if the name of the folder is ``checkpoint-N``, and else None."""
    match = _NAME.fullmatch(os.path.basename(os.path.normpath(folder)))
    return int(match[1]) if match else None


def pointed_step(folder: str) -> int | None:
    """Return the number of the step that a folder points to; None if the folder has no pointer.

    Raises:
        ConfigError: The pointer cannot be read, or has no number.
    """
    path = os.path.join(folder, POINTER)
    try:
        with open(path, encoding="utf-8") as file:
            step = json.load(file)["step"]
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} cannot be read ({error!r}): resume_from_checkpoint=True writes it again"
        ) from error
    if type(step) is not int:
        raise ConfigError(f"{path} names no step: resume_from_checkpoint=True writes it again")
    return step


def check_is_checkpoint(value: object, output_dir: str, steps: Sequence[int]) -> None:
    """Raise ``ConfigError`` if a value to resume from is not the folder of a checkpoint.

    Args:
        value: The value of ``resume_from_checkpoint``.
        output_dir: The ``output_dir`` of the Trainer.
        steps: The steps of this run on its tiers, in ascending order.

    Raises:
        ConfigError: The value is no folder with ``trainer_state.json``. The error suggests a value
            to resume from.
    """
    if isinstance(value, str | os.PathLike):
        folder = os.fspath(cast("str | os.PathLike[str]", value))
        if folder and os.path.isfile(os.path.join(folder, STATE)):
            return
    if steps:
        # A fresh machine has no folders. The value True writes the folder of the newest step.
        folders = (folder_of(output_dir, step) for step in reversed(steps))
        checkpoint = next(
            (candidate for candidate in folders if os.path.isfile(os.path.join(candidate, STATE))),
            None,
        )
        way = (
            "give " if checkpoint is None else f"give {checkpoint!r}, or "
        ) + "True for the newest step"
    else:
        way = f'{output_dir} has no step of ckpt: give the folder of a checkpoint, or "auto"'
    raise ConfigError(
        f"resume_from_checkpoint={value!r} is not the folder of a checkpoint, since it has no "
        f"{STATE}: {way}"
    )


def steps_lost(output_dir: str, places: str) -> NoCheckpoint:
    """Return the error for a run whose folders point to steps, while its tiers have none.

    ``places`` is a text with the URLs of the tiers.
    """
    names = [os.path.basename(folder) for _, folder in sorted(_folders(output_dir).items())]
    return NoCheckpoint(
        places,
        f"{few(names, quote=False)} in {output_dir} point to steps that are gone. Bring the steps "
        "back, or give the place that has them as ckpt_tiers. To train from the beginning, remove "
        'these folders, and give resume_from_checkpoint="auto" or None',
    )


def write_folder(output_dir: str, step: int, text: str) -> None:
    """Write the folder of ``step``, which is committed, with ``text`` as ``trainer_state.json``."""
    folder = folder_of(output_dir, step)
    new_folder = os.path.join(output_dir, f".checkpoint-{step}.{uuid.uuid4().hex}")
    os.makedirs(new_folder)
    for name, content in ((STATE, text), (POINTER, json.dumps({"step": step}) + "\n")):
        write_durably(os.path.join(new_folder, name), content.encode())
    try:
        os.rename(new_folder, folder)
    except OSError:
        # The folder exists already. Its files belong to a step with the same number, so they may be
        # replaced one after the other.
        try:
            for name in (STATE, POINTER):
                os.replace(os.path.join(new_folder, name), os.path.join(folder, name))
        except OSError:
            # This is no error if another node has just written the same folder.
            if not all(os.path.isfile(os.path.join(folder, name)) for name in (STATE, POINTER)):
                raise
        finally:
            shutil.rmtree(new_folder, ignore_errors=True)


def remove_folders(output_dir: str, *, keep: Collection[object]) -> None:
    """Remove the folders that have a pointer and whose steps are not in ``keep``."""
    for step, folder in _folders(output_dir).items():
        if step not in keep:
            trash = os.path.join(output_dir, f".checkpoint-{step}.gone")
            # A killed process may have left files at this path, and the rename would then fail.
            shutil.rmtree(trash, ignore_errors=True)
            with contextlib.suppress(OSError):  # Another node may have renamed the folder
                os.rename(folder, trash)
            shutil.rmtree(trash, ignore_errors=True)


def _folders(output_dir: str) -> dict[int, str]:
    """Return the path of each folder in ``output_dir`` that has a pointer (``ckpt.json``), by the
    number of its step.
    """
    folders: dict[int, str] = {}
    for name in os.listdir(output_dir):
        step, folder = step_named(name), os.path.join(output_dir, name)
        if step is not None and os.path.isfile(os.path.join(folder, POINTER)):
            folders[step] = folder
    return folders

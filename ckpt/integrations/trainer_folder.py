"""The folders ``checkpoint-N`` that stand for committed steps in the ``output_dir`` of a Trainer.

Each has ``trainer_state.json`` and a pointer, ``ckpt.json``. A folder appears whole or not at all.
Folders without a pointer are not ours, and nothing here changes or removes them.
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

POINTER: Final = "ckpt.json"
STATE: Final = "trainer_state.json"
_NAME: Final = re.compile(r"checkpoint-([0-9]+)")


@dataclass(frozen=True, slots=True)
class Kept:
    """Which steps ``save_total_limit`` keeps: the newest ones, and the best among them.

    Attributes:
        limit: How many in all, if that is not less than the newest and the best; None for all.
        has_best: Whether there is a best step, which counts among the limit.
    """

    limit: int | None
    has_best: bool

    @classmethod
    def of(cls, limit: int | None, *, has_best: bool) -> Self:
        """Read a limit as transformers does, for which 0 is none."""
        return cls(None if limit is None or limit <= 0 else limit, has_best)

    def apply(self, output_dir: str, step: int, best: str | None) -> None:
        """Remove the folders that go now that ``step`` is committed."""
        if self.limit is not None:
            steps, kept = sorted(_folders(output_dir)), best and step_named(best)
            is_older = kept is not None and kept in steps[: -self.limit]
            newest = steps[-max(1, self.limit - is_older) :]
            remove_folders(output_dir, keep={*newest, step, kept})


def folder_of(output_dir: str, step: int) -> str:
    """Return the folder of a step."""
    return os.path.normpath(os.path.join(output_dir, f"checkpoint-{step}"))


def step_named(folder: str) -> int | None:
    """Return the step that the name of a folder says, if it says one."""
    found = _NAME.fullmatch(os.path.basename(os.path.normpath(folder)))
    return int(found[1]) if found else None


def pointed_step(folder: str) -> int | None:
    """Return the step that a folder points to; None for a folder of transformers' own format.

    Raises:
        ConfigError: The pointer cannot be read.
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


def check_is_checkpoint(asked: object, output_dir: str, steps: Sequence[int]) -> None:
    """Refuse a value to resume from that is not the folder of a checkpoint.

    Args:
        asked: The value.
        steps: The steps that ``output_dir`` has, in ascending order.

    Raises:
        ConfigError: The value has no ``trainer_state.json``. The error names a value that resumes.
    """
    if isinstance(asked, str | os.PathLike):
        folder = os.fspath(cast("str | os.PathLike[str]", asked))
        if folder and os.path.isfile(os.path.join(folder, STATE)):
            return
    if steps:
        way = f"give {folder_of(output_dir, steps[-1])!r}, or True for the newest step"
    else:
        way = f'{output_dir} has no step of ckpt: give the folder of a checkpoint, or "auto"'
    raise ConfigError(
        f"resume_from_checkpoint={asked!r} is not the folder of a checkpoint, since it has no "
        f"{STATE}: {way}"
    )


def steps_lost(output_dir: str, places: str) -> NoCheckpoint:
    """Return the error for folders that point to steps, while ``places`` have none."""
    names = [os.path.basename(folder) for _, folder in sorted(_folders(output_dir).items())]
    return NoCheckpoint(
        places,
        f"{few(names, quote=False)} in {output_dir} point to steps that are gone. Bring the steps "
        "back, or give the place that has them as ckpt_tiers. To train from the beginning, remove "
        'these folders, and give resume_from_checkpoint="auto" or None',
    )


def write_folder(output_dir: str, step: int, text: str) -> None:
    """Write the folder of ``step``, with ``text`` as its state. The step is committed."""
    folder = folder_of(output_dir, step)
    fresh = os.path.join(output_dir, f".checkpoint-{step}.{uuid.uuid4().hex}")
    os.makedirs(fresh)
    for name, content in ((STATE, text), (POINTER, json.dumps({"step": step}) + "\n")):
        with open(os.path.join(fresh, name), "w", encoding="utf-8") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    try:
        os.rename(fresh, folder)
    except OSError:
        # An older folder is there. Its files belong to the same step, so they may be replaced one
        # after the other.
        try:
            for name in (STATE, POINTER):
                os.replace(os.path.join(fresh, name), os.path.join(folder, name))
        except OSError:
            # Another node writes the same folder.
            if not all(os.path.isfile(os.path.join(folder, name)) for name in (STATE, POINTER)):
                raise
        finally:
            shutil.rmtree(fresh, ignore_errors=True)


def remove_folders(output_dir: str, *, keep: Collection[object]) -> None:
    """Remove the folders of ours whose steps are not in ``keep``."""
    for step, folder in _folders(output_dir).items():
        if step not in keep:
            gone = os.path.join(output_dir, f".checkpoint-{step}.gone")
            with contextlib.suppress(OSError):  # Another node may have renamed it
                os.rename(folder, gone)
            shutil.rmtree(gone, ignore_errors=True)


def _folders(output_dir: str) -> dict[int, str]:
    """Return our folders by step."""
    found: dict[int, str] = {}
    for name in os.listdir(output_dir):
        step, folder = step_named(name), os.path.join(output_dir, name)
        if step is not None and os.path.isfile(os.path.join(folder, POINTER)):
            found[step] = folder
    return found

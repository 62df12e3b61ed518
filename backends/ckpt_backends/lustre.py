"""Lustre: the striping of a step's files over storage targets.

A file is stored on one target unless its folder says otherwise, and then one image has the
bandwidth of one target. So a new folder gets a striping for the files in it: the first 64 MiB of a
file are on one target, which keeps fragments and manifests small, and the rest is striped over
several targets in pieces of 4 MiB. A striping that the site or the user has set on the folder above
stays as it is.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
from typing import Final

from ckpt.errors import ConfigError
from ckpt_backends.mounts import kind_of

_log = logging.getLogger("ckpt")
_COUNT: Final = 4
_MOST: Final = 2000  # The most targets of one file
_SECONDS: Final = 10.0


class Striping:
    """Thread safety: any thread may call ``apply``.

    It never raises: a checkpoint on one target is a checkpoint too.

    Args:
        root: Of the store; need not be there yet.
        count: Targets for each large file, -1 for all there are. None: four, unless a layout is
            inherited; 0: as it is.
    """

    def __init__(self, root: str, count: int | None) -> None:
        self._root, self._count = root, count
        self._lfs: str | None = None
        self._looked = False

    def apply(self, folder: str) -> None:
        """Set the layout of ``folder``, which is new and empty."""
        if not self._looked:
            self._looked = True
            self._lfs = self._find()
        if self._lfs is None:
            return
        count = str(self._count or _COUNT)
        layout = ["-E", "64M", "-c", "1", "-S", "4M", "-E", "-1", "-c", count, "-S", "4M"]
        if (error := _run([self._lfs, "setstripe", *layout, folder])[1]) is not None:
            _log.warning("ckpt: no striping on %s: %s", folder, error)
            self._lfs = None  # Log it only once

    def _find(self) -> str | None:
        """Return the program, if there is something for it to do."""
        if self._count == 0 or kind_of(self._root) != "lustre" or not (lfs := shutil.which("lfs")):
            return None
        if self._count is None:
            there = self._root
            while not os.path.isdir(there):
                there = os.path.dirname(there)
            if _run([lfs, "getstripe", "-d", "-c", there])[0].strip() != "1":
                return None  # A composite layout has no single number
        return lfs


def stripe_count(value: object) -> int:
    """Return the option ``stripe_count`` after a check."""
    if not isinstance(value, int) or isinstance(value, bool) or not -1 <= value <= _MOST:
        text = value if isinstance(value, int) else f"<{type(value).__name__}>"
        raise ConfigError(
            f"stripe_count={text}: give a number of Lustre storage targets from 1 to {_MOST}, -1 "
            "for all, or 0 to leave folders as they are"
        )
    return value


def _run(command: list[str]) -> tuple[str, str | None]:
    """Return what the command printed, and the reason if it failed."""
    try:
        done = subprocess.run(  # noqa: S603 - lfs, and names that are ours
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SECONDS,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return "", str(error)
    return (
        done.stdout,
        None if done.returncode == 0 else done.stderr.strip() or f"exit code {done.returncode}",
    )

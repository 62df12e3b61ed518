"""Stripes the files of a step over the storage targets of a Lustre file system.

By default, Lustre stores a file on one target, which limits the write of an image to the bandwidth
of one target. This module therefore sets a layout on each new folder, which applies to the files in
the folder. The first 64 MiB of a file are on one target, so that fragments and manifests do not
occupy several targets. The bytes after that are striped over several targets in pieces of 4 MiB. If
the site or the user has already set a striping on the root or the folder above, new folders inherit
it. This module then sets a layout only if the option ``stripe_count`` asks for one.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import threading
from typing import Final

from ckpt.errors import ConfigError

_log = logging.getLogger("ckpt")
_DEFAULT_COUNT: Final = 4
_MOST_TARGETS: Final = 2000  # Lustre stripes a file over at most this many targets
_TIMEOUT_SECONDS: Final = 10.0


class Striping:
    """The striping of the folders of one store on Lustre.

    Thread safety: any thread may call ``apply``.

    Args:
        root: The path of the root, which need not exist yet.
        count: The number of targets for each large file; -1 for all targets. None means four
            targets, unless the root inherits a striping.
    """

    def __init__(self, root: str, count: int | None) -> None:
        self._root, self._count = root, count
        self._lock = threading.Lock()  # Guards the two fields below
        self._lfs: str | None = None
        self._has_searched = False

    def apply(self, folder: str) -> None:
        """Set the layout of ``folder``, which is new and empty. Do nothing if the program ``lfs``
        is not installed, or if the root inherits a striping and no ``count`` was given.

        Never raise: the first failure is logged, and later calls do nothing. Files without striping
        are valid, too.
        """
        with self._lock:  # Other threads wait here until it is known whether to set layouts
            if not self._has_searched:
                self._lfs = self._find_lfs()
                self._has_searched = True
            lfs = self._lfs
        if lfs is None:
            return
        count = str(self._count or _DEFAULT_COUNT)
        # -E: the end of an extent; -c: its number of targets; -S: the size of a stripe
        layout = ["-E", "64M", "-c", "1", "-S", "4M", "-E", "-1", "-c", count, "-S", "4M"]
        _, error = _run([lfs, "setstripe", *layout, folder])
        if error is not None:
            with self._lock:
                is_first, self._lfs = self._lfs is not None, None  # Do not try again
            if is_first:
                _log.warning("ckpt: no striping on %s: %s", folder, error)

    def _find_lfs(self) -> str | None:
        """Return the path of the program ``lfs`` if it must set layouts, else None."""
        if not (lfs := shutil.which("lfs")):
            return None
        if self._count is None:
            folder = self._root
            while not os.path.isdir(folder):
                folder = os.path.dirname(folder)
            output, _ = _run([lfs, "getstripe", "-d", "-c", folder])
            if output.strip() != "1":
                return None  # The folder has a striping. A composite one prints no single number
        return lfs


def stripe_count(value: object) -> int:
    """Return the value of the option ``stripe_count``.

    Raises:
        ConfigError: The value is not a number from -1 to 2000.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not -1 <= value <= _MOST_TARGETS:
        text = value if isinstance(value, int) else f"<{type(value).__name__}>"
        raise ConfigError(
            f"stripe_count={text}: give a number of Lustre storage targets from 1 to "
            f"{_MOST_TARGETS}, -1 for all, or 0 to leave folders as they are"
        )
    return value


def _run(command: list[str]) -> tuple[str, str | None]:
    """Run ``command``. Return its standard output, and the reason of a failure or None."""
    try:
        process = subprocess.run(  # noqa: S603 - lfs, and names that are ours
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return "", str(error)
    return (
        process.stdout,
        None
        if process.returncode == 0
        else process.stderr.strip() or f"exit code {process.returncode}",
    )

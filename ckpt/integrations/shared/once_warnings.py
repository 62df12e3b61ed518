"""Warnings that a process logs only once, such as a warning about an untested framework."""

from __future__ import annotations

import logging
import re
from importlib.metadata import version
from typing import Final

_log = logging.getLogger("ckpt")
_logged_lines: Final[set[str]] = set()


def warn_once(text: str, *args: object) -> None:
    """Log ``text % args`` as a warning, unless this process has logged the same line before."""
    if (line := text % args) not in _logged_lines:
        _logged_lines.add(line)
        _log.warning("%s", line)


def warn_of_untested(
    package: str, releases: tuple[str, str], *, advice: str, release: str | None = None
) -> None:
    """Log a warning, once in a process, if the installed release of a framework is not tested.

    Args:
        package: The name of the framework's distribution.
        releases: The first and the last release that were tested, such as ``("2.6", "2.6")``.
        advice: The text that says how to test this release before relying on it.
        release: The release; None if the distribution has the name of the package.
    """
    release = release or version(package)
    oldest, last = map(_release_numbers, releases)
    if not oldest <= _release_numbers(release) <= last:
        warn_once(
            "ckpt: %s %s is installed, and this version of ckpt was tested with %s %s only: %s "
            "before you rely on it",
            package,
            release,
            package,
            " to ".join(dict.fromkeys(releases)),
            advice,
        )


def _release_numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])

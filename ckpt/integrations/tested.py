"""Warnings that a process logs only once, such as a warning about an untested framework."""

from __future__ import annotations

import logging
import re
from importlib.metadata import version
from typing import Final

_log = logging.getLogger("ckpt")
_warned: Final[set[str]] = set()


def warn_once(text: str, *args: object) -> None:
    """Log ``text % args`` as a warning, unless this process has logged the same line before."""
    if (line := text % args) not in _warned:
        _warned.add(line)
        _log.warning("%s", line)


def warn_of_untested(package: str, tested: tuple[str, str], *, advice: str) -> None:
    """Log a warning, once in a process, if the installed release of a framework is not tested.

    Args:
        package: The name of the framework's distribution.
        tested: The first and the last release that were tested, such as ``("2.6", "2.6")``.
        advice: The text that says how to test this release before relying on it.
    """
    installed = version(package)
    first, last = map(_release, tested)
    if not first <= _release(installed) <= last:
        warn_once(
            "ckpt: %s %s is installed, and this version of ckpt was tested with %s %s only: %s "
            "before you rely on it",
            package,
            installed,
            package,
            " to ".join(dict.fromkeys(tested)),
            advice,
        )


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])

"""The releases of frameworks that the tests ran with."""

from __future__ import annotations

import logging
import re
from importlib.metadata import version
from typing import Final

_log = logging.getLogger("ckpt")
_warned: Final[set[tuple[str, str]]] = set()


def warn_of_untested(package: str, tested: tuple[str, str], *, advice: str) -> None:
    """Log a warning, once in a process for a release, if the tests did not run with it.

    Args:
        package: The name of its distribution.
        tested: The first and the last release that were tested, such as ``("2.6", "2.6")``.
        advice: What to do before relying on it.
    """
    installed = version(package)
    release, first, last = map(_release, (installed, *tested))
    key = (package, ".".join(map(str, release)))
    if first <= release <= last or key in _warned:
        return
    _warned.add(key)
    _log.warning(
        "ckpt: %s %s is installed, and this version of ckpt was tested with %s %s only: %s before "
        "you rely on it",
        package,
        installed,
        package,
        tested[0] if first == last else " to ".join(tested),
        advice,
    )


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])

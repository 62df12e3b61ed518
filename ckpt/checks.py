"""Checks of values that a user sets, and conversions of them (``as_...``).

Each check raises ``ConfigError`` if it fails. The error gives the name of the setting, its value,
and the values that are accepted. A *manifest* is the JSON file that describes a checkpoint.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Final, TypeGuard

from ckpt.errors import ConfigError

_LARGEST: Final = 1e9
"""The greatest number that ``number`` accepts. Python waits for at most 9e9 seconds."""
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgtp]?)(i?)b?", re.IGNORECASE)


def check_keys(prefix: str, table: Mapping[str, Any], names: Sequence[str]) -> None:
    """Raise for the first key of ``table`` that is not in ``names``.

    The error shows the key after ``prefix``. It suggests the most similar known key, or lists all
    known keys if none is similar.
    """
    for key in table:
        if key not in names:
            similar = get_close_matches(key, names, n=1, cutoff=0.5)
            hint = f"did you mean {similar[0]}?" if similar else f"known are {', '.join(names)}"
            raise ConfigError(f"{prefix}{key} is not a setting: {hint}")


def check_json(name: str, value: object) -> None:
    """Raise unless a manifest can hold the value. It cannot hold the dates, nan and inf of TOML."""
    if isinstance(value, dict):
        for key, item in value.items():
            check_json(f"{name}.{key}", item)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            check_json(f"{name}[{index}]", item)
    elif (
        not isinstance(value, str | bool | int | float)
        or value != value  # NaN
        or value in (float("inf"), float("-inf"))
    ):
        raise ConfigError(f"{name}={value!s} cannot be kept in a manifest: write it as a string")


def text_of(value: object) -> str:
    """Return the text that quotes a setting's value in an error.

    The text is the ``repr`` of a plain value. For any other value, such as a container, the text is
    only the name of the type, since the value may hold secrets.
    """
    is_plain = value is None or isinstance(value, str | bytes | bool | int | float)
    return repr(value) if is_plain else f"<{type(value).__name__}>"


def as_place(name: str, value: object, purpose: str) -> str:
    """Return ``value``, a folder or URL, as a string. Raise ``ConfigError`` if it is neither.

    The error says with ``purpose`` what needs the folder or URL.
    """
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(
            f"{name}={text_of(value)}: {purpose}, such as 'runs/gpt' or 's3://bucket/run42'"
        )
    return value


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raise unless the value is one of ``choices``."""
    if value not in choices:
        raise ConfigError(
            f"{name}={text_of(value)}: choose {' or '.join(repr(choice) for choice in choices)}"
        )


def check_int(name: str, value: object, least: int, largest: int) -> None:
    """Raise unless the value is an int from ``least`` to ``largest``. A bool does not count."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= largest:
        raise ConfigError(f"{name}={text_of(value)}: give a whole number from {least} to {largest}")


def check_number(name: str, value: object, of: str, *, above_zero: bool = False) -> None:
    """Raise unless the value is a number from 0 to 1e9, but not 0 if ``above_zero`` is set.

    ``of`` ends the error's text "give a number of ...": it names the unit, and an accepted value.
    """
    if not is_number(value) or not 0 <= value <= _LARGEST or (above_zero and not value):
        note = " (at most 1e9)" if is_number(value) and value > _LARGEST else ""
        raise ConfigError(f"{name}={text_of(value)}: give a number of {of}{note}")


def check_bool(name: str, value: object) -> None:
    """Raise unless the value is True or False. 1 and 0 do not count."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={text_of(value)}: give true or false")


def as_bytes(name: str, value: int | str) -> int:
    """Return a size in bytes: '200GB' is 200 * 1000**3 and '200GiB' is 200 * 1024**3.

    Raise unless ``value`` is such a text or an int, and the size is from 1 to 2**60.
    """
    size: object = value
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is not None:
        digits, prefix, binary = match.groups()
        power = " kmgtp".index(prefix.lower() or " ")
        # Hundreds of digits give an infinite float, which ``round`` does not accept.
        size = round(min(float(digits), 2.0**100) * (1024 if binary else 1000) ** power)
    if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= 1 << 60:
        raise ConfigError(
            f"{name}={text_of(value)}: give a size above 0, such as '200GB', '64GiB', or bytes"
        )
    return size


def is_number(value: object) -> TypeGuard[float]:
    """Return True if the value is an int or a float. True and False do not count."""
    return isinstance(value, int | float) and not isinstance(value, bool)

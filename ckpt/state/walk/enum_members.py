"""Save a member of an enum among the settings of an optimizer as the number or text it equals.

A checkpoint names no class, so only the optimizer in the state knows the enum of a setting.
"""

from __future__ import annotations

import enum
from typing import Any


def plain_of(setting: Any) -> Any:
    """Return the value of ``setting`` if it is a member of an enum and equal to its value, as those
    of ``IntEnum`` and ``StrEnum`` are. Return any other setting itself.
    """
    is_equal = isinstance(setting, enum.Enum) and isinstance(setting, int | str)
    return setting.value if is_equal else setting


def member_like(present: Any, value: Any) -> Any:
    """Return the member for ``value`` of the enum that ``present`` is a member of. If ``present``
    is no member of such an enum, return ``value`` itself.

    Raises:
        ValueError: The enum has no member for ``value``.
    """
    return value if plain_of(present) is present else type(present)(value)

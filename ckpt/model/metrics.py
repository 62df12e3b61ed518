"""The metrics of a step: numbers by name, in the manifest's metadata under ``metrics``.

Only rank 0 writes them, so ranks with different losses need not agree. The merge takes values that
only one rank has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, SupportsFloat

import msgspec

from ckpt.errors import CkptError, ConfigError
from ckpt.model.values import decode, parse

METRICS: Final = "metrics"
Metrics = Mapping[str, SupportsFloat]


def as_metrics(given: object) -> dict[str, float]:
    """Return a user's metrics as floats. Raises ``ConfigError`` for values that are not numbers,
    and for empty names.
    """
    if not isinstance(given, Mapping):
        raise ConfigError(f'metrics={given!r}: give numbers by name, such as {{"loss": 1.2}}')
    return {_name(name): _number(name, value) for name, value in given.items()}


def metrics_of(metadata: msgspec.Raw) -> dict[str, float]:
    """Return the metrics in the metadata of a manifest. Values that are no numbers are left out."""
    try:
        found = decode(parse(metadata, "metadata"), lambda _tag, _node: None)[METRICS]
        return {name: float(value) for name, value in found.items() if type(value) in (int, float)}
    except (CkptError, msgspec.MsgspecError, LookupError, TypeError, AttributeError, OverflowError):
        return {}


def _name(name: object) -> str:
    if not isinstance(name, str) or not name:
        raise ConfigError(f"metrics: {name!r} is not a name: give a string")
    return name


def _number(name: object, value: object) -> float:
    value = getattr(value, "detach", lambda: value)()  # A loss may still be part of its graph
    if isinstance(value, SupportsFloat) and not isinstance(value, bool):
        try:
            return float(value)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            pass  # For example, a tensor of several elements
    raise ConfigError(f"metrics[{name!r}] is a {type(value).__name__}, not a number: give a float")

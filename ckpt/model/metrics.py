"""Convert the metrics of a step to and from the metadata of its manifest.

Metrics are numbers by name, under the key ``metrics`` of the metadata. Only rank 0 stores its
metrics, since other ranks may have other values, such as another loss. The merge of the fragments
accepts an item of the metadata that only one rank has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, SupportsFloat

import msgspec

from ckpt.errors import CkptError, ConfigError
from ckpt.model.values import decode, parse

METRICS: Final = "metrics"
Metrics = Mapping[str, SupportsFloat]


def as_metrics(metrics: object) -> dict[str, float]:
    """Convert the values of the metrics that a user has passed to floats, and return them by name.

    Raises:
        ConfigError: The argument is not a mapping, a name is not a string or is empty, or a value
            is not a number.
    """
    if not isinstance(metrics, Mapping):
        raise ConfigError(f'metrics={metrics!r}: give numbers by name, such as {{"loss": 1.2}}')
    return {_name(name): _number(name, value) for name, value in metrics.items()}


def metrics_of(metadata: msgspec.Raw) -> dict[str, float]:
    """Return the metrics in the metadata of a manifest. Values that are not numbers are left out.
    The result is empty if the metadata has no metrics or is invalid.
    """
    try:
        metrics = decode(parse(metadata, "metadata"), lambda _tag, _node: None)[METRICS]
        return {
            name: float(value) for name, value in metrics.items() if type(value) in (int, float)
        }
    except (CkptError, msgspec.MsgspecError, LookupError, TypeError, AttributeError, OverflowError):
        return {}


def _name(name: object) -> str:
    if not isinstance(name, str) or not name:
        raise ConfigError(f"metrics: {name!r} is not a name: give a string")
    return name


def _number(name: object, value: object) -> float:
    # A loss may be a tensor that requires gradients, and ``float`` warns about such a tensor.
    value = getattr(value, "detach", lambda: value)()
    if isinstance(value, SupportsFloat) and not isinstance(value, bool):
        try:
            return float(value)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            pass  # For example, a tensor of several elements
    raise ConfigError(f"metrics[{name!r}] is a {type(value).__name__}, not a number: give a float")

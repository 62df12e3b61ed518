"""Convert the metrics of a step to and from the metadata of its manifest.

Metrics are numbers by name, under the key ``metrics`` of the metadata. Only rank 0 stores its
metrics, since other ranks may have other values, such as another loss. The merge of the fragments
accepts an item of the metadata that only one rank has.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Final, SupportsFloat

import msgspec

from ckpt.config import Mode, Tier
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
    return {_check_name(name): _as_float(name, value) for name, value in metrics.items()}


def metrics_of(metadata: msgspec.Raw) -> dict[str, float]:
    """Return the metrics in the metadata of a manifest. Values that are not numbers are left out.
    The result is empty if the metadata has no metrics or is invalid.
    """
    try:
        # Values of other kinds in the metadata become None.
        metrics = decode(parse(metadata, "metadata"), lambda _tag, _node: None)[METRICS]
        return {
            name: float(value) for name, value in metrics.items() if type(value) in (int, float)
        }
    except (CkptError, msgspec.MsgspecError, LookupError, TypeError, AttributeError, OverflowError):
        return {}


def best_steps(values: Iterable[tuple[int, float]], mode: Mode) -> list[int]:
    """Return the steps of ``values``, best first.

    Infinite values and NaN are left out. If the values of steps are equal, the newer step is
    better. A step that has several values has the best of them.

    Args:
        values: Pairs of a step and the value of a metric.
        mode: Which values are the best.
    """
    sign = -1 if mode == "max" else 1
    pairs = sorted((sign * value, -step) for step, value in values if math.isfinite(value))
    return list(dict.fromkeys(-step for _, step in pairs))


def mode_of(metric: str, modes: Mapping[str, Mode]) -> Mode | None:
    """Return which values of ``metric`` are the best: what ``modes`` says, or else the smallest
    values of a metric with "loss" in its name. Return None if it is not known.
    """
    return modes.get(metric) or ("min" if "loss" in metric.lower() else None)


def modes_of(tiers: Iterable[Tier]) -> dict[str, Mode]:
    """Return which values of a metric are the best, by its name, as ``keep_best`` of tiers says."""
    return {tier.best.metric: tier.best.mode for tier in tiers if tier.best is not None}


def _check_name(name: object) -> str:
    if not isinstance(name, str) or not name:
        raise ConfigError(f"metrics: {name!r} is not a name: give a string")
    return name


def _as_float(name: object, value: object) -> float:
    """Return a metric as a float. Raise ``ConfigError`` if it is not a number."""
    # A loss may be a tensor that requires gradients, and ``float`` warns about such a tensor.
    value = getattr(value, "detach", lambda: value)()
    if isinstance(value, SupportsFloat) and not isinstance(value, bool):
        try:
            return float(value)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            pass  # For example, a tensor of several elements
    raise ConfigError(f"metrics[{name!r}] is a {type(value).__name__}, not a number: give a float")

"""The columns of metrics in a list of steps, with a star at the best value, and their order."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Self, TypeVar

from ckpt.config import Mode
from ckpt.errors import ConfigError
from ckpt.model.metrics import best_steps, mode_of

T = TypeVar("T")

BY_STEP: Final = "step"
"""The value of ``--sort`` that sorts by the number of the step."""
_MOST_COLUMNS: Final = 8
"""Further metrics of a step are shown with its metadata."""
_STAR: Final = "* "
_TITLES: Final = frozenset(
    ("step", "attempt", "committed at", "ranks", "tensors", "size", "state", "metadata")
)
"""The titles of the other columns of the list."""


@dataclass(frozen=True, slots=True)
class MetricColumns:
    """The columns of metrics.

    Attributes:
        names: The metrics that have a column: first those of ``keep_best``, then those whose best
            value is known, then the others.
        best: The step with the best value of each metric, by its name. A metric is left out if it
            is not known which values are the best, or if no value is finite.
    """

    names: tuple[str, ...]
    best: Mapping[str, int]

    @classmethod
    def of(
        cls,
        steps: Mapping[int, Mapping[str, float]],
        modes: Mapping[str, Mode],
        rows: Iterable[Mapping[str, float]] = (),
    ) -> Self:
        """Return the columns for the metrics of ``steps``.

        Args:
            steps: The metrics of each step that may be the best one, by the number of the step.
            modes: Which values are the best, by the name of the metric, as the settings say.
            rows: The metrics of rows that may not be the best one.
        """
        metrics = {name for values in (*steps.values(), *rows) for name in values}
        modes_by_metric: dict[str, Mode] = {
            name: mode for name in metrics if (mode := mode_of(name, modes)) is not None
        }
        names = sorted(
            metrics, key=lambda name: (name not in modes, name not in modes_by_metric, name)
        )
        orders = {
            name: best_steps(_values(steps, name), mode) for name, mode in modes_by_metric.items()
        }
        return cls(
            tuple(names[:_MOST_COLUMNS]),
            {name: order[0] for name, order in orders.items() if order},
        )

    @property
    def titles(self) -> tuple[str, ...]:
        """The titles of the columns. None is the title of another column of the list."""
        return tuple(f"metric {name}" if name in _TITLES else name for name in self.names)

    def cells(self, metrics: Mapping[str, float], step: int | None) -> tuple[str, ...]:
        """Return a cell for each column.

        Args:
            metrics: The metrics of a row.
            step: The step of the row; None if the row can be no best step.
        """
        return tuple(
            f"{_STAR if step is not None and self.best.get(name) == step else ''}"
            f"{metrics[name]:.6g}"
            if name in metrics
            else "-"
            for name in self.names
        )

    def best_of(self, step: int) -> list[str]:
        """Return the metrics whose best value ``step`` has."""
        return sorted(name for name, best_step in self.best.items() if best_step == step)


def sort_by(
    rows: Sequence[T],
    metric: str,
    metrics_of: Callable[[T], Mapping[str, float]],
    modes: Mapping[str, Mode],
) -> list[T]:
    """Return ``rows`` in the order of ``metric``, the best value last. Rows without a finite value
    come first, in the order in which they are.

    Raises:
        ConfigError: No row has the metric.
    """
    names = sorted({name for row in rows for name in metrics_of(row)})
    if rows and metric not in names:
        advice = f"there is {', '.join(map(repr, names))}" if names else "no step has metrics"
        raise ConfigError(f"--sort {metric}: no step has this metric; {advice}")
    sign = -1 if mode_of(metric, modes) == "min" else 1

    def value(row: T) -> float:
        number = sign * metrics_of(row).get(metric, math.nan)
        return number if math.isfinite(number) else -math.inf

    return sorted(rows, key=value)


def _values(steps: Mapping[int, Mapping[str, float]], name: str) -> list[tuple[int, float]]:
    return [(step, metrics[name]) for step, metrics in steps.items() if name in metrics]

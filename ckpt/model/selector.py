"""Selectors: names of a step by its place in the history of a run.

``1200`` is the step of this number, ``latest`` the newest checkpoint, ``latest~3`` the one that is
three checkpoints older, and ``best:loss`` the checkpoint with the best value of a metric. Only
checkpoints of the current branch count. ``branch:before-spike`` is the step that a person has given
this name, on any branch. A selector does not begin with a minus, which begins an option of the
command line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, cast, get_args

from ckpt.config import Mode
from ckpt.errors import ConfigError
from ckpt.errors.base import few
from ckpt.model.keys import step_of
from ckpt.model.metrics import best_steps, mode_of

LATEST: Final = "latest"
"""The selector of the newest checkpoint."""
_OLDER: Final = f"{LATEST}~"
_BEST: Final = "best:"
_BRANCH: Final = "branch:"
_BRANCH_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_MODES: Final = get_args(Mode)
_MOST_DIGITS: Final = 18


@dataclass(frozen=True, slots=True)
class LatestStep:
    """The newest checkpoint, or the one that is ``age`` checkpoints older."""

    age: int = 0

    def __str__(self) -> str:
        return f"{_OLDER}{self.age}" if self.age else LATEST


@dataclass(frozen=True, slots=True)
class BestStep:
    """The checkpoint with the best value of ``metric``.

    Attributes:
        mode: Which values are the best. None: as ``keep_best`` says, or else the smallest values of
            a metric with "loss" in its name.
    """

    metric: str
    mode: Mode | None = None

    def __post_init__(self) -> None:
        """Check the fields.

        Raises:
            ConfigError: A field is wrong.
        """
        metric: object = self.metric
        if not isinstance(metric, str) or not metric:
            raise ConfigError(f'{metric!r} is not the name of a metric: give one, such as "loss"')
        if self.mode not in (None, *_MODES):
            raise ConfigError(f'mode={self.mode!r}: give "min" or "max"')

    def __str__(self) -> str:
        return f"{_BEST}{self.metric}" + (f":{self.mode}" if self.mode else "")


@dataclass(frozen=True, slots=True)
class BranchStep:
    """The step that a person has named, with the branch that led to it."""

    name: str

    def __post_init__(self) -> None:
        """Check the name.

        Raises:
            ConfigError: The name is wrong.
        """
        if not _BRANCH_NAME.fullmatch(self.name):
            raise ConfigError(
                f"a branch named {self.name[:80]!r}: use 1 to 64 letters, digits, '-', '_' and "
                "'.', and begin with a letter or digit"
            )

    def __str__(self) -> str:
        return f"{_BRANCH}{self.name}"


NamedStep = LatestStep | BestStep | BranchStep
Selector = int | NamedStep


def is_selector(text: str) -> bool:
    """Return True if ``text`` is a selector or begins like one."""
    return text == LATEST or _is_number(text) or text.startswith((_OLDER, _BEST, _BRANCH))


def parse_selector(text: str) -> Selector:
    """Return the selector that ``text`` describes.

    Raises:
        ConfigError: It describes none.
    """
    age_text, metric_text = text.removeprefix(_OLDER), text.removeprefix(_BEST)
    if text == LATEST:
        return LatestStep()
    if _is_number(text):
        return int(text)
    if age_text != text and _is_number(age_text):
        return LatestStep(int(age_text))
    if text.startswith(_BRANCH):
        return BranchStep(text.removeprefix(_BRANCH))
    if metric_text not in (text, ""):
        name, _, mode = metric_text.rpartition(":")
        has_mode = name and mode in _MODES
        return BestStep(name, cast("Mode", mode)) if has_mode else BestStep(metric_text)
    raise ConfigError(
        f"step={text!r}: a step is a number of at most {_MOST_DIGITS} digits, {LATEST}, "
        f"{_OLDER}1, {_BEST}METRIC or {_BRANCH}NAME"
    )


def selector_of(step: object) -> Selector | None:
    """Return the selector that a user gives as ``step``, a number or a text. None stands for the
    newest step, as "latest" does.

    Raises:
        ConfigError: ``step`` is neither.
    """
    if step is None:
        return None
    if not isinstance(step, str):
        return step_of({}, step, last=None)
    selector = parse_selector(step)
    return None if selector == LatestStep() else selector


def resolve(
    selector: LatestStep | BestStep,
    steps: Mapping[int, Mapping[str, float]],
    modes: Mapping[str, Mode],
) -> int | None:
    """Return the step that ``selector`` names; None if there is none.

    Infinite values and NaN are never the best. If the values of steps are equal, the newer step is
    better.

    Args:
        selector: The selector.
        steps: The metrics of each checkpoint of the current branch, by the number of the step.
        modes: Which values of a metric are the best, by its name, as ``keep_best`` says.

    Raises:
        ConfigError: Some steps have metrics, but none has that of the selector. Or it is not known
            which values are the best.
    """
    if isinstance(selector, LatestStep):
        step_by_age = dict(enumerate(sorted(steps, reverse=True)))
        return step_by_age.get(selector.age)
    name = selector.metric
    values = [(step, metrics[name]) for step, metrics in steps.items() if name in metrics]
    if not values and (names := sorted({name for metrics in steps.values() for name in metrics})):
        raise ConfigError(f"{selector}: no step has this metric; there is {few(names, 20)}")
    mode = selector.mode or mode_of(name, modes)
    if values and mode is None:
        raise ConfigError(
            f"{selector}: neither keep_best nor the name of the metric says which values are the "
            f"best: {_BEST}{name}:max takes the largest, and {_BEST}{name}:min the smallest"
        )
    return next(iter(best_steps(values, mode)), None) if mode is not None else None


def why_none(selector: LatestStep | BestStep, steps: Mapping[int, Mapping[str, float]]) -> str:
    """Return why ``resolve`` finds no step among ``steps``, which is not empty."""
    if isinstance(selector, LatestStep):
        count_text = (
            "there is 1 checkpoint" if len(steps) == 1 else f"there are {len(steps)} checkpoints"
        )
        oldest = LatestStep(len(steps) - 1)
        return (
            f"{selector} is not there: {count_text}, and the oldest is {oldest}, step {min(steps)}"
        )
    if any(selector.metric in metrics for metrics in steps.values()):
        return f"{selector} is not there: no value of the metric is finite"
    return (
        f"{selector} is not there: no checkpoint has metrics, which save_async(metrics=...) and "
        "add_metrics(...) give"
    )


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS

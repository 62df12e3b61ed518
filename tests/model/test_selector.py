"""Selectors name a step by its place in the history of a run."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.cli.metric_columns import MetricColumns
from ckpt.config import Mode
from ckpt.errors import ConfigError
from ckpt.model.metrics import mode_of
from ckpt.model.selector import (
    BestStep,
    BranchStep,
    LatestStep,
    is_selector,
    parse_selector,
    resolve,
    selector_of,
    why_none,
)

VALUES = st.sampled_from([-1.0, 0.0, 0.5, 2.0, math.nan, math.inf, -math.inf])
NAMES = st.sampled_from(["loss", "val/loss", "acc"])
STEPS = st.dictionaries(st.integers(0, 30), st.dictionaries(NAMES, VALUES), max_size=8)
MODES = st.dictionaries(NAMES, st.sampled_from(["min", "max"]))


@pytest.mark.parametrize(
    ("text", "selector"),
    [
        ("1200", 1200),
        ("0", 0),
        ("latest", LatestStep()),
        ("latest~0", LatestStep()),
        ("latest~3", LatestStep(3)),
        ("best:loss", BestStep("loss")),
        ("best:acc:max", BestStep("acc", "max")),
        ("best:val/loss:min", BestStep("val/loss", "min")),
        ("best:a:b", BestStep("a:b")),
        ("best:max", BestStep("max")),
        ("best::max", BestStep(":max")),
        ("best:x:max:min", BestStep("x:max", "min")),
        ("branch:before-spike", BranchStep("before-spike")),
        ("branch:0.1_b", BranchStep("0.1_b")),
    ],
)
def test_a_text_is_a_selector(text, selector):
    assert is_selector(text)
    assert parse_selector(text) == selector
    if not isinstance(selector, int):
        assert parse_selector(str(selector)) == selector


@pytest.mark.parametrize(
    "text",
    [
        *("", "best:", "latest~", "latest~x", "latest~-1", "latest~1/2", "-3", "runs", "1.5"),
        *("9" * 19, "Latest", "latest ", "best", "\N{DEVANAGARI DIGIT FOUR}"),
    ],
)
def test_another_text_names_no_step(text):
    with pytest.raises(ConfigError, match=r"step=.*: a step is a number"):
        parse_selector(text)


@pytest.mark.parametrize("name", ["", "a/b", "-a", ".a", "a b", "x" * 65, "\u00e4"])
def test_a_branch_has_a_name_without_slashes(name):
    with pytest.raises(ConfigError, match="use 1 to 64 letters"):
        parse_selector(f"branch:{name}")


@pytest.mark.parametrize("place", ["runs/latest~3", "./best:loss", "best", "s3://best:a/b", "12x"])
def test_a_place_is_no_selector(place):
    assert not is_selector(place)


@pytest.mark.parametrize(("step", "selector"), [(None, None), ("latest", None), ("7", 7), (7, 7)])
def test_a_user_gives_a_number_or_a_text(step, selector):
    assert selector_of(step) == selector


@pytest.mark.parametrize("wrong", [-1, 1.5, True, b"latest", ["best:loss"]])
def test_another_value_is_no_step(wrong):
    with pytest.raises(ConfigError, match="a step is a whole number"):
        selector_of(wrong)


@pytest.mark.parametrize(
    ("metric", "mode", "words"),
    [
        ("", None, "is not the name of a metric"),
        (3, None, "is not the name"),
        ("a", "most", "mode"),
    ],
)
def test_a_best_step_has_a_name_and_a_mode(metric, mode, words):
    with pytest.raises(ConfigError, match=words):
        BestStep(metric, mode)


@given(STEPS, st.integers(0, 9))
def test_latest_counts_checkpoints_back(steps, age):
    number = resolve(LatestStep(age), steps, {})
    assert (number is None) == (age >= len(steps))
    if number is not None:
        assert sum(other > number for other in steps) == age


def naive_best(
    steps: dict[int, dict[str, float]], metric: str, mode: Mode | None
) -> tuple[int | None, str]:
    """Return the best step as a person would look for it, and what an error must say instead."""
    if not any(metric in metrics for metrics in steps.values()):
        return None, "no step has this metric" if any(steps.values()) else ""
    if mode is None:
        return None, "neither keep_best nor the name"
    best: int | None = None
    for step in sorted(steps):
        value = steps[step].get(metric, math.nan)
        if math.isnan(value) or math.isinf(value):
            continue
        old = math.nan if best is None else steps[best][metric]
        if best is None or (value >= old if mode == "max" else value <= old):
            best = step
    return best, ""


@given(STEPS, NAMES, st.sampled_from([None, "min", "max"]), MODES)
def test_the_best_is_that_which_a_naive_search_finds(steps, metric, mode, modes):
    direction: Mode | None = mode or modes.get(metric) or ("min" if "loss" in metric else None)
    best, fault = naive_best(steps, metric, direction)
    if fault:
        with pytest.raises(ConfigError, match=fault):
            resolve(BestStep(metric, mode), steps, modes)
    else:
        assert resolve(BestStep(metric, mode), steps, modes) == best


@given(STEPS, MODES)
def test_the_star_of_a_list_is_at_the_best_step(steps, modes):
    columns = MetricColumns.of(steps, modes)
    for metric in {name for metrics in steps.values() for name in metrics}:
        if mode_of(metric, modes) is None:
            assert metric not in columns.best
        else:
            assert columns.best.get(metric) == resolve(BestStep(metric), steps, modes)


@pytest.mark.parametrize(
    ("text", "steps", "words"),
    [
        (
            "latest~99",
            {5: {}, 7: {}},
            "there are 2 checkpoints, and the oldest is latest~1, step 5",
        ),
        ("latest~1", {5: {}}, "there is 1 checkpoint, and the oldest is latest, step 5"),
        ("best:loss", {5: {"loss": math.nan}}, "no value of the metric is finite"),
        ("best:loss", {5: {}, 6: {}}, "no checkpoint has metrics"),
    ],
)
def test_the_reason_is_given_where_there_is_no_such_step(text, steps, words):
    selector = parse_selector(text)
    assert isinstance(selector, LatestStep | BestStep)
    assert resolve(selector, steps, {}) is None
    assert words in why_none(selector, steps)


def test_an_unknown_metric_names_those_that_there_are():
    steps = {1: {"val/loss": 1.0}, 2: {"acc": 0.5}}
    with pytest.raises(ConfigError, match="best:loss: no step has this metric; there is 'acc', 'v"):
        resolve(BestStep("loss"), steps, {})


def test_a_metric_without_a_direction_says_how_to_give_one():
    with pytest.raises(ConfigError, match="best:acc:max takes the largest"):
        resolve(BestStep("acc"), {1: {"acc": 1.0}}, {})

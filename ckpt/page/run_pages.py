"""The contents of the pages, as values for the templates.

A row stands for one attempt of a job at a step. It has a cell for each tier of the run, with the
state of the attempt there. The *mode* of a metric says whether its smallest or its largest value is
the best. The settings of the run declare the modes of some metrics, and ``mode_of`` guesses some
others by their names.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from shlex import quote
from typing import Final

from ckpt.catalog.step_listing import read_manifest
from ckpt.catalog.tensor_reader import StepReader
from ckpt.config import Mode
from ckpt.errors import NoCheckpoint
from ckpt.model.dtype import DTYPES
from ckpt.model.keys import StepRef
from ckpt.model.manifest import Manifest, Tensor, chunk_offsets
from ckpt.model.metrics import best_steps, mode_of
from ckpt.model.readable import duration
from ckpt.observe.journal_record import Record
from ckpt.observe.run_view import RunView, RunWatch, StepView, TierView
from ckpt.page.charts import Chart, chart
from ckpt.page.metric_chart import MetricChart, Point, metric_chart, runs_chart
from ckpt.page.time_shares import TimeShare, time_shares
from ckpt.pipeline.workers import Workers

ROWS: Final = 50
"""The number of steps on one page of the table."""
STRIP: Final = 60
"""The number of newest steps in the strip, a graphic of the state of each step on each tier."""
TENSORS: Final = 200
"""The number of tensors on one page of a step."""
METRICS: Final = 4
"""The number of metrics that have a chart and a column."""
_MOST_REMOVED: Final = 200
"""The number of newest removed steps that are listed."""
_BY_STEP: Final = "step"
_EXISTING_STATES: Final = frozenset({"committed", "verified", "damaged", "saving", "incomplete"})
"""The states of a cell of a step that a tier has, or may get yet."""
_MOST_FAILURES: Final = 8
"""The greatest number of records in ``RunPage.failures``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPage:
    """The contents of the page of a run.

    Attributes:
        run: The view of the run.
        durable: The newest step on a tier that is not in memory; None if there is none.
        strip: The newest steps, for the graphic of their states on each tier.
        rows: The steps on this page of the table: those that exist, in the order of ``sort``.
        sort: "step", or the metric by which the steps are sorted, best first.
        past_rows: The newest steps that no tier has any more, or that have failed.
        past_count: The number of all of these.
        metrics: The metrics that have a chart and a column, the most important one first.
        best: The best step that exists, by the name of the metric.
        risk: How many training steps the newest save is ahead of the newest durable one; None if
            nothing was saved.
        page, pages: The number of this page of the table, from 1 on, and the number of pages.
        stall_seconds: The median stall of a save; None if the journal has none.
        durable_seconds: The median time from the call to the commit on the nearest tier that is
            not in memory; None if the journal has none.
        curves: The curve of each of ``metrics`` that has enough points.
        charts: The charts that have enough points.
        time_shares: The parts of a bar that shows where the time of the run went.
        failures: The journal's records of the newest saves that failed, newest first.
        failure_count: The number of all saves that failed, without those that were skipped.
    """

    run: RunView
    durable: StepView | None
    strip: Sequence[StepView]
    rows: Sequence[StepView]
    sort: str
    past_rows: Sequence[StepView]
    past_count: int
    metrics: Sequence[str]
    best: Mapping[str, int]
    risk: int | None
    page: int
    pages: int
    stall_seconds: float | None
    durable_seconds: float | None
    curves: Sequence[MetricChart]
    charts: Sequence[Chart]
    time_shares: Sequence[TimeShare]
    failures: Sequence[Record]
    failure_count: int


def run_page(run: RunView, page: int, sort: str = _BY_STEP) -> RunPage:
    """Return the contents of the page of a run. They include page number ``page`` of the table, or
    the nearest page if the table has no page of this number.

    Args:
        run: The view of the run.
        page: The number of the page of the table.
        sort: The metric to sort by, if the run has it.
    """
    existing_rows = [row for row in run.steps if _exists(row)]
    past_rows = [row for row in run.steps if not _exists(row)]
    pages = _page_count(len(existing_rows), ROWS)
    page = min(max(page, 1), pages)
    metrics, best = _metrics(run, existing_rows)
    if sort in metrics:
        existing_rows = _by_metric(existing_rows, sort, run)
    saves = [run.history.saves[step] for step in sorted(run.history.saves)]
    stalls = [(save.step, save.stall_seconds) for save in saves if save.stall_seconds]
    arrivals = {  # The seconds until each save was committed, by the URL of the tier
        tier.url: [
            (save.step, save.tiers[tier.url].seconds)
            for save in saves
            if tier.url in save.tiers and save.tiers[tier.url].seconds
        ]
        for tier in run.tiers
    }
    durable_indices = [index for index, tier in enumerate(run.tiers) if not is_in_memory(tier)]
    charts = (
        chart("Stall of a save", {"stall": stalls}, duration),
        chart("From the call to the commit", arrivals, duration),
    )
    durable = next((row for row in run.steps if _is_durable(row, durable_indices)), None)
    saves_of_branch = [save for save in saves if not save.is_abandoned]
    newest = max(saves_of_branch, key=lambda save: (save.at, save.step), default=None)
    nearest = next((run.tiers[index].url for index in durable_indices), "")
    failures = [record for record in run.history.failures if record.error != "SaveSkipped"]
    return RunPage(
        run=run,
        durable=durable,
        strip=run.steps[:STRIP],
        rows=existing_rows[(page - 1) * ROWS : page * ROWS],
        sort=sort if sort in metrics else _BY_STEP,
        past_rows=past_rows[:_MOST_REMOVED],
        past_count=len(past_rows),
        metrics=metrics,
        best=best,
        risk=None if newest is None else max(0, newest.step - (durable.step if durable else 0)),
        page=page,
        pages=pages,
        stall_seconds=_median(stalls),
        durable_seconds=_median(arrivals.get(nearest, [])),
        curves=[curve for name in metrics if (curve := _curve(run, name, best)) is not None],
        charts=[item for item in charts if item is not None],
        time_shares=time_shares(run.time_spent),
        failures=failures[: -_MOST_FAILURES - 1 : -1],  # The last ones, newest first
        failure_count=len(failures),
    )


def _page_count(item_count: int, page_size: int) -> int:
    return max(1, math.ceil(item_count / page_size))


def is_in_memory(tier: TierView) -> bool:
    """Return True if ``tier`` is in memory, so that its steps are lost when the machine ends."""
    return tier.url.startswith("shm://")


def _exists(row: StepView) -> bool:
    return any(cell.state in _EXISTING_STATES for cell in row.cells)


def _metrics(run: RunView, existing_rows: Sequence[StepView]) -> tuple[list[str], dict[str, int]]:
    """Return the metrics to show, the most important one first, and the best step that exists of
    each whose best values are known.
    """
    declared_modes = run.history.modes
    names = {name for row in run.steps for name in row.metrics}
    modes_by_metric: dict[str, Mode] = {
        name: mode for name in names if (mode := mode_of(name, declared_modes))
    }
    best: dict[str, int] = {}
    for name, mode in modes_by_metric.items():
        values = [
            (row.step, row.metrics[name])
            for row in existing_rows
            if name in row.metrics and not row.is_abandoned
        ]
        if steps := best_steps(values, mode):
            best[name] = steps[0]
    order = sorted(
        names, key=lambda name: (name not in declared_modes, name not in modes_by_metric, name)
    )
    return order[:METRICS], best


def _by_metric(rows: Sequence[StepView], metric: str, run: RunView) -> list[StepView]:
    """Return ``rows`` with the best value of ``metric`` first, and rows without a value last."""
    sign = -1 if mode_of(metric, run.history.modes) == "max" else 1

    def value(row: StepView) -> float:
        number = sign * row.metrics.get(metric, math.nan)
        return number if math.isfinite(number) else math.inf

    return sorted(rows, key=value)


def _curve(run: RunView, name: str, best: Mapping[str, int]) -> MetricChart | None:
    """Return the curve of a metric over all steps of the run."""
    failures = [record.step for record in run.history.failures if record.error != "SaveSkipped"]
    return metric_chart(
        name,
        _points(run, name),
        best.get(name),
        abandoned_points=_points(run, name, is_abandoned=True),
        restores=[restore.record.step for restore in run.history.job_restores],
        failures=failures,
    )


def _points(run: RunView, name: str, *, is_abandoned: bool = False) -> list[Point]:
    """Return the values of a metric at the steps of a run that are abandoned, or that are not."""
    points: dict[int, Point] = {}
    for row in reversed(run.steps):  # Of several attempts at a step, one that exists counts
        if name not in row.metrics or row.is_abandoned != is_abandoned:
            continue
        if row.step not in points or _exists(row):
            points[row.step] = Point(row.step, row.metrics[name], _exists(row))
    return [points[step] for step in sorted(points)]


def run_charts(runs: Sequence[RunView]) -> list[Chart]:
    """Return a chart with a line for each run, for the metrics that most of the runs have."""
    declared_modes: dict[str, Mode] = {}
    for run in runs:
        declared_modes |= run.history.modes
    metrics_by_run = [{name for row in run.steps for name in row.metrics} for run in runs]
    counts = Counter(name for metrics in metrics_by_run for name in metrics)
    names = sorted(
        (name for name, count in counts.items() if count > 1),
        key=lambda name: (
            name not in declared_modes,
            mode_of(name, declared_modes) is None,
            -counts[name],
            name,
        ),
    )
    charts = (
        runs_chart(name, {run.name: _points(run, name) for run in runs}) for name in names[:METRICS]
    )
    return [chart for chart in charts if chart is not None]


def commands_of(row: StepView, tiers: Sequence[TierView]) -> dict[str, str]:
    """Return the commands that a reader may want for a step, by their names. The commands take the
    step from the nearest tier that has it, but rather not from memory.
    """
    places = [
        tier
        for tier, cell in zip(tiers, row.cells, strict=True)
        if cell.state in ("committed", "verified")
    ]
    place = next((tier for tier in places if not is_in_memory(tier)), next(iter(places), None))
    if place is None:
        return {}
    url = quote(place.url)
    return {
        "restore": f"ckpt restore {url} {row.step} --to restored-{row.step}",
        "export": f"ckpt export {url} step-{row.step}.safetensors --step {row.step}",
        "pin": f"ckpt pin {url} {row.step} --for 1d",
    }


def _is_durable(row: StepView, tiers: Sequence[int]) -> bool:
    return not row.is_abandoned and any(
        row.cells[index].state in ("committed", "verified") for index in tiers
    )


def _median(points: Sequence[tuple[int, float]]) -> float | None:
    return statistics.median(value for _, value in points) if points else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardLine:
    """A shard as the page shows it.

    Attributes:
        rank: The rank that wrote the shard.
        offsets: The position of its first element in the tensor.
        shape: Its shape.
        file: The name of the file that holds it.
        offset: Its position in that file, in bytes.
        checksums: The checksums of its chunks, in order.
    """

    rank: int
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    offset: int
    checksums: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPage:
    """The contents of the page of a step.

    Attributes:
        row: The states of the step on all tiers.
        url: The tier that the manifest was read from.
        manifest: The manifest of the step.
        query: The text to search for. The page lists the tensors with this text in their names;
            all tensors if it is empty.
        tensors: The listed tensors on this page.
        match_count: The number of listed tensors on all pages.
        page, pages: The number of this page, from 1 on, and the number of pages.
        tensor: The tensor that is shown in detail; None if there is none.
        shards: The shards of ``tensor``.
        earlier_step: The newest earlier step that a tier has, to compare with; None if there is
            none.
    """

    row: StepView
    url: str
    manifest: Manifest
    query: str
    tensors: Sequence[Tensor]
    match_count: int
    page: int
    pages: int
    tensor: Tensor | None
    shards: Sequence[ShardLine]
    earlier_step: StepView | None


class StepOpener:
    """Opens the steps of a run, and keeps the reader of the step that was opened last.

    The reader is used again while its tier is the nearest one that has the step.

    ``_watch.tiers`` have the open stores of the run. ``_last`` is the reader of the step that was
    opened last, with the URL of its tier and the step.

    Thread safety: any thread may call the methods. ``_last`` is replaced as a whole.
    """

    def __init__(self, watch: RunWatch) -> None:
        self._watch = watch
        self._last: tuple[StepReader, str, StepRef] | None = None

    def step(self, run: RunView, name: str) -> tuple[StepView, str, StepReader]:
        """Open a step from the nearest tier that has it.

        Args:
            run: The view of the run.
            name: ``STEP`` or ``STEP.ATTEMPT``.

        Returns:
            The row of the step, the URL of the tier, and a reader of the step.

        Raises:
            NoCheckpoint: No tier has the step.
            CkptError: The manifest cannot be read.
        """
        row = find_row(run, name)
        if row is None:
            raise NoCheckpoint(run.name, f"step {name} is not there")
        ref = StepRef(row.step, row.attempt)
        for tier, cell in zip(run.tiers, row.cells, strict=True):
            if cell.state not in ("committed", "verified"):
                continue
            if (last := self._last) is not None:
                last_reader, *last_place = last
                if last_place == [tier.url, ref]:
                    return row, tier.url, last_reader
            backends = (watch.backend for watch in self._watch.tiers if watch.url == tier.url)
            backend = next(backends, None)
            if backend is not None:
                reader = StepReader(backend, ref, read_manifest(backend, ref), Workers("page", 1))
                self._last = reader, tier.url, ref
                return row, tier.url, reader
        raise NoCheckpoint(run.name, f"step {row.step} is on no tier that can be read")

    def page(self, run: RunView, name: str, query: str, tensor: str, page: int) -> StepPage:
        """Return the page of a step. Raises ``CkptError`` if no tier has it, or it cannot be read.

        Args:
            run: The view of the run.
            name: ``STEP`` or ``STEP.ATTEMPT``.
            query: A text that the names of the listed tensors contain; empty for all tensors.
            tensor: The name of the tensor that is shown in detail; another text shows none.
            page: The number of the page of the list. If the list has no page of this number, the
                nearest page is used.
        """
        row, url, reader = self.step(run, name)
        matches = [entry for entry in reader.manifest.tensors if query in entry.name]
        pages = _page_count(len(matches), TENSORS)
        page = min(max(page, 1), pages)
        shown_tensor = reader.tensors.get(tensor)
        earlier_rows = (view for view in run.steps if view.step < row.step and view.attempt)
        return StepPage(
            row=row,
            url=url,
            manifest=reader.manifest,
            query=query,
            tensors=matches[(page - 1) * TENSORS : page * TENSORS],
            match_count=len(matches),
            page=page,
            pages=pages,
            tensor=shown_tensor,
            shards=_shards(reader, shown_tensor) if shown_tensor is not None else (),
            earlier_step=next((view for view in earlier_rows if _is_committed(view)), None),
        )


def find_row(run: RunView, name: str) -> StepView | None:
    """Return the row of the step ``name``, given as ``STEP`` or ``STEP.ATTEMPT``; None if there is
    none.

    If several rows fit, return the first row whose attempt is a checkpoint on a tier. If no attempt
    is, return the first of these rows.
    """
    step, _, attempt = name.partition(".")
    rows = [row for row in run.steps if str(row.step) == step and attempt in ("", row.attempt)]
    return next((row for row in rows if _is_committed(row)), rows[0] if rows else None)


def _is_committed(row: StepView) -> bool:
    return bool(row.attempt) and any(cell.state in ("committed", "verified") for cell in row.cells)


def _shards(reader: StepReader, tensor: Tensor) -> list[ShardLine]:
    """Return the shards of ``tensor``, each with the checksums of its chunks."""
    files, itemsize = reader.manifest.file_map(), DTYPES[tensor.dtype].itemsize
    lines: list[ShardLine] = []
    for shard in tensor.shards:
        file = files[shard.rank]
        end = shard.offset + math.prod(shard.shape) * itemsize
        starts = chunk_offsets(file)
        checksums = [
            chunk.checksum
            for start, chunk in zip(starts, file.chunks, strict=False)
            if shard.offset <= start < end
        ]
        lines.append(
            ShardLine(
                rank=shard.rank,
                offsets=shard.offsets,
                shape=shard.shape,
                file=file.name,
                offset=shard.offset,
                checksums=checksums,
            )
        )
    return lines

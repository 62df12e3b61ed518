"""``ckpt ls``: list the checkpoints.

Each job that saves a step makes an *attempt* at it, and each row of the list is one attempt. A
*base* of a step is an older step that holds a part of its data, and an *outer base* is in another
root. The *mode* of a metric says whether its smallest or its largest value is the best. A
*rollback* lets the run go on from an older step, and *abandons* the later attempts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Annotated, Any, Final

import typer

from ckpt.catalog.inventory import Inventory, StoredStep
from ckpt.catalog.step_listing import committed, why_missing
from ckpt.cli import output
from ckpt.cli.metric_columns import BY_STEP, MetricColumns, sort_by
from ckpt.cli.options import (
    TIMEOUT_SECONDS,
    ConfigOption,
    JsonOption,
    PlacesArgument,
    RootsOption,
    TimeoutOption,
    ask_each,
    open_each,
    places,
    tiers_of,
)
from ckpt.config import MEMORY, Mode, Tier
from ckpt.errors import CkptError, NoCheckpoint
from ckpt.model.keys import StepRef
from ckpt.model.metrics import METRICS
from ckpt.model.patterns import LEFT_OUT
from ckpt.model.values import decode, exact_text, parse
from ckpt.observe.metric_modes import modes_of_run
from ckpt.root.pins import BASE_END, ENDLESS
from ckpt.storage.api import StorageBackend
from ckpt.storage.registry import open_backend, stores_in_memory
from ckpt.storage.tiers import resolve_tier, urls_of


def ls(
    arguments: PlacesArgument = None,
    newest: Annotated[
        int | None,
        typer.Option("-n", "--newest", metavar="N", min=1, help="List only the N newest steps."),
    ] = None,
    reverse: Annotated[bool, typer.Option("--reverse", help="List the newest step first.")] = False,
    sort: Annotated[
        str,
        typer.Option(
            metavar="METRIC|step",
            help="Sort by a metric, so that the last line is the best step, or by the step.",
        ),
    ] = BY_STEP,
    long: Annotated[
        bool, typer.Option("--long", "-l", help="List also the attempt of each step.")
    ] = False,
    root: RootsOption = None,
    config: ConfigOption = None,
    timeout: TimeoutOption = TIMEOUT_SECONDS,
    json: JsonOption = False,
) -> None:
    r"""List the checkpoints; the last line is the newest.

    With several tiers (more than one ROOT, or --config) there is a column for each, which shows how
    much of the step is there. A tier that cannot be reached, or that does not answer for --timeout
    seconds, is named, and the others are shown.

    No data file is read: "committed" means that a checkpoint is complete, and `ckpt verify` shows
    whether its data is intact. "incomplete" is a save that is still under way or was cut
    short. It is never restored. No retention removes a step that is "pinned" (`ckpt pin`). If two
    attempts at a step are committed, a restore takes the younger one, and the other is "older". A
    step that a rollback has "abandoned" is not taken for the newest (`ckpt log`).

    Each metric has a column, and a star marks its best value: the smallest or the largest, as the
    keep_best of ckpt.toml or of the job says, or else the smallest of a metric with "loss" in its
    name.

    The root "memory" stands for everything that this user's jobs have in the memory of this
    machine. Each is listed under its URL, shm://NAME, by which the other commands find it, and -n
    counts the steps of each. If there is one ROOT, and the memory tier before it has newer steps, a
    line on standard error says so.

    \b
    Examples:
      ckpt ls runs/gpt
      ckpt ls runs/gpt -n 20
      ckpt ls runs/gpt --sort loss               the last line is the best step
      ckpt ls /nvme/ckpt s3://bucket/run42       a column for each tier
      ckpt ls --config ckpt.toml
      ckpt ls memory                             what jobs have left in this machine's memory
      ckpt ls s3://bucket/run42 --json | jq '.steps[-1].step'
    """
    roots = places(arguments, root)
    answers = ask_each(open_each(roots, config, timeout=timeout), partial(_list_steps, newest))
    urls = [url for url, answer in answers if not isinstance(answer, CkptError)]
    view = _View(newest, sort, reverse, long, modes_of_run(_settings(roots, config), urls))
    tiers = [
        _Tier(url, error=answer) if isinstance(answer, CkptError) else _Tier(url, answer)
        for url, answer in answers
    ]
    if roots == [MEMORY] and len(tiers) > 1 and not json:
        _show_tiers_apart(tiers, view)
        return
    table = view.table(tiers)
    if len(tiers) == 1 and MEMORY not in roots:
        if not json:
            _note_memory(tiers[0], resolve_tier(roots[0] if roots else None, config))
        _show_tier(tiers[0], table, json=json)
    else:
        _show_tiers(tiers, table, json=json)


def _settings(roots: Sequence[str], config: str | None) -> list[Tier]:
    """Return the tiers that are listed, with the settings that ``ckpt.toml`` gives them."""
    if config:
        return list(tiers_of(config))
    named_tiers = [root for root in roots if root != MEMORY]
    return [resolve_tier(root) for root in named_tiers] if roots else [resolve_tier(None)]


@dataclass(frozen=True, slots=True)
class _Tier:
    """The listing of one tier.

    Attributes:
        url: The URL of the tier.
        steps: The attempts at steps on the tier.
        error: The reason why ``steps`` is empty: the tier has no steps (`NoCheckpoint`), or it
            could not be listed. None if the tier has steps.
    """

    url: str
    steps: dict[StepRef, StoredStep] = field(default_factory=dict[StepRef, StoredStep])
    error: CkptError | None = None

    @property
    def is_unreachable(self) -> bool:
        """Return True if the tier could not be listed. The tier may have steps in this case."""
        return self.error is not None and not isinstance(self.error, NoCheckpoint)


def _list_steps(newest: int | None, store: StorageBackend) -> dict[StepRef, StoredStep]:
    """Return the attempts at the ``newest`` steps (None: all) in a store, with their states. Raises
    ``NoCheckpoint`` if the store has no attempts.

    Of the newest steps of several stores, each store has those that are among its own newest.
    """
    if steps := Inventory(store, for_display=True).look(newest=newest):
        return {step.ref: step for step in steps}
    raise NoCheckpoint(store.url, why_missing(store, [], None))


@dataclass(frozen=True, slots=True)
class _Row:
    """An attempt at a step, for a row of the table.

    Attributes:
        ref: The attempt.
        committed_step: The attempt on the nearest tier where it is committed; None if it is
            committed on no tier. The manifests on all tiers have the same facts about the attempt.
        older: Whether there is another committed attempt at the same step, which a restore takes.
        is_abandoned: Whether a rollback has abandoned the attempt.
    """

    ref: StepRef
    committed_step: StoredStep | None
    older: bool
    is_abandoned: bool

    @property
    def facts(self) -> tuple[str, ...]:
        """Return the cells below the titles ``_FACTS``. Each is "-" if the attempt is not
        committed. So is the number of ranks if files of another program stand for them.
        """
        if (step := self.committed_step) is None:
            return ("-",) * len(_FACTS)
        ranks = "-" if step.is_adopted else f"{step.ranks:,}"
        return output.moment(step.created_at), ranks, f"{step.tensors:,}"

    @property
    def metrics(self) -> Mapping[str, float]:
        """Return the metrics of the attempt; empty if it is not committed."""
        return self.committed_step.metrics if self.committed_step else {}

    @property
    def step(self) -> int | None:
        """Return the number of the step; None if a restore of the newest or of this step takes
        another attempt, or if the attempt is not committed.
        """
        is_first = not (self.older or self.is_abandoned)
        return self.ref.step if self.committed_step and is_first else None

    @property
    def facts_as_json(self) -> dict[str, object]:
        """Return the facts for the JSON output, by name. Each is None if the attempt is not
        committed.
        """
        step = self.committed_step
        return {
            "committed_at": output.moment_utc(step.created_at) if step else None,
            "world_size": step.ranks if step else None,
            "tensors": step.tensors if step else None,
        }


_REMOVAL_TEXT: Final = "being removed"
_FACTS: Final = ("committed at", "ranks", "tensors")
"""The titles of the columns with facts from the manifest.

A table of several tiers leaves out the column "tensors".
"""


@dataclass(frozen=True, slots=True)
class _Table:
    """The rows of a table.

    Attributes:
        rows: The attempts.
        metrics: The columns of metrics.
        has_attempts: Whether the table has a column with the names of the attempts.
    """

    rows: Sequence[_Row]
    metrics: MetricColumns
    has_attempts: bool


@dataclass(frozen=True, slots=True)
class _View:
    """What a call wants to see.

    Attributes:
        newest: The number of steps to include; None for all steps.
        sort: The metric by which the rows are sorted, or ``BY_STEP``.
        reverse: Whether to reverse the order of the rows.
        long: Whether to show the names of the attempts also if each step has one attempt.
        modes: Which values of a metric are the best, by its name.
    """

    newest: int | None
    sort: str
    reverse: bool
    long: bool
    modes: Mapping[str, Mode]

    def table(self, tiers: Sequence[_Tier]) -> _Table:
        """Return the table of ``tiers``.

        Raises:
            ConfigError: No step has the metric by which the rows are sorted.
        """
        rows = _rows(tiers, self.newest)
        metrics = MetricColumns.of(
            {row.step: row.metrics for row in rows if row.step is not None}, self.modes
        )
        has_attempts = self.long or len({row.ref.step for row in rows}) < len(rows)
        if self.sort != BY_STEP:
            rows = sort_by(rows, self.sort, lambda row: row.metrics, self.modes)
        return _Table(rows[::-1] if self.reverse else rows, metrics, has_attempts)


def _rows(tiers: Sequence[_Tier], newest: int | None) -> list[_Row]:
    """Return a row for each attempt at the newest steps, oldest step first.

    Among several attempts at one step, the attempt that a restore takes comes last.

    Args:
        tiers: The listings of the tiers.
        newest: The number of steps to include; None for all steps.
    """
    committed_steps: dict[StepRef, StoredStep | None] = {}
    for tier in tiers:
        for ref, step in tier.steps.items():
            committed_steps[ref] = committed_steps.get(ref) or (
                step if step.state == "committed" else None
            )

    abandoned_refs = {
        ref for tier in tiers for ref, step in tier.steps.items() if step.is_abandoned
    }

    def sort_key(ref: StepRef) -> tuple[int, bool, bool, float, str]:
        step, is_abandoned = committed_steps[ref], ref in abandoned_refs
        created_at = step.created_at if step else 0.0
        return ref.step, step is not None, not is_abandoned, created_at, ref.attempt

    refs = sorted(committed_steps, key=sort_key)
    older = {
        ref
        for ref, successor in pairwise(ref for ref in refs if committed_steps[ref])
        if ref.step == successor.step
    }
    steps = frozenset(sorted({ref.step for ref in refs})[-newest if newest else 0 :])
    return [
        _Row(ref, committed_steps[ref], ref in older, ref in abandoned_refs)
        for ref in refs
        if ref.step in steps
    ]


def _note_memory(listing: _Tier, tier: Tier) -> None:
    """Print a note if the tier in memory that belongs to ``tier`` has newer steps.

    The note does not consider other nearer tiers, because they may take long to answer.

    Args:
        listing: The listing of ``tier``.
        tier: The tier as a job has it, with its URL and options.
    """
    memory = urls_of([Tier(MEMORY), tier])[0]  # The next tier decides which store it is
    if memory not in stores_in_memory():  # Opening a store in memory that is not there creates it
        return
    with suppress(CkptError), closing(open_backend(memory)) as store:
        newest = max((ref.step for ref in committed(store)), default=-1)
        committed_steps = [
            ref.step for ref, step in listing.steps.items() if step.state == "committed"
        ]
        if newest > max(committed_steps, default=-1):
            output.note(
                f"{memory} has newer steps, up to {newest}: "
                f"`ckpt ls {memory} {listing.url}` shows both"
            )


def _show_tier(tier: _Tier, table: _Table, *, json: bool) -> None:
    """Print the table of one tier, or the same data as JSON. Raises the error of the tier."""
    if tier.error:
        raise tier.error
    if json:
        steps = [_step_as_json(tier.steps[row.ref], row, table) for row in table.rows]
        output.show_json({"root": tier.url, "steps": steps})
        return
    sizes_and_states = [_size_and_state(tier.steps[row.ref]) for row in table.rows]
    cells = [
        (*row.facts, size, *table.metrics.cells(row.metrics, row.step), state)
        for row, (size, state) in zip(table.rows, sizes_and_states, strict=True)
    ]
    titles = (*_FACTS, "size", *table.metrics.titles, "state")
    _show(urls=(), table=table, titles=titles, cells=cells)


def _show_tiers_apart(tiers: Sequence[_Tier], view: _View) -> None:
    """Show a separate table for each tier, because the tiers belong to different jobs.

    The tier with the latest commit comes last, or first if ``view`` reverses the order.
    """
    unreachable = _warn_of_unreachable(tiers)
    nonempty_tiers = sorted(
        (tier for tier in tiers if tier.steps),
        key=lambda tier: max(step.created_at for step in tier.steps.values()),
        reverse=view.reverse,
    )
    if not nonempty_tiers and (error := (unreachable or tiers)[0].error):
        raise error
    for number, tier in enumerate(nonempty_tiers):
        if number:
            output.show_line()
        output.show_line(tier.url, style="bold")
        _show_tier(tier, view.table([tier]), json=False)


def _show_tiers(tiers: Sequence[_Tier], table: _Table, *, json: bool) -> None:
    """Show a row for each attempt that any tier has, with a column for each tier. With ``json``,
    print the same data as JSON.
    """
    if all(tier.is_unreachable for tier in tiers) and tiers[0].error:
        raise tiers[0].error
    if json:
        _show_tiers_as_json(tiers, table)
        return
    unreachable = _warn_of_unreachable(tiers)
    if not table.rows:
        if unreachable and unreachable[0].error:  # A tier that could not be listed may have steps
            raise unreachable[0].error
        raise NoCheckpoint(", ".join(tier.url for tier in tiers), "they are empty, or do not exist")
    cells = [
        (
            *row.facts[:-1],
            *table.metrics.cells(row.metrics, row.step),
            *(_cell(tier, row) for tier in tiers),
        )
        for row in table.rows
    ]
    urls = [tier.url for tier in tiers]
    _show(urls, table, (*_FACTS[:-1], *table.metrics.titles, *urls), cells)


def _warn_of_unreachable(tiers: Sequence[_Tier]) -> list[_Tier]:
    unreachable = [tier for tier in tiers if tier.is_unreachable]
    for tier in unreachable:
        output.warn(f"{tier.url} cannot be listed: {tier.error}")
    return unreachable


def _show(
    urls: Sequence[str], table: _Table, titles: Sequence[str], cells: Sequence[Sequence[str]]
) -> None:
    """Show a table with a row for each attempt.

    Args:
        urls: The titles that are URLs of tiers. They are replaced by short names if the table is
            too wide.
        table: The attempts.
        titles: The titles of the columns after "step" and "attempt", and before "metadata".
        cells: The cells below ``titles`` for each row.
    """
    columns, lines = (
        ["step", *titles],
        [[str(row.ref.step), *row_cells] for row, row_cells in zip(table.rows, cells, strict=True)],
    )
    if table.has_attempts:
        columns.insert(1, "attempt")
        for row, line in zip(table.rows, lines, strict=True):
            line.insert(1, f"{row.ref.attempt}, older" if row.older else row.ref.attempt)
    names = output.short_names(urls, columns, lines)
    columns = [names.get(column, column) for column in columns]
    notes = [_metadata_text(_without_columns(row, table.metrics)) for row in table.rows]
    if any(notes):
        columns.append("metadata")
        lines = [[*line, note] for line, note in zip(lines, notes, strict=True)]
    output.show_table(
        columns,
        lines,
        right=("step", "size", *_FACTS[1:], *table.metrics.titles),
        flexible=("metadata",),
        # The last columns are left out first. The first metric stays on the narrowest terminal.
        optional=(*_FACTS[:0:-1], *table.metrics.titles[:0:-1], _FACTS[0]),
    )


def _without_columns(row: _Row, metrics: MetricColumns) -> dict[str, Any]:
    """Return the metadata of a row without the metrics that have a column."""
    metadata = _metadata(row.committed_step)
    if isinstance(step_metrics := metadata.get(METRICS), dict):
        metadata[METRICS] = {
            name: value
            for name, value in step_metrics.items()
            if name not in metrics.names or name not in row.metrics
        }
    return metadata


def _show_tiers_as_json(tiers: Sequence[_Tier], table: _Table) -> None:
    output.show_json(
        {
            "tiers": [
                {"root": tier.url, "error": str(tier.error) if tier.is_unreachable else None}
                for tier in tiers
            ],
            "steps": [_row_as_json(tiers, row, table) for row in table.rows],
        }
    )
    if not table.rows:
        error = next((tier.error for tier in tiers if tier.is_unreachable and tier.error), None)
        raise typer.Exit(error.exit_code if error else NoCheckpoint.exit_code)


def _cell(tier: _Tier, row: _Row) -> str:
    """Return a text that shows how much of an attempt a tier has, or how the attempt is damaged.

    The text is "-" if the tier has no part of the attempt. It is "unreachable" if the tier could
    not be listed.
    """
    if tier.is_unreachable:
        return "unreachable"
    step = tier.steps.get(row.ref)
    if step is None:
        return "-"
    if step.state == "committed":
        marks = (", pinned" if step.pins else "") + (", abandoned" if step.is_abandoned else "")
        return _size(step) + marks
    if step.state != "incomplete":
        return f"damaged: {step.reason}"
    if step.has_removal_begun:
        return f"{_REMOVAL_TEXT}, {output.size(step.nbytes)}"
    total = f" of {row.committed_step.ranks}" if row.committed_step else ""
    ranks = f"rank{'' if step.finished_ranks == 1 and not total else 's'}"
    return f"incomplete: {step.finished_ranks}{total} {ranks}, {output.size(step.nbytes)}"


def _row_as_json(tiers: Sequence[_Tier], row: _Row, table: _Table) -> dict[str, object]:
    """Return an attempt for the JSON output, with its state on each tier that has a part of it."""
    return {
        "step": row.ref.step,
        "attempt": row.ref.attempt,
        "older": row.older,
        "abandoned": row.is_abandoned,
        **row.facts_as_json,
        "metadata": _metadata(row.committed_step),
        **_metrics_as_json(row, table),
        "tiers": {
            tier.url: {
                "state": _state_and_detail(step)[0],
                **_bytes_and_pins(step),
                "finished_ranks": None if step.state == "committed" else step.finished_ranks,
            }
            for tier in tiers
            if (step := tier.steps.get(row.ref))
        },
    }


def _metadata(step: StoredStep | None) -> dict[str, Any]:
    """Return the user's metadata of a step. The result is empty if ``step`` is None.

    If the save was limited to some names by the patterns ``only`` or ``exclude``, the result has
    these patterns under ``LEFT_OUT``.
    """
    raw = parse(step.metadata, "metadata") if step else None
    # A value of a type that JSON does not have is shown as the tag of this type
    metadata = decode(raw, lambda tag, _: f"<{tag}>")
    if not isinstance(metadata, dict):
        return {}
    if isinstance(patterns := metadata.get(LEFT_OUT), dict):
        patterns.pop("used", None)  # Which of the patterns have matched is of no interest here
    return metadata


def _metadata_text(metadata: Mapping[str, Any]) -> str:
    """Return metadata as text, such as 'team=speech, loss=0.25'.

    The items of a nested dict are written without the name of the dict.
    """
    return ", ".join(
        _metadata_text(value)
        if isinstance(value, dict)
        else f"{key}={value:.6g}"
        if isinstance(value, float)
        else f"{key}={value if isinstance(value, str) else exact_text(value)}"
        for key, value in metadata.items()
        if value != {}
    )


def _state_and_detail(step: StoredStep) -> tuple[str, str]:
    """Return the state of a step, and a text that explains the state. The text is empty for
    "committed".

    A step of another format counts as "damaged" in this output.
    """
    if step.state == "committed":
        return step.state, ""
    if step.state == "incomplete" and step.has_removal_begun:
        return step.state, _REMOVAL_TEXT
    if step.state == "incomplete":
        return step.state, f"{output.count(step.finished_ranks, 'rank')} finished, no manifest"
    return "damaged", step.reason


def _size_and_state(step: StoredStep) -> tuple[str, str]:
    """Return the cells "size" and "state" of a step on a tier.

    A pin whose end is ``ENDLESS`` stands for a named branch. One with the end ``BASE_END`` keeps
    the step for another run, whose steps need it as their base.
    """
    state, detail = _state_and_detail(step)
    text = state
    if step.is_abandoned:
        text += ", abandoned"
    if step.pins:
        end = _pinned_until(step)
        marks = {ENDLESS: ", named", BASE_END: ", base of another run"}
        text += marks.get(end) or f", pinned until {output.moment(end)}"
    if detail:
        text += f": {detail}"
    if step.state == "committed":
        return _size(step), text
    return output.size(step.nbytes) if step.nbytes else "-", text


def _size(step: StoredStep) -> str:
    """Return as text the size of a committed step on the tier.

    For an encoded step, the text also has the codecs and the size before encoding. An adopted step
    consists of files of another program, and the text has their size. If a part of the step is in
    older steps, the text names them. Deltas are small files with the differences from an earlier
    step. They are no part of the step, and have a size of their own.
    """
    deltas = sum(info.size for info in step.objects if info.key.endswith(".delta"))
    text = output.size(step.nbytes - deltas)
    if deltas:
        text += f" + {output.size(deltas)} deltas"
    if step.is_adopted:
        return f"{text} (adopted: {output.size(step.staged_bytes)} elsewhere)"
    if step.bases:
        text += f" and step {output.ranges([ref.step for ref in step.bases])}"
    for base in sorted(step.outer_bases):
        text += f" and step {base.ref.step} of {base.root}"
    if not step.codecs:
        return text
    return f"{text} ({', '.join(step.codecs)} of {output.size(step.staged_bytes)})"


def _pinned_until(step: StoredStep) -> int:
    return max(pin.until for pin in step.pins)


def _bytes_and_pins(step: StoredStep) -> dict[str, object]:
    """Return the sizes of a step on a tier, and the end of its pins, for the JSON output."""
    is_committed = step.state == "committed"
    return {
        "bytes": step.staged_bytes if is_committed else step.nbytes,
        "stored_bytes": step.stored_bytes if is_committed else step.nbytes,
        "tier_bytes": step.nbytes,
        "codecs": list(step.codecs),
        "adopted": step.is_adopted,
        "bases": sorted(ref.step for ref in step.bases),
        "outer_bases": [base.name for base in sorted(step.outer_bases)],
        "pinned_until": output.moment_utc(_pinned_until(step)) if step.pins else None,
    }


def _metrics_as_json(row: _Row, table: _Table) -> dict[str, object]:
    return {
        "metrics": dict(row.metrics) if row.committed_step else None,
        "best": [] if row.step is None else table.metrics.best_of(row.step),
    }


def _step_as_json(step: StoredStep, row: _Row, table: _Table) -> dict[str, object]:
    state, detail = _state_and_detail(step)
    return {
        "step": row.ref.step,
        "attempt": row.ref.attempt,
        "older": row.older,
        "abandoned": row.is_abandoned,
        "state": state,
        "detail": detail or None,
        **row.facts_as_json,
        "metadata": _metadata(row.committed_step),
        **_metrics_as_json(row, table),
        **_bytes_and_pins(step),
    }

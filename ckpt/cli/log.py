"""``ckpt log``: show the history of a run, with its branches.

A rollback lets the run go on from an older step. It abandons the later steps, which then are a
branch of their own. The steps that no rollback has abandoned are the current branch. The *mode* of
a metric says whether its smallest or its largest value is the best.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Final

import typer

from ckpt.catalog.branches import Branch, all_branches
from ckpt.catalog.inventory import StoredStep
from ckpt.catalog.step_listing import why_missing
from ckpt.cli import output
from ckpt.cli.metric_columns import MetricColumns
from ckpt.cli.options import (
    TIMEOUT_SECONDS,
    ConfigFileOption,
    JsonOption,
    PlacesArgument,
    RootsOption,
    TimeoutOption,
    places,
)
from ckpt.cli.run_tiers import RunTier, look_at_run, rollbacks_of
from ckpt.config import Mode, load_config
from ckpt.errors import NoCheckpoint
from ckpt.model.keys import StepRef
from ckpt.model.rollback import Rollback, abandoned_by, history_of
from ckpt.model.selector import BranchStep
from ckpt.observe.metric_modes import modes_of_run

_CURRENT_SYMBOL: Final = "*"
_OLDER_SYMBOL: Final = "o"
_ABANDONED_SYMBOLS: Final = "| o"
_FORK_SYMBOLS: Final = "|/"


@dataclass(frozen=True, slots=True)
class _Line:
    """A line of the history.

    Attributes:
        graph: The symbols that draw the branches.
        step: The checkpoint of the line; None for a line that only joins two branches.
        note: The names of the step, the rollbacks to it, and the one that has abandoned it.
    """

    graph: str
    step: StoredStep | None = None
    note: str = ""


def log(
    arguments: PlacesArgument = None,
    newest: Annotated[
        int | None,
        typer.Option("-n", "--newest", metavar="N", min=1, help="Show only the N newest steps."),
    ] = None,
    roots: RootsOption = None,
    config: ConfigFileOption = None,
    timeout: TimeoutOption = TIMEOUT_SECONDS,
    json: JsonOption = False,
) -> None:
    r"""Show the history of a run, newest step first.

    "*" is a step of the current branch, from which the next job goes on. "o" is an older attempt at
    such a step, or after "|" a step that a rollback has abandoned; "|/" joins its branch with the
    step that both have in common. `ckpt rollback` goes back, and takes an abandoned branch up
    again. `ckpt branch` gives a step a name.

    \b
    Examples:
      ckpt log runs/gpt
      ckpt log runs/gpt s3://bucket/gpt -n 20
    """
    tiers = look_at_run(places(arguments, roots), config, timeout)
    steps = _checkpoints(tiers)
    if not steps:
        urls = ", ".join(tier.store.url for tier in tiers)
        store, refs = tiers[-1].store, [step.ref for step in tiers[-1].steps]
        raise NoCheckpoint(urls, store.call_in_time(partial(why_missing, store, refs, None)))
    rollbacks, branches = history_of(rollbacks_of(tiers)), _branches(tiers)  # Oldest first
    if json:
        rollback_by_ref = {ref: abandoned_by(rollbacks, ref) for ref in steps}
        current_refs = [ref for ref, rollback in rollback_by_ref.items() if rollback is None]
        older_refs = _older_refs(current_refs)
        output.show_json(
            {
                "roots": [tier.store.url for tier in tiers],
                "steps": [
                    _as_json(step, rollback_by_ref[ref], is_older=ref in older_refs)
                    for ref, step in steps.items()
                ],
                "rollbacks": [_rollback_as_json(rollback) for rollback in rollbacks],
                "branches": [_branch_as_json(branch) for branch in branches],
            }
        )
        return
    lines = _lines(list(steps.values()), rollbacks, branches)
    modes = modes_of_run(load_config(config).tiers, [tier.store.url for tier in tiers])
    _show(lines if newest is None else _head(lines, newest), modes)


def _checkpoints(tiers: Sequence[RunTier]) -> dict[StepRef, StoredStep]:
    """Return the checkpoints on any tier, newest first. Of two attempts at a step, the one with the
    younger manifest comes first.
    """
    committed = [step for tier in tiers for step in tier.steps if step.state == "committed"]
    committed.sort(key=lambda step: (step.ref.step, step.created_at), reverse=True)
    by_ref: dict[StepRef, StoredStep] = {}
    for step in committed:
        by_ref.setdefault(step.ref, step)
    return by_ref


def _branches(tiers: Sequence[RunTier]) -> list[Branch]:
    """Return the named branches on any tier, by name."""
    by_name: dict[str, Branch] = {}
    for tier in tiers:
        for branch in tier.store.call_in_time(partial(all_branches, tier.store)):
            by_name.setdefault(branch.name, branch)
    return [by_name[name] for name in sorted(by_name)]


def _lines(
    steps: Sequence[StoredStep], rollbacks: Sequence[Rollback], branches: Sequence[Branch]
) -> list[_Line]:
    """Return the lines of the history, newest step first.

    The steps that one rollback has abandoned stand together, after the steps of the current branch
    that are later than all that both branches have in common.
    """
    groups: dict[int, list[StoredStep]] = {}  # Abandoned steps, by the number of the rollback
    current_steps: list[StoredStep] = []
    for step in steps:
        if (rollback := abandoned_by(rollbacks, step.ref)) is None:
            current_steps.append(step)
        else:
            groups.setdefault(rollback.number, []).append(step)
    older_refs = _older_refs([step.ref for step in current_steps])
    lines: list[_Line] = []
    for step in current_steps:
        is_older = step.ref in older_refs
        lines += _take_groups_above(groups, step.ref.step)
        targets = [rollback for rollback in rollbacks if rollback.ref == step.ref]
        notes = [*(["older attempt"] if is_older else []), *map(_rollback_text, targets)]
        lines.append(_Line(_OLDER_SYMBOL if is_older else _CURRENT_SYMBOL, step, "; ".join(notes)))
    lines += _take_groups_above(groups, -1)  # All groups that are left
    return [_with_names(line, branches) for line in lines]


def _older_refs(refs: Sequence[StepRef]) -> set[StepRef]:
    """Return those of ``refs``, newest first, that have a newer attempt at the same step."""
    newest_refs = {ref.step: ref for ref in reversed(refs)}  # The newest one overwrites the others
    return {ref for ref in refs if newest_refs[ref.step] != ref}


def _with_names(line: _Line, branches: Sequence[Branch]) -> _Line:
    names = [
        _branch_text(branch) for branch in branches if line.step and branch.ref == line.step.ref
    ]
    return replace(line, note="; ".join(filter(None, [*names, line.note]))) if names else line


def _branch_text(branch: Branch) -> str:
    return f"{BranchStep(branch.name)}{f': {branch.reason}' if branch.reason else ''}"


def _take_groups_above(groups: dict[int, list[StoredStep]], number: int) -> list[_Line]:
    """Remove the abandoned groups whose steps are all later than ``number`` from ``groups``, and
    return their lines.
    """
    lines: list[_Line] = []
    for rollback_number in sorted(groups):
        steps = groups[rollback_number]
        if min(step.ref.step for step in steps) > number:
            note = f"abandoned by rollback {rollback_number}"
            lines += [_Line(_ABANDONED_SYMBOLS, step, note) for step in groups.pop(rollback_number)]
            lines.append(_Line(_FORK_SYMBOLS))
    return lines


def _rollback_text(rollback: Rollback) -> str:
    # The reason comes first, since a narrow terminal cuts the end.
    reason = f": {rollback.reason}" if rollback.reason else ""
    author = f", {rollback.author}" if rollback.author else ""
    moment = output.moment(rollback.created_at)
    return f"rollback {rollback.number} to here{reason} ({moment}{author})"


def _head(lines: Sequence[_Line], count: int) -> list[_Line]:
    """Return the lines of the first ``count`` steps."""
    indexes = [index for index, line in enumerate(lines) if line.step is not None]
    return list(lines[: indexes[count - 1] + 1]) if count < len(indexes) else list(lines)


def _show(lines: Sequence[_Line], modes: dict[str, Mode]) -> None:
    steps = [(_markable_step(line), line.step.metrics) for line in lines if line.step]
    metrics = MetricColumns.of(
        {number: values for number, values in steps if number is not None},
        modes,
        rows=[values for number, values in steps if number is None],
    )
    rows = [
        (
            f"{line.graph} {line.step.ref.step}" if line.step else line.graph,
            output.moment(line.step.created_at) if line.step else "",
            *(
                metrics.cells(line.step.metrics, _markable_step(line))
                if line.step
                else [""] * len(metrics.titles)
            ),
            line.note,
        )
        for line in lines
    ]
    output.show_table(
        ("step", "committed at", *metrics.titles, "note"),
        rows,
        right=metrics.titles,
        flexible=("note",),
    )


def _markable_step(line: _Line) -> int | None:
    """Return the step if it may be marked as the best, which an abandoned step may not."""
    return line.step.ref.step if line.step and line.graph == _CURRENT_SYMBOL else None


def _as_json(step: StoredStep, rollback: Rollback | None, *, is_older: bool) -> dict[str, object]:
    return {
        "step": step.ref.step,
        "attempt": step.ref.attempt,
        "committed_at": output.moment_utc(step.created_at),
        "metrics": dict(step.metrics),
        "older": is_older,
        "abandoned_by": rollback.number if rollback is not None else None,
    }


def _branch_as_json(branch: Branch) -> dict[str, object]:
    return {
        "name": branch.name,
        "step": branch.ref.step,
        "attempt": branch.ref.attempt,
        "author": branch.author,
        "reason": branch.reason,
    }


def _rollback_as_json(rollback: Rollback) -> dict[str, object]:
    return {
        "number": rollback.number,
        "step": rollback.step,
        "attempt": rollback.attempt,
        "at": output.moment_utc(rollback.created_at),
        "author": rollback.author,
        "reason": rollback.reason,
    }

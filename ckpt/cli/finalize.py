"""``ckpt finalize``: finish the saves whose leader died before it wrote the manifest.

Each job that saves a step makes an *attempt* at it, which a `StepRef` names. An attempt is
committed, and so a checkpoint, once it has a manifest.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated

import typer

from ckpt.catalog.finalize import RunFacts
from ckpt.catalog.finalize import finalize as finish
from ckpt.catalog.inventory import Inventory
from ckpt.catalog.step_listing import is_committed, why_missing
from ckpt.cli import output
from ckpt.cli.options import (
    TIMEOUT_SECONDS,
    ConfigFileOption,
    JsonOption,
    RootOption,
    StepOption,
    TimeoutOption,
    open_root,
    place_and_number,
    workers_for,
)
from ckpt.errors import CkptError, CommitError, IntegrityError, NoCheckpoint
from ckpt.model.keys import StepRef
from ckpt.model.manifest import Manifest
from ckpt.pipeline.workers import Workers
from ckpt.root.attempts import step_refs
from ckpt.storage.api import StorageBackend


def finalize(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[ROOT] [STEP]",
            help="ROOT is the same as --root. STEP is a number. Default: all that are unfinished.",
            show_default=False,
        ),
    ] = None,
    step: StepOption = None,
    job_is_dead: Annotated[
        bool,
        typer.Option(
            "--job-is-dead",
            help="The job ran on another machine, and all its processes have ended.",
        ),
    ] = False,
    root: RootOption = None,
    config: ConfigFileOption = None,
    timeout: TimeoutOption = TIMEOUT_SECONDS,
    json: JsonOption = False,
) -> None:
    r"""Finish a save whose first rank died before the last write.

    If every rank has made its part durable, and only the manifest is missing, the step becomes the
    checkpoint that the job would have made. Every byte is first read and compared with its
    checksum. A save that was aborted, that lacks a part, or whose job still runs is left as it is,
    and the reason is shown.

    Exit code 0: at least one save was finished, or none was unfinished. 5: the unfinished save
    cannot become a checkpoint. 4: it is damaged. 7: there is no such step.

    \b
    Examples:
      ckpt finalize runs/gpt          all that ckpt ls calls "incomplete"
      ckpt finalize s3://bucket/run42 1300 --job-is-dead
    """
    default = "all that are unfinished are tried"
    place, number = place_and_number(arguments, root, step, default)
    backend = open_root(place, config, timeout=timeout)
    all_refs = backend.call_in_time(partial(step_refs, backend))
    refs = [ref for ref in all_refs if number in (None, ref.step)]
    if not refs:
        raise NoCheckpoint(
            backend.url, backend.call_in_time(partial(why_missing, backend, all_refs, number))
        )
    uncommitted_refs = backend.call_in_time(
        lambda: [ref for ref in refs if not is_committed(backend, ref)]
    )
    with workers_for(backend) as workers:
        outcomes = [
            _try_to_finish(backend, ref, workers, job_is_dead=job_is_dead)
            for ref in uncommitted_refs
        ]
    if json:
        output.show_json(
            {"root": backend.url, "steps": [_as_json(outcome) for outcome in outcomes]}
        )
    elif not outcomes:
        steps = backend.call_in_time(partial(Inventory(backend, for_display=True).look, among=refs))
        damaged_count = sum(stored_step.state == "damaged" for stored_step in steps)
        text = (
            f"nothing is unfinished: {output.count(len(steps) - damaged_count, 'step')} committed"
        )
        output.show_line(
            text + (f", {damaged_count} damaged (ckpt ls says how)" if damaged_count else "")
        )
    else:
        _show(outcomes)
    failures = [outcome.error for outcome in outcomes if outcome.error]
    if failures and len(failures) == len(outcomes):
        if json or len(failures) > 1:  # The reasons are shown already
            raise typer.Exit(failures[0].exit_code)
        raise failures[0]


@dataclass(frozen=True, slots=True)
class _Outcome:
    """The result for one unfinished save: its new manifest, or the error that prevented it."""

    ref: StepRef
    manifest: Manifest | None = None
    error: CkptError | None = None


def _try_to_finish(
    backend: StorageBackend, ref: StepRef, workers: Workers, *, job_is_dead: bool
) -> _Outcome:
    """Finish one save, and return the result, which may be an error about this save alone."""
    try:
        with output.progress(f"step {ref.step}") as bar:
            facts = RunFacts(job_is_dead=job_is_dead)
            return _Outcome(
                ref, finish(backend, ref, workers=workers, facts=facts, on_progress=bar)
            )
    except (CommitError, IntegrityError) as error:  # Other steps may still be finished
        return _Outcome(ref, error=error)


def _show(outcomes: list[_Outcome]) -> None:
    """Print the result of each save.

    If ``outcomes`` has only one save and it was not finished, nothing is printed, since the command
    raises the error.
    """
    for outcome in outcomes:
        if outcome.manifest:
            output.show_line(
                f"step {outcome.ref.step} (attempt {outcome.ref.attempt}) is a checkpoint now: "
                f"{output.size(outcome.manifest.nbytes)} of "
                f"{output.count(outcome.manifest.world_size, 'rank')}, verified",
                style="green",
            )
        elif len(outcomes) > 1:
            output.warn(
                f"step {outcome.ref.step} (attempt {outcome.ref.attempt}) was left alone: "
                f"{outcome.error}"
            )


def _as_json(outcome: _Outcome) -> dict[str, object]:
    return {
        "step": outcome.ref.step,
        "attempt": outcome.ref.attempt,
        "finished": outcome.manifest is not None,
        "bytes": outcome.manifest.nbytes if outcome.manifest else None,
        "world_size": outcome.manifest.world_size if outcome.manifest else None,
        "reason": str(outcome.error) if outcome.error else None,
    }

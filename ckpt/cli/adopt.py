"""``ckpt adopt``: make a step of the files of another program, where they are.

An *attempt* at a step is what one job has saved as this step; a root may have several.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from ckpt.catalog.step_listing import committed
from ckpt.cli import output
from ckpt.cli.import_ import Format, lines_of, show_notes
from ckpt.cli.options import (
    TIMEOUT_SECONDS,
    JsonOption,
    NewPlaceArgument,
    ParamNamesOption,
    PlainOption,
    RootOption,
    TimeoutOption,
    one_place,
)
from ckpt.cli.watched_store import open_watched
from ckpt.storage.tiers import resolve_tier


def adopt(
    source: Annotated[
        str, typer.Argument(metavar="FOLDER", help="A local folder or file.", show_default=False)
    ],
    argument: NewPlaceArgument = None,
    *,
    step: Annotated[
        int | None,
        typer.Option(
            "--step",
            metavar="N",
            min=0,
            help="Which step it becomes. Default: the last number in the name of FOLDER.",
        ),
    ] = None,
    kind: Annotated[
        Format | None, typer.Option("--format", help="Default: what FOLDER looks like.")
    ] = None,
    plain_dicts: PlainOption = None,
    param_names: ParamNamesOption = None,
    root: RootOption = None,
    timeout: TimeoutOption = TIMEOUT_SECONDS,
    json: JsonOption = False,
) -> None:
    r"""Make a step of a folder of another program, whose files stay where they are.

    The step in ROOT consists of records alone, which say where in the files of FOLDER the bytes of
    each tensor are, and have their checksums. Everything that reads steps reads it: ls, show,
    verify, diff, ckpt.load, and CheckpointManager(ROOT).restore(state) with the optimizer, on any
    number of ranks. The names are those that ckpt import gives.

    FOLDER must stay as it is, and where it is, as long as the step is used; a restore notices each
    changed byte. ckpt copy makes a step of its own of it. ckpt rm and retention remove the records,
    and never a file of FOLDER.

    \b
    Examples:
      ckpt adopt dcp/step-1200 runs/gpt
      ckpt adopt checkpoint_folder runs/gpt --step 1200
      ckpt copy runs/gpt s3://bucket/run42 --step 1200
    """
    from ckpt.exchange.foreign.adoption import adopt_checkpoint
    from ckpt.exchange.foreign.imports import ForeignCheckpoint

    tier = resolve_tier(one_place([argument] if argument else None, root))
    store = open_watched(tier.url, tier.options, timeout)
    foreign = ForeignCheckpoint(
        path=source, kind=kind, plain=plain_dicts or (), parameter_names=lines_of(param_names)
    )
    list_attempts = partial(store.call_in_time, partial(committed, store))
    with output.progress("reading") as bar:
        report = adopt_checkpoint(foreign, tier, step, list_attempts=list_attempts, on_progress=bar)
    if json:
        output.show_json(
            {
                "step": report.step,
                "root": tier.url,
                "format": report.kind,
                "files": report.files,
                "bytes": report.nbytes,
                "written_bytes": report.written_bytes,
                "names": report.names,
                "notes": report.notes,
                "left_aside": report.leftovers,
            }
        )
        return
    output.show_line(
        f"step {report.step} in {tier.url} is {output.count(report.files, 'file')} of {source}, "
        f"from {report.kind}: {output.size(report.nbytes)} stay there, "
        f"{output.size(report.written_bytes)} were written",
        style="green",
    )
    show_notes(report, source)

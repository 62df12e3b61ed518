"""``ckpt export``: write a checkpoint in a format of other programs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer

from ckpt.catalog.index import read_manifest
from ckpt.catalog.tensor_reader import StepReader
from ckpt.catalog.verify import Meter
from ckpt.checks import as_bytes
from ckpt.cli import output, records
from ckpt.cli.options import (
    STEP_FORMS,
    TIMEOUT_SECONDS,
    JsonOption,
    RootOption,
    TimeoutOption,
    find_steps,
    naming_a_removed,
    naming_the_way_out,
    open_root,
    source_and_destination,
    workers_for,
)
from ckpt.cli.records import Field
from ckpt.errors import ConfigError
from ckpt.model.selector import selector_of

if TYPE_CHECKING:
    from ckpt.exchange.export import ExportReport

Format = Literal["safetensors", "torch", "dcp"]
"""The formats that can be written."""
_MOST_NOTES = 20
_SUFFIXES: Final[dict[str, Format]] = {
    ".safetensors": "safetensors", ".pt": "torch", ".pth": "torch",
}  # fmt: skip


_NOTE_FIELDS: Final[Sequence[Field[tuple[str, str]]]] = (
    Field("name", lambda pair: pair[0]),
    Field("why", lambda pair: pair[1]),
)


def export(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="[ROOT] OUT",
            help="ROOT is the same as --root. OUT is a local file or folder that does not exist "
            "yet.",
            show_default=False,
        ),
    ],
    kind: Annotated[
        Format | None,
        typer.Option("--format", help="Default: what OUT ends in says, .safetensors, .pt or .pth."),
    ] = None,
    step: Annotated[
        str | None,
        typer.Option("--step", metavar="STEP", help=f"{STEP_FORMS}. Default: the newest."),
    ] = None,
    name: Annotated[
        list[str] | None,
        typer.Option(
            "--name",
            metavar="GLOB",
            help="Only names that match, such as 'model/*'; may be given again.",
        ),
    ] = None,
    strip: Annotated[
        str,
        typer.Option(
            "--strip", metavar="PREFIX", help="Take this off names, such as 'model/' (safetensors)."
        ),
    ] = "",
    max_shard_size: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="The most bytes of one file in a folder (safetensors). Default: 5GB.",
        ),
    ] = None,
    root: RootOption = None,
    timeout: TimeoutOption = TIMEOUT_SECONDS,
    json: JsonOption = False,
) -> None:
    r"""Write a checkpoint in a format that other programs read.

    Tensors are whole, whichever ranks have saved their parts, and every byte is verified on the
    way. The checkpoint need not fit into memory. OUT appears when it is complete. Values that the
    format cannot hold are listed.

    \b
    safetensors  tensors only. OUT that ends in .safetensors is one file; else it is a
                 folder, with an index as Hugging Face has it if it is larger than
                 --max-shard-size.
    torch        one file for torch.load(OUT): nested dicts as state_dict() gives them.
                 Needs as much room again beside OUT while it is written.
    dcp          a folder for torch.distributed.checkpoint.load, onto any number of ranks.

    \b
    Examples:
      ckpt export runs/gpt gpt.safetensors --name 'model/*' --strip model/
      ckpt export runs/gpt hf/ --format safetensors --name 'model/*' --max-shard-size 2GB
      ckpt export runs/gpt gpt.pt --step best:loss
      ckpt export s3://bucket/run42 dcp/ --format dcp
    """
    from ckpt.exchange.export import ExportOptions
    from ckpt.exchange.export import export as write

    place, out = source_and_destination(arguments, root, "OUT")
    backend = open_root(place, timeout=timeout)
    file_format = kind or _format_of(out)
    ref = find_steps(backend, selector_of(step))[0]
    with (
        workers_for(backend) as workers,
        output.progress(f"step {ref.step}") as bar,
        naming_the_way_out(backend, ref),
        naming_a_removed([backend], ref),
    ):
        reader = StepReader(
            backend, ref, backend.ask(partial(read_manifest, backend, ref)), workers
        )

        def start(nbytes: int) -> None:
            reader.on_bytes = Meter(nbytes, bar).add

        report = write(
            reader,
            out,
            file_format,
            ExportOptions(
                globs=name or (),
                strip=strip,
                max_shard_bytes=as_bytes("--max-shard-size", max_shard_size)
                if max_shard_size
                else None,
            ),
            on_start=start,
        )
    if json:
        output.show_json(
            {"step": ref.step, "attempt": ref.attempt, "format": file_format, **_as_json(report)}
        )
    else:
        _show(report, ref.step, file_format)


def _format_of(out: str) -> Format:
    for suffix, kind in _SUFFIXES.items():
        if out.endswith(suffix):
            return kind
    raise ConfigError(f"the format of {out} is not known: give --format safetensors, torch or dcp")


def _show(report: ExportReport, step: int, kind: Format) -> None:
    tensors = output.count(report.tensors, "tensor")
    output.show_line(
        f"step {step}: {tensors}, {output.size(report.nbytes)}, as {kind}", style="green"
    )
    output.show_facts({"place": report.place})
    for title, notes in (("changed", report.notes.changes), ("left out", report.notes.left_out)):
        if notes:
            output.show_line()
            output.show_line(f"{title}: {output.count(len(notes), 'name')}", style="yellow")
            records.show(_NOTE_FIELDS, notes[:_MOST_NOTES])
            if len(notes) > _MOST_NOTES:
                output.show_line(f"and {len(notes) - _MOST_NOTES} more: --json lists them all")


def _as_json(report: ExportReport) -> dict[str, object]:
    return {
        "place": report.place,
        "tensors": report.tensors,
        "bytes": report.nbytes,
        "changed": records.entries(_NOTE_FIELDS, report.notes.changes),
        "left_out": records.entries(_NOTE_FIELDS, report.notes.left_out),
    }

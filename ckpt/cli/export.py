"""``ckpt export``: write a checkpoint in a format of other programs.

A *lease*, which is a pin that is renewed, keeps the step from being removed meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer

from ckpt.catalog.step_listing import read_manifest
from ckpt.catalog.tensor_reader import StepReader
from ckpt.catalog.verify import Meter
from ckpt.checks import as_bytes
from ckpt.cli import output, record_tables
from ckpt.cli.options import (
    STEP_FORMS,
    TIMEOUT_SECONDS,
    JsonOption,
    RootOption,
    TimeoutOption,
    adding_mend_advice,
    find_steps,
    no_checkpoint_if_removed,
    open_root,
    source_and_destination,
    workers_for,
)
from ckpt.cli.record_tables import Field
from ckpt.cli.watched_store import WatchedStore
from ckpt.errors import ConfigError, NoCheckpoint
from ckpt.errors.base import few
from ckpt.model.keys import StepRef
from ckpt.model.selector import selector_of
from ckpt.root.leases import lease_if_allowed

if TYPE_CHECKING:
    from ckpt.exchange.exports.export import ExportReport
    from ckpt.exchange.exports.hf_folder import HfOptions

Format = Literal["safetensors", "torch", "dcp", "hf"]
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
            "yet, or a URL (hf).",
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
    attempt: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="One attempt at the step of this number, as ckpt show names it. Default: the "
            "newest.",
        ),
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
            help="The most bytes of one file in a folder (safetensors, hf). Default: 5GB.",
        ),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="The folder with config.json and the files of the tokenizer, which are copied "
            "(hf).",
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(metavar="DTYPE", help="float32, float16 or bfloat16 (hf). Default: as saved."),
    ] = None,
    names: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="A JSON object with the name in the files of each tensor, or null to leave it "
            "out; or the word transformers (hf). Default: the names without their prefix.",
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
    hf           a folder for from_pretrained: the part model, config.json and the
                 tokenizer. With --names transformers, names and shapes are those that
                 transformers itself writes; that needs memory for the whole model.

    \b
    Examples:
      ckpt export runs/gpt gpt.safetensors --name 'model/*' --strip model/
      ckpt export runs/gpt hf/ --format safetensors --name 'model/*' --max-shard-size 2GB
      ckpt export runs/gpt gpt.pt --step best:loss
      ckpt export s3://bucket/run42 dcp/ --format dcp
      ckpt export runs/gpt hf/ --format hf --config gpt2/ --dtype bfloat16
    """
    from ckpt.exchange.exports.export import ExportOptions
    from ckpt.exchange.exports.export import export as write

    hf = _hf_options(kind, config, dtype, names)
    if kind == "hf":
        name, strip = name or ["model/*"], strip or "model/"
    place, out = source_and_destination(arguments, root, "OUT")
    backend = open_root(place, timeout=timeout)
    file_format = kind or _format_of(out)
    ref = _find_attempt(backend, step, attempt)
    with (
        workers_for(backend) as workers,
        output.progress(f"step {ref.step}") as bar,
        adding_mend_advice(backend, ref),
        no_checkpoint_if_removed([backend], ref),
        lease_if_allowed(backend, ref, "ckpt export"),
    ):
        reader = StepReader(
            backend, ref, backend.call_in_time(partial(read_manifest, backend, ref)), workers
        )

        def start_meter(nbytes: int) -> None:
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
                hf=hf,
            ),
            on_start=start_meter,
        )
    if json:
        output.show_json(
            {"step": ref.step, "attempt": ref.attempt, "format": file_format, **_as_json(report)}
        )
    else:
        _show(report, ref.step, file_format)


def _find_attempt(backend: WatchedStore, step: str | None, attempt: str | None) -> StepRef:
    """Return the attempt that the options name. Raises the errors of ``find_steps``."""
    selector = selector_of(step)
    if attempt is not None and not isinstance(selector, int):
        raise ConfigError("--attempt is of a number: give --step N too")
    refs = find_steps(backend, selector)
    ref = next((ref for ref in refs if attempt in (None, ref.attempt)), None)
    if ref is None:
        attempts = few([ref.attempt for ref in refs])
        raise NoCheckpoint(backend.url, f"step {selector} has the attempts {attempts} only")
    return ref


def _hf_options(
    kind: Format | None, config: str | None, dtype: str | None, names: str | None
) -> HfOptions | None:
    """Return the options of a folder of Hugging Face; None if no option of that format is given."""
    from ckpt.exchange.exports.hf_folder import HfOptions, read_names

    options = {"--config": config, "--dtype": dtype, "--names": names}
    if kind != "hf" and (extra := [flag for flag, value in options.items() if value is not None]):
        raise ConfigError(
            f"{', '.join(extra)}: only --format hf takes this; leave it out, or give --format hf"
        )
    if kind != "hf":
        return None
    if config is None:
        raise ConfigError("--format hf needs --config, the folder with the model's config.json")
    return HfOptions(files=config, dtype=dtype, names=read_names(names) if names else None)


def _format_of(out: str) -> Format:
    for suffix, kind in _SUFFIXES.items():
        if out.endswith(suffix):
            return kind
    raise ConfigError(
        f"the format of {out} is not known: give --format safetensors, torch, dcp or hf"
    )


def _show(report: ExportReport, step: int, kind: Format) -> None:
    """Print what was written, and the names that were changed or left out, with the reasons."""
    tensors = output.count(report.tensors, "tensor")
    output.show_line(
        f"step {step}: {tensors}, {output.size(report.nbytes)}, as {kind}", style="green"
    )
    output.show_facts({"place": report.place})
    for title, notes in (("changed", report.notes.changes), ("left out", report.notes.left_out)):
        if notes:
            output.show_line()
            output.show_line(f"{title}: {output.count(len(notes), 'name')}", style="yellow")
            record_tables.show(_NOTE_FIELDS, notes[:_MOST_NOTES])
            if len(notes) > _MOST_NOTES:
                output.show_line(f"and {len(notes) - _MOST_NOTES} more: --json lists them all")


def _as_json(report: ExportReport) -> dict[str, object]:
    return {
        "place": report.place,
        "tensors": report.tensors,
        "bytes": report.nbytes,
        "changed": record_tables.entries(_NOTE_FIELDS, report.notes.changes),
        "left_out": record_tables.entries(_NOTE_FIELDS, report.notes.left_out),
    }

"""``ckpt import``: make a checkpoint from files of other programs."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer

from ckpt.catalog.step_listing import committed
from ckpt.cli import output
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
from ckpt.errors import ConfigError
from ckpt.errors.base import few
from ckpt.storage.tiers import resolve_tier

if TYPE_CHECKING:
    from ckpt.exchange.foreign.foreign_objects import ImportReport

Format = Literal["torch", "dcp", "safetensors"]
"""The formats that can be imported."""
_MOST_LEFTOVERS: Final = 20


def import_(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="A local file or folder.", show_default=False)
    ],
    argument: NewPlaceArgument = None,
    *,
    step: Annotated[
        int | None,
        typer.Option(
            "--step",
            metavar="N",
            min=0,
            help="Which step it becomes. Required.",
            show_default=False,
        ),
    ] = None,
    kind: Annotated[
        Format | None, typer.Option("--format", help="Default: what SOURCE looks like.")
    ] = None,
    plain_dicts: PlainOption = None,
    param_names: ParamNamesOption = None,
    root: RootOption = None,
    timeout: TimeoutOption = TIMEOUT_SECONDS,
    json: JsonOption = False,
) -> None:
    r"""Make a checkpoint from files of torch.save, torch.distributed.checkpoint or safetensors.

    A dict of tensors becomes a model, and a dict of "state" and "param_groups" becomes an
    optimizer. All other values keep their types. CheckpointManager(ROOT).restore(state) then loads
    the step into {"model": model, "optimizer": optimizer, ...}. A file with nothing but tensors
    becomes {"model": ...}.

    Nothing is unpickled but what torch.load(weights_only=True) allows. Optimizer state is kept by
    parameter name; where the source has numbers only, they are matched with the model's entries by
    order and shape, or by --param-names: the name of each parameter in optimizer.param_groups, in
    this order.

    \b
    Examples:
      ckpt import checkpoint.pt runs/gpt --step 1200
      ckpt import dcp_folder/ s3://bucket/run42 --step 1200
      ckpt import model.safetensors runs/gpt --step 0
      python -c "...; print(*names, sep='\n')" > names.txt
      ckpt import checkpoint.pt runs/gpt --step 1200 --param-names names.txt
    """
    from ckpt.exchange.foreign.imports import ForeignCheckpoint, import_checkpoint

    if step is None:
        raise ConfigError(_step_request(source))
    tier = resolve_tier(one_place([argument] if argument else None, root))
    store = open_watched(tier.url, tier.options, timeout)
    foreign = ForeignCheckpoint(
        path=source,
        kind=kind,
        plain=plain_dicts or (),
        parameter_names=lines_of(param_names),
    )
    report = import_checkpoint(
        foreign, tier, step, list_attempts=partial(store.call_in_time, partial(committed, store))
    )
    if json:
        output.show_json(
            {
                "step": step,
                "root": tier.url,
                "format": report.kind,
                "names": report.names,
                "notes": report.notes,
                "left_aside": report.leftovers,
            }
        )
        return
    output.show_line(f"step {step} in {tier.url}, from {report.kind}", style="green")
    show_notes(report, source)


def _step_request(source: str) -> str:
    """Return a text that asks for the number of the step. A number in the name of a file may be
    that of a part or of a model, so it is only proposed.
    """
    from ckpt.exchange.foreign.adoption import number_in

    request = f"give --step N: which step {source} becomes"
    number = number_in(source)
    return request if number is None else f"{request}, such as --step {number}, as in its name"


def show_notes(report: ImportReport, source: str) -> None:
    """Print what the entries of a state are, the notes, and what the step does not have."""
    output.show_table(("name", "what"), list(report.names.items()))
    for note in report.notes:
        output.warn(note)
    if report.leftovers:
        output.warn(
            f"not taken from {source}: {few(report.leftovers, _MOST_LEFTOVERS, quote=False)}"
        )


def lines_of(path: str | None) -> list[str] | None:
    """Return the lines of a file that are not blank; None if ``path`` is None."""
    if path is None:
        return None
    try:
        with open(path, encoding="utf-8") as file:
            return [line.strip() for line in file if line.strip()]
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--param-names {path} cannot be read: {error}") from None

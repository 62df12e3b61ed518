"""``ckpt verify``: is it still what was written?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ckpt.cli.options import JsonOption, RootOption, open_root, workers_for

if TYPE_CHECKING:
    from ckpt.catalog.verify import Fault, VerifyReport


def verify(
    step: Annotated[
        int | None, typer.Argument(metavar="STEP", min=0, help="Default: the newest.", show_default=False)
    ] = None,
    all_steps: Annotated[bool, typer.Option("--all", help="Every committed step.")] = False,
    root: RootOption = None,
    json: JsonOption = False,
) -> None:
    r"""Compare every byte with its checksums.

    Exit code 0: intact. 4: something is damaged; a table says which bytes of which file. 7: there is no such checkpoint.

    \b
    Examples:
      ckpt verify --root runs/gpt              the newest step
      ckpt verify 1200 --root s3://bucket/run42
      ckpt verify --all --json | jq '.steps[] | select(.intact | not)'
    """
    from ckpt.catalog.index import find
    from ckpt.catalog.verify import verify_step
    from ckpt.cli import output
    from ckpt.errors import ConfigError, IntegrityError

    if all_steps and step is not None:
        raise ConfigError("--all and a STEP exclude each other: leave one out")
    backend = open_root(root)
    refs = find(backend, step)
    reports: list[VerifyReport] = []
    with workers_for(backend) as workers:
        for ref in refs if all_steps or step is not None else refs[:1]:
            with output.progress(f"step {ref.step}") as bar:
                reports.append(verify_step(backend, ref, workers=workers, on_progress=bar))
            if not json:
                _show(reports[-1])
    intact = all(report.intact for report in reports)
    if json:
        output.show_json(
            {"root": backend.url, "intact": intact, "steps": [_as_json(report) for report in reports]}
        )
    if not intact:
        raise typer.Exit(IntegrityError.exit_code)


def _show(report: VerifyReport) -> None:
    from ckpt.cli import output

    name = f"step {report.ref.step} (attempt {report.ref.attempt})"
    if report.intact:
        speed = output.rate(report.verified_bytes, report.seconds)
        output.show_line(
            f"{name}: intact, {output.size(report.verified_bytes)} in {report.seconds:.2f} s, {speed}"
        )
        return
    output.show_line(f"{name}: damaged, {output.count(len(report.faults), 'fault')}", style="red")
    output.show_table(("file", "bytes", "what"), [_row(fault) for fault in report.faults])


def _row(fault: Fault) -> tuple[str, str, str]:
    if fault.offset is None:
        return fault.key, "-", fault.what
    end = f" to {fault.offset + fault.nbytes}" if fault.nbytes is not None else " on"
    return fault.key, f"{fault.offset}{end}", fault.what


def _as_json(report: VerifyReport) -> dict[str, object]:
    return {
        "step": report.ref.step,
        "attempt": report.ref.attempt,
        "intact": report.intact,
        "verified_bytes": report.verified_bytes,
        "seconds": round(report.seconds, 6),
        "faults": [
            {"file": fault.key, "offset": fault.offset, "bytes": fault.nbytes, "what": fault.what}
            for fault in report.faults
        ],
    }

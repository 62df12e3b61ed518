"""``ckpt verify``: compare every byte of checkpoints with its checksum.

A *fault* is a span of a file that is missing or damaged. A step may have several *attempts*, each
by another job, which a `StepRef` names.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Final

import typer

from ckpt.catalog.step_listing import find, read_packed
from ckpt.catalog.verify import Fault, VerifyReport, verify_step
from ckpt.cli import output, record_tables
from ckpt.cli.options import (
    TIMEOUT_SECONDS,
    ConfigOption,
    JsonOption,
    PlacesAndStepArgument,
    RootsOption,
    StepOption,
    StoreOrError,
    TimeoutOption,
    ask_each,
    may_be_there,
    open_each,
    places_and_step,
    removal_error,
    step_id,
    workers_for,
)
from ckpt.cli.record_tables import Field
from ckpt.errors import CkptError, ConfigError, IntegrityError, NoCheckpoint
from ckpt.model.keys import StepId, StepRef
from ckpt.observe.journal import note_verified
from ckpt.storage.api import StorageBackend


def verify(
    arguments: PlacesAndStepArgument = None,
    step: StepOption = None,
    all_steps: Annotated[bool, typer.Option("--all", help="Verify every committed step.")] = False,
    all_tiers: Annotated[
        bool,
        typer.Option("--all-tiers", help="Verify on every tier of --config, or of ./ckpt.toml."),
    ] = False,
    root: RootsOption = None,
    config: ConfigOption = None,
    timeout: TimeoutOption = TIMEOUT_SECONDS,
    json: JsonOption = False,
) -> None:
    r"""Compare every byte with its checksum.

    With --all-tiers, or more than one --root, every tier is verified: its newest step, or STEP, or
    with --all every step. For each damaged part the output names the tiers that have it intact.

    Exit code 0: intact. 4: something is damaged; a table shows which bytes of which file. 7: there
    is no such checkpoint, or it was removed meanwhile. 3: a tier cannot be reached, and the others
    are intact.

    \b
    Examples:
      ckpt verify runs/gpt                     the newest step
      ckpt verify s3://bucket/run42 1200
      ckpt verify runs/gpt best:loss
      ckpt verify --all-tiers --config ckpt.toml
      ckpt verify --all --json | jq '.steps[] | select(.intact | not)'
    """
    roots, selector = places_and_step(arguments, root, step)
    if all_steps and selector is not None:
        raise ConfigError("--all and a STEP exclude each other: leave one out")
    places = open_each(roots, config, timeout=timeout, all_tiers=all_tiers)
    chosen_step = step_id([place.store for place in places], selector, config)
    all_attempts = all_steps or selector is not None
    if len(places) == 1 and not all_tiers:
        _verify_one(places[0], chosen_step, all_attempts=all_attempts, json=json)
    else:
        _verify_several(places, chosen_step, all_attempts=all_attempts, json=json)


def _verify_one(
    place: StoreOrError, step: StepId | None, *, all_attempts: bool, json: bool
) -> None:
    """Verify the steps of one tier, and print the reports.

    Args:
        place: The tier.
        step: The step whose committed attempts are considered; None for those at any step.
        all_attempts: Whether to verify all of these attempts, and not only the newest one.
        json: Whether to print JSON.

    Raises:
        NoCheckpoint: There is no committed attempt, or all were removed meanwhile.
        typer.Exit: An attempt is damaged.
    """
    if isinstance(backend := place.store, CkptError):
        raise backend
    refs = backend.call_in_time(partial(find, backend, step))
    reports: list[VerifyReport] = []
    for ref in refs if all_attempts else refs[:1]:
        if report := _verify(backend, ref):
            reports.append(report)
            if not json:
                _show(report)
    if not reports:
        raise removal_error([backend], refs[0])
    intact = all(report.intact for report in reports)
    if json:
        output.show_json(
            {
                "root": backend.url,
                "intact": intact,
                "steps": record_tables.entries(_REPORT_FIELDS, reports),
            }
        )
    if not intact:
        raise typer.Exit(IntegrityError.exit_code)


def _verify(backend: StorageBackend, ref: StepRef, label: str = "") -> VerifyReport | None:
    """Verify one attempt, and return the report. Record the result in the journal beside the tier,
    if there is one.

    Return None if the attempt was removed meanwhile, since its missing files are then no damage.
    """
    with workers_for(backend) as workers, output.progress(f"step {ref.step}{label}") as bar:
        report = verify_step(backend, ref, workers=workers, on_progress=bar)
    if not report.intact and not may_be_there([backend], ref):
        return None
    fault = "" if report.intact else f"{output.count(len(report.faults), 'fault')} found"
    note_verified(backend.url, ref.step, fault)
    return report


def _show(report: VerifyReport) -> None:
    """Print the result for one attempt, with a table of its faults and what to do about them."""
    name = f"step {report.ref.step} (attempt {report.ref.attempt})"
    if report.intact:
        speed = output.rate(report.verified_bytes, report.seconds)
        output.show_line(
            f"{name}: intact, {output.size(report.verified_bytes)} in "
            f"{output.duration(report.seconds)}, {speed}"
        )
        return
    output.show_line(f"{name}: damaged, {output.count(len(report.faults), 'fault')}", style="red")
    record_tables.show(_FAULT_FIELDS, report.faults)
    _show_remedies([report])


def _show_remedies(reports: Iterable[VerifyReport]) -> None:
    remedies = (fault.way for report in reports for fault in report.faults)
    for way in dict.fromkeys(filter(None, remedies)):
        output.show_line(way)


def _span(fault: Fault) -> str:
    if fault.offset is None:
        return "-"
    end = f" to {fault.offset + fault.nbytes}" if fault.nbytes is not None else " on"
    return f"{fault.offset}{end}"


_FAULT_FIELDS: Final[Sequence[Field[Fault]]] = (
    Field("file", lambda fault: fault.key),
    Field("bytes", lambda fault: fault.nbytes, text=_span),
    Field("what", lambda fault: fault.what),
    Field("", lambda fault: fault.offset, key="offset"),
)
_REPORT_FIELDS: Final[Sequence[Field[VerifyReport]]] = (
    Field("", lambda report: report.ref, kind="step"),
    Field("", lambda report: report.intact, key="intact"),
    Field("", lambda report: report.verified_bytes, key="verified_bytes"),
    Field("", lambda report: report.seconds, key="seconds", kind="time"),
    Field("", lambda report: record_tables.entries(_FAULT_FIELDS, report.faults), key="faults"),
)


# -- several tiers ---------------------------------------------------------------------------------


@dataclass(slots=True)
class _Tier:
    """One tier, and the results of its verification.

    Attributes:
        url: The URL of the tier.
        store: The store; the error if the tier cannot be opened.
        refs: The committed attempts that the command may verify, newest step first.
        error: The reason why the tier has no attempt to verify, or why it cannot be read; None if
            neither is the case.
        reports: The reports of the attempts that were verified.
    """

    url: str
    store: StorageBackend | CkptError
    refs: list[StepRef]
    error: CkptError | None
    reports: dict[StepRef, VerifyReport] = field(default_factory=dict["StepRef", "VerifyReport"])

    @classmethod
    def of(cls, place: StoreOrError, answer: list[StepRef] | CkptError) -> _Tier:
        if isinstance(answer, CkptError):
            return cls(place.url, place.store, [], answer)
        return cls(place.url, place.store, answer, None)


def _verify_several(
    places: list[StoreOrError], step: StepId | None, *, all_attempts: bool, json: bool
) -> None:
    """Verify the steps of several tiers, and print one result for all tiers.

    Args:
        places: The tiers.
        step: The step whose committed attempts are considered; None for those at any step.
        all_attempts: Whether to verify all of these attempts, and not only the newest one.
        json: Whether to print JSON.

    Raises:
        typer.Exit: An attempt is damaged, a tier cannot be read, or there is no attempt.
    """
    answers = ask_each(places, lambda store: find(store, step))
    tiers = [_Tier.of(place, answer) for place, (_, answer) in zip(places, answers, strict=True)]
    for tier in tiers:
        _verify_on(tier, tier.refs if all_attempts else tier.refs[:1])
    damaged_refs = {
        ref for tier in tiers for ref, report in tier.reports.items() if not report.intact
    }
    # If a step is damaged on one tier, verify it on all other tiers, since one may have it intact.
    for tier in tiers:
        _verify_on(
            tier, [ref for ref in tier.refs if ref in damaged_refs and ref not in tier.reports]
        )
    if json:
        output.show_json(
            {"intact": not damaged_refs, "tiers": [_tier_as_json(tier, tiers) for tier in tiers]}
        )
    else:
        _show_tier_reports(tiers)
    if damaged_refs:
        raise typer.Exit(IntegrityError.exit_code)
    for tier in tiers:
        if tier.error and not isinstance(tier.error, NoCheckpoint):
            raise typer.Exit(tier.error.exit_code)
    if not any(tier.reports for tier in tiers):
        raise typer.Exit(NoCheckpoint.exit_code)


def _verify_on(tier: _Tier, refs: list[StepRef]) -> None:
    """Verify ``refs`` on a tier, and store the results in ``tier.reports`` or ``tier.error``."""
    if isinstance(tier.store, CkptError) or tier.error:
        return
    try:
        for ref in refs:
            if report := _verify(tier.store, ref, f" on {tier.url}"):
                tier.reports[ref] = report
        if refs and not tier.reports:
            tier.error = removal_error([tier.store], refs[0])
    except CkptError as error:  # The step may be removed, or the store may fail
        tier.error = error


def _show_tier_reports(tiers: list[_Tier]) -> None:
    """Print a table of the attempts on all tiers, and one of the faults, with the tiers that have
    the same bytes intact.
    """
    rows: list[tuple[str, ...]] = []
    fault_rows: list[tuple[str, ...]] = []
    for tier in tiers:
        for ref, report in tier.reports.items():
            state = (
                "intact"
                if report.intact
                else f"damaged: {output.count(len(report.faults), 'fault')}"
            )
            rows.append(
                (tier.url, str(ref.step), ref.attempt, output.size(report.verified_bytes), state)
            )
            for fault in report.faults:
                intact_urls = ", ".join(_intact_on(fault, ref, tier, tiers))
                cells = record_tables.cells_of(_FAULT_FIELDS, fault)
                fault_rows.append((tier.url, *cells, intact_urls or "no other tier"))
        if tier.error:
            rows.append((tier.url, "-", "-", "-", _error_text(tier)))
    report_titles, fault_titles = (
        ("tier", "step", "attempt", "verified", "state"),
        ("tier", "file", "bytes", "what", "intact on"),
    )
    widest = max(((report_titles, rows), (fault_titles, fault_rows)), key=_width)
    names = output.short_names([tier.url for tier in tiers], *widest)
    output.show_table(
        report_titles, [(names[row[0]], *row[1:]) for row in rows], right=("step", "verified")
    )
    if fault_rows:
        output.show_line()
        for index, row in enumerate(fault_rows):
            intact_names = ", ".join(names.get(place, place) for place in row[-1].split(", "))
            fault_rows[index] = (names[row[0]], *row[1:-1], intact_names)
        output.show_table(fault_titles, fault_rows)
    _show_remedies(report for tier in tiers for report in tier.reports.values())


def _width(table: tuple[Sequence[str], Sequence[Sequence[str]]]) -> int:
    """Return the number of characters of the widest cells of all columns of a table together."""
    return sum(max(map(len, cells)) for cells in zip(table[0], *table[1], strict=True))


def _error_text(tier: _Tier) -> str:
    error = tier.error
    return f"none: {error.detail}" if isinstance(error, NoCheckpoint) else f"unreachable: {error}"


def _intact_on(fault: Fault, ref: StepRef, tier: _Tier, tiers: list[_Tier]) -> list[str]:
    """Return the URLs of the other tiers that have the bytes of ``fault`` intact.

    Args:
        fault: A fault of ``ref`` on ``tier``.
        ref: The attempt.
        tier: The tier with the fault.
        tiers: All tiers.
    """
    return [
        peer.url
        for peer in tiers
        if peer is not tier
        and (report := peer.reports.get(ref))
        and not any(
            _may_overlap(fault, peer_fault, _same_encoding(ref, tier, peer))
            for peer_fault in report.faults
        )
    ]


def _same_encoding(ref: StepRef, tier: _Tier, peer: _Tier) -> bool:
    """Return True if both tiers have the files of ``ref`` in the same encoding.

    If the encodings differ, offsets in the files of the two tiers are not comparable. Return False
    if the manifest of ``ref`` cannot be read on one of the tiers.
    """
    if isinstance(tier.store, CkptError) or isinstance(peer.store, CkptError):
        return False
    try:
        _, manifest_bytes = read_packed(tier.store, ref)  # The manifest names the encoding
        _, peer_manifest_bytes = read_packed(peer.store, ref)
    except CkptError:
        return False
    return manifest_bytes == peer_manifest_bytes


def _may_overlap(fault_a: Fault, fault_b: Fault, same_encoding: bool) -> bool:
    """Return True if two faults of one attempt on two tiers may concern the same bytes.

    A fault of the manifest on the second tier counts as a fault of all bytes.

    Args:
        fault_a: A fault on the first tier.
        fault_b: A fault on the second tier.
        same_encoding: Whether both tiers have the files in the same encoding.
    """
    if fault_b.key.endswith("manifest.json"):
        return True
    if fault_a.key != fault_b.key:  # The name of a rank's file depends on the codec
        same_name = (
            not same_encoding and fault_a.key.rpartition(".")[0] == fault_b.key.rpartition(".")[0]
        )
        return same_name and not fault_a.key.endswith(".json") and not fault_b.key.endswith(".json")
    if fault_a.offset is None or fault_b.offset is None or not same_encoding:
        return True
    end_a, end_b = (
        math.inf if fault.nbytes is None else (fault.offset or 0) + fault.nbytes
        for fault in (fault_a, fault_b)
    )
    return fault_b.offset < end_a and fault_a.offset < end_b


def _tier_as_json(tier: _Tier, tiers: list[_Tier]) -> dict[str, object]:
    steps = [
        {
            **record_tables.entry(_REPORT_FIELDS, report),
            "faults": [
                {
                    **record_tables.entry(_FAULT_FIELDS, fault),
                    "intact_on": _intact_on(fault, ref, tier, tiers),
                }
                for fault in report.faults
            ],
        }
        for ref, report in tier.reports.items()
    ]
    return {"root": tier.url, "error": tier.error, "steps": steps}

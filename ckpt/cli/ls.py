"""``ckpt ls``: what is there?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Final

import typer

from ckpt.catalog.index import Entry, survey
from ckpt.catalog.pins import all_pins, live_of
from ckpt.cli import output
from ckpt.cli.options import (
    TIMEOUT_SECONDS,
    ConfigOption,
    JsonOption,
    PlacesArgument,
    Reached,
    RootsOption,
    TimeoutOption,
    at_once,
    open_each,
    places,
)
from ckpt.config import MEMORY
from ckpt.errors import CkptError, ManifestCorrupt, NoCheckpoint
from ckpt.model.keys import StepRef
from ckpt.model.manifest import Manifest
from ckpt.model.metrics import metrics_of
from ckpt.model.patterns import LEFT_OUT
from ckpt.model.values import parse


def ls(
    where: PlacesArgument = None,
    newest: Annotated[
        int | None,
        typer.Option("-n", "--newest", metavar="N", min=1, help="Only the N newest steps."),
    ] = None,
    reverse: Annotated[bool, typer.Option("--reverse", help="The newest first.")] = False,
    root: RootsOption = None,
    config: ConfigOption = None,
    timeout: TimeoutOption = TIMEOUT_SECONDS,
    json: JsonOption = False,
) -> None:
    r"""List the checkpoints; the last line is the newest.

    With several tiers (more than one ROOT, or --config) there is a column for each, which shows how
    much of the step is there. A tier that cannot be reached, or that does not answer for --timeout
    seconds, is named, and the others are shown.

    Only manifests are read: "committed" means that a checkpoint is complete, and `ckpt verify`
    shows whether its data is intact. "incomplete" is a save that is still under way or was cut
    short. It is never restored. No retention removes a step that is "pinned" (`ckpt pin`).

    The root "memory" stands for everything that this user's jobs have in the memory of this
    machine. Each is listed under its URL, shm://NAME, by which the other commands find it.

    \b
    Examples:
      ckpt ls runs/gpt
      ckpt ls runs/gpt -n 20
      ckpt ls /nvme/ckpt s3://bucket/run42       a column for each tier
      ckpt ls --config ckpt.toml
      ckpt ls memory                             what jobs have left in this machine's memory
      ckpt ls s3://bucket/run42 --json | jq '.steps[-1].step'
    """
    roots = places(where, root)
    reached_tiers = open_each(roots, config, timeout=timeout)
    tiers = at_once([partial(_look, reached) for reached in reached_tiers])
    refs = sorted({ref for tier in tiers for ref in tier.entries})
    refs = refs[-newest:] if newest else refs
    if reverse:
        refs.reverse()
    if len(tiers) == 1 and MEMORY not in roots:
        _one(tiers[0], refs, json=json)
    else:
        _several(tiers, refs, json=json)


@dataclass(frozen=True, slots=True)
class _Tier:
    """The steps of a tier, and when the last pin on each ends; or the reason why there are none."""

    url: str
    entries: dict[StepRef, Entry] = field(default_factory=dict[StepRef, Entry])
    pinned: dict[StepRef, int] = field(default_factory=dict[StepRef, int])
    error: CkptError | None = None


def _look(reached: Reached) -> _Tier:
    if (store := reached.backend) is None:
        return _Tier(reached.url, error=reached.error)
    try:
        found = store.ask(partial(survey, store))
        pins = live_of(store.ask(partial(all_pins, store)))
    except CkptError as error:
        return _Tier(reached.url, error=error)
    ends = {ref: max(pin.until for pin in held) for ref, held in pins.items()}
    return _Tier(reached.url, {entry.ref: entry for entry in found}, ends)


@dataclass(frozen=True, slots=True)
class _Fact:
    """What a manifest says about its step: a column of the table, and a key of the JSON.

    Attributes:
        title: The head of the column.
        key: The key in the JSON.
        of: Reads it from a manifest.
        text: Shows it to people.
        json: Shows it to programs.
        is_number: Whether the column is aligned to the right.
        across: Whether it is shown beside columns of several tiers, too.
    """

    title: str
    key: str
    of: Callable[[Manifest], Any]
    text: Callable[[Any], str] = "{:,}".format
    json: Callable[[Any], object] = lambda value: value
    is_number: bool = True
    across: bool = True

    def cell(self, manifest: Manifest | None) -> str:
        return self.text(self.of(manifest)) if manifest else "-"


_FACTS: Final = (
    _Fact(
        "committed at", "committed_at", lambda manifest: manifest.created_at,
        text=output.moment, json=output.moment_utc, is_number=False,
    ),
    _Fact("ranks", "world_size", lambda manifest: manifest.world_size),
    _Fact("tensors", "tensors", lambda manifest: len(manifest.tensors), across=False),
)  # fmt: skip


def _facts_as_json(manifest: Manifest | None) -> dict[str, object]:
    return {fact.key: fact.json(fact.of(manifest)) if manifest else None for fact in _FACTS}


def _one(tier: _Tier, refs: Sequence[StepRef], *, json: bool) -> None:
    if tier.error:
        raise tier.error
    if json:
        steps = [_as_json(tier, ref) for ref in refs]
        output.show_json({"root": tier.url, "steps": steps})
        return
    cells = {ref: _size_and_state(tier, ref) for ref in refs}
    _show([tier], refs, _FACTS, ("size", "state"), cells)


def _several(tiers: list[_Tier], refs: Sequence[StepRef], *, json: bool) -> None:
    """One row for each attempt that any tier has, one column for each tier."""
    failed = [tier for tier in tiers if tier.error and not isinstance(tier.error, NoCheckpoint)]
    if len(failed) == len(tiers) and failed[0].error:
        raise failed[0].error
    if json:
        _show_several_as_json(tiers, failed, refs)
        return
    for tier in failed:
        output.warn(f"{tier.url} cannot be listed: {tier.error}")
    if not refs:
        if failed and failed[0].error:  # it may hold steps
            raise failed[0].error
        raise NoCheckpoint(", ".join(tier.url for tier in tiers), "they are empty, or do not exist")
    cells: dict[StepRef, Sequence[str]] = {}
    for ref in refs:
        known = _known(tiers, ref)
        cells[ref] = [
            "unreachable" if tier in failed else _cell(tier, ref, known) for tier in tiers
        ]
    facts = [fact for fact in _FACTS if fact.across]
    _show(tiers, refs, facts, [tier.url for tier in tiers], cells)


def _show(
    tiers: Sequence[_Tier],
    refs: Sequence[StepRef],
    facts: Sequence[_Fact],
    titles: Sequence[str],
    cells: Mapping[StepRef, Sequence[str]],
) -> None:
    """Show a row for each step: facts about it, then its cells below ``titles``, and metadata."""
    known = [_known(tiers, ref) for ref in refs]
    columns = ["step", "attempt", *(fact.title for fact in facts), *titles]
    rows = [
        [str(ref.step), ref.attempt, *(fact.cell(manifest) for fact in facts), *cells[ref]]
        for ref, manifest in zip(refs, known, strict=True)
    ]
    urls = [tier.url for tier in tiers if tier.url in titles]
    names = output.short_names(urls, columns, rows)
    columns = [names.get(column, column) for column in columns]
    notes = [_brief(_metadata(manifest)) for manifest in known]
    if any(notes):
        columns.append("metadata")
        rows = [[*row, note] for row, note in zip(rows, notes, strict=True)]
    numbers = ("step", "size", *(fact.title for fact in facts if fact.is_number))
    output.show_table(columns, rows, right=numbers, elided=("metadata",))


def _show_several_as_json(
    tiers: list[_Tier], failed: Sequence[_Tier], refs: Sequence[StepRef]
) -> None:
    output.show_json(
        {
            "tiers": [
                {"root": tier.url, "error": str(tier.error) if tier in failed else None}
                for tier in tiers
            ],
            "steps": [_across_as_json(tiers, ref) for ref in refs],
        }
    )
    if not refs:
        error = failed[0].error if failed else None
        raise typer.Exit(error.exit_code if error else NoCheckpoint.exit_code)


def _known(tiers: Sequence[_Tier], ref: StepRef) -> Manifest | None:
    """The manifest of any tier: they are the same."""
    return next(
        (entry.manifest for tier in tiers if (entry := tier.entries.get(ref)) and entry.manifest),
        None,
    )


def _cell(tier: _Tier, ref: StepRef, known: Manifest | None) -> str:
    """Return how much of a step is on one tier."""
    entry = tier.entries.get(ref)
    if entry is None:
        return "-"
    if entry.manifest:
        return _size(entry.manifest) + (", pinned" if ref in tier.pinned else "")
    if entry.damage:
        return "damaged: its manifest cannot be read"
    of = f" of {known.world_size}" if known else ""
    ranks = f"rank{'' if entry.finished_ranks == 1 and not of else 's'}"
    return f"incomplete: {entry.finished_ranks}{of} {ranks}, {output.size(entry.nbytes)}"


def _across_as_json(tiers: list[_Tier], ref: StepRef) -> dict[str, object]:
    known = _known(tiers, ref)
    return {
        "step": ref.step,
        "attempt": ref.attempt,
        **_facts_as_json(known),
        "metadata": _metadata(known),
        "tiers": {
            tier.url: {
                "state": _state(entry)[0],
                "bytes": entry.nbytes,
                "stored_bytes": entry.manifest.stored_bytes if entry.manifest else entry.nbytes,
                "codecs": list(entry.manifest.codecs) if entry.manifest else [],
                "finished_ranks": None if entry.manifest else entry.finished_ranks,
                "pinned_until": _pinned_until(tier, ref),
            }
            for tier in tiers
            if (entry := tier.entries.get(ref))
        },
    }


def _metadata(manifest: Manifest | None) -> dict[str, Any]:
    """Return the user's metadata of a step, and which part of a state it is."""
    found = parse(manifest.metadata, "metadata") if manifest else None
    if not isinstance(found, dict):
        return {}
    if isinstance(part := found.get(LEFT_OUT), dict):
        part.pop("used", None)
    return found


def _brief(metadata: Mapping[str, Any]) -> str:
    """'team=speech, loss=0.25'; a dict by what is in it."""
    return ", ".join(
        _brief(value)
        if isinstance(value, dict)
        else f"{key}={value:.6g}"
        if isinstance(value, float)
        else f"{key}={value}"
        for key, value in metadata.items()
        if value != {}
    )


def _state(entry: Entry) -> tuple[str, str]:
    """Return the state of a step with its remarks."""
    if entry.manifest:
        return "committed", ""
    if entry.damage:
        return "damaged", entry.damage.detail if isinstance(entry.damage, ManifestCorrupt) else str(
            entry.damage
        )
    return (
        "incomplete",
        f"{entry.finished_ranks} rank{'' if entry.finished_ranks == 1 else 's'} finished, no "
        "manifest",
    )


def _pinned_until(tier: _Tier, ref: StepRef) -> str | None:
    return output.moment_utc(tier.pinned[ref]) if ref in tier.pinned else None


def _size_and_state(tier: _Tier, ref: StepRef) -> tuple[str, str]:
    entry = tier.entries[ref]
    state, detail = _state(entry)
    told = f"{state}: {detail}" if detail else state
    if ref in tier.pinned:
        told += f", pinned until {output.moment(tier.pinned[ref])}"
    if entry.manifest:
        return _size(entry.manifest), told
    return output.size(entry.nbytes) if entry.nbytes else "-", told


def _size(manifest: Manifest) -> str:
    """Return the size on the tier, and for an encoded step also the size before."""
    stored = output.size(manifest.stored_bytes)
    if not manifest.codecs:
        return stored
    return f"{stored} ({', '.join(manifest.codecs)} of {output.size(manifest.nbytes)})"


def _as_json(tier: _Tier, ref: StepRef) -> dict[str, object]:
    entry = tier.entries[ref]
    state, detail = _state(entry)
    found = entry.manifest
    return {
        "step": entry.ref.step,
        "attempt": entry.ref.attempt,
        "state": state,
        "detail": detail or None,
        **_facts_as_json(found),
        "bytes": entry.nbytes,
        "metadata": _metadata(found),
        "metrics": metrics_of(found.metadata) if found else None,
        "stored_bytes": found.stored_bytes if found else entry.nbytes,
        "codecs": list(found.codecs) if found else [],
        "pinned_until": _pinned_until(tier, ref),
    }

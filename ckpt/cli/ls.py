"""``ckpt ls``: what is there?"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Annotated, Any, Final

import typer

from ckpt.catalog.index import committed, instead_of
from ckpt.catalog.inventory import Inventory, StoredStep
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
from ckpt.config import MEMORY, Tier, resolve_tier
from ckpt.errors import CkptError, NoCheckpoint
from ckpt.model.keys import StepRef
from ckpt.model.patterns import LEFT_OUT
from ckpt.model.values import parse
from ckpt.storage.registry import open_backend, stores_in_memory
from ckpt.storage.tiers import urls_of


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
    short. It is never restored. No retention removes a step that is "pinned" (`ckpt pin`). If two
    attempts at a step are committed, a restore takes the younger one, and the other is "older".

    The root "memory" stands for everything that this user's jobs have in the memory of this
    machine. Each is listed under its URL, shm://NAME, by which the other commands find it, and -n
    counts the steps of each. If there is one ROOT, and the memory tier before it has newer steps, a
    line on standard error says so.

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
    if roots == [MEMORY] and len(tiers) > 1 and not json:
        _each(tiers, newest, reverse=reverse)
        return
    refs = _chosen(tiers, newest, reverse=reverse)
    if len(tiers) == 1 and MEMORY not in roots:
        if not json:
            _note_memory(tiers[0], resolve_tier(roots[0] if roots else None, config).url)
        _one(tiers[0], refs, json=json)
    else:
        _several(tiers, refs, json=json)


@dataclass(frozen=True, slots=True)
class _Tier:
    """The steps of a tier, or the reason why there are none."""

    url: str
    steps: dict[StepRef, StoredStep] = field(default_factory=dict[StepRef, StoredStep])
    error: CkptError | None = None


def _look(reached: Reached) -> _Tier:
    if (store := reached.backend) is None:
        return _Tier(reached.url, error=reached.error)
    try:
        found = store.ask(Inventory(store, shown=True).look)
        if not found:
            raise NoCheckpoint(store.url, store.ask(partial(instead_of, store, [], None)))
    except CkptError as error:
        return _Tier(reached.url, error=error)
    return _Tier(reached.url, {held.ref: held for held in found})


def _chosen(tiers: Sequence[_Tier], newest: int | None, *, reverse: bool) -> list[StepRef]:
    """Return the attempts to show. Of those at one step, the one that a restore takes is last."""

    def age(ref: StepRef) -> tuple[int, bool, float, str]:
        known = _known(tiers, ref)
        return ref.step, known is not None, known.created_at if known else 0.0, ref.attempt

    refs = sorted({ref for tier in tiers for ref in tier.steps}, key=age)
    refs = refs[-newest:] if newest else refs
    return refs[::-1] if reverse else refs


def _older(tiers: Sequence[_Tier]) -> frozenset[StepRef]:
    """Return the committed attempts that a restore takes after a younger one at the same step."""
    refs = [ref for ref in _chosen(tiers, None, reverse=False) if _known(tiers, ref)]
    return frozenset(one for one, next_ in pairwise(refs) if one.step == next_.step)


def _note_memory(shown: _Tier, url: str) -> None:
    """Say if the memory before the tier ``url`` has newer steps than ``shown``.

    Only memory is looked at: another tier may be far away.
    """
    memory = urls_of([Tier(MEMORY), Tier(url)])[0]
    if memory not in stores_in_memory():  # To open it would make it
        return
    with suppress(CkptError), closing(open_backend(memory)) as store:
        newest = max((ref.step for ref in committed(store)), default=-1)
        if newest > max((ref.step for ref in shown.steps if _known([shown], ref)), default=-1):
            output.note(
                f"{memory} has newer steps, up to {newest}: "
                f"`ckpt ls {memory} {shown.url}` shows both"
            )


@dataclass(frozen=True, slots=True)
class _Fact:
    """What a manifest says about its step: a column of the table, and a key of the JSON.

    Attributes:
        title: The head of the column.
        key: The key in the JSON.
        of: Reads it from a committed step.
        text: Shows it to people.
        json: Shows it to programs.
        is_number: Whether the column is aligned to the right.
        across: Whether it is shown beside columns of several tiers, too.
    """

    title: str
    key: str
    of: Callable[[StoredStep], Any]
    text: Callable[[Any], str] = "{:,}".format
    json: Callable[[Any], object] = lambda value: value
    is_number: bool = True
    across: bool = True

    def cell(self, held: StoredStep | None) -> str:
        return self.text(self.of(held)) if held else "-"


_FACTS: Final = (
    _Fact(
        "committed at", "committed_at", lambda held: held.created_at,
        text=output.moment, json=output.moment_utc, is_number=False,
    ),
    _Fact("ranks", "world_size", lambda held: held.ranks),
    _Fact("tensors", "tensors", lambda held: held.tensors, across=False),
)  # fmt: skip


def _facts_as_json(held: StoredStep | None) -> dict[str, object]:
    return {fact.key: fact.json(fact.of(held)) if held else None for fact in _FACTS}


def _one(tier: _Tier, refs: Sequence[StepRef], *, json: bool) -> None:
    if tier.error:
        raise tier.error
    if json:
        older = _older([tier])
        steps = [_as_json(tier, ref, older) for ref in refs]
        output.show_json({"root": tier.url, "steps": steps})
        return
    cells = {ref: _size_and_state(tier, ref) for ref in refs}
    _show([tier], refs, _FACTS, ("size", "state"), cells)


def _each(tiers: Sequence[_Tier], newest: int | None, *, reverse: bool) -> None:
    """Show a table for each tier: they belong to different jobs. The job that has committed last
    comes last.
    """
    failed = [tier for tier in tiers if tier.error and not isinstance(tier.error, NoCheckpoint)]
    for tier in failed:
        output.warn(f"{tier.url} cannot be listed: {tier.error}")
    shown = sorted(
        (tier for tier in tiers if tier.steps),
        key=lambda tier: max(held.created_at for held in tier.steps.values()),
        reverse=reverse,
    )
    if not shown and (error := (failed or tiers)[0].error):
        raise error
    for number, tier in enumerate(shown):
        if number:
            output.show_line()
        output.show_line(tier.url, style="bold")
        _one(tier, _chosen([tier], newest, reverse=reverse), json=False)


def _several(tiers: list[_Tier], refs: Sequence[StepRef], *, json: bool) -> None:
    """Show a row for each attempt that any tier has, with a column for each tier."""
    failed = [tier for tier in tiers if tier.error and not isinstance(tier.error, NoCheckpoint)]
    if len(failed) == len(tiers) and failed[0].error:
        raise failed[0].error
    if json:
        _show_several_as_json(tiers, failed, refs)
        return
    for tier in failed:
        output.warn(f"{tier.url} cannot be listed: {tier.error}")
    if not refs:
        if failed and failed[0].error:  # A tier that failed may hold steps
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
    older = _older(tiers)
    rows = [
        [str(ref.step), _attempt(ref, older), *(fact.cell(held) for fact in facts), *cells[ref]]
        for ref, held in zip(refs, known, strict=True)
    ]
    urls = [tier.url for tier in tiers if tier.url in titles]
    names = output.short_names(urls, columns, rows)
    columns = [names.get(column, column) for column in columns]
    notes = [_brief(_metadata(held)) for held in known]
    if any(notes):
        columns.append("metadata")
        rows = [[*row, note] for row, note in zip(rows, notes, strict=True)]
    numbers = ("step", "size", *(fact.title for fact in facts if fact.is_number))
    output.show_table(columns, rows, right=numbers, elided=("metadata",))


def _attempt(ref: StepRef, older: Collection[StepRef]) -> str:
    return f"{ref.attempt}, older" if ref in older else ref.attempt


def _show_several_as_json(
    tiers: list[_Tier], failed: Sequence[_Tier], refs: Sequence[StepRef]
) -> None:
    older = _older(tiers)
    output.show_json(
        {
            "tiers": [
                {"root": tier.url, "error": str(tier.error) if tier in failed else None}
                for tier in tiers
            ],
            "steps": [_across_as_json(tiers, ref, older) for ref in refs],
        }
    )
    if not refs:
        error = failed[0].error if failed else None
        raise typer.Exit(error.exit_code if error else NoCheckpoint.exit_code)


def _known(tiers: Sequence[_Tier], ref: StepRef) -> StoredStep | None:
    """Return the step as any tier has it committed: the manifests are the same."""
    there = (held for tier in tiers if (held := tier.steps.get(ref)))
    return next((held for held in there if held.state == "committed"), None)


def _cell(tier: _Tier, ref: StepRef, known: StoredStep | None) -> str:
    """Return how much of a step is on one tier."""
    held = tier.steps.get(ref)
    if held is None:
        return "-"
    if held.state == "committed":
        return _size(held) + (", pinned" if held.pins else "")
    if held.state != "incomplete":
        return f"damaged: {held.reason}"
    of = f" of {known.ranks}" if known else ""
    ranks = f"rank{'' if held.finished_ranks == 1 and not of else 's'}"
    return f"incomplete: {held.finished_ranks}{of} {ranks}, {output.size(held.nbytes)}"


def _across_as_json(
    tiers: list[_Tier], ref: StepRef, older: Collection[StepRef]
) -> dict[str, object]:
    known = _known(tiers, ref)
    return {
        "step": ref.step,
        "attempt": ref.attempt,
        "older": ref in older,
        **_facts_as_json(known),
        "metadata": _metadata(known),
        "tiers": {
            tier.url: {
                "state": _state(held)[0],
                **_bytes_and_pins(held),
                "finished_ranks": None if held.state == "committed" else held.finished_ranks,
            }
            for tier in tiers
            if (held := tier.steps.get(ref))
        },
    }


def _metadata(held: StoredStep | None) -> dict[str, Any]:
    """Return the user's metadata of a step, and which part of a state it is."""
    found = parse(held.metadata, "metadata") if held else None
    if not isinstance(found, dict):
        return {}
    if isinstance(part := found.get(LEFT_OUT), dict):
        part.pop("used", None)
    return found


def _brief(metadata: Mapping[str, Any]) -> str:
    """Return metadata as text, such as 'team=speech, loss=0.25'. A dict is shown by its items."""
    return ", ".join(
        _brief(value)
        if isinstance(value, dict)
        else f"{key}={value:.6g}"
        if isinstance(value, float)
        else f"{key}={value}"
        for key, value in metadata.items()
        if value != {}
    )


def _state(held: StoredStep) -> tuple[str, str]:
    """Return the state of a step with its remarks."""
    if held.state == "committed":
        return held.state, ""
    if held.state == "incomplete":
        return held.state, f"{output.count(held.finished_ranks, 'rank')} finished, no manifest"
    return "damaged", held.reason


def _size_and_state(tier: _Tier, ref: StepRef) -> tuple[str, str]:
    held = tier.steps[ref]
    state, detail = _state(held)
    shown = f"{state}: {detail}" if detail else state
    if held.pins:
        shown += f", pinned until {output.moment(_pinned_until(held))}"
    if held.state == "committed":
        return _size(held), shown
    return output.size(held.nbytes) if held.nbytes else "-", shown


def _size(held: StoredStep) -> str:
    """Return the size on the tier, and for an encoded step also the size before."""
    stored = output.size(held.stored_bytes)
    if not held.codecs:
        return stored
    return f"{stored} ({', '.join(held.codecs)} of {output.size(held.staged_bytes)})"


def _pinned_until(held: StoredStep) -> int:
    return max(pin.until for pin in held.pins)


def _bytes_and_pins(held: StoredStep) -> dict[str, object]:
    is_committed = held.state == "committed"
    return {
        "bytes": held.staged_bytes if is_committed else held.nbytes,
        "stored_bytes": held.stored_bytes if is_committed else held.nbytes,
        "codecs": list(held.codecs),
        "pinned_until": output.moment_utc(_pinned_until(held)) if held.pins else None,
    }


def _as_json(tier: _Tier, ref: StepRef, older: Collection[StepRef]) -> dict[str, object]:
    held = tier.steps[ref]
    state, detail = _state(held)
    known = held if held.state == "committed" else None
    return {
        "step": ref.step,
        "attempt": ref.attempt,
        "older": ref in older,
        "state": state,
        "detail": detail or None,
        **_facts_as_json(known),
        "metadata": _metadata(known),
        "metrics": dict(held.metrics) if known else None,
        **_bytes_and_pins(held),
    }

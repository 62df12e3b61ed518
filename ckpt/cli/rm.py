"""``ckpt rm``: remove steps that a person names, on all tiers of a run.

A *base* is a step that holds a part of other steps, its *heirs*. An *outer base* is in another
root. A *base pin* there, whose end is ``BASE_END``, keeps it for this run. A *lease* is a pin that
a running job renews. It may go once the job has ended.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Final

import typer

from ckpt.catalog.inventory import StoredStep, heirs_of
from ckpt.catalog.outer_bases import roots_of_unfinished
from ckpt.catalog.rollbacks import remove_rollbacks
from ckpt.catalog.step_listing import why_missing
from ckpt.catalog.watching import remove_watch_records, watch_records
from ckpt.cli import output, record_tables
from ckpt.cli.options import (
    PLACE_AND_STEP,
    TIMEOUT_SECONDS,
    ConfigFileOption,
    JsonOption,
    RootsOption,
    TimeoutOption,
    number_of,
    places,
)
from ckpt.cli.prune import step_fields
from ckpt.cli.record_tables import Field
from ckpt.cli.run_tiers import RunTier, check_idle, look_at_run, rollback_of, warn_of_other_tiers
from ckpt.cli.watched_store import warn_of_silence
from ckpt.config import load_config
from ckpt.errors import CkptError, CommitError, ConfigError, NoCheckpoint
from ckpt.model.rollback import on_branch
from ckpt.model.selector import LatestStep, Selector, is_selector, parse_selector
from ckpt.observe.journal_files import journal_files, journal_folder
from ckpt.retention.removal import remove
from ckpt.root.base_pins import pinned_bases, remove_base_pins
from ckpt.root.leases import LEASE_REASON
from ckpt.root.owner import delete_owner
from ckpt.root.pins import BASE_END, Pin, all_pins, note_of, remove_pin
from ckpt.storage.group import is_shared
from ckpt.storage.tiers import tier_at
from ckpt.storage.urls import is_folder, local_path, path_between

_FIELDS: Final[Sequence[Field[tuple[RunTier, StoredStep]]]] = (
    *step_fields(lambda pair: pair[1]),
    Field("tier", lambda pair: pair[0].store.url, key="root"),
)


@dataclass(frozen=True, slots=True)
class _Choice:
    """The steps that a call names.

    Attributes:
        numbers: The steps that are named one by one.
        last_step: All steps after this one are named; None for none of them.
        is_whole_run: Whether all steps are named.
    """

    numbers: frozenset[int]
    last_step: int | None
    is_whole_run: bool

    def takes(self, step: int) -> bool:
        """Return True if the call names the step."""
        is_newer = self.last_step is not None and step > self.last_step
        return self.is_whole_run or is_newer or step in self.numbers


def rm(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[ROOT]... [STEP]...",
            help=PLACE_AND_STEP,
            show_default=False,
        ),
    ] = None,
    last_step: Annotated[
        str | None,
        typer.Option(
            "--after", metavar="STEP", help="Remove all steps after STEP, to go back to it."
        ),
    ] = None,
    whole_run: Annotated[
        bool,
        typer.Option("--run", help="Remove all that ckpt has put there."),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show what would be removed.")
    ] = False,
    force: Annotated[
        bool,
        typer.Option("--force", help="Remove the steps although a job or its agent may use them."),
    ] = False,
    roots: RootsOption = None,
    config: ConfigFileOption = None,
    timeout: TimeoutOption = TIMEOUT_SECONDS,
    json: JsonOption = False,
) -> None:
    r"""Remove steps for good, on all tiers of a run.

    The tiers are those of ckpt.toml, if ROOT is one of them or is not given; else those that are
    given. A step that stayed on a tier would be restored from there. So nothing is removed if a
    tier does not answer, if a step is pinned, or if the job is alive or has left work to its agent
    (--force). The last checkpoint of the current branch goes only with --run, or after a `ckpt
    rollback` to another branch.

    \b
    Examples:
      ckpt rm runs/gpt 1200 1300 --dry-run
      ckpt rm runs/gpt latest latest~1                the two newest
      ckpt rm runs/gpt --after 1200                   go on from step 1200
      ckpt rm memory runs/gpt s3://bucket/gpt --run   start from nothing
    """
    words = arguments or []
    urls = places([word for word in words if not is_selector(word)], roots)
    step_words = [word for word in words if is_selector(word)]
    if (bool(step_words) + (last_step is not None) + whole_run) != 1:
        raise ConfigError("name what goes: one or more of STEP, or --after STEP, or --run")
    if last_step is not None:
        step_words = [last_step]
    selectors = [parse_selector(word) for word in step_words]
    tiers = look_at_run(urls, config, timeout)
    warn_of_other_tiers(tiers, consequence="a job restores the steps that stay there")
    numbers = _numbers(selectors, tiers, config)
    choice = (
        _Choice(numbers, last_step=None, is_whole_run=whole_run)
        if last_step is None
        else _Choice(frozenset(), last_step=max(numbers), is_whole_run=False)
    )
    _check_presence(tiers, choice)
    removals = _removals(tiers, choice)
    _check(tiers, choice, removals, force=force)
    with ExitStack() as stack:
        for tier in tiers:
            stack.enter_context(warn_of_silence(tier.store))
        if not dry_run:
            outer_roots = [_outer_roots(tier, config) for tier in tiers]
            removals = _carry_out(removals)
            if not force:  # With --force, a job that is alive may write a file that needs the base
                _end_base_pins(tiers, outer_roots, removals)
            if whole_run:
                _remove_rest(tiers)
    if json:
        output.show_json(
            {
                "roots": [tier.store.url for tier in tiers],
                "dry_run": dry_run,
                "removed": record_tables.entries(_FIELDS, removals),
            }
        )
    else:
        _show(removals, dry_run=dry_run)


def _numbers(
    selectors: Sequence[Selector], tiers: Sequence[RunTier], config: str | None
) -> frozenset[int]:
    """Return the numbers of the steps that ``selectors`` name. If the run has no checkpoint, the
    newest step is the newest begun one.
    """
    stores = [tier.store for tier in tiers]
    present = {step.ref.step for tier in tiers for step in tier.steps}
    has_no_checkpoint = bool(present) and not _checkpoints(tiers)
    return frozenset(
        max(present)
        if has_no_checkpoint and selector == LatestStep()
        else number_of(stores, selector, config)
        for selector in selectors
    )


def _check_presence(tiers: Sequence[RunTier], choice: _Choice) -> None:
    """Check that the steps that ``choice`` names are there.

    Raises:
        NoCheckpoint: No tier has anything of a step that is named, the step to go back to is no
            checkpoint, or the run has no step at all. With all steps named, a run may have none if
            something else of it is left.
    """
    present = {step.ref.step for tier in tiers for step in tier.steps}
    urls, last_step = ", ".join(tier.store.url for tier in tiers), choice.last_step
    if not present and not (choice.is_whole_run and any(map(_has_rest, tiers))):
        store = tiers[-1].store
        raise NoCheckpoint(urls, store.call_in_time(partial(why_missing, store, [], None)))
    if missing := sorted(choice.numbers - present):
        raise NoCheckpoint(urls, f"step {missing[0]} is not there")
    if last_step is not None and last_step not in _checkpoints(tiers):
        raise NoCheckpoint(urls, f"step {last_step}, to go back to, is no checkpoint there")


def _checkpoints(tiers: Sequence[RunTier]) -> set[int]:
    """Return the checkpoints of the run. If no tier has a whole one, return all steps that have a
    manifest: the other files may be on other nodes, or a newer ckpt may read the format.
    """
    states = {(step.ref.step, step.state) for tier in tiers for step in tier.steps}
    committed = {number for number, state in states if state == "committed"}
    return committed or {number for number, state in states if state != "incomplete"}


def _removals(tiers: Sequence[RunTier], choice: _Choice) -> list[tuple[RunTier, StoredStep]]:
    """Return the attempts to remove, newest step first. So an interrupted call leaves the history
    up to some step. A step that others refer to goes after them.
    """
    removals = [
        (tier, step) for tier in tiers for step in tier.steps if choice.takes(step.ref.step)
    ]
    bases = {base for _, step in removals for base in step.bases}
    removals.sort(key=lambda removal: removal[1].ref, reverse=True)
    return sorted(removals, key=lambda removal: removal[1].ref in bases)


def _check(
    tiers: Sequence[RunTier],
    choice: _Choice,
    removals: Sequence[tuple[RunTier, StoredStep]],
    *,
    force: bool,
) -> None:
    """Check that the steps may be removed.

    Raises:
        CommitError: A step is pinned, a step that stays refers to one, or a job or its agent may be
            at work (not with ``force``).
        ConfigError: No checkpoint of the current branch would be left, and the call does not name
            the whole run.
    """
    if not force:
        check_idle(tiers, consequence="may save or copy the steps again")
    for tier, step in removals:
        # A job that was killed leaves its leases on the bases of its steps.
        if pins := [pin for pin in step.pins if not _is_lease(tier, pin)]:
            if names := [name for pin in pins if (name := _branch_of(tier, pin))]:
                raise CommitError(
                    f"step {step.ref.step} on {tier.store.url} is the branch {names[0]}: end it "
                    f"with `ckpt branch {tier.store.url} {names[0]} --delete` first"
                )
            if base_pins := [pin for pin in pins if pin.until == BASE_END]:
                notes = (
                    tier.store.call_in_time(partial(note_of, tier.store, pin)) for pin in base_pins
                )
                reasons = sorted({note.reason for note in notes})
                raise CommitError(
                    f"step {step.ref.step} on {tier.store.url} holds a part of "
                    f"{'other runs' if len(reasons) > 1 else 'another run'} ({'; '.join(reasons)}),"
                    " which would be damaged without it: remove each of these runs first with "
                    "`ckpt rm ROOT --run`, or copy its steps with `ckpt copy`; if none is left, "
                    f"end the pins with `ckpt unpin {tier.store.url} {step.ref.step}`"
                )
            raise CommitError(
                f"step {step.ref.step} on {tier.store.url} is pinned until "
                f"{output.moment(max(pin.until for pin in pins))}: end the pin with "
                f"`ckpt unpin {tier.store.url} {step.ref.step}` first"
            )
    for tier, step in removals:
        heirs = heirs_of(other for other in tier.steps if not choice.takes(other.ref.step))
        if step.ref in heirs:
            numbers_text = ", ".join(str(ref.step) for ref in sorted(heirs[step.ref]))
            raise CommitError(
                f"step {step.ref.step} on {tier.store.url} holds a part of other steps "
                f"({numbers_text}), which would be damaged without it: name these too to remove "
                "them all, or copy them with `ckpt copy` first, which gives whole steps"
            )
    numbers = _checkpoints(tiers)
    if numbers and all(map(choice.takes, numbers)) and not choice.is_whole_run:
        raise ConfigError(
            f"{output.count(len(numbers), 'checkpoint')} would go, and none be left: to remove "
            "the whole run, give --run alone"
        )
    _check_branch(tiers, choice)


def _check_branch(tiers: Sequence[RunTier], choice: _Choice) -> None:
    """Check that a checkpoint of the current branch is left, if there is one. Otherwise the next
    start would take an abandoned step.

    Raises:
        ConfigError: None would be left.
    """
    refs = {step.ref for tier in tiers for step in tier.steps if step.state == "committed"}
    rest = {ref for ref in refs if not choice.takes(ref.step)}
    branch = on_branch(rollback_of(tiers), refs)
    if branch and rest and rest.isdisjoint(branch):
        newest, urls = max(rest).step, " ".join(tier.store.url for tier in tiers)
        raise ConfigError(
            f"no checkpoint of the current branch would be left, and a start would take step "
            f"{newest}, which a rollback has abandoned: to go on from it, give `ckpt rollback "
            f"{urls} {newest}` first; to remove the whole run, give --run alone"
        )


def _branch_of(tier: RunTier, pin: Pin) -> str:
    """Return the name of the branch that ``pin`` stands for; empty if it stands for none."""
    return tier.store.call_in_time(partial(note_of, tier.store, pin)).branch


def _is_lease(tier: RunTier, pin: Pin) -> bool:
    return tier.store.call_in_time(partial(note_of, tier.store, pin)).reason == LEASE_REASON


def _carry_out(
    removals: Sequence[tuple[RunTier, StoredStep]],
) -> list[tuple[RunTier, StoredStep]]:
    """Remove the attempts, and return them.

    Raises:
        CommitError: A step stays, since another process has pinned it meanwhile, or finishes it.
    """
    for tier, step in removals:
        for pin in step.pins:  # Only leases, since ``_check`` raises for other pins
            remove_pin(tier.store, pin)
        if not remove(tier.store, step):
            raise CommitError(
                f"step {step.ref.step} on {tier.store.url} stays, since another process has "
                "pinned it meanwhile, or finishes it: try again later"
            )
    return list(removals)


def _outer_roots(tier: RunTier, config: str | None) -> set[str]:
    """Return the paths from a tier to other roots that may have base pins of the run: those that
    its steps refer to, and the ``base`` of ckpt.toml, to which a job may have begun to refer.
    """
    roots = {base.root for step in tier.steps for base in step.outer_bases}
    for step in tier.steps:
        if step.state == "incomplete":
            roots |= roots_of_unfinished(tier.store, step.objects)
    if base := tier_at(tier.store.url, load_config(config).tiers).base:
        with suppress(ConfigError):
            roots.add(path_between(tier.store.url, base))
    return roots


def _end_base_pins(
    tiers: Sequence[RunTier],
    outer_roots: Sequence[Collection[str]],
    removals: Sequence[tuple[RunTier, StoredStep]],
) -> None:
    """End the base pins on steps of other roots that no step refers to after ``removals``.

    A step that is no checkpoint may become one, and what it refers to is not known. So all pins
    stay as long as there is such a step.

    Args:
        tiers: The tiers of the run.
        outer_roots: The result of ``_outer_roots`` for each, before the steps were removed.
        removals: The steps that were removed.
    """
    for tier, roots in zip(tiers, outer_roots, strict=True):
        removed_refs = {step.ref for other_tier, step in removals if other_tier is tier}
        rest = [step for step in tier.steps if step.ref not in removed_refs]
        if all(step.state == "committed" or step.outer_bases for step in rest):
            rest_bases = {base for step in rest for base in step.outer_bases}
            for root in roots:
                with suppress(CkptError):  # ``ckpt unpin`` removes such a pin too
                    bases = set(pinned_bases(tier.store, root))
                    remove_base_pins(tier.store, bases - rest_bases)


def _has_rest(tier: RunTier) -> bool:
    """Return True if the tier has something of a run beside its steps."""
    return bool(
        tier.owner is not None
        or tier.rollback is not None
        or tier.store.call_in_time(partial(all_pins, tier.store))
        or tier.store.call_in_time(partial(watch_records, tier.store))
        or (is_folder(tier.store.url) and journal_files(tier.store.url))
    )


def _remove_rest(tiers: Sequence[RunTier]) -> None:
    """Remove the pins, the rollbacks, the records of watchers, the owners of the roots, and the
    journals, and the folders that are empty then. Files that are not ours stay.
    """
    for tier in tiers:
        for pin in all_pins(tier.store):
            remove_pin(tier.store, pin)
        tier.store.call_in_time(partial(remove_rollbacks, tier.store))
        tier.store.call_in_time(partial(remove_watch_records, tier.store))
        delete_owner(tier.store)
        if is_folder(tier.store.url):
            for path in journal_files(tier.store.url):
                with suppress(FileNotFoundError):
                    os.unlink(path)
            _remove_if_empty(journal_folder(tier.store.url))
            _remove_if_empty(os.path.abspath(local_path(tier.store.url)))


def _remove_if_empty(folder: str) -> None:
    """Remove a folder that is empty. The working folder stays, and so does one that a person has
    set up for a group, since only that person can make it again.
    """
    with suppress(OSError):
        status = os.stat(folder)
        if not is_shared(status) and not os.path.samestat(status, os.stat(os.curdir)):
            os.rmdir(folder)


def _show(removals: Collection[tuple[RunTier, StoredStep]], *, dry_run: bool) -> None:
    record_tables.show(_FIELDS, removals)
    count = len({step.ref.step for _, step in removals})
    total = output.size(sum(step.nbytes for _, step in removals))
    output.show_line(
        f"{output.count(count, 'step')} {'would be ' if dry_run else ''}removed, {total}"
    )

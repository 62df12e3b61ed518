"""``ckpt rollback``: let a run go on from an older step.

A rollback abandons the later steps. A further rollback to one of these steps resumes it. A step may
have several attempts, each by another job. *Rivals* of an attempt are the other committed attempts
at its step, and a *head* is the newest step of an attempt.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated

import typer
from msgspec.structs import replace

from ckpt.catalog.rollbacks import put_rollback
from ckpt.cli import output
from ckpt.cli.options import (
    TIMEOUT_SECONDS,
    ConfigFileOption,
    JsonOption,
    PlacesAndStepArgument,
    RootsOption,
    StepOption,
    TimeoutOption,
    places_and_step,
    step_id,
)
from ckpt.cli.run_tiers import (
    RunTier,
    attempt_at,
    check_idle,
    look_at_run,
    rollback_of,
    rollbacks_of,
    warn_of_other_tiers,
)
from ckpt.errors import ConfigError
from ckpt.model.keys import StepRef
from ckpt.model.rollback import Rollback, heads_of, on_branch, roll_back
from ckpt.model.selector import LATEST
from ckpt.processes import user_at_host
from ckpt.storage.registry import scheme_of


def rollback(
    arguments: PlacesAndStepArgument = None,
    step: StepOption = None,
    reason: Annotated[
        str, typer.Option("--reason", metavar="TEXT", help="Shown by `ckpt log`.")
    ] = "",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show what would be abandoned.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Roll back although a job or its agent may be at work.")
    ] = False,
    roots: RootsOption = None,
    config: ConfigFileOption = None,
    timeout: TimeoutOption = TIMEOUT_SECONDS,
    json: JsonOption = False,
) -> None:
    r"""Let a run go on from an older step.

    The next job restores STEP, and may save the later numbers again. The later steps are abandoned:
    a tier that has a limit, such as keep_last, removes all of them once the new branch has a step.
    Until then, a rollback to one of them takes the old branch up again. `ckpt log` shows all
    branches, `ckpt branch` keeps a step, and `ckpt rm --after STEP` removes the later steps at
    once.

    The tiers are those of ckpt.toml, if ROOT is one of them or is not given; else those that are
    given. Every tier that the job uses should be named.

    \b
    Examples:
      ckpt rollback runs/gpt 1200 --reason "loss spike at 1250"
      ckpt rollback runs/gpt best:loss
      ckpt rollback runs/gpt 1500                      take the abandoned branch up again
      ckpt rollback runs/gpt s3://bucket/gpt 1200      on both tiers
    """
    urls, selector = places_and_step(arguments, roots, step)
    if selector is None:
        raise ConfigError(f"name the step to go back to; {LATEST!r} is where the run stands")
    tiers = look_at_run(urls, config, timeout)
    warn_of_other_tiers(
        tiers, consequence="a job that lacks this tier restores the later steps from there"
    )
    if not (force or dry_run):
        check_idle(tiers, consequence="may save later steps again")
    # The attempt of a branch, or a number. It is None only if there is no selector.
    target = step_id([tier.store for tier in tiers], selector, config)
    ref = target if isinstance(target, StepRef) else attempt_at(tiers, target or 0)
    steps = [step for tier in tiers for step in tier.steps]
    rivals = {step.ref for step in steps if step.ref.step == ref.step and step.state == "committed"}
    new_rollback = roll_back(
        rollbacks_of(tiers),
        ref,
        heads_of({step.ref for step in steps}),
        rivals=rivals - {ref},
    )  # None if the run stands at this step already
    if new_rollback is not None:
        new_rollback = replace(new_rollback, reason=reason, author=user_at_host())
    record = new_rollback or rollback_of(tiers)
    if record is not None and not dry_run:
        durable_tiers = [tier for tier in tiers if scheme_of(tier.store.url) != "shm"] or tiers
        for tier in durable_tiers:  # Also those that an earlier call did not reach
            tier.store.call_in_time(partial(put_rollback, tier.store, record))
    _show(tiers, ref, new_rollback, dry_run=dry_run, json=json)


def _show(
    tiers: Sequence[RunTier],
    ref: StepRef,
    new_rollback: Rollback | None,
    *,
    dry_run: bool,
    json: bool,
) -> None:
    """Print the steps that the new rollback to ``ref`` abandons and resumes. ``new_rollback`` is
    None if the run stands at ``ref`` already.
    """
    committed = {step.ref for tier in tiers for step in tier.steps if step.state == "committed"}
    old_branch = set(on_branch(rollback_of(tiers), committed))
    branch = set(on_branch(new_rollback, committed)) if new_rollback is not None else old_branch
    abandoned_refs, resumed_refs = sorted(old_branch - branch), sorted(branch - old_branch)
    if json:
        output.show_json(
            {
                "roots": [tier.store.url for tier in tiers],
                "dry_run": dry_run,
                "step": ref.step,
                "attempt": ref.attempt,
                "rollback": new_rollback.number if new_rollback is not None else None,
                "abandoned": [ref.step for ref in abandoned_refs],
                "resumed": [ref.step for ref in resumed_refs],
            }
        )
        return
    if new_rollback is None:
        output.show_line(f"the run stands at step {ref.step} already: nothing to do")
        return
    output.show_line(f"the run {'would go' if dry_run else 'goes'} on from step {ref.step}")
    if resumed_refs:
        numbers = [ref.step for ref in resumed_refs]
        output.show_line(f"  on the branch again: {output.ranges(numbers)}")
    if abandoned_refs:
        numbers = [ref.step for ref in abandoned_refs]
        are_rivals = not {ref.step for ref in resumed_refs}.isdisjoint(numbers)
        text = output.ranges(numbers) + (", where they are other attempts" if are_rivals else "")
        output.show_line(f"  abandoned: {text}")
        output.show_line(
            "  a tier with a limit removes them after the next save: `ckpt branch` keeps a step"
        )

"""``ckpt rollback``: let a run go on from an older step."""

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
    target = step_id([tier.store for tier in tiers], selector, config)
    ref = target if isinstance(target, StepRef) else attempt_at(tiers, target or 0)
    steps = [step for tier in tiers for step in tier.steps]
    rivals = {step.ref for step in steps if step.ref.step == ref.step and step.state == "committed"}
    new = roll_back(
        rollbacks_of(tiers),
        ref,
        heads_of({step.ref for step in steps}),
        rivals=rivals - {ref},
    )
    if new is not None:
        new = replace(new, reason=reason, author=user_at_host())
    record = new or rollback_of(tiers)
    if record is not None and not dry_run:
        durable = [tier for tier in tiers if scheme_of(tier.store.url) != "shm"] or tiers
        for tier in durable:  # Also those that an earlier call did not reach
            tier.store.ask(partial(put_rollback, tier.store, record))
    _show(tiers, ref, new, dry_run=dry_run, json=json)


def _show(
    tiers: Sequence[RunTier], ref: StepRef, new: Rollback | None, *, dry_run: bool, json: bool
) -> None:
    committed = {step.ref for tier in tiers for step in tier.steps if step.state == "committed"}
    old_branch = set(on_branch(rollback_of(tiers), committed))
    branch = set(on_branch(new, committed)) if new is not None else old_branch
    abandoned_steps, resumed_steps = sorted(old_branch - branch), sorted(branch - old_branch)
    if json:
        output.show_json(
            {
                "roots": [tier.store.url for tier in tiers],
                "dry_run": dry_run,
                "step": ref.step,
                "attempt": ref.attempt,
                "rollback": new.number if new is not None else None,
                "abandoned": [step.step for step in abandoned_steps],
                "resumed": [step.step for step in resumed_steps],
            }
        )
        return
    if new is None:
        output.show_line(f"the run stands at step {ref.step} already: nothing to do")
        return
    output.show_line(f"the run {'would go' if dry_run else 'goes'} on from step {ref.step}")
    if resumed_steps:
        output.show_line(f"  on the branch again: {output.ranges([s.step for s in resumed_steps])}")
    if abandoned_steps:
        numbers = [ref.step for ref in abandoned_steps]
        is_rival = not {ref.step for ref in resumed_steps}.isdisjoint(numbers)
        text = output.ranges(numbers) + (", where they are other attempts" if is_rival else "")
        output.show_line(f"  abandoned: {text}")
        output.show_line(
            "  a tier with a limit removes them after the next save: `ckpt branch` keeps a step"
        )

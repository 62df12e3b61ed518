"""``ckpt branch``: give a step a name, and keep it.

Each job that saves a step makes an *attempt* at it, so a root may have several attempts at one
step. The name of a branch stands for one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated

import typer

from ckpt.catalog.branches import find_branch, may_name, put_branch, remove_branch
from ckpt.cli import output
from ckpt.cli.options import (
    STEP_FORMS,
    TIMEOUT_SECONDS,
    ConfigFileOption,
    JsonOption,
    RootsOption,
    TimeoutOption,
    places,
    step_id,
)
from ckpt.cli.run_tiers import RunTier, attempt_at, look_at_run, warn_of_other_tiers
from ckpt.errors import ConfigError
from ckpt.model.keys import StepRef
from ckpt.model.selector import BranchStep, is_selector, parse_selector
from ckpt.storage.registry import scheme_of


def branch(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[ROOT]... NAME STEP",
            help=f"ROOT is the same as --root. STEP is {STEP_FORMS}.",
            show_default=False,
        ),
    ] = None,
    deletes: Annotated[
        bool, typer.Option("--delete", help="End the branch NAME. Its step is removed as others.")
    ] = False,
    reason: Annotated[
        str, typer.Option("--reason", metavar="TEXT", help="Shown by `ckpt log`.")
    ] = "",
    roots: RootsOption = None,
    config: ConfigFileOption = None,
    timeout: TimeoutOption = TIMEOUT_SECONDS,
    json: JsonOption = False,
) -> None:
    r"""Give a step a name, and keep it.

    Every command and `restore` take branch:NAME for a step, also after a rollback has abandoned the
    step: `ckpt rollback branch:NAME` takes its branch up again. No retention, quota or `ckpt rm`
    removes the step before `--delete`. `ckpt log` lists the names.

    The tiers are those of ckpt.toml, if ROOT is one of them or is not given; else those that are
    given. The step gets the name on each tier that has it.

    \b
    Examples:
      ckpt branch runs/gpt before-spike 1200 --reason "loss spike at 1250"
      ckpt rollback runs/gpt branch:before-spike
      ckpt branch runs/gpt before-spike --delete
    """
    words = list(arguments or ())
    step = words.pop() if words and not deletes and is_selector(words[-1]) else None
    if not words or (step is None) != deletes:
        raise ConfigError("give NAME and STEP, or NAME and --delete; `ckpt log` lists the names")
    if len(words) == 1 and "/" in words[0]:
        raise ConfigError(f"{words[0]} is a place, since a name has no slash: give NAME after it")
    name = BranchStep(words.pop())
    tiers = look_at_run(places(words, roots), config, timeout)
    warn_of_other_tiers(tiers, consequence="the step has no name there")
    if step is None:
        ref, changes = _delete(tiers, name)
    else:
        # The attempt of a branch, or a number. It is None only if there is no selector.
        target = step_id([tier.store for tier in tiers], parse_selector(step), config)
        ref = target if isinstance(target, StepRef) else attempt_at(tiers, target or 0)
        changes = _put(tiers, name, ref, reason)
    if json:
        output.show_json(
            {
                "roots": changes,
                "branch": name.name,
                "step": ref.step,
                "attempt": ref.attempt,
                "deleted": deletes,
            }
        )
    elif deletes:
        output.show_line(f"step {ref.step} has the name {name.name} no more")
    else:
        output.show_line(f"step {ref.step} is {name} now, on {', '.join(changes)}")


def _put(tiers: Sequence[RunTier], name: BranchStep, ref: StepRef, reason: str) -> list[str]:
    """Give ``ref`` the name on each tier that has it, and return their URLs. A tier in memory gets
    it only if no other tier has the step.

    Raises:
        ConfigError: Another step of the run has the name. Nothing was written.
    """
    for tier in tiers:
        # Raises if the name is taken
        tier.store.call_in_time(partial(may_name, tier.store, name, ref))
    holders = [
        tier
        for tier in tiers
        if any(step.ref == ref and step.state == "committed" for step in tier.steps)
    ]
    durable_tiers = [tier for tier in holders if scheme_of(tier.store.url) != "shm"] or holders
    for tier in durable_tiers:
        tier.store.call_in_time(partial(put_branch, tier.store, name, ref, reason))
    return [tier.store.url for tier in durable_tiers]


def _delete(tiers: Sequence[RunTier], name: BranchStep) -> tuple[StepRef, list[str]]:
    """Remove the name from all tiers. Return its step, and the URLs of the tiers that had it."""
    stores = [tier.store for tier in tiers]
    ref = stores[0].call_in_time(partial(find_branch, stores, name))
    urls = [
        store.url for store in stores if store.call_in_time(partial(remove_branch, store, name))
    ]
    return ref, urls

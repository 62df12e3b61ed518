"""``ckpt prune``: remove checkpoints that need not be kept, and the remains of failed saves.

A *verdict* on a step has the reasons why it stays. A step without a reason is removed. A *guard*
names further steps that must stay. The pruning of a tier may not remove what a *farther* tier of
the same job still has to copy from there. The *owner* of a root is the job that may write to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Final, TypeVar

import typer

from ckpt.catalog.inventory import Inventory, State, StoredStep
from ckpt.catalog.step_listing import why_missing
from ckpt.cli import output, record_tables
from ckpt.cli.options import (
    TIMEOUT_SECONDS,
    ConfigFileOption,
    JsonOption,
    PlaceArgument,
    RootOption,
    TimeoutOption,
    one_place,
)
from ckpt.cli.record_tables import Field
from ckpt.cli.watched_store import WatchedStore, open_watched, warn_of_silence
from ckpt.config import Best, Tier, load_config
from ckpt.errors import CkptError, CommitError, ConfigError, NoCheckpoint
from ckpt.model.keys import StepRef
from ckpt.model.rollback import Rollback
from ckpt.observe.metric_modes import best_rules_at
from ckpt.retention.policy import (
    YOUNG,
    FixedGuard,
    Metrics,
    PruneContext,
    Retention,
    Verdict,
    judge,
    on_branch,
    unknown_metric,
)
from ckpt.retention.pruner import Removal, carry_out
from ckpt.root.owner import NO_PROCESS, Owner, read_owner
from ckpt.storage.tiers import resolve_tier
from ckpt.upkeep.look import checkpoints
from ckpt.upkeep.plan import missing_steps

T = TypeVar("T")


def state_text(state: State) -> str:
    return {
        "committed": "checkpoint",
        "damaged": "files are missing",
        "incomplete": "remains",
        "unsupported": "of another format",
    }[state]


def step_fields(step_of: Callable[[T], StoredStep | Removal]) -> tuple[Field[T], ...]:
    """Return the fields of a step that is removed, or could be. ``step_of`` returns the step of a
    record.
    """
    return (
        Field("", lambda record: step_of(record).ref, kind="step"),
        Field("size", lambda record: step_of(record).nbytes, key="tier_bytes", kind="size"),
        Field(
            "what",
            lambda record: step_of(record).state,
            key="state",
            text=lambda record: state_text(step_of(record).state),
        ),
    )


_Fate = tuple[StoredStep | Removal, str]
"""A step, and what happens to it."""
_FATE_FIELDS: Final[Sequence[Field[_Fate]]] = (
    *step_fields(lambda fate: fate[0]),
    Field("fate", lambda fate: fate[1]),
)
_REMOVAL_FIELDS: Final[Sequence[Field[_Fate]]] = (
    *_FATE_FIELDS[:-1],
    Field("", lambda fate: fate[0].state == "committed", key="committed"),
)
_KEPT_FIELDS: Final[Sequence[Field[Verdict]]] = (
    *step_fields(lambda verdict: verdict.step),
    Field("", lambda verdict: verdict.reasons, key="why"),
    Field("", lambda verdict: verdict.step.metrics, key="metrics"),
)


def prune(
    argument: PlaceArgument = None,
    keep_last: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Keep the N newest steps. Default: as ckpt.toml says."
        ),
    ] = None,
    keep_every: Annotated[
        int | None,
        typer.Option(
            metavar="K", min=1, help="Keep every multiple of K too. Default: as ckpt.toml says."
        ),
    ] = None,
    keep_best: Annotated[
        str | None,
        typer.Option(
            metavar="METRIC:MODE[:N]",
            help="Keep the N (1) best too; MODE is min or max. Default: as ckpt.toml says, or "
            "as the job keeps the best, by its journal.",
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Only say what would be removed, and why the rest is kept."),
    ] = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Prune also what farther tiers of a job may still have to read from here.",
        ),
    ] = False,
    root: RootOption = None,
    config: ConfigFileOption = None,
    timeout: TimeoutOption = TIMEOUT_SECONDS,
    json: JsonOption = False,
) -> None:
    r"""Remove old checkpoints, those that have lost files, and the remains of saves that failed
    more than a day ago.

    The newest checkpoint always stays, and so do files that are not ours. A job may write to the
    root meanwhile. If ckpt.toml names the farther tiers of the job, the steps that these tiers
    still lack and would keep stay, even if the job has ended. If it does not, nothing is removed
    without --force if the job is alive, may be alive on another machine, or has left the root to
    its agent.

    \b
    Examples:
      ckpt prune runs/gpt --keep-last 3 --dry-run
      ckpt prune s3://bucket/run42 --keep-last 3 --keep-every 1000 --keep-best loss:min
    """
    root = one_place([argument] if argument else None, root)
    tier = resolve_tier(root, config)
    rule = _rule(tier, keep_last, keep_every, keep_best)
    backend = open_watched(tier.url, tier.options, timeout)
    # A tier that is local to each node may have only a part of each step
    inventory = Inventory(backend, part=tier.local is True)
    owner, steps = backend.call_in_time(lambda: (read_owner(backend), inventory.look()))
    if not steps:
        raise NoCheckpoint(
            backend.url, backend.call_in_time(partial(why_missing, backend, [], None))
        )
    if rule.keep_best is None and any(step.metrics for step in steps):
        rule = replace(rule, keep_best=_best_of_job(backend))
    _warn_of_unknown_metric(rule, steps)
    missing_refs = (
        frozenset["StepRef"]()
        if force
        else _missing_farther(
            _farther_tiers(tier, config, owner, url=backend.url, dry_run=dry_run),
            on_branch([step for step in steps if step.state == "committed"]),
            inventory.rollback,
            timeout,
        )
    )
    verdicts = judge(
        steps,
        rule,
        PruneContext(
            own=owner.attempt if owner else "",
            alive=owner is not None and owner.alive,
            includes_undated=owner is None,  # Remains of an unknown age go too
            guard=FixedGuard(missing_refs),
        ),
    )
    with warn_of_silence(backend):
        removals = carry_out(backend, verdicts, dry_run=dry_run)
    kept_steps = [verdict for verdict in verdicts if verdict.reasons]
    if json:
        output.show_json(
            {
                "root": backend.url,
                "dry_run": dry_run,
                "pruned": record_tables.entries(
                    _REMOVAL_FIELDS, [(step, "goes") for step in removals]
                ),
                "kept": record_tables.entries(_KEPT_FIELDS, kept_steps),
            }
        )
    else:
        _show(removals, kept_steps, dry_run=dry_run)


def _rule(
    tier: Tier, keep_last: int | None, keep_every: int | None, keep_best: str | None
) -> Retention:
    """Return the rule that says which steps stay, from the options, or else from the settings of
    the tier. Its ``best_counts`` says whether the best steps are among the last N, or beside them.

    Raises:
        ConfigError: The rule would keep all steps, or ``--keep-last`` is missing.
    """
    best = tier.best if keep_best is None else _best(keep_best)
    last = tier.keep_last if keep_last is None else keep_last
    for option, value in (("--keep-every", keep_every), ("--keep-best", keep_best)):
        if value is not None and last is None:
            raise ConfigError(
                f"{option} adds to --keep-last: give --keep-last N too, such as --keep-last 3"
            )
    rule = Retention(
        keep_last=last,
        keep_every=tier.keep_every if keep_every is None else keep_every,
        keep_best=best,
        best_counts=tier.best_counts,
    )
    if rule.keeps_all:
        raise ConfigError(
            "how many are to be kept? Give --keep-last N, or write keep_last into ckpt.toml "
            "(--keep-every and --keep-best keep more)"
        )
    return rule


def _best_of_job(backend: WatchedStore) -> Best | None:
    """Return the rule by which the job keeps the best steps, as its journal says. None if there is
    none, or if the tiers of the job go by several metrics.
    """

    def read() -> Sequence[Best]:
        with backend.request():  # Notes the time, so that a silent file system is given up
            return best_rules_at(backend.url)

    rules = backend.call_in_time(read)
    if len(rules) > 1:
        metrics = ", ".join(sorted(rule.metric for rule in rules))
        output.warn(
            f"the job keeps the best steps by {metrics}, and "
            "this command does not: name one of them with --keep-best"
        )
    return rules[0] if len(rules) == 1 else None


def _farther_tiers(
    tier: Tier, config: str | None, owner: Owner | None, *, url: str, dry_run: bool
) -> Sequence[Tier]:
    """Return the tiers farther than ``tier`` that may still have to read steps from it.

    A job may have ended before these tiers had all its steps. The agent, or the next job, then
    copies the rest. If the farther tiers are not known, and ``dry_run`` is set or no job and no
    agent may be at work, return an empty sequence. In the first case, also print a warning.

    Args:
        tier: The tier to prune.
        config: The configuration file; None for ``./ckpt.toml``.
        owner: The owner of the root.
        url: The URL of the tier for the message.
        dry_run: Whether the command only shows what it would remove.

    Raises:
        CommitError: A job or its agent may be at work, the farther tiers are not known, and
            ``dry_run`` is not set.
    """
    tiers = load_config(config).tiers
    if tier in tiers:
        return tiers[tiers.index(tier) + 1 :]
    if owner is None or not (work := activity(owner)):
        return ()
    text = (
        f"{url}: the job that writes here {work} ({owner}), and what its farther tiers still "
        "have to read is not known: write all its tiers into ckpt.toml (--config), or give "
        "--force"
    )
    if not dry_run:
        raise CommitError(text)
    output.warn(text)
    return ()


def activity(owner: Owner) -> str:
    """Return in words whether the job ``owner`` or its agent may be at work; empty if neither."""
    if owner.pid == NO_PROCESS:
        return "has left the rest of its work to the agent"
    if owner.alive:
        return "is alive"
    return "may be alive" if owner.is_unknown else ""


def _missing_farther(
    farther_tiers: Sequence[Tier],
    steps: Sequence[StoredStep],
    rollback: Rollback | None,
    timeout: float,
) -> frozenset[StepRef]:
    """Return those of ``steps``, the checkpoints of the branch that ``rollback`` has begun, that
    one of the ``farther_tiers`` takes, lacks, and would keep.

    A job or its agent may still have to read these steps to copy them. If a farther tier cannot be
    listed, all steps that it takes count as lacking, and a warning is printed.
    """
    missing_refs: set[StepRef] = set()
    for tier in farther_tiers:
        tier_metrics: Metrics = {}  # The checkpoints on the tier, with their metrics
        try:
            store = open_watched(tier.url, tier.options, timeout)
            tier_metrics = store.call_in_time(partial(checkpoints, store, tier, steps, rollback))
            # Each step is judged beside the steps that the tier has, and not beside the others that
            # it lacks, since a running job copies all of these. ``best_counts`` would keep fewer.
            settings = replace(tier, best_counts=False)
        except CkptError as error:
            output.warn(
                f"the steps that {tier.url} lacks are not known, so all that it takes stay: {error}"
            )
            settings = Tier(tier.url, every=tier.every)
        missing_refs |= {
            step.ref for step in steps if missing_steps(settings, tier_metrics, [step])
        }
    return frozenset(missing_refs)


def _warn_of_unknown_metric(rule: Retention, steps: Sequence[StoredStep]) -> None:
    if text := unknown_metric(rule, [step.metrics for step in steps]):
        output.warn(text)


def _show(removals: Sequence[Removal], kept_steps: Sequence[Verdict], *, dry_run: bool) -> None:
    """Print the steps that go, and the number of saves whose remains are too ``YOUNG`` to be
    removed. With ``dry_run``, also print the steps that stay.
    """
    fates: list[_Fate] = [(removal, "goes") for removal in removals]
    fates += [
        (verdict.step, f"stays: {', '.join(verdict.reasons)}")
        for verdict in (kept_steps if dry_run else ())
    ]
    record_tables.show(_FATE_FIELDS, fates)
    count = len({removal.ref.step for removal in removals})
    total = output.size(sum(removal.nbytes for removal in removals))
    output.show_line(
        f"{output.count(count, 'step')} {'would be ' if dry_run else ''}removed, {total}"
    )
    if young := sum(YOUNG in verdict.reasons for verdict in kept_steps):
        output.show_line(
            f"remains of {output.count(young, 'save')} stay until they are a day old, since a job "
            "may still finish them"
        )


def _best(text: str) -> Best:
    """Parse a value of ``--keep-best``, such as 'loss:min:3', and return its rule.

    Raises:
        ConfigError: ``text`` is not METRIC:MODE or METRIC:MODE:N.
    """
    metric, *rest = (
        text.rsplit(":", 2) if text.rpartition(":")[2].isdecimal() else text.rsplit(":", 1)
    )
    try:
        return Best.of((metric, *(int(part) if part.isdecimal() else part for part in rest)))
    except ConfigError:
        raise ConfigError(
            f"--keep-best {text}: write METRIC:MODE or METRIC:MODE:N, such as loss:min, or "
            "accuracy:max:3 to keep three"
        ) from None

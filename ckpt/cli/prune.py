"""``ckpt prune``: remove checkpoints that need not be kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ckpt.cli.options import ConfigFileOption, JsonOption, PlaceArgument, RootOption, one_place, places

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpt.config import Best, Tier
    from ckpt.coordination.owner import Owner
    from ckpt.model.keys import StepRef
    from ckpt.retention.inventory import State, StoredStep
    from ckpt.retention.policy import Retention
    from ckpt.retention.prune import Judged, Pruned


def prune(
    where: PlaceArgument = None,
    keep_last: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Keep the N newest steps. Default: as ckpt.toml says."),
    ] = None,
    keep_every: Annotated[
        int | None,
        typer.Option(metavar="K", min=1, help="Keep every multiple of K too. Default: as ckpt.toml says."),
    ] = None,
    keep_best: Annotated[
        str | None,
        typer.Option(
            metavar="METRIC:MODE[:N]",
            help="Keep the N (1) best too; MODE is min or max. Default: as ckpt.toml says.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be removed, and why the rest is kept.")
    ] = False,
    force: Annotated[
        bool,
        typer.Option("--force", help="Also where a job may run whose farther tiers still read from here."),
    ] = False,
    root: RootOption = None,
    config: ConfigFileOption = None,
    json: JsonOption = False,
) -> None:
    r"""Remove old checkpoints, those that have lost files, and the remains of saves that failed more than a day ago.

    The newest checkpoint always stays, and so do files that are not ours. A job may write to the root meanwhile. What its farther tiers still have to read from here stays, if ckpt.toml
    names them; if not, a root whose job is alive, or may be so on another machine, is left alone without --force.

    \b
    Examples:
      ckpt prune runs/gpt --keep-last 3 --dry-run
      ckpt prune s3://bucket/run42 --keep-last 3 --keep-every 1000 --keep-best loss:min
    """
    from ckpt.cli import output
    from ckpt.config import resolve_tier
    from ckpt.coordination.owner import read_owner
    from ckpt.errors import ConfigError, NoCheckpoint
    from ckpt.retention.inventory import Inventory
    from ckpt.retention.policy import Retention
    from ckpt.retention.prune import carry_out, judge
    from ckpt.storage.registry import open_backend

    root = one_place(places([where] if where else None, [root] if root else None))
    tier = resolve_tier(root, config)
    rule = Retention(
        keep_last=tier.keep_last if keep_last is None else keep_last,
        keep_every=tier.keep_every if keep_every is None else keep_every,
        keep_best=tier.best if keep_best is None else _best(keep_best),
    )
    if rule.keeps_all:
        raise ConfigError("how many shall be kept? Give --keep-last N, or write keep_last into ckpt.toml")
    backend = open_backend(tier.url, tier.options)
    owner = read_owner(backend)
    found = Inventory(backend, part=tier.local is True).look()
    if not found:
        raise NoCheckpoint(backend.url, "it is empty, or does not exist")
    _warn_of_names(rule, found)
    late = (
        frozenset["StepRef"]() if force else _late(backend.url, owner, tier, config, found, dry_run=dry_run)
    )
    judged = judge(
        found,
        rule,
        own=owner.attempt if owner else "",
        alive=owner is not None and owner.alive,
        undated=owner is None,
        protected=lambda: late,
    )
    gone = carry_out(backend, judged, dry_run=dry_run)
    kept = [one for one in judged if one.kept]
    if json:
        output.show_json(
            {
                "root": backend.url,
                "dry_run": dry_run,
                "pruned": [_as_json(one) for one in gone],
                "kept": [_kept_as_json(one) for one in kept],
            }
        )
        return
    _show(gone, kept if dry_run else [])
    total = output.size(sum(one.nbytes for one in gone))
    output.show_line(f"{output.count(len(gone), 'step')} {'would be ' if dry_run else ''}removed, {total}")


def _late(
    url: str,
    owner: Owner | None,
    tier: Tier,
    config: str | None,
    found: Sequence[StoredStep],
    *,
    dry_run: bool,
) -> frozenset[StepRef]:
    """Steps that a running job's farther tiers lack, and so may be reading.

    Raises:
        RootInUse: A job may run, and what farther tiers it has is not known.
    """
    from ckpt.catalog.index import committed
    from ckpt.cli import output
    from ckpt.config import load_config
    from ckpt.errors import CkptError, CommitError
    from ckpt.storage.registry import open_backend

    if owner is None or not (owner.alive or owner.is_unknown):
        return frozenset()
    tiers = load_config(config).tiers
    if tier not in tiers:
        state = "is alive" if owner.alive else "may be alive"
        told = f"{url}: the job that writes here {state} ({owner}), and what its farther tiers still have to read is not known: write all its tiers into ckpt.toml (--config), or give --force"
        if dry_run:
            output.warn(told)
            return frozenset()
        raise CommitError(told)
    late: set[StepRef] = set()
    for farther in tiers[tiers.index(tier) + 1 :]:
        taken = {held.ref for held in found if held.state == "whole" and held.ref.step % farther.every == 0}
        try:
            late |= taken - set(committed(open_backend(farther.url, farther.options)))
        except CkptError as error:
            output.warn(f"what {farther.url} lacks cannot be seen, so all that it takes stays: {error}")
            late |= taken
    return frozenset(late)


def _warn_of_names(rule: Retention, found: Sequence[StoredStep]) -> None:
    from ckpt.cli import output
    from ckpt.retention.policy import unknown_metric

    if told := unknown_metric(rule, [held.metrics for held in found]):
        output.warn(told)


def _show(found: Sequence[Pruned], kept: Sequence[Judged]) -> None:
    from ckpt.cli import output

    rows = [
        (str(one.ref.step), one.ref.attempt, output.size(one.nbytes), _what(one.state), "goes")
        for one in found
    ]
    rows += [
        (
            str(one.held.ref.step),
            one.held.ref.attempt,
            output.size(one.held.nbytes),
            _what(one.held.state),
            f"stays: {', '.join(one.kept)}",
        )
        for one in kept
    ]
    if rows:
        output.show_table(("step", "attempt", "size", "what", "fate"), rows, right=("step", "size"))


def _best(text: str) -> Best:
    """'loss:min:3', as one types it."""
    from ckpt.config import Best

    metric, *rest = text.rsplit(":", 2) if text.rpartition(":")[2].isdecimal() else text.rsplit(":", 1)
    return Best.of((metric, *(int(part) if part.isdecimal() else part for part in rest)))


def _what(state: State) -> str:
    return {
        "whole": "checkpoint",
        "broken": "files are missing",
        "begun": "remains",
        "newer": "of a later ckpt",
    }[state]


def _as_json(one: Pruned) -> dict[str, object]:
    return {
        "step": one.ref.step,
        "attempt": one.ref.attempt,
        "bytes": one.nbytes,
        "committed": one.committed,
        "state": one.state,
    }


def _kept_as_json(one: Judged) -> dict[str, object]:
    return {
        "step": one.held.ref.step,
        "attempt": one.held.ref.attempt,
        "why": list(one.kept),
        "metrics": dict(one.held.metrics),
    }

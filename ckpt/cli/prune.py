"""``ckpt prune``: remove checkpoints that need not be kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ckpt.cli.options import JsonOption, RootOption

if TYPE_CHECKING:
    from ckpt.catalog.prune import Pruned


def prune(
    keep_last: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Keep the N newest steps. Default: as ckpt.toml says."),
    ] = None,
    keep_every: Annotated[
        int | None,
        typer.Option(metavar="K", min=1, help="Keep every multiple of K too. Default: as ckpt.toml says."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")] = False,
    root: RootOption = None,
    json: JsonOption = False,
) -> None:
    r"""Remove old checkpoints, and the remains of saves that failed more than a day ago.

    The newest checkpoint always stays, and so do files that are not ours. A job that writes to the root may run meanwhile.

    \b
    Examples:
      ckpt prune --keep-last 3 --dry-run --root runs/gpt
      ckpt prune --keep-last 3 --keep-every 1000 --root s3://bucket/run42
    """
    from ckpt.catalog.prune import prune as apply
    from ckpt.cli import output
    from ckpt.config import resolve_tier
    from ckpt.coordination.owner import read_owner
    from ckpt.errors import ConfigError
    from ckpt.plan.retention import Retention
    from ckpt.storage.registry import open_backend

    tier = resolve_tier(root)
    rule = Retention(
        keep_last=tier.keep_last if keep_last is None else keep_last,
        keep_every=tier.keep_every if keep_every is None else keep_every,
    )
    if rule.keeps_all:
        raise ConfigError("how many shall be kept? Give --keep-last N, or write keep_last into ckpt.toml")
    backend = open_backend(tier.url, tier.options)
    owner = read_owner(backend)
    found = apply(backend, rule, dry_run=dry_run, undated=owner is None)
    if json:
        output.show_json(
            {"root": backend.url, "dry_run": dry_run, "pruned": [_as_json(one) for one in found]}
        )
        return
    total = output.size(sum(one.nbytes for one in found))
    what = "would be removed" if dry_run else "removed"
    if found:
        rows = [
            (
                str(one.ref.step),
                one.ref.attempt,
                output.size(one.nbytes),
                "checkpoint" if one.committed else "remains",
            )
            for one in found
        ]
        output.show_table(("step", "attempt", "size", "what"), rows, right=("step", "size"))
    output.show_line(f"{output.count(len(found), 'step')} {what}, {total}")


def _as_json(one: Pruned) -> dict[str, object]:
    return {"step": one.ref.step, "attempt": one.ref.attempt, "bytes": one.nbytes, "committed": one.committed}

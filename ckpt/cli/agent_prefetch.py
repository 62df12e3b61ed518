"""``ckpt agent prefetch``: copy a step to the near tiers of a node before its trainer starts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ckpt.agent.prefetch import Prefetched
from ckpt.agent.prefetch import prefetch as copy_ahead
from ckpt.catalog.index import find
from ckpt.cli import output
from ckpt.cli.options import TIMEOUT_SECONDS, naming_a_removed, workers_for
from ckpt.cli.store_timeout import open_watched
from ckpt.config import MEMORY, Tier, load_config
from ckpt.errors import ConfigError, FormatUnsupported, IntegrityError
from ckpt.storage.tiers import OpenTier, open_tiers, tier_at


def prefetch(
    url: str | None, to: Sequence[str], step: int | None, config: str | None, *, as_json: bool
) -> None:
    """Copy a step of the far tier to the near tiers, and print the result for each near tier.

    Args:
        url: The far tier; None for the last tier of the configuration.
        to: The near tiers, nearest first. If it is empty, the near tiers are the tiers before the
            far tier in the configuration.
        step: The number of the step; None for the newest intact step of the far tier.
        config: The configuration file; None for ``./ckpt.toml``.
        as_json: Whether to print JSON.

    Raises:
        ConfigError: The tiers are not known, or a near tier is in memory.
        CkptError: The step does not exist, is damaged, or cannot be copied.
    """
    far, near = _tiers(url, to, config)
    opened = open_tiers((*near, far))
    for tier in opened[:-1]:
        if tier.in_memory:
            raise ConfigError(f"{tier.url} is memory, which a trainer fills: name a folder")
    done = _fill(far, opened[:-1], step)
    if as_json:
        output.show_json({"source": opened[-1].url, "tiers": [_as_json(one) for one in done]})
        return
    rows = [
        (
            one.tier,
            str(one.ref.step),
            output.size(one.copied_bytes) if one.nbytes else "-",
            output.duration(one.seconds) if one.nbytes else "-",
            "copied" if one.copied_bytes else "already there",
        )
        for one in done
    ]
    output.show_table(("tier", "step", "copied", "time", "result"), rows, right=("step", "copied"))


def _tiers(url: str | None, to: Sequence[str], config: str | None) -> tuple[Tier, list[Tier]]:
    """Return the far tier, and the near tiers, nearest first.

    The near tiers are those of ``to``. If ``to`` is empty, they are the tiers before the far tier
    in the configuration, or all tiers of the configuration if the far tier is not among them. The
    tier "memory" is left out.
    """
    known = [tier for tier in load_config(config).tiers if tier.url != MEMORY]
    if url is None and not known:
        raise ConfigError(
            "where are the checkpoints? Give the far tier: ckpt agent prefetch s3://bucket/run "
            "--to /nvme/run"
        )
    far = tier_at(url, known) if url else known[-1]
    if to:
        return far, [tier_at(place, known) for place in to]
    near = known[: known.index(far)] if far in known else known
    if not near:
        raise ConfigError(
            f"which tiers are to get the step of {far.url}? Name them with --to, nearest first, or "
            "run this where ckpt.toml lists all tiers"
        )
    return far, near


def _fill(far: Tier, near: Sequence[OpenTier], step: int | None) -> list[Prefetched]:
    source = open_watched(far.url, far.options, TIMEOUT_SECONDS)
    refs = source.ask(partial(find, source, step))
    with workers_for(source) as workers:
        for ref, before in zip(refs, [*refs[1:], None], strict=True):
            try:
                with output.progress(f"step {ref.step}") as bar, naming_a_removed([source], ref):
                    return copy_ahead(
                        source, near, ref, workers, latest=step is None, on_progress=bar
                    )
            except FormatUnsupported:  # Copying an older step would hide this error
                raise
            except IntegrityError as error:
                if before is None:
                    raise
                output.warn(f"step {ref.step} is damaged: {error}; trying step {before.step}")
    raise AssertionError(refs)


def _as_json(one: Prefetched) -> dict[str, object]:
    return {
        "tier": one.tier,
        "step": one.ref.step,
        "attempt": one.ref.attempt,
        "copied_bytes": one.copied_bytes,
        "seconds": round(one.seconds, 6),
    }

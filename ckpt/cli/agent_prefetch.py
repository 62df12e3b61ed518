"""``ckpt agent prefetch``: copy a step to the near tiers of a node before its trainer starts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ckpt.agent.prefetch import PrefetchResult
from ckpt.agent.prefetch import prefetch as copy_ahead
from ckpt.cli import output, record_tables
from ckpt.cli.options import TIMEOUT_SECONDS, find_steps, no_checkpoint_if_removed, workers_for
from ckpt.cli.record_tables import Field
from ckpt.cli.watched_store import open_watched
from ckpt.config import MEMORY, Tier, load_config
from ckpt.errors import ConfigError, FormatUnsupported, IntegrityError
from ckpt.model.selector import Selector
from ckpt.storage.tiers import OpenTier, open_tiers, tier_at

_FIELDS: Final[Sequence[Field[PrefetchResult]]] = (
    Field("tier", lambda copy: copy.tier),
    Field("", lambda copy: copy.ref, kind="step"),
    Field("copied", lambda copy: copy.copied_bytes, key="copied_bytes", kind="size"),
    Field("time", lambda copy: copy.seconds, key="seconds", kind="time"),
    Field("result", lambda copy: "copied" if copy.copied_bytes else "already there"),
)


def prefetch(
    url: str | None,
    destinations: Sequence[str],
    step: Selector | None,
    config: str | None,
    *,
    as_json: bool,
) -> None:
    """Copy a step of the far tier to the near tiers, and print the result for each near tier.

    Args:
        url: The far tier; None for the last tier of the configuration.
        destinations: The near tiers, nearest first. If it is empty, the near tiers are the tiers
            before the far tier in the configuration.
        step: The selector of the step; None for the newest intact step of the far tier.
        config: The configuration file; None for ``./ckpt.toml``.
        as_json: Whether to print JSON.

    Raises:
        ConfigError: The tiers are not known, or a near tier is in memory.
        CkptError: The step does not exist, is damaged, or cannot be copied.
    """
    far_tier, near_tiers = _tiers(url, destinations, config)
    tiers = open_tiers((*near_tiers, far_tier))
    for tier in tiers[:-1]:
        if tier.in_memory:
            raise ConfigError(f"{tier.url} is memory, which a trainer fills: name a folder")
    copies = _fill(far_tier, tiers[:-1], step, config)
    if as_json:
        output.show_json({"source": tiers[-1].url, "tiers": record_tables.entries(_FIELDS, copies)})
    else:
        record_tables.show(_FIELDS, copies)


def _tiers(
    url: str | None, destinations: Sequence[str], config: str | None
) -> tuple[Tier, list[Tier]]:
    """Return the far tier, and the near tiers, nearest first.

    The near tiers are those of ``destinations``. If ``destinations`` is empty, they are the tiers
    before the far tier in the configuration, or all tiers of the configuration if the far tier is
    not among them. The tier "memory" is left out.
    """
    configured_tiers = [tier for tier in load_config(config).tiers if tier.url != MEMORY]
    if url is None and not configured_tiers:
        raise ConfigError(
            "where are the checkpoints? Give the far tier: ckpt agent prefetch s3://bucket/run "
            "--to /nvme/run"
        )
    far_tier = tier_at(url, configured_tiers) if url else configured_tiers[-1]
    if destinations:
        return far_tier, [tier_at(place, configured_tiers) for place in destinations]
    near_tiers = (
        configured_tiers[: configured_tiers.index(far_tier)]
        if far_tier in configured_tiers
        else configured_tiers
    )
    if not near_tiers:
        raise ConfigError(
            f"which tiers are to get the step of {far_tier.url}? Name them with --to, nearest "
            "first, or run this where ckpt.toml lists all tiers"
        )
    return far_tier, near_tiers


def _fill(
    far_tier: Tier, near_tiers: Sequence[OpenTier], step: Selector | None, config: str | None
) -> list[PrefetchResult]:
    """Copy the newest intact one of the attempts that ``step`` names to the near tiers, and return
    the result for each tier. Without ``step``, a near tier that has a later step gets nothing.
    """
    source = open_watched(far_tier.url, far_tier.options, TIMEOUT_SECONDS)
    refs = find_steps(source, step, config)
    with workers_for(source) as workers:
        for ref, older in zip(refs, [*refs[1:], None], strict=True):
            try:
                with (
                    output.progress(f"step {ref.step}") as bar,
                    no_checkpoint_if_removed([source], ref),
                ):
                    return copy_ahead(
                        source, near_tiers, ref, workers, latest=step is None, on_progress=bar
                    )
            except FormatUnsupported:  # Copying an older step would hide this error
                raise
            except IntegrityError as error:
                if older is None:
                    raise
                output.warn(f"step {ref.step} is damaged: {error}; trying step {older.step}")
    raise AssertionError(refs)  # Not reached: ``find_steps`` raises if there is no attempt

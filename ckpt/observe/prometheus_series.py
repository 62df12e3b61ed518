"""The names of the metrics, and the registry that holds them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any, Final, Literal

from ckpt.errors import MissingExtra

_Kind = Literal["counter", "gauge", "stall", "wait"]
_TIER_LABEL: Final = ("tier",)
_BUCKET_BOUNDS: Final = {
    "stall": (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
    "wait": (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600),
}
"""The upper bounds of the buckets of each kind of histogram, in seconds."""

SERIES: Final[dict[str, tuple[_Kind, tuple[str, ...], str]]] = {
    "stall_seconds": ("stall", (), "What a save has cost the training thread."),
    "durable_seconds": ("wait", _TIER_LABEL, "From the call of a save to its commit on the tier."),
    "restore_seconds": ("wait", _TIER_LABEL, "A restore, by the tier that most of it came from."),
    "staged_bytes": ("counter", (), "Bytes copied to host memory."),
    "committed_bytes": ("counter", _TIER_LABEL, "Bytes of committed steps, by tier."),
    "replica_seconds": ("wait", _TIER_LABEL, "The copying of other nodes' files of a step."),
    "replica_bytes": ("counter", _TIER_LABEL, "Bytes of other nodes' files that were copied here."),
    "replicated_step": ("gauge", _TIER_LABEL, "The newest step whose copies this node keeps."),
    "restored_bytes": ("counter", _TIER_LABEL, "Bytes restored, by the tier that most came from."),
    "repaired_bytes": ("counter", _TIER_LABEL, "Bytes that the tier should have had intact."),
    "repairs": ("counter", (*_TIER_LABEL, "mended"), "Files that the tier should have had intact."),
    "damaged_steps": ("counter", _TIER_LABEL, "Steps that are intact on no tier."),
    "verified_steps": ("counter", _TIER_LABEL, "Steps that the agent has found intact."),
    "verified_bytes": ("counter", _TIER_LABEL, "Bytes that the agent has compared with checksums."),
    "verified_timestamp_seconds": ("gauge", _TIER_LABEL, "When a step was last verified there."),
    "finished_commits": ("counter", (), "Commits of dead jobs that a restore has finished."),
    "failures": ("counter", ("error",), "Saves that failed or were skipped, by error class."),
    "suspicious_saves": ("counter", (), "Committed steps that show that training is dead."),
    "tier_misses": ("counter", (*_TIER_LABEL, "error"), "Steps that did not get to the tier."),
    "staged_step": ("gauge", (), "The newest step in host memory."),
    "restored_step": ("gauge", (), "The step that was restored last."),
    "tier_step": ("gauge", _TIER_LABEL, "The newest step on the tier."),
    "tier_commit_timestamp_seconds": (
        "gauge",
        _TIER_LABEL,
        "When a step was last committed there.",
    ),
    "durable_step": ("gauge", (), "The newest step on a tier that is not in memory."),
    "durable_timestamp_seconds": (
        "gauge",
        (),
        "When a step was last committed on a tier that is not in memory, or when the job began.",
    ),
    "save_interval_seconds": ("gauge", (), "Between the last two saves."),
    "slot_bytes": ("gauge", (), "Host memory of all slots of the rank."),
    "backlog_steps": ("gauge", _TIER_LABEL, "Steps that wait for the tier."),
    "backlog_bytes": ("gauge", _TIER_LABEL, "Bytes of this rank that wait for the tier."),
    "backlog_age_seconds": ("gauge", _TIER_LABEL, "For how long the oldest of them has waited."),
    "tier_free_bytes": ("gauge", _TIER_LABEL, "Free space of the file system of the tier."),
    "tier_size_bytes": ("gauge", _TIER_LABEL, "Size of the file system of the tier."),
}
"""The metrics: name -> (kind, labels beside ``run`` and ``rank``, help text). In Prometheus each
name begins with ``ckpt_``, and the name of a counter ends with ``_total``.
"""


def prometheus() -> Any:
    """Return the module ``prometheus_client``. Raises ``MissingExtra`` if it is not installed."""
    try:
        return import_module("prometheus_client")
    except ImportError:
        raise MissingExtra("Metrics", "prometheus-client", "metrics") from None


def make_series(run: str, rank: int) -> tuple[Any, Any]:
    """Make a registry with all metrics of a rank.

    Returns:
        The registry, and an object with an attribute for each name of ``SERIES``. The attribute is
        a function that takes the values of the metric's labels beside ``run`` and ``rank``, and
        returns the series of `prometheus_client`.

    Raises:
        MissingExtra: prometheus-client is not installed.
    """
    client = prometheus()
    registry = client.CollectorRegistry()
    series: dict[str, Callable[..., Any]] = {}
    for name, (kind, labels, text) in SERIES.items():
        options: dict[str, Any] = {"registry": registry, "labelnames": ("run", "rank", *labels)}
        match kind:
            case "counter":
                metric: Any = client.Counter(f"ckpt_{name}", text, **options)
            case "gauge":
                metric = client.Gauge(f"ckpt_{name}", text, **options)
            case _:
                metric = client.Histogram(
                    f"ckpt_{name}", text, buckets=_BUCKET_BOUNDS[kind], **options
                )
        series[name] = partial(metric.labels, run, str(rank))
    return registry, SimpleNamespace(**series)

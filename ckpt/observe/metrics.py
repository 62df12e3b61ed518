"""The metrics of one rank for Prometheus and OpenTelemetry.

A save is *staged* when its state is copied to host memory, into one of the buffers that are called
slots. Then it waits for its tiers, as a part of their *backlog*, until they have committed it. A
*replica* is a copy of the files of another node.
"""

from __future__ import annotations

import logging
import os
import time
from functools import partial
from typing import Any, Final

from ckpt.checks import check_int, text_of
from ckpt.config import local_rank_of_this_process, rank_of_this_process
from ckpt.errors import ConfigError
from ckpt.events import (
    CommitFinished,
    Event,
    NodeReplicated,
    Repaired,
    Restored,
    SaveCommitted,
    SaveFailed,
    SaveStaged,
    SaveSuspicious,
    StepDamaged,
    StepVerified,
    TierMissed,
)
from ckpt.observe.backlog import Backlog
from ckpt.observe.disk_space import FolderSpace
from ckpt.observe.otlp import sender
from ckpt.observe.prometheus_series import make_series, prometheus
from ckpt.storage.registry import scheme_of
from ckpt.storage.urls import is_folder

_log = logging.getLogger("ckpt")
_LAST_PORT: Final = 65535


class Metrics:
    """An observer that keeps the metrics of a rank in a Prometheus registry.

    Args:
        port: Serve the metrics at ``http://HOST:PORT/metrics``. The local rank is added to ``port``
            so that each rank of a node has a port of its own. 0 takes any free port. None: do not
            serve the metrics.
        host: The address to listen at. Any client that can reach it can read the metrics.
        textfile: A folder for the textfile collector of node-exporter. The file of this rank,
            ``ckpt-RANK.prom``, is replaced after each event.
        run: The label ``run`` of all series.
        rank: The label ``rank`` of all series; None for the rank that the launcher names.
        otlp: Send the same metrics to a receiver of OpenTelemetry: the URL of the receiver
            (``http://HOST:4318/v1/metrics``), or True for the one that the variables
            ``OTEL_EXPORTER_OTLP_*`` name. None: send if ``OTEL_EXPORTER_OTLP_METRICS_ENDPOINT`` or
            ``OTEL_EXPORTER_OTLP_ENDPOINT`` is set; if that is not possible, log why. False: do not
            send.

    Raises:
        MissingExtra: prometheus-client, or a package that ``otlp`` needs, is not installed.
        ConfigError: ``port`` is not a port number or is taken, ``textfile`` cannot be written to,
            or ``otlp`` cannot be used.

    Thread safety: all methods may be called from any thread. The registry and the backlog have
    locks of their own, and each other field changes in a single operation.

    Attributes:
        registry: The `prometheus_client.CollectorRegistry` of the metrics.
        port: The port that the metrics are served at; None if they are not served.
    """

    def __init__(
        self,
        *,
        port: int | None = None,
        host: str = "127.0.0.1",
        textfile: str | os.PathLike[str] | None = None,
        run: str = "",
        rank: int | None = None,
        otlp: bool | str | None = None,
    ) -> None:
        rank = rank_of_this_process() if rank is None else rank
        self.registry, self._series = make_series(run, rank)
        self._series.durable_timestamp_seconds().set_to_current_time()  # Until the first commit
        self._backlog = Backlog()
        self._tiers: set[str] = set()
        self._staged_at = 0.0  # When a save was last staged
        self._file: str | None = None
        if textfile is not None:
            self._file = os.path.join(os.fspath(textfile), f"ckpt-{rank}.prom")
            self._write_file_or_raise()
        self._sender = sender(self.registry, otlp)
        self._server: Any = None
        self.port: int | None = None
        if port is not None:
            check_int("port", port, 0, _LAST_PORT)
            own_port = port + local_rank_of_this_process() if port else 0
            if own_port > _LAST_PORT:
                raise ConfigError(
                    f"port={port} is for local rank 0, and this rank would need {own_port}: give a "
                    "lower number"
                )
            self._serve(host, own_port)
        if self._sender is not None:
            self._sender.start()

    def __call__(self, event: Event) -> None:
        """Update the metrics according to ``event``. If there is a text file, write it again."""
        self._backlog(event)
        series = self._series
        match event:
            case SaveStaged():
                self._count_staged(event)
            case SaveCommitted():
                self._count_committed(event)
            case NodeReplicated():
                series.replicated_step(event.tier).set(event.step)
                series.replica_seconds(event.tier).observe(event.seconds)
                series.replica_bytes(event.tier).inc(event.nbytes)
            case TierMissed():
                series.tier_misses(event.tier, type(event.error).__name__).inc()
            case SaveFailed():
                series.failures(type(event.error).__name__).inc()
            case SaveSuspicious():
                series.suspicious_saves().inc()
            case StepDamaged():
                series.damaged_steps(event.tier).inc()
            case Repaired():
                series.repairs(event.tier, str(event.mended).lower()).inc()
                series.repaired_bytes(event.tier).inc(event.nbytes)
            case CommitFinished():
                series.finished_commits().inc()
            case Restored():
                series.restore_seconds(event.tier).observe(event.seconds)
                series.restored_bytes(event.tier).inc(event.nbytes)
                series.restored_step().set(event.step)
            case StepVerified():
                self._count_verified(event)
            case _:
                pass  # The metrics of the training are no metrics of checkpoints
        if self._file is not None:
            self._write_file_or_warn()

    def close(self) -> None:
        """Stop serving the metrics. If they are sent as OTLP, first send the last values, and wait
        for that 5 s at most.

        If the process ends without this call, the last values are not sent.
        """
        if self._sender is not None:
            self._sender.close()
            self._sender = None
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = self.port = None

    def _count_staged(self, event: SaveStaged) -> None:
        series, current_time = self._series, time.monotonic()
        series.stall_seconds().observe(event.stall_seconds)
        series.staged_bytes().inc(event.nbytes)
        series.staged_step().set(event.step)
        series.slot_bytes().set(event.slot_bytes)
        if self._staged_at:
            series.save_interval_seconds().set(current_time - self._staged_at)
        self._staged_at = current_time
        for tier in event.tiers:
            if tier not in self._tiers:
                self._tiers.add(tier)
                self._add_tier_series(tier)

    def _count_committed(self, event: SaveCommitted) -> None:
        series = self._series
        series.durable_seconds(event.tier).observe(event.durable_seconds)
        series.committed_bytes(event.tier).inc(event.nbytes)
        series.tier_step(event.tier).set(event.step)
        series.tier_commit_timestamp_seconds(event.tier).set_to_current_time()
        if scheme_of(event.tier) != "shm":
            series.durable_step().set(event.step)
            series.durable_timestamp_seconds().set_to_current_time()

    def _count_verified(self, event: StepVerified) -> None:
        series = self._series
        series.verified_bytes(event.tier).inc(event.nbytes)
        series.verified_timestamp_seconds(event.tier).set_to_current_time()
        if event.mended:
            series.repairs(event.tier, "true").inc(len(event.mended))
        if event.damage:
            series.damaged_steps(event.tier).inc()
        else:
            series.verified_steps(event.tier).inc()

    def _add_tier_series(self, tier: str) -> None:
        """Add the series of ``tier`` whose values are computed whenever the registry is read.

        They are the backlog of the tier and, if the tier is a folder, its disk space.
        """
        series, space = self._series, FolderSpace(tier)
        series.backlog_steps(tier).set_function(partial(self._backlog.steps, tier))
        series.backlog_bytes(tier).set_function(partial(self._backlog.nbytes, tier))
        series.backlog_age_seconds(tier).set_function(partial(self._backlog.age_seconds, tier))
        if is_folder(tier):
            series.tier_free_bytes(tier).set_function(space.free)
            series.tier_size_bytes(tier).set_function(space.size)

    def _serve(self, host: str, port: int) -> None:
        try:
            server, _thread = prometheus().start_http_server(
                port, addr=host, registry=self.registry
            )
        except OSError as error:
            raise ConfigError(
                f"metrics cannot be served at {host}:{port} ({error.strerror or error}): give "
                "another port, or stop what listens there"
            ) from None
        self._server, self.port = server, server.server_port

    def _write_file_or_raise(self) -> None:
        try:
            self._write_file()
        except OSError as error:
            raise ConfigError(
                f"textfile={text_of(self._file)} cannot be written ({error.strerror or error}): "
                "give the folder that node-exporter reads (--collector.textfile.directory)"
            ) from None

    def _write_file_or_warn(self) -> None:
        try:
            self._write_file()
        except OSError as error:
            # The next event tries again.
            _log.warning("ckpt: %s was not written: %s", self._file, error)

    def _write_file(self) -> None:
        prometheus().write_to_textfile(self._file or "", self.registry)

"""Send the metrics of a Prometheus registry to a receiver of OpenTelemetry (OTLP over HTTP).

OTLP over gRPC is not supported, because the gRPC library starts threads of its own, and a trainer
that forks must not have such threads. The HTTP exporter uses requests, which starts no threads.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, wait
from importlib import import_module
from types import SimpleNamespace
from typing import Any, Final

from ckpt.checks import text_of
from ckpt.errors import CkptError, ConfigError, MissingExtra
from ckpt.errors.sanitize import redact
from ckpt.pipeline.workers import Workers
from ckpt.version import __version__

_log = logging.getLogger("ckpt")
_ENDPOINT_VARIABLES: Final = ("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOL_VARIABLES: Final = ("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_PROTOCOL: Final = "http/protobuf"
_CREDENTIAL_VARIABLES: Final = (
    "OTEL_PYTHON_EXPORTER_OTLP_HTTP_METRICS_CREDENTIAL_PROVIDER",
    "OTEL_PYTHON_EXPORTER_OTLP_HTTP_CREDENTIAL_PROVIDER",
)
_INTERVAL_VARIABLE: Final = "OTEL_METRIC_EXPORT_INTERVAL"
_EXPORTER_MODULE: Final = "opentelemetry.exporter.otlp.proto.http.metric_exporter"
_DAY_SECONDS: Final = 86400.0
_CLOSE_SECONDS: Final = 5.0
"""How long ``Sender.close`` waits for the receiver."""
_MOST_CHARACTERS: Final = 500
_NANOSECONDS: Final = 1_000_000_000


def sender(registry: Any, otlp: bool | str | None) -> Sender | None:
    """Return a `Sender` for ``registry`` that has not been started, or None if no metrics are to be
    sent.

    If ``otlp`` is None and the environment asks for OTLP, an error is logged and not raised.

    Args:
        registry: The `prometheus_client.CollectorRegistry`.
        otlp: The URL of the receiver, or True for the one that the environment names; None to send
            only if the environment asks for it; False not to send.

    Raises:
        MissingExtra: The packages are missing, and ``otlp`` is True or a URL.
        ConfigError: The variables or the URL cannot be used, and ``otlp`` is True or a URL.
    """
    if otlp is False or (otlp is None and not _is_asked_for()):
        return None
    try:
        return Sender(registry, otlp if isinstance(otlp, str) else None)
    except CkptError as error:
        if otlp is not None:
            raise
        _log.warning(
            "ckpt: metrics are not sent as OTLP, for which the environment asks: %s "
            "(Metrics(otlp=False) leaves this message out)",
            error,
        )
        return None


class Sender:
    """A thread that sends the current values of all metrics of a registry at regular intervals.

    Values that could not be sent are not kept. The first failure is logged as a warning, and later
    failures are not logged. A receiver that does not answer delays ``close`` by 5 s at most. It
    delays neither training nor the end of a process that does not call ``close``.

    ``_sdk`` has the classes of the OpenTelemetry packages. The exporter only logs why it has
    failed, and ``_log_messages`` keeps its first message. ``_stop`` ends the loop that runs as
    ``_task``.

    Args:
        registry: The `prometheus_client.CollectorRegistry`.
        endpoint: The URL of the receiver; None for the receiver that the environment names.

    Thread safety: ``close`` may be called from any thread.
    """

    def __init__(self, registry: Any, endpoint: str | None) -> None:
        """Read the settings and make the exporter. Raises ``MissingExtra`` or ``ConfigError``."""
        self._registry, self._start_time = registry, time.time_ns()
        self._sdk, exporter = _packages()
        self._interval_seconds = _interval_seconds()
        self._endpoint = endpoint or next(
            filter(None, map(_variable, _ENDPOINT_VARIABLES)), "localhost"
        )
        try:
            _check_endpoint(endpoint)
            self._exporter = exporter(endpoint=endpoint, session=_session())
        except (ValueError, OSError, RuntimeError, ImportError) as error:
            raise ConfigError(
                f"the variables OTEL_EXPORTER_OTLP_* cannot be used: {redact(str(error))}"
            ) from None
        self._resource = _resource(self._sdk)
        self._log_messages = _LogOfThread()
        self._has_warned = False
        self._stop = threading.Event()
        self._workers = Workers("otlp", 1)
        self._task: Future[None] | None = None

    def start(self) -> None:
        """Start the thread that sends the metrics."""
        self._task = self._workers.submit(self._run)

    def close(self) -> None:
        """End the thread, which first sends the last values. Wait for it 5 s at most, and close the
        exporter.
        """
        self._stop.set()
        if self._task is not None:
            wait([self._task], _CLOSE_SECONDS)
        self._exporter.shutdown()

    def _run(self) -> None:
        """Send the values again and again, and a last time at the end: the body of the thread."""
        log = logging.getLogger(_EXPORTER_MODULE)
        self._log_messages.thread = threading.get_ident()
        log.addFilter(self._log_messages)
        try:
            while not self._stop.wait(self._interval_seconds):
                self._send()
            self._send()
        finally:
            log.removeFilter(self._log_messages)

    def _send(self) -> None:
        """Send the current values. A failure is logged and never raised."""
        self._log_messages.first_message = ""
        try:
            result = self._exporter.export(self._metrics_data())
            has_failed = result is not self._sdk.MetricExportResult.SUCCESS
            reason = self._log_messages.first_message
        except Exception as error:  # noqa: BLE001 - a receiver never disturbs the training
            has_failed, reason = True, repr(error)
        if has_failed and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "ckpt: metrics could not be sent to %s, and are sent again every %g s, without a "
                "further message: %s",
                redact(self._endpoint),
                self._interval_seconds,
                redact(reason)[:_MOST_CHARACTERS],
            )

    def _metrics_data(self) -> Any:
        sdk = self._sdk
        metrics = list(_metrics(sdk, self._registry.collect(), self._start_time, time.time_ns()))
        scope = sdk.ScopeMetrics(sdk.InstrumentationScope("ckpt", __version__), metrics, "")
        return sdk.MetricsData([sdk.ResourceMetrics(self._resource, [scope], "")])


class _LogOfThread(logging.Filter):
    """A filter that drops the log records of one thread, and keeps the text of the first of them.

    The filter is on the logger of the exporter. Other code in the process may use the same exporter
    on other threads. The log records of these threads are not dropped.

    Attributes:
        thread: The identifier of the thread; 0 before it is set.
        first_message: The first message of the thread since ``first_message`` was last set to "".
            Later messages are not kept, because they are about retries of the same request.
    """

    def __init__(self) -> None:
        super().__init__()
        self.thread, self.first_message = 0, ""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.thread != self.thread:
            return True
        self.first_message = self.first_message or record.getMessage()
        return False


# -- from Prometheus to OpenTelemetry --------------------------------------------------------------


def _metrics(
    sdk: Any, families: Iterable[Any], start_time: int, current_time: int
) -> Iterator[Any]:
    """Yield each metric that has a value as a ``Metric`` of OpenTelemetry.

    The names and labels are those of Prometheus.

    Args:
        sdk: A namespace with the classes of the SDK of OpenTelemetry.
        families: The metrics of a registry, as its ``collect`` returns them.
        start_time: When the process began to count, in nanoseconds since 1970. It is used for a
            series whose creation time the registry does not contain.
        current_time: The time of the values, in nanoseconds since 1970.
    """
    for family in families:
        start_times = {
            _labels(sample): int(sample.value * _NANOSECONDS)
            for sample in family.samples
            if sample.name == f"{family.name}_created"
        }
        cumulative = sdk.AggregationTemporality.CUMULATIVE
        name = family.name
        match family.type:
            case "counter":
                name += "_total"
                points = [
                    sdk.NumberDataPoint(
                        dict(sample.labels),
                        start_times.get(_labels(sample), start_time),
                        current_time,
                        sample.value,
                    )
                    for sample in family.samples
                    if sample.name == name
                ]
                data = sdk.Sum(points, cumulative, is_monotonic=True)
            case "gauge":
                points = [
                    sdk.NumberDataPoint(dict(sample.labels), 0, current_time, sample.value)
                    for sample in family.samples
                    if not math.isnan(sample.value)  # nan: the file system does not answer
                ]
                data = sdk.Gauge(points)
            case "histogram":
                points = [
                    sdk.HistogramDataPoint(
                        attributes=dict(labels),
                        start_time_unix_nano=start_times.get(labels, start_time),
                        time_unix_nano=current_time,
                        **histogram,
                    )
                    for labels, histogram in _histograms(family).items()
                ]
                data = sdk.Histogram(points, cumulative)
            case _:
                continue
        if points:
            yield sdk.Metric(name, family.documentation, "", data)


_Labels = tuple[tuple[str, str], ...]


def _labels(sample: Any) -> _Labels:
    """Return the labels of a series. The label "le" is the upper bound of a bucket of it."""
    return tuple(sorted((name, text) for name, text in sample.labels.items() if name != "le"))


def _histograms(family: Any) -> dict[_Labels, dict[str, Any]]:
    """Return the fields of a ``HistogramDataPoint`` for each series of a histogram, by its labels.

    In Prometheus the count of a bucket includes the counts of all lower buckets, and in
    OpenTelemetry it does not.
    """
    histograms: dict[_Labels, dict[str, Any]] = {}
    for sample in family.samples:
        fields = histograms.setdefault(
            _labels(sample),
            {"bucket_counts": [], "explicit_bounds": [], "count": 0, "min": None, "max": None},
        )
        match sample.name.removeprefix(family.name):
            case "_bucket":
                fields["bucket_counts"].append(int(sample.value) - fields["count"])
                fields["count"] = int(sample.value)
                if sample.labels["le"] != "+Inf":
                    fields["explicit_bounds"].append(float(sample.labels["le"]))
            case "_sum":
                fields["sum"] = sample.value
            case _:
                pass  # "_count" equals the value of the last bucket
    return histograms


# -- packages and settings of OpenTelemetry --------------------------------------------------------


def _packages() -> tuple[Any, Any]:
    """Return a namespace with the classes of the SDK, and the class of the exporter.

    Raises:
        MissingExtra: A package of OpenTelemetry is not installed.
    """
    try:
        names = vars(import_module("opentelemetry.sdk.metrics.export"))
        resource = import_module("opentelemetry.sdk.resources").Resource
        scope = import_module("opentelemetry.sdk.util.instrumentation").InstrumentationScope
        exporter = import_module(_EXPORTER_MODULE).OTLPMetricExporter
    except ImportError:
        package = "opentelemetry-exporter-otlp-proto-http"
        raise MissingExtra("Metrics(otlp=...)", package, "otlp") from None
    return SimpleNamespace(**names, Resource=resource, InstrumentationScope=scope), exporter


def _session() -> Any:
    """Return a ``requests.Session`` that does not read the bodies of answers, which may be endless.

    Return None if the environment names a provider of credentials, because the exporter then makes
    its session from that provider.
    """
    if any(map(_variable, _CREDENTIAL_VARIABLES)):
        return None
    session = import_module("requests").Session()
    session.stream = True
    return session


def _resource(sdk: Any) -> Any:
    """Return the OpenTelemetry resource that describes this process, from the environment.

    The name of the service is "ckpt" if the environment does not set a name.
    """
    resource = sdk.Resource.create()
    if str(resource.attributes.get("service.name", "")).startswith("unknown_service"):
        resource = resource.merge(sdk.Resource({"service.name": "ckpt"}))
    return resource


def _is_asked_for() -> bool:
    exporters = _variable("OTEL_METRICS_EXPORTER")
    return (
        any(map(_variable, _ENDPOINT_VARIABLES))
        and _variable("OTEL_SDK_DISABLED").lower() != "true"
        and (not exporters or "otlp" in [name.strip() for name in exporters.split(",")])
    )


def _check_endpoint(endpoint: str | None) -> None:
    """Raise ``ConfigError`` if ``endpoint`` is not an HTTP URL.

    If ``endpoint`` is None, raise ``ConfigError`` if the environment names another protocol than
    ``http/protobuf``.
    """
    advice = "give the URL of a receiver of OTLP over HTTP, such as http://HOST:4318/v1/metrics"
    if endpoint is not None:
        if not endpoint.startswith(("http://", "https://")):
            raise ConfigError(f"otlp={text_of(redact(endpoint))}: {advice}")
        return
    name = next(filter(_variable, _PROTOCOL_VARIABLES), "")
    if name and _variable(name) != _PROTOCOL:
        raise ConfigError(
            f"{name}={_variable(name)!r}, and ckpt knows {_PROTOCOL!r} only: {advice}"
        )


def _interval_seconds() -> float:
    text = _variable(_INTERVAL_VARIABLE) or "60000"
    if not text.isdecimal() or not int(text):
        raise ConfigError(
            f"{_INTERVAL_VARIABLE}={text!r}: give a number of milliseconds, such as 60000"
        )
    return min(int(text) / 1e3, _DAY_SECONDS)


def _variable(name: str) -> str:
    # These variables are not settings of ckpt: the library of OpenTelemetry reads them as well.
    return os.environ.get(name, "").strip()  # noqa: TID251

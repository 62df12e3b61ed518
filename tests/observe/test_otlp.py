"""The metrics reach a receiver of OpenTelemetry, and no receiver disturbs the training."""

from __future__ import annotations

import gzip
import logging
import math
import re
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch

from ckpt import CheckpointManager, Tier
from ckpt.errors import CkptError, ConfigError, MissingExtra, TierBehind
from ckpt.events import Repaired, SaveFailed, SaveStaged, StepVerified, TierMissed
from ckpt.observe.prometheus_series import SERIES
from tests.kit.waiting import until
from tests.processes import run
from tests.servers import free_port

EXTRA = "pip install 'ckpt-stream[otlp]'"
pytest.importorskip("prometheus_client", reason=EXTRA)
pytest.importorskip("opentelemetry.exporter.otlp.proto.http.metric_exporter", reason=EXTRA)

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (  # noqa: E402
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)

from ckpt.observe import Metrics  # noqa: E402

CUMULATIVE = 2


class Receiver:
    """An OTLP receiver on loopback.

    It parses each request, and answers with ``status``. An ``endless`` answer goes on until the
    other side closes the connection.
    """

    def __init__(self, status: int = 200, endless: bool = False) -> None:
        self.requests: SimpleQueue[Any] = SimpleQueue()
        self.headers: dict[str, str] = {}
        self.count = 0
        self.ends = threading.Event()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                receiver.headers = {key.lower(): text for key, text in self.headers.items()}
                receiver.count += 1
                if self.path == "/v1/metrics" and status == 200:
                    receiver.requests.put(ExportMetricsServiceRequest.FromString(body))
                answer = ExportMetricsServiceResponse().SerializeToString()
                self.send_response(status if self.path == "/v1/metrics" else 404)
                self.send_header("Content-Type", "application/x-protobuf")
                if not endless:
                    self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)
                with suppress(OSError):
                    while endless and not receiver.ends.wait(0.01):
                        self.wfile.write(b"more")

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.base = f"http://127.0.0.1:{self.server.server_port}"
        self.url = f"{self.base}/v1/metrics"

    def last(self) -> Any:
        """Return the last request that has come. There must be one."""
        found = self.requests.get_nowait()
        while not self.requests.empty():
            found = self.requests.get_nowait()
        return found


@contextmanager
def receiving(status: int = 200, endless: bool = False) -> Iterator[Receiver]:
    receiver = Receiver(status, endless)
    thread = threading.Thread(target=receiver.server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield receiver
    finally:
        receiver.ends.set()
        receiver.server.shutdown()
        receiver.server.server_close()
        thread.join()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as found:
        yield found


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)


def metrics_in(request: Any) -> list[Any]:
    (resource,) = request.resource_metrics
    (scope,) = resource.scope_metrics
    assert scope.scope.name == "ckpt"
    return list(scope.metrics)


def attributes(found: Any) -> dict[str, str]:
    return {each.key: each.value.string_value for each in found.attributes}


def samples(request: Any) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Return what Prometheus would show of a request."""
    found: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    for metric in metrics_in(request):
        for point in getattr(metric, metric.WhichOneof("data")).data_points:
            labels = attributes(point)
            key = frozenset(labels.items())
            if not metric.HasField("histogram"):
                found[metric.name, key] = point.as_double
                continue
            found[f"{metric.name}_sum", key] = point.sum
            found[f"{metric.name}_count", key] = point.count
            bounds = [str(float(bound)) for bound in point.explicit_bounds] + ["+Inf"]
            assert len(bounds) == len(point.bucket_counts)
            below = 0
            for bound, count in zip(bounds, point.bucket_counts, strict=True):
                below += count
                found[f"{metric.name}_bucket", key | {("le", bound)}] = below
    return found


def scraped(metrics: Metrics) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
        if not sample.name.endswith("_created") and not math.isnan(sample.value)
    }


def count_something(metrics: Metrics) -> None:
    """Give most metrics values, with labels and characters of all kinds."""
    tier = 's3://bücket/"r"\\n'
    for stall in (0.002, 0.3, 1000.0):
        metrics(SaveStaged(step=1, nbytes=7, stall_seconds=stall, tiers=(tier, "/nowhere")))
    metrics(TierMissed(step=1, tier=tier, error=TierBehind(1)))
    metrics(SaveFailed(step=1, error=CkptError("x")))
    metrics(Repaired(step=1, tier=tier, key="f", nbytes=3, reason="x", mended=True))
    metrics(StepVerified(step=1, tier=tier, nbytes=2**53, seconds=1.0))


def test_a_receiver_gets_what_prometheus_scrapes(receiver: Receiver) -> None:
    metrics = Metrics(otlp=receiver.url, run="gpt", rank=3)
    count_something(metrics)
    metrics.close()
    metrics.close()
    request = receiver.last()
    there, sent = scraped(metrics), samples(request)
    assert len(there) > 30
    assert sent.keys() == there.keys()
    aged = {key for key in there if key[0] == "ckpt_backlog_age_seconds"}
    assert [key for key in there.keys() - aged if sent[key] != there[key]] == []


def test_counters_are_sums_and_histograms_have_buckets(receiver: Receiver) -> None:
    metrics = Metrics(otlp=receiver.url)
    count_something(metrics)
    metrics.close()
    request = receiver.last()
    kinds = {"counter": "sum", "gauge": "gauge"}
    for metric in metrics_in(request):
        name = metric.name.removeprefix("ckpt_").removesuffix("_total")
        kind, labels, text = SERIES[name]
        data = metric.WhichOneof("data")
        assert (data, metric.description) == (kinds.get(kind, "histogram"), text)
        assert metric.name.endswith("_total") == (kind == "counter")
        for point in getattr(metric, data).data_points:
            assert attributes(point).keys() == {"run", "rank", *labels}
            assert point.time_unix_nano
            if data != "gauge":
                assert 0 < point.start_time_unix_nano <= point.time_unix_nano
                assert getattr(metric, data).aggregation_temporality == CUMULATIVE
        if data == "sum":
            assert metric.sum.is_monotonic
    (resource,) = request.resource_metrics
    assert attributes(resource.resource)["service.name"] == "ckpt"


def test_the_environment_asks_for_it(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.base)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "api-key=secret")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.name=gpt,rack=r7")
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "20")
    metrics = Metrics()
    assert until(lambda: receiver.count >= 3)  # repeatedly, and not only at the end
    metrics.close()
    assert receiver.headers["api-key"] == "secret"
    assert receiver.headers["content-type"] == "application/x-protobuf"
    (resource,) = receiver.last().resource_metrics
    found = attributes(resource.resource)
    assert (found["service.name"], found["rack"]) == ("gpt", "r7")


@pytest.mark.parametrize(
    "env",
    [
        {"OTEL_SDK_DISABLED": "true"},
        {"OTEL_METRICS_EXPORTER": "none"},
        {"OTEL_METRICS_EXPORTER": "prometheus"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": ""},
    ],
    ids=str,
)
def test_the_environment_may_ask_for_nothing(
    receiver: Receiver, env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in ({"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.base} | env).items():
        monkeypatch.setenv(name, text)
    Metrics().close()
    assert receiver.count == 0


def test_false_sends_nothing(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.base)
    Metrics(otlp=False).close()
    assert receiver.count == 0


@pytest.mark.parametrize(
    ("env", "what"),
    [
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "OTEL_EXPORTER_OTLP_PROTOCOL='grpc'"),
        ({"OTEL_METRIC_EXPORT_INTERVAL": "soon"}, "OTEL_METRIC_EXPORT_INTERVAL='soon'"),
        (
            {"OTEL_PYTHON_EXPORTER_OTLP_HTTP_CREDENTIAL_PROVIDER": "nowhere"},
            "OTEL_EXPORTER_OTLP_.* cannot be used: .*'nowhere'",
        ),
    ],
)
def test_an_environment_that_cannot_be_used_is_an_error_if_it_was_asked_for_in_code(
    env: dict[str, str],
    what: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    for name, text in env.items():
        monkeypatch.setenv(name, text)
    with pytest.raises(ConfigError, match=what):
        Metrics(otlp=True)
    Metrics().close()
    assert re.search(what, caplog.text)
    assert "Metrics(otlp=False)" in caplog.text


@pytest.mark.parametrize("url", ["localhost:4318", "grpc://localhost:4317", ""])
def test_a_url_of_something_else_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"otlp=.*http://HOST:4318/v1/metrics"):
        Metrics(otlp=url)


def test_without_the_packages_the_error_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.sdk.metrics.export", None)
    with pytest.raises(MissingExtra, match=r"ckpt-stream\[otlp\]"):
        Metrics(otlp="http://127.0.0.1:9/v1/metrics")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    Metrics().close()
    assert "ckpt-stream[otlp]" in caplog.text


# -- receivers that are away, slow or broken -------------------------------------------------------


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


@pytest.mark.parametrize("status", [None, 400, 503], ids=["away", "refuses", "overloaded"])
def test_a_receiver_that_fails_costs_one_warning(
    tmp_path: Path,
    status: int | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "20")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.2")
    with receiving(status or 200) as broken:
        url = broken.url if status else f"http://user:secret@127.0.0.1:{free_port()}/v1/metrics"
        metrics = Metrics(otlp=url)
        with CheckpointManager(Tier(str(tmp_path)), observers=[metrics]) as manager:
            for step in range(3):
                manager.save({"x": torch.full((4,), step)}, step)
            assert until(lambda: warnings(caplog))
            if status:
                assert until(lambda: broken.count >= 5)
            manager.save({"x": torch.full((4,), 9)}, 9)
        metrics.close()
    (said,) = warnings(caplog)
    assert f"could not be sent to http://{'' if status else '***@'}127.0.0.1:" in said
    assert "secret" not in said


def test_an_answer_without_an_end_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "20")
    with receiving(endless=True) as drips:
        metrics = Metrics(otlp=drips.url)
        assert until(lambda: drips.count >= 3, 20)
        metrics.close()


def test_another_exporter_keeps_its_log(
    receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    log = logging.getLogger("opentelemetry.exporter.otlp.proto.http.metric_exporter")
    metrics = Metrics(otlp=receiver.url)
    log.warning("of another thread")
    metrics.close()
    assert warnings(caplog) == ["of another thread"]
    assert log.filters == []


ENDS = """
import sys
from ckpt.observe import Metrics
from tests.kit.waiting import until
metrics = Metrics(otlp=sys.argv[1])
assert until(lambda: open(sys.argv[2]).read())
print("ends")
"""


def test_a_receiver_that_hangs_holds_up_neither_close_nor_the_end_of_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "20")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "10000")
    heard = tmp_path / "heard"
    heard.touch()
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/v1/metrics"

        def hang() -> None:
            taken.append(server.accept()[0])
            heard.write_text("a request")

        taken: list[socket.socket] = []
        for ends in (True, False):
            heard.write_text("")
            thread = threading.Thread(target=hang)
            thread.start()
            if ends:
                ran = run([sys.executable, "-c", ENDS, url, heard], timeout=60)
                assert (ran.returncode, ran.stdout) == (0, "ends\n")
            else:
                metrics = Metrics(otlp=url)
                assert until(heard.read_text)
                metrics.close()
            thread.join()
        for each in taken:
            each.close()

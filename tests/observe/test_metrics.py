"""Metrics: what an operator sees of saves and restores, also through a real Prometheus."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckpt import CheckpointManager, CkptError, Tier
from ckpt.errors import ConfigError, MissingExtra, OutOfSpace, ReplicasDiverged, TierBehind
from ckpt.events import Restored, SaveCommitted, SaveFailed, SaveStaged, StepDamaged, TierMissed
from ckpt.observe.backlog import Backlog
from ckpt.observe.prometheus_series import SERIES

prometheus = pytest.importorskip("prometheus_client", reason="pip install 'ckpt-stream[metrics]'")

from ckpt.observe import Metrics  # noqa: E402

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
RULES = DEPLOY / "prometheus"
promtool = pytest.mark.skipif(
    not shutil.which("promtool"), reason="no promtool: apt-get install prometheus"
)


def state() -> dict[str, Any]:
    model = nn.Linear(64, 64)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}


def train(state: dict[str, Any]) -> None:
    state["model"](torch.ones(2, 64)).square().mean().backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    found = metrics.registry.get_sample_value(name, {"run": "", "rank": "0", **labels})
    return None if found is None else float(found)


def test_a_step_without_a_change_is_counted(tmp_path: Path) -> None:
    metrics, model = Metrics(), nn.Linear(2, 2)
    trained = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    with CheckpointManager(tmp_path, observers=[metrics], on_suspicious="warn") as manager:
        for step in range(3):
            manager.save(trained, step)
    assert value(metrics, "ckpt_suspicious_saves_total") == 2


def test_a_training_is_counted(tmp_path: Path) -> None:
    near, far = str(tmp_path / "near"), str(tmp_path / "far")
    metrics, trained = Metrics(), state()
    with CheckpointManager([near, Tier(far, every=2)], observers=[metrics]) as manager:
        for step in range(1, 5):
            train(trained)
            manager.save_async(trained, step)
    with CheckpointManager([near, far], observers=[metrics]) as manager:
        manager.restore(state())
    assert value(metrics, "ckpt_stall_seconds_count") == 4
    assert value(metrics, "ckpt_durable_seconds_count", tier=near) == 4
    assert value(metrics, "ckpt_durable_seconds_count", tier=far) == 2
    assert value(metrics, "ckpt_restore_seconds_count", tier=near) == 1
    assert value(metrics, "ckpt_durable_step") == value(metrics, "ckpt_restored_step") == 4
    assert value(metrics, "ckpt_tier_step", tier=far) == 4
    staged = value(metrics, "ckpt_staged_bytes_total")
    assert staged == value(metrics, "ckpt_committed_bytes_total", tier=near)
    assert staged is not None
    assert staged > 4 * 3 * 64 * 64 * 4
    for tier in (near, far):
        assert value(metrics, "ckpt_backlog_steps", tier=tier) == 0
        assert value(metrics, "ckpt_backlog_age_seconds", tier=tier) == 0
        free = value(metrics, "ckpt_tier_free_bytes", tier=tier)
        assert free
        assert free <= (value(metrics, "ckpt_tier_size_bytes", tier=tier) or 0)
    assert (value(metrics, "ckpt_slot_bytes") or 0) >= staged / 4
    assert (value(metrics, "ckpt_save_interval_seconds") or 0) > 0


def test_what_goes_wrong_is_counted_by_its_class(tmp_path: Path) -> None:
    metrics, tier = Metrics(), str(tmp_path)
    metrics(SaveStaged(step=1, nbytes=7, stall_seconds=0.1, tiers=(tier, "s3://b/r")))
    metrics(TierMissed(step=1, tier="s3://b/r", error=TierBehind(1)))
    metrics(SaveFailed(step=1, error=OutOfSpace("x")))
    metrics(SaveFailed(step=2, error=ReplicasDiverged("w", [0, 1])))
    metrics(StepDamaged(step=1, tier=tier, error=CkptError("x")))
    assert value(metrics, "ckpt_failures_total", error="OutOfSpace") == 1
    assert value(metrics, "ckpt_failures_total", error="ReplicasDiverged") == 1
    assert value(metrics, "ckpt_tier_misses_total", tier="s3://b/r", error="TierBehind") == 1
    assert value(metrics, "ckpt_damaged_steps_total", tier=tier) == 1
    assert value(metrics, "ckpt_durable_step") is None
    assert value(metrics, "ckpt_tier_free_bytes", tier="s3://b/r") is None


def test_a_step_in_memory_is_not_durable() -> None:
    metrics = Metrics()
    metrics(SaveStaged(step=3, nbytes=1, stall_seconds=0, tiers=("shm://a", "/x")))
    metrics(SaveCommitted(step=3, tier="shm://a", nbytes=1, durable_seconds=1))
    assert value(metrics, "ckpt_durable_step") is None
    metrics(SaveCommitted(step=3, tier="/x", nbytes=1, durable_seconds=1))
    assert value(metrics, "ckpt_durable_step") == 3


def test_the_backlog_has_what_is_staged_and_not_committed() -> None:
    backlog = Backlog()
    for step in (1, 2, 3):
        backlog(SaveStaged(step=step, nbytes=10, stall_seconds=0, tiers=("near", "far")))
        backlog(SaveCommitted(step=step, tier="near", nbytes=10, durable_seconds=0))
    assert (backlog.steps("near"), backlog.steps("far")) == (0, 3)
    assert backlog.nbytes("far") == 30
    assert backlog.age_seconds("far") > 0 == backlog.age_seconds("near")
    backlog(TierMissed(step=1, tier="far", error=TierBehind(1)))
    backlog(SaveFailed(step=2, error=CkptError("x")))
    backlog(Restored(step=3, tier="near", nbytes=1, seconds=1))
    assert backlog.steps("far") == 1


def test_a_textfile_is_replaced_after_each_event(tmp_path: Path) -> None:
    metrics = Metrics(textfile=tmp_path, run="gpt", rank=3)
    metrics(SaveStaged(step=9, nbytes=1, stall_seconds=0, tiers=()))
    (path,) = tmp_path.iterdir()
    assert path.name == "ckpt-3.prom"
    assert 'ckpt_staged_step{rank="3",run="gpt"} 9.0' in path.read_text()


def test_a_textfile_that_cannot_be_written_costs_a_log_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigError, match=r"node-exporter"):
        Metrics(textfile=tmp_path / "none")
    folder = tmp_path / "text"
    folder.mkdir()
    metrics = Metrics(textfile=folder)
    shutil.rmtree(folder)
    metrics(SaveFailed(step=1, error=CkptError("x")))
    assert "was not written" in caplog.text
    assert value(metrics, "ckpt_failures_total", error="CkptError") == 1


def test_metrics_are_served_on_loopback_and_each_rank_has_a_port(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    port = free_port()
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("RANK", "5")
    metrics = Metrics(port=port - 1)
    try:
        assert metrics.port == port
        text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read()
        assert b'rank="5"' in text
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port} .*another port"):
            Metrics(port=port - 1)
    finally:
        metrics.close()
    metrics.close()
    Metrics(port=port - 1).close()


@pytest.mark.parametrize("port", [-1, 65536, "9401", True])
def test_a_wrong_port_is_refused(port: Any) -> None:
    with pytest.raises(ConfigError, match="port="):
        Metrics(port=port)


def test_a_port_that_is_too_high_for_this_rank_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(ConfigError, match=r"port=65535 .*65536"):
        Metrics(port=65535)


def test_without_the_package_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "prometheus_client", None)
    with pytest.raises(MissingExtra, match=r"ckpt-stream\[metrics\]"):
        Metrics()


# -- what is in deploy/ ----------------------------------------------------------------------------


def expressions() -> list[str]:
    """Return the PromQL of the dashboard, with its variables filled in."""
    dashboard = json.loads((DEPLOY / "grafana" / "ckpt.json").read_text())
    found = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    return [re.sub(r"\$(job|run)", ".*", each).replace("$__rate_interval", "1m") for each in found]


def test_the_dashboard_and_the_rules_use_metrics_that_there_are() -> None:
    endings = {"counter": ("_total",), "gauge": ("",)}
    there = {
        f"ckpt_{name}{ending}"
        for name, (kind, _, _) in SERIES.items()
        for ending in endings.get(kind, ("_bucket", "_count", "_sum"))
    }
    used = set(re.findall(r"\bckpt_\w+", " ".join(expressions())))
    assert len(used) >= 12
    used |= set(re.findall(r"\bckpt_\w+", (RULES / "rules.yml").read_text()))
    used |= set(re.findall(r"\bckpt_\w+", (RULES / "rules.test.yml").read_text()))
    assert used <= there


@promtool
@pytest.mark.parametrize(
    "words", ["check rules rules.yml", "check config prometheus.yml", "test rules rules.test.yml"]
)
def test_promtool_accepts_what_is_shipped(words: str) -> None:
    done = subprocess.run(
        ["promtool", *words.split()], cwd=RULES, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


def free_port() -> int:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        return int(server.getsockname()[1])


@contextmanager
def running_prometheus(target: int, folder: Path) -> Iterator[Callable[[str], Any]]:
    """Prometheus with the rules that are shipped. It gives a function that evaluates PromQL."""
    config = folder / "prometheus.yml"
    config.write_text(
        (RULES / "prometheus.yml")
        .read_text()
        .replace("15s", "1s")
        .replace("rules.yml", str(RULES / "rules.yml"))
        .replace("127.0.0.1:9401", f"127.0.0.1:{target}")
    )
    port = free_port()
    with (folder / "prometheus.log").open("w") as log:
        server = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={config}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=log,
        )

    def query(text: str) -> Any:
        url = f"http://127.0.0.1:{port}/api/v1/query?" + urllib.parse.urlencode({"query": text})
        while True:
            assert server.poll() is None, (folder / "prometheus.log").read_text()
            try:
                return json.load(urllib.request.urlopen(url, timeout=10))["data"]["result"]
            except urllib.error.HTTPError as error:
                if error.code != 503:  # it has not started yet
                    raise AssertionError((text, error.read())) from None
            except urllib.error.URLError as error:
                if not isinstance(error.reason, ConnectionRefusedError):
                    raise

    try:
        yield query
    finally:
        server.terminate()
        server.wait(30)


@pytest.mark.server
@pytest.mark.skipif(
    not shutil.which("prometheus"), reason="no prometheus: apt-get install prometheus"
)
def test_a_real_prometheus_scrapes_a_real_training(tmp_path: Path) -> None:
    near, far = str(tmp_path / "near"), str(tmp_path / "far")
    metrics, trained = Metrics(port=0, run="digits"), state()
    tiers = [Tier(near, keep_last=2), Tier(far, every=2, keep_last=2)]
    assert metrics.port
    try:
        with (
            running_prometheus(metrics.port, tmp_path) as query,
            CheckpointManager(tiers, observers=[metrics]) as manager,
        ):
            deadline, step, seen = time.monotonic() + 60, 0, 0.0
            while seen < 6:  # until the server has seen durable steps of this training
                assert time.monotonic() < deadline
                step += 1
                train(trained)
                manager.save(trained, step)
                found = query('ckpt_durable_step{run="digits"}')
                seen = float(found[0]["value"][1]) if found else 0.0
            answers = {each: query(each) for each in expressions()}
            quantiles = [each for each in answers if "ckpt_durable_seconds_bucket" in each]
            assert len(quantiles) == 2
            assert query("sum(ckpt_durable_seconds_count)")[0]["value"][1] != "0"
            assert {each["metric"]["tier"] for each in query("ckpt_tier_step")} == {near, far}
            assert query("ALERTS") == []
    finally:
        metrics.close()


def test_the_page_has_every_metric() -> None:
    page = (DEPLOY.parent / "docs" / "monitoring.md").read_text()
    endings = {"counter": "_total"}
    assert {f"ckpt_{name}{endings.get(kind, '')}" for name, (kind, _, _) in SERIES.items()} == set(
        re.findall(r"`(ckpt_\w+)`", page)
    )

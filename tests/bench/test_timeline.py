from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from bench import report
from bench.__main__ import main
from bench.scenarios.timeline import _Save, _visible
from bench.spans import Span

pytest.importorskip("matplotlib")


def test_a_save_that_takes_long_loses_nothing_that_is_short() -> None:
    spans = [
        Span("copying", "copy", 0.0, 1e-5),
        Span("copying", "copy", 1e-5, 3e-5),
        Span("writing 1", "write", 0.0, 0.5),
        Span("streaming", "make the fragment", 99.0, 99.0 + 1e-6),
    ]
    drawn = _visible(_Save(100.0, 1.0, spans))
    assert drawn == spans[1:]


def test_all_that_the_threads_of_a_save_do_has_a_name(tmp_path: Path) -> None:
    words = ["--quick", "--out", str(tmp_path / "out"), "--dir", str(tmp_path / "disk")]
    assert main(["timeline", *words]) == 0
    result = report.read(str(tmp_path / "out"))["timeline"]
    lines = result.of(result.cases()[0])
    spans = [Span(*row) for row in json.loads(result.conditions["spans"])]
    threads = {span.thread for span in spans}
    assert {"training", "copying", "writing 1", "streaming"} <= threads
    for thread in threads:
        own = sorted((span for span in spans if span.thread == thread), key=lambda one: one.begin)
        assert all(a.end <= b.begin + 2e-5 for a, b in itertools.pairwise(own))
    streaming = [span for span in spans if span.thread == "streaming"]
    whole = max(span.end for span in streaming) - min(span.begin for span in streaming)
    assert sum(span.seconds for span in streaming) == pytest.approx(whole, rel=0.02)
    names = {span.name for span in spans}
    assert {"copy", "hash", "write", "put the fragment", "put the manifest"} <= names
    assert {"fsync of a file", "fsync of a folder"} <= names
    assert any(other.label == "writing: write" for other in lines)
    assert (tmp_path / "out" / "timeline.png").read_bytes().startswith(b"\x89PNG")

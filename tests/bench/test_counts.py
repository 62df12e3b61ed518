"""What acts ask of the system and of the stores is counted, and only shrinks."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path

import ckpt.storage.tiers
from bench.counts import Meter
from ckpt.model.checksum import checksum
from tests.kit.worlds import ROOT, run_script

GATES = ROOT / "bench" / "gates.toml"
SYSTEM = ("call ", "KiB copied")
"""The beginnings of what depends on the file system, which may refuse ``O_DIRECT``. The gates were
measured on one that takes it, which needs most.
"""


def beyond(counts: Mapping[str, int], gates: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Return the counts that are not those of the gates, with both numbers."""
    pairs = {key: (counts.get(key, 0), gates.get(key, 0)) for key in counts.keys() | gates.keys()}
    return {
        key: (count, gate)
        for key, (count, gate) in pairs.items()
        if count > gate or (count < gate and not key.startswith(SYSTEM))
    }


def test_no_act_asks_more_than_its_gate() -> None:
    """A request less is noticed too: lower the number in bench/gates.toml then."""
    counts = tomllib.loads(run_script(ROOT / "bench" / "counts.py", "--toml"))
    gates = tomllib.loads(GATES.read_text())
    assert counts.keys() == gates.keys()
    differences = {name: beyond(counts[name], gates[name]) for name in gates}
    assert {name: pairs for name, pairs in differences.items() if pairs} == {}


def test_the_gates_differ_from_more_and_from_fewer_requests() -> None:
    gates = {"call open": 3, "near put": 2}
    assert beyond({"call open": 2, "near put": 2}, gates) == {}
    assert beyond({"call open": 4, "near put": 1}, gates) == {
        "call open": (4, 3),
        "near put": (1, 2),
    }
    assert beyond({"near head": 1, **gates}, gates) == {"near head": (1, 0)}


def test_the_meter_counts_calls_bytes_and_requests(tmp_path: Path) -> None:
    meter = Meter()
    with meter.watch():
        store = ckpt.storage.tiers.open_backend(str(tmp_path / "near"))  # type: ignore[attr-defined]
        store.put("first", [b"x"])
        meter.take()
        store.put("second", [b"x" * 1024])
        checksum(b"x" * 2048, memoryview(b"x" * 1000))
        os.close(os.open(tmp_path, os.O_RDONLY))
        counts = meter.take()
    assert counts["near put"] == counts["KiB written"] == counts["call rename"] == 1
    assert counts["KiB hashed"] == 3
    assert counts["call fsync"] == 2  # the file and its folder
    assert counts["call open"] == 3

"""A contender that fails, gives wrong bytes or hangs has no numbers.

The others are measured nevertheless.
"""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from bench.floors import WINDOW_BYTES
from bench.heat import Checker, Heat, Session
from bench.process import BenchError, Process
from bench.runner import Bench, Shape
from bench.scenarios import idle

SHAPE = Shape("raw", 1 << 20, 4)
pytestmark = pytest.mark.slow


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with Bench(
        "raw",
        str(tmp_path),
        ["torch.save", "safetensors"],
        60,
        Console(file=io.StringIO()),
        quick=True,
    ) as bench:
        yield bench
    assert list(tmp_path.iterdir()) == []


def flip_a_bit(session: Session) -> None:
    """Flip a bit in the middle of the largest file, far from any header."""
    _, _, made = session.kept[-1]
    files = [
        path for entry in made for path in (Path(entry), *Path(entry).rglob("*")) if path.is_file()
    ]
    with max(files, key=lambda path: path.stat().st_size).open("r+b") as data:
        data.seek(os.path.getsize(data.name) // 2)
        byte = data.read(1)
        data.seek(-1, os.SEEK_CUR)
        data.write(bytes([byte[0] ^ 1]))


@pytest.mark.torture
def test_a_checkpoint_with_one_wrong_bit_has_no_numbers(bench: Bench) -> None:
    with Heat(bench, "case", SHAPE, bench.names) as heat:
        heat.each(0, lambda session: session.save("idle"))
        flip_a_bit(heat.sessions["safetensors"])
        heat.finish()
        assert list(heat.sessions) == ["torch.save"]
    (failure,) = bench.failures
    assert failure.name == "safetensors"
    assert "not what was saved: 1 differ" in failure.reason


def test_a_worker_that_dies_costs_its_contender_only(bench: Bench) -> None:
    with Heat(bench, "case", SHAPE, bench.names) as heat:
        os.kill(heat.sessions["torch.save"].process.pid, signal.SIGKILL)
        heat.each(0, lambda session: session.save("idle"))
        assert list(heat.sessions) == ["safetensors"]
        heat.finish()
        assert heat.sessions["safetensors"].compared == 1
    assert [failure.name for failure in bench.failures] == ["torch.save"]


def test_a_load_that_raises_does_not_take_the_next_one_along(bench: Bench, tmp_path: Path) -> None:
    with Heat(bench, "case", SHAPE, ["torch.save"]) as heat, Checker(bench, SHAPE) as checker:
        heat.each(0, lambda session: session.save("idle"))
        with pytest.raises(BenchError):
            checker.load("torch.save", str(tmp_path / "is not there"), {})
        heat.each(0, Session.check, checker)
        assert heat.sessions["torch.save"].compared == 1


def test_a_worker_that_does_not_answer_is_given_up(tmp_path: Path) -> None:
    with Process(str(tmp_path / "log")) as process:
        process.ask("close")
        os.kill(process.pid, signal.SIGSTOP)
        process.tell("close")
        with pytest.raises(BenchError, match="no answer within 1 s"):
            process.hear(1)
        process.end(0)
        with pytest.raises(ProcessLookupError):
            os.kill(process.pid, 0)


def test_time_that_is_up_leaves_out_all_but_the_first_lot_and_says_so(bench: Bench) -> None:
    bench._began -= 1000
    large = SHAPE.need_bytes("torch.save")
    bench._memory_bytes = large + large // 2 + 2 * WINDOW_BYTES  # one at a time
    lines = idle.measure(bench, "case", SHAPE, 1)
    assert {line.name for line in lines} == {"torch.save", "floor.copy", "floor.write"}
    assert [one.name for one in bench.skipped if one.case == "case"] == ["safetensors"]
    assert bench.failures == []

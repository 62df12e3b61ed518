"""The computation of the numbers."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

from bench.floors import Floors
from bench.machine import disk_of, evict
from bench.measure import (
    Block,
    Spread,
    Step,
    TrainedSave,
    footprint,
    host_memory_bytes,
    slope,
    tree_bytes,
)
from bench.plots import spread_out
from bench.result import Column, Failure, Line, Result
from bench.runner import Shape, lots
from bench.scenarios.soak import flat
from bench.style import cell, round_bytes, seconds, tick
from tests.processes import ended


def test_the_wait_at_the_fence_is_stall_and_not_drag() -> None:
    save = TrainedSave(0.5, 9.0, [1.0, 1.0, 1.2], [Step(1.25, 0.25), Step(1.5, 0.0)])
    assert save.stall_seconds == 0.75
    assert save.drag_seconds == 0.75
    assert save.beside_step_seconds == 1.375


def test_a_save_that_is_over_when_it_returns_drags_nothing() -> None:
    save = TrainedSave(0.5, 0.5, [1.0, 2.0, 3.0], [])
    assert (save.stall_seconds, save.drag_seconds, save.beside_step_seconds) == (0.5, 0, 2.0)


def test_a_spread_keeps_the_ends() -> None:
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0, (3.0, 1.0, 2.0))


def test_a_ratio_is_taken_within_its_round() -> None:
    # the machine was half as fast in the second round, but the ratio is the same
    assert Spread.ratio([1.0, 2.0, 1.0], [0.5, 1.0, 0.5]).all == (2.0, 2.0, 2.0)
    with pytest.raises(ValueError, match="zip"):
        Spread.ratio([1.0, 2.0], [0.5])


def test_a_slowdown_is_of_all_steps_of_a_block() -> None:
    assert Block([1.0, 1.2], [1.0, 1.0]).slowdown == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("values", "grown"), [([5.0] * 10, 0.0), ([1.0, 3.0, 5.0], 2.0), ([9.0, 8.0, 7.0], -1.0)]
)
def test_a_slope_is_the_growth_from_one_to_the_next(values: list[float], grown: float) -> None:
    assert slope(values) == pytest.approx(grown)


@pytest.mark.parametrize(
    ("growth", "is_flat"),
    [
        ({"memory_bytes": 3 << 20, "descriptors": 0.5, "threads": 0.0}, True),
        ({"memory_bytes": 5 << 20, "descriptors": 0.0, "threads": 0.0}, False),
        ({"memory_bytes": 0, "descriptors": 1.0, "threads": 0.0}, False),
        ({"memory_bytes": 0, "descriptors": 0.0, "threads": 2.0}, False),
    ],
)
def test_flat_means_nothing_was_left_behind(growth: dict[str, float], is_flat: bool) -> None:
    assert flat(growth, memory_bytes=100 << 20) is is_flat


def test_memory_and_descriptors_of_a_process_are_seen() -> None:
    """In a process of its own: a test before this one may have left descriptors to be collected."""
    with ended(subprocess.Popen([sys.executable, "-c", _GROWS], **_PIPES)) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"small\n"
        before, counted = host_memory_bytes(process.pid), footprint(process.pid)
        process.stdin.write(b"grow\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"large\n"
        grown, after = host_memory_bytes(process.pid) - before, footprint(process.pid)
    assert 60 << 20 < grown < 70 << 20
    assert after.descriptors - counted.descriptors == 7
    assert after.threads == 1


_PIPES: Final[dict[str, Any]] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
_GROWS: Final = """
import mmap, os
print("small", flush=True)
input()
shared = mmap.mmap(-1, 64 << 20)  # shared and anonymous: RssShmem
shared.write(b"x" * (64 << 20))
descriptors = [os.dup(0) for _ in range(7)]
print("large", flush=True)
input()
"""


def test_floors_are_times_of_the_size_asked_for_and_leave_nothing(tmp_path: Path) -> None:
    floors = Floors(3_000_000)  # not a multiple of a block
    assert floors.copy() > 0
    assert floors.write(str(tmp_path)) > 0
    assert list(tmp_path.iterdir()) == []
    assert floors.read(str(tmp_path)) > 0
    assert tree_bytes(str(tmp_path)) == 3_002_368


def test_a_floor_reads_as_many_bytes_as_its_state_has_after_a_smaller_one(tmp_path: Path) -> None:
    assert Floors(1_000_000).read(str(tmp_path)) > 0
    assert Floors(20_000_000).read(str(tmp_path)) > 0


def test_evicted_files_are_whole(tmp_path: Path) -> None:
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1" / "data").write_bytes(b"x" * 10_000)
    evict(str(tmp_path / "step-1"))
    evict(str(tmp_path / "1"))  # a root and a step: the whole root is evicted
    assert (tmp_path / "step-1" / "data").read_bytes() == b"x" * 10_000


def test_the_disk_is_that_of_the_folder_also_when_it_is_relative(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert disk_of(".") == disk_of(str(tmp_path))
    assert disk_of("/dev/shm").startswith("tmpfs")  # a slot is there


def test_a_result_survives_its_file() -> None:
    line = Line(
        "1 GiB",
        "ckpt.save",
        "ckpt save",
        {"a": Spread.of([1.0, 2.0]), "b": 3, "c": "none", "d": None},
    )
    columns = [Column("a", "A", "seconds")]
    result = Result(
        "raw",
        "Title",
        columns,
        ["note"],
        [line],
        [Failure("1 GiB", "nvrx", "why")],
        [],
        {"cores": 2},
    )
    assert Result.from_json(result.as_json()) == result


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.000456, "0.46 ms"),
        (0.0456, "45.6 ms"),
        (-0.456, "-456 ms"),
        (4.561, "4.56 s"),
        (45.61, "45.6 s"),
    ],
)
def test_times_have_three_digits(value: float, text: str) -> None:
    assert seconds(value) == text


def test_a_cell_shows_the_median_a_text_or_nothing() -> None:
    assert cell(Spread.of([1.0, 3.0, 2.0]), "seconds") == "2.00 s"
    assert cell("none", "seconds") == "none"
    assert cell(None, "seconds") == ""
    assert cell(0.031, "percent") == "+3.1 %"
    assert cell(3 << 20, "bytes") == "3 MiB"


def test_names_at_the_ends_of_lines_do_not_overlap_and_keep_their_order() -> None:
    placed = spread_out([0.5, 0.1, 0.51, 0.9, 0.5], gap=0.05)
    order = sorted(placed)
    assert all(high - low > 0.049 for low, high in itertools.pairwise(order))
    assert placed[1] == 0.1
    assert placed[3] == 0.9
    assert placed[2] == max(placed[0], placed[2], placed[4])


def test_lots_fit_into_memory_keep_the_order_and_are_not_too_many() -> None:
    assert lots({"a": 3, "b": 3, "c": 5, "d": 1}, room=6) == [["a", "b"], ["c", "d"]]
    assert lots(dict.fromkeys("abcdefgh", 1), room=100) == [list("abcdef"), list("gh")]
    assert lots({}, room=1) == []


def test_ours_makes_do_with_one_image_where_two_do_not_fit() -> None:
    shape = Shape("raw", 8 << 30, 128)
    assert (
        shape.need_bytes("ckpt.save_async") - shape.need_bytes("ckpt.save_async", least=True)
        == 8 << 30
    )
    assert shape.need_bytes("torch.save") == shape.need_bytes("torch.save", least=True)


@pytest.mark.parametrize(
    "verb",
    ["raw", "small", "train", "restore", "ranks", "growth", "soak", "every", "all", "render"],
)
def test_every_verb_explains_itself(verb, capsys):
    from bench.__main__ import main

    with pytest.raises(SystemExit) as ended:
        main([verb, "--help"])
    assert ended.value.code == 0
    assert "usage" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("most", "marks"), [(163 << 20, "32 MiB"), (662 << 20, "128 MiB"), (9 << 30, "2 GiB")]
)
def test_an_axis_of_bytes_has_round_marks(most: int, marks: str) -> None:
    assert tick(round_bytes(most), "bytes") == marks

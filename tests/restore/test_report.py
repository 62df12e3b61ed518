"""The report of a restore, as a terminal and a notebook show it."""

from __future__ import annotations

from pathlib import Path

import torch

from ckpt import CheckpointManager
from ckpt.catalog.tiered_reader import Repair
from ckpt.restore.report import RestoreReport, why_none


def report(**fields: object) -> RestoreReport:
    return RestoreReport(
        step=7, attempt="abcdef", tier="/runs/<b>", nbytes=2_000_000, read_bytes=0, seconds=0.5,
        saved_world_size=1, skipped=(), **fields,  # type: ignore[arg-type]
    )  # fmt: skip


def test_a_report_is_one_line() -> None:
    assert repr(report()) == (
        "<RestoreReport: step 7 from /runs/<b>: 2.00 MB in 0.50 s, 4.00 MB/s, checksums verified>"
    )
    assert repr(report(missing=("a", "b"))).endswith("checksums verified; 2 missing>")


def test_a_notebook_shows_a_line_and_what_was_not_as_usual() -> None:
    html = report()._repr_html_()
    assert html == (
        "<div>restored <b>step 7</b> from /runs/&lt;b&gt;: 2.00 MB in 0.50 s (4.00 MB/s), "
        "checksums verified</div>"
    )
    repair = Repair(tier="near", key="rank-0", reason="3 of 4 chunks", nbytes=5, mended=True)
    names = tuple(f"<name {number}>" for number in range(60))
    html = report(
        repaired=(repair,), unexpected=names, converted=(("x", "f4", "f2"),)
    )._repr_html_()
    assert "<summary>1 repaired</summary>" in html
    assert "<li>near: rank-0: 3 of 4 chunks; written again there</li>" in html
    assert "<li>x, f4, f2</li>" in html
    assert "<summary>60 unexpected</summary>" in html
    assert "<li>&lt;name 49&gt;</li><li>and 10 more</li>" in html


def test_a_manager_says_where_it_saves_and_what_is_under_way(tmp_path: Path) -> None:
    near, far = str(tmp_path / "near"), str(tmp_path / "far")
    with CheckpointManager([near, far]) as manager:
        assert repr(manager) == f"<CheckpointManager {near}, {far}, 0 saves under way>"
        manager.save({"x": torch.ones(2)}, 3)
        assert repr(manager) == f"<CheckpointManager {near}, {far}, step 3, 0 saves under way>"
    assert repr(manager) == f"<CheckpointManager {near}, {far}, step 3, closed>"


def test_a_reason_that_several_steps_share_is_told_once() -> None:
    skips = [(4, "its base is gone"), (3, "cut"), (2, "its base is gone")]
    assert why_none(None, skips, is_overwritten=False) == (
        "no step is intact (steps 4, 2: its base is gone; step 3: cut); "
        "nothing in the state was changed"
    )

"""Optimizers are resumed as ``torch.save`` resumes them, and the page says what was measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.census import page
from tests.census.cells import Row


def row(name: str, ranks: int = 1, **cells: Any) -> Row:
    given = {way.replace("_", " "): cell for way, cell in cells.items()}
    return Row("torch.optim", name, "all step", ranks, given)


EQUAL: dict[str, Any] = dict.fromkeys(("torch", "torch_rollback", "ckpt", "ckpt_rollback"), "equal")


def test_an_optimizer_that_only_torch_resumes_is_a_shortfall() -> None:
    silent = row("A", **{**EQUAL, "ckpt": "differs"})
    crashed = row("B", **{**EQUAL, "ckpt_rollback": "RuntimeError"})
    refused = row("C", torch="equal", torch_rollback="equal", ckpt="refused: UnsupportedValue")
    differs: dict[str, Any] = dict.fromkeys(EQUAL, "differs")
    alike = row("D", **differs)
    idle = row("E", none="TypeError: no")
    rows = [silent, crashed, refused, alike, idle, row("F", **EQUAL)]
    assert page.shortfalls(rows) == [silent, crashed]


def test_the_page_counts_the_equal_ones_and_lists_the_others() -> None:
    refused: dict[str, Any] = {**EQUAL, "ckpt": "refused: UnsupportedValue"}
    del refused["ckpt_rollback"]
    rows = [
        row("A", **EQUAL),
        row("B", **refused, wrapped="equal", wrapped_rollback="equal"),
        row("C", none="TypeError: no"),
        row("A", 2, **EQUAL),
        row("B", 2, none="RuntimeError: no"),
    ]
    lines = page.table(rows, {"torch.optim": "2.13"}).splitlines()
    assert "| `torch.optim` | 2.13 | 3 | 2 of 2 | 1 of 2 | 1 of 1 | 1 of 1 |" in lines
    cell = "refused: UnsupportedValue, wrapped: equal"
    assert f"| `torch.optim`: B | one process | equal | equal | {cell} | {cell} |" in lines
    assert "Did not train here (one process): `torch.optim`: C." in lines
    assert "Did not train here (FSDP2): `torch.optim`: B." in lines


def test_a_row_that_is_measured_again_replaces_the_old_one(tmp_path: Path) -> None:
    rows = [row("b", ckpt="differs"), row("a", 2, **EQUAL), row("A", **EQUAL), row("b", **EQUAL)]
    lines = [msgspec.json.encode(line) + b"\n" for line in rows]
    (tmp_path / "torch.optim.jsonl").write_bytes(b"".join(lines))
    assert page.rows_in(tmp_path, "torch.optim") == [rows[2], rows[3], rows[1]]


def test_a_run_of_one_optimizer_keeps_the_rows_of_the_others(tmp_path: Path) -> None:
    """The folder of the last run may be gone."""
    build, again, records = (tmp_path / name for name in ("build", "again", "records"))
    build.mkdir()
    again.mkdir()
    rows = [row("a", **EQUAL), row("b", ckpt="differs")]
    lines = b"".join(msgspec.json.encode(line) + b"\n" for line in rows)
    (build / "torch.optim.jsonl").write_bytes(lines)
    page.record(build, records)
    page.recall(again, records)
    with (again / "torch.optim.jsonl").open("ab") as file:
        file.write(msgspec.json.encode(row("b", **EQUAL)) + b"\n")
    page.recall(again, records)
    page.record(again, records)
    assert page.rows_in(records, "torch.optim") == [rows[0], row("b", **EQUAL)]


def test_the_table_of_the_docs_is_made_of_the_records() -> None:
    rows = [row for package in page.PACKAGES for row in page.rows_in(page.RECORDS, package)]
    assert page.shortfalls(rows) == []
    assert page.table(rows, page.versions_of({row.package: None for row in rows})).strip() == (
        page.reported()
    )


def test_the_table_of_the_docs_names_the_pinned_versions() -> None:
    lines = [line.strip("| ").split(" | ") for line in page.reported().splitlines()]
    found = {line[0].strip("`"): line[1] for line in lines if line[0].strip("`") in page.PACKAGES}
    assert found
    pinned = page.versions_of(found)
    for package in found.keys() - {"torch.optim", "schedulefree"}:  # Those of the environment
        assert found[package] == pinned[package]


@pytest.mark.torture
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("package", ["torch.optim", "schedulefree"])
def test_every_optimizer_resumes_as_torch_save_resumes_it(package: str, tmp_path: Path) -> None:
    """The other packages are in the environment of ``make census`` only."""
    page.measure(package, tmp_path)
    rows = page.rows_in(tmp_path, package)
    trained = [row for row in rows if "none" not in row.cells]
    assert len(trained) > len({row.name for row in rows})  # Most train in both places
    assert page.shortfalls(rows) == []

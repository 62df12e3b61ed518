"""The glossary names what exists in the code."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MOST_TERMS = 40
ROW = re.compile(
    r"\| (?P<term>[^|]+) \| (?P<meaning>[^|]+) \| `(?P<file>[^`]+)` `(?P<symbol>[^`]+)` \|"
)


def rows() -> list[re.Match[str]]:
    lines = (ROOT / "docs" / "glossary.md").read_text().splitlines()
    table = [line for line in lines if line.startswith("| ") and not line.startswith("| term")]
    found = [ROW.fullmatch(line) for line in table]
    assert all(found), [line for line, match in zip(table, found, strict=True) if not match]
    return [match for match in found if match]


def names_in(path: Path) -> set[str]:
    """Return classes, functions and constants at the top of a module."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found.update(target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return found


def test_the_glossary_is_short_sorted_and_has_each_term_once() -> None:
    terms = [row["term"] for row in rows()]
    assert 20 <= len(terms) <= MOST_TERMS
    assert terms == sorted(set(terms))


@pytest.mark.parametrize("row", rows(), ids=lambda row: row["term"])
def test_a_term_is_explained_in_one_sentence_and_exists_in_the_code(row: re.Match[str]) -> None:
    assert row["meaning"].endswith(".")
    assert not re.search(r"[.?!] [A-Z]", row["meaning"])
    path = ROOT / row["file"]
    assert path.is_file(), row["file"]
    assert row["symbol"] in names_in(path), (row["file"], row["symbol"])

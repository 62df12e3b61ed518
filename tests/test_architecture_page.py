"""docs/architecture.md follows a save and a restore through functions that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
HOP = re.compile(r"\| (\d+) \| `([^`]+)` \| `([^`]+)` \| [^|]+ \|")
MOST_HOPS = {"The path of a save": 12, "The path of a restore": 10}


def hops(section: str) -> list[tuple[int, str, str]]:
    text = PAGE.partition(f"## {section}\n")[2].partition("\n## ")[0]
    return [(int(number), file, name) for number, file, name in HOP.findall(text)]


def defined(path: Path) -> set[str]:
    """Return functions at the top of a module, and methods as ``Class.method``."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            found.update(
                f"{node.name}.{item.name}"
                for item in node.body
                if isinstance(item, ast.FunctionDef)
            )
    return found


@pytest.mark.parametrize("section", MOST_HOPS)
def test_the_way_is_short_and_each_hop_exists(section: str) -> None:
    found = hops(section)
    assert [number for number, _, _ in found] == list(range(1, len(found) + 1))
    assert 8 <= len(found) <= MOST_HOPS[section]
    for _, file, name in found:
        assert (ROOT / file).is_file(), file
        assert name in defined(ROOT / file), (file, name)


def test_every_package_is_described() -> None:
    packages = {path.parent.name for path in (ROOT / "ckpt").glob("*/__init__.py")}
    assert packages <= set(re.findall(r"`ckpt/(\w+)/`", PAGE))

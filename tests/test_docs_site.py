"""The documentation site builds without a warning, and loads nothing from another host.

It shows every public name.
"""

from __future__ import annotations

import importlib.util
import json
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ckpt
from ckpt import errors

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
_NEEDED = ("mkdocs", "material", "mkdocstrings", "mkdocstrings_handlers")
_LOADED = re.compile(
    r"""<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=["']?(https?:)?//|url\(["']?https?:|@import"""
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(
            f"the extra [docs] is not installed ({', '.join(missing)}): `make docs` installs it"
        )
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=ROOT, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
def test_the_site_builds_without_a_warning(site: Path) -> None:
    assert (site / "index.html").exists()
    assert (site / "bench" / "results" / "train.png").exists()


@pytest.mark.slow
def test_the_site_loads_nothing_from_another_host(site: Path) -> None:
    files = [path for path in site.rglob("*") if path.suffix in (".html", ".css")]
    assert files
    assert not [(path, found[0]) for path in files if (found := _LOADED.search(path.read_text()))]


@pytest.mark.slow
def test_the_search_finds_every_public_name(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text())
    places = {each["location"] for each in index["docs"]}
    assert {f"api.html#ckpt.{name}" for name in ckpt.__all__ if name != "__version__"} <= places


@pytest.mark.slow
def test_the_pictures_follow_the_colours_of_the_site(site: Path) -> None:
    page = (site / "concepts.html").read_text()
    assert page.count('class="drawing"') == 2
    assert "pictures/save.svg" not in page


def test_the_page_of_the_api_names_all_that_is_public() -> None:
    shown = re.findall(r"^::: ckpt\.([\w.]+)$", (DOCS / "api.md").read_text(), re.MULTILINE)
    assert set(ckpt.__all__) - {"__version__"} <= set(shown)
    for name in set(shown) - set(ckpt.__all__):
        assert pkgutil.resolve_name(f"ckpt.{name}").__doc__


def test_every_page_of_docs_has_a_place_in_the_site() -> None:
    shown = set(re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert {page.name for page in DOCS.glob("*.md")} <= shown


def test_operations_has_every_error_with_its_exit_code() -> None:
    rows = re.findall(
        r"^\| `(\w+)` \| (\d+) \|", (DOCS / "operations.md").read_text(), re.MULTILINE
    )
    kinds = {name: getattr(errors, name) for name in errors.__all__}
    classes: dict[str, Any] = {name: kind for name, kind in kinds.items() if isinstance(kind, type)}
    expected = {name: kind.exit_code for name, kind in classes.items()}
    assert len(rows) == len(expected)
    assert {name: int(code) for name, code in rows} == expected


def test_the_figures_of_operations_are_those_of_the_results() -> None:
    """When the results change, this page changes with them."""
    lines = (ROOT / "bench" / "results" / "train.md").read_text().splitlines()
    heads, ours = (
        [cell.strip() for cell in next(line for line in lines if words in line).split("|")]
        for words in ("| stall |", "**ckpt save_async**")
    )
    row = dict(zip(heads, ours, strict=True))
    page = " ".join((DOCS / "operations.md").read_text().split())
    assert f"measured {row['memory added']} of added memory" in page
    cost = sum(float(row[name].removesuffix(" ms")) for name in ("stall", "drag"))
    assert f"about {round(cost, -1):.0f} ms together" in page


def test_the_list_of_decisions_has_all() -> None:
    listed = re.findall(r"\]\((\d{4}-[\w-]+\.md)\)", (DOCS / "decisions" / "README.md").read_text())
    assert listed == sorted(path.name for path in (DOCS / "decisions").glob("0*.md"))


def test_the_pictures_are_what_the_script_draws() -> None:
    script = DOCS / "pictures" / "draw.py"
    subprocess.run([sys.executable, script, "--check"], timeout=60, check=True)


# -- 100 columns --------------------------------------------------------------------------------

LONG = re.compile(r"bench/results/")
"""Pages that are not wrapped: records of what was, and pages that have not been rewritten yet."""
PAGES = sorted({*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *(ROOT / "bench").rglob("*.md")})


def too_long(text: str) -> list[str]:
    """Return the lines of more than 100 columns. Tables, links and the output of programs may be
    longer.
    """
    found: list[str] = []
    language: str | None = None
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            language = None if language is not None else line.strip().removeprefix("```")
            continue
        may_be_longer = language in ("", "text") or (language is None and line.startswith("|"))
        if not may_be_longer and len(re.sub(r"\]\([^)]*\)", "]()", line)) > 100:
            found.append(line)
    return found


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if not LONG.search(str(page.relative_to(ROOT)))],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_a_page_is_wrapped_at_100_columns(page: Path) -> None:
    assert too_long(page.read_text()) == []


def test_only_tables_links_and_output_may_be_longer() -> None:
    word = "word " * 25
    assert too_long(f"{word}\n") == [word]
    assert too_long(f"```python\n{word}\n```\n") == [word]
    assert too_long(f"```\n{word}\n```\n| {word} |\n[short](https://{'x' * 100})\n") == []

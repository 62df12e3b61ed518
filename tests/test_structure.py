"""The tests have the structure of the code, and share code by modules without tests."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.kit.worlds import ROOT

TESTS = ROOT / "tests"

# Folders and files that do not belong to a single package. These lists only shrink.
ACROSS_PACKAGES = {
    "census",
    "chaos",
    "crash",
    "device",
    "distributed",
    "faults",
    "fuzz",
    "launch",
    "overlap",
    "safety",
    "versions",
}
ACROSS_FILES = {
    "added_metrics",
    "architecture",
    "architecture_page",
    "bad_input",
    "bad_tiers",
    "begun",
    "capacity",
    "changed_on_one_rank",
    "codec",
    "continuing",
    "copied_roots",
    "docs",
    "docs_site",
    "ending",
    "extending",
    "far_tier",
    "fragments",
    "glossary",
    "how_do_i",
    "jobs_that_meet",
    "keep_best",
    "memory_tier",
    "names",
    "nearest",
    "nearest_encoded",
    "on_error",
    "other_users",
    "packaging",
    "partial",
    "parts",
    "public_api",
    "rename",
    "review",
    "serving_page",
    "signal_handlers",
    "soak",
    "started_processes",
    "structure",
    "suspicious",
    "targets",
    "tiers",
    "waves",
}


def imports_of_tests(code: str) -> Iterator[str]:
    """Return the modules with tests that a file imports."""
    for node in ast.walk(ast.parse(code)):
        match node:
            case ast.ImportFrom(module=str(module)):
                names = [module, *(f"{module}.{alias.name}" for alias in node.names)]
            case ast.Import():
                names = [alias.name for alias in node.names]
            case _:
                continue
        for name in names:
            path = ROOT / f"{name.replace('.', '/')}.py"
            if path.name.startswith("test_") and path.exists():
                yield name


@pytest.mark.parametrize(
    "code",
    [
        "from tests.test_manager import x",
        "import tests.test_manager",
        "from tests import test_manager",
        "def f():\n    from tests.cli.test_ls import x",
    ],
)
def test_imports_of_tests_are_found(code: str) -> None:
    assert list(imports_of_tests(code))


def test_no_file_imports_a_module_with_tests() -> None:
    found = {
        str(path.relative_to(ROOT)): modules
        for top in ("tests", "bench", "examples", "docs")
        for path in (ROOT / top).rglob("*.py")
        if (modules := list(imports_of_tests(path.read_text())))
    }
    assert found == {}


def test_each_folder_with_tests_has_the_name_of_a_package() -> None:
    folders = {path.parent.relative_to(TESTS).parts[0] for path in TESTS.glob("*/**/test_*.py")}
    packages = {path.parent.name for path in (ROOT / "ckpt").glob("*/__init__.py")}
    assert folders - packages - {"backends", "bench", "examples"} == ACROSS_PACKAGES


def test_each_other_file_with_tests_has_the_name_of_a_module() -> None:
    files = {path.stem.removeprefix("test_") for path in TESTS.glob("test_*.py")}
    modules = {path.stem for path in (ROOT / "ckpt").glob("*.py")}
    assert files - modules == ACROSS_FILES

"""The tests have the structure of the code, and share code by modules without tests."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from tests.kit.processor_time import ProcessorTime
from tests.kit.worlds import ROOT
from tests.processes import fork

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


def test_each_folder_with_tests_of_a_package_has_the_name_of_a_folder_of_it() -> None:
    folders = {path.parent.relative_to(TESTS) for path in TESTS.glob("*/*/**/test_*.py")}
    own_folders = {folder for folder in folders if folder.parts[0] not in ACROSS_PACKAGES}
    homes = {
        folder: (
            Path("backends", "ckpt_backends", *folder.parts[1:])
            if folder.parts[0] == "backends"
            else Path("ckpt", folder)
        )
        for folder in own_folders
    }
    assert len(homes) >= 10
    assert {folder for folder, home in homes.items() if not (ROOT / home).is_dir()} == set()


def test_each_other_file_with_tests_has_the_name_of_a_module() -> None:
    files = {path.stem.removeprefix("test_") for path in TESTS.glob("test_*.py")}
    modules = {path.stem for path in (ROOT / "ckpt").glob("*.py")}
    assert files - modules == ACROSS_FILES


DEAR = """
import os, time
import pytest

def child_works():
    if child := os.fork():
        os.waitpid(child, 0)
    else:
        while time.process_time() < 0.6:
            pass
        os._exit(0)

def test_a_child_works():
    child_works()

@pytest.mark.torture
def test_torture():
    child_works()

def test_nothing():
    pass
"""


def test_a_test_that_takes_too_much_processor_time_fails_unless_it_is_torture(
    tmp_path: Path,
) -> None:
    (tmp_path / "test_dear.py").write_text(DEAR)
    report = tmp_path / "report"

    def run() -> None:
        words = [str(tmp_path), "-c", os.devnull, "--rootdir", str(tmp_path), "-rpE"]
        words += ["-p", "no:cacheprovider", "-W", "ignore"]
        with report.open("w") as file, redirect_stdout(file):
            status = pytest.main(words, plugins=[ProcessorTime(0.5)])
        assert status == pytest.ExitCode.TESTS_FAILED

    _, status = os.waitpid(fork(run), 0)
    text = report.read_text()
    assert status == 0, text
    assert re.search(r"ERROR \S*test_dear.py::test_a_child_works", text)
    assert "test_dear.py::test_a_child_works took 1 s of processor time, and a test may" in text
    assert re.search(r"PASSED \S*test_dear.py::test_torture", text)
    assert "3 passed, 1 error" in text

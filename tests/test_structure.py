"""The tests have the structure of the code, and share code by modules without tests."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from tests.kit.processor_time import ProcessorTime
from tests.kit.workers import Workers
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
    if not re.search(r"(?m)^\s*(from|import)\s.*\btest_|^\s*from tests.* import \($", code):
        return  # hundreds of files need not be parsed
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
        "from tests import (\n    kit,\n    test_manager,\n)",
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


SHARED = """
import os, signal
import pytest

def test_passes(tmp_path):
    print("told")

def test_fails():
    print("told")
    assert 1 == 2

def test_is_skipped():
    pytest.skip("as it says")

def test_dies():
    os.kill(os.getpid(), signal.SIGKILL)

def test_follows(tmp_path):
    assert tmp_path.parts[-2].startswith("worker")
"""


def test_workers_run_each_test_once_and_outlive_one_that_dies(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / f"test_{name}.py").write_text(SHARED)
    report, xml = tmp_path / "report", tmp_path / "xml"
    begun: list[int] = []

    def run() -> None:
        words = [str(tmp_path), "-c", os.devnull, "--rootdir", str(tmp_path), "-rA"]
        words += ["-p", "no:cacheprovider", "-W", "ignore", f"--junitxml={xml}"]
        words += ["-p", "no:faulthandler"]  # the thread of its time limit is not in a fork
        with report.open("w") as file, redirect_stdout(file):
            status = pytest.main(words, plugins=[Workers(2, lambda: begun.append(1))])
        assert status == pytest.ExitCode.TESTS_FAILED
        assert begun == []  # in the workers alone

    _, status = os.waitpid(fork(run), 0)
    text = report.read_text()
    assert status == 0, text
    assert "6 failed, 6 passed, 3 skipped" in text
    assert text.count("the process of this test has ended with the status -9") >= 3
    assert text.count("as it says") >= 1
    cases = [case.get("name") for case in ET.parse(xml).iter("testcase")]
    names = ["passes", "fails", "is_skipped", "dies", "follows"]
    assert sorted(map(str, cases)) == sorted([f"test_{name}" for name in names] * 3)

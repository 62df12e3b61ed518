"""The wheel and the sdist, as a user without a checkout gets them.

``python -m build`` makes the wheel out of the sdist, so a file that the sdist lacks is missing in
the wheel too. The clean environment does not install torch and the rest again: a ``.pth`` line
appends this interpreter's site-packages *behind* its own, and ``.pth`` files in there (an editable
install of this very project) are not followed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]

ROUND_TRIP = """
import sys
import torch
from ckpt import CheckpointManager

folder = sys.argv[1]
manager = CheckpointManager(folder)
manager.save({"w": torch.ones(3)}, step=1)
manager.close()

state = {"w": torch.zeros(3)}
manager = CheckpointManager(folder)
assert manager.restore(state) is not None
manager.close()
assert torch.equal(state["w"], torch.ones(3)), state
"""


class Distributions(NamedTuple):
    sdist: Path
    wheel: Path


def run(*command: str | Path, cwd: Path) -> str:
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    }
    done = subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Distributions:
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT, cwd=out)
    return Distributions(sdist=next(out.glob("*.tar.gz")), wheel=next(out.glob("*.whl")))


@pytest.fixture(scope="module")
def sdist_names(built: Distributions) -> set[str]:
    """Return the paths in the sdist, relative to its one top folder."""
    with tarfile.open(built.sdist) as archive:
        return {name.partition("/")[2] for name in archive.getnames()}


@pytest.fixture(scope="module")
def wheel_names(built: Distributions) -> set[str]:
    with zipfile.ZipFile(built.wheel) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="module")
def clean(built: Distributions, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ``bin`` of a clean environment with the wheel in it."""
    home = tmp_path_factory.mktemp("clean") / "venv"
    venv.create(home, with_pip=False, symlinks=True)
    python = home / "bin" / "python"
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        built.wheel,
        cwd=home,
    )
    own = Path(
        run(
            python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=home
        ).strip()
    )
    borrowed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (own / "borrowed.pth").write_text("\n".join(sorted(borrowed)) + "\n")
    return home / "bin"


@pytest.mark.parametrize("package", ["ckpt", "ckpt_backends"])
def test_the_packages_come_from_the_wheel(clean: Path, tmp_path: Path, package: str) -> None:
    place = run(
        clean / "python", "-c", f"import {package}; print({package}.__file__)", cwd=tmp_path
    ).strip()
    assert Path(place).is_relative_to(clean.parent)


@pytest.mark.parametrize(
    "module", ["folder.posix", "memory", "fsspec_bridge", "s3.backend", "gcs.backend"]
)
def test_every_backend_imports(clean: Path, tmp_path: Path, module: str) -> None:
    run(clean / "python", "-c", f"import ckpt_backends.{module}", cwd=tmp_path)


def test_the_command_runs(clean: Path, tmp_path: Path) -> None:
    assert "restore" in run(clean / "ckpt", "--help", cwd=tmp_path)


def test_the_version_is_that_of_the_wheel(clean: Path, tmp_path: Path) -> None:
    code = (
        "import ckpt; from importlib.metadata import version; assert ckpt.__version__ == "
        "version('ckpt-stream')"
    )
    run(clean / "python", "-c", code, cwd=tmp_path)


def test_a_state_goes_round(clean: Path, tmp_path: Path) -> None:
    run(clean / "python", "-c", ROUND_TRIP, tmp_path / "root", cwd=tmp_path)
    assert list((tmp_path / "root").glob("step-*/manifest.json"))


def test_the_wheel_holds_the_two_packages_and_nothing_else(wheel_names: set[str]) -> None:
    tops = {name.partition("/")[0] for name in wheel_names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"ckpt", "ckpt_backends"}
    assert {"ckpt/py.typed", "ckpt_backends/py.typed"} <= wheel_names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in wheel_names)


def test_the_wheel_holds_every_module(wheel_names: set[str]) -> None:
    core = {str(path.relative_to(ROOT)) for path in (ROOT / "ckpt").rglob("*.py")}
    backends = {
        str(path.relative_to(ROOT / "backends")) for path in (ROOT / "backends").rglob("*.py")
    }
    assert core | backends <= wheel_names


@pytest.mark.parametrize("folder", ["ckpt", "backends", "tests", "examples", "bench"])
def test_the_sdist_holds_every_module_of(folder: str, sdist_names: set[str]) -> None:
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / folder).rglob("*.py")}
    assert modules
    assert modules <= sdist_names


@pytest.mark.parametrize(
    "name",
    [
        "README.md",
        "LICENSE",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "Makefile",
        "constraints.txt",
        "pyproject.toml",
        "docs/decisions",
        "mkdocs.yml",
    ],
)
def test_the_sdist_holds(name: str, sdist_names: set[str]) -> None:
    assert name in sdist_names or any(other.startswith(f"{name}/") for other in sdist_names)


def test_the_sdist_holds_no_environment_or_cache(sdist_names: set[str]) -> None:
    parts = {part for name in sdist_names for part in Path(name).parts}
    assert not {
        part
        for part in parts
        if part.startswith(".venv") or part == "__pycache__" or part.endswith("_cache")
    }


def test_what_builds_the_distribution_and_what_it_was_tested_on_are_pinned_in_one_way() -> None:
    from ckpt.torch_private import TESTED_TORCH, is_tested

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    assert project["build-system"]["requires"] == [f"hatchling=={pins['hatchling']}"]
    first, (major, minor) = TESTED_TORCH
    bounds = f"torch>={'.'.join(map(str, first))},<{major}.{minor + 1}"
    assert bounds in project["project"]["dependencies"]
    assert is_tested(pins["torch"])

"""Run the quick tests with the lowest versions that pyproject.toml allows.

``python -m tests.versions.lowest`` (``make lowest``) makes the environment in ``.build/lowest``;
further arguments are for pytest. The packages that ckpt and its extras need at run time have the
versions of their floors there. torch and the tools of the tests have those of constraints.txt:
``make matrix`` tests the releases of torch.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from typing import Final

from tests.versions.matrix import ROOT, uv

BUILD: Final = ROOT / ".build" / "lowest"
EXTRAS: Final = ("s3", "obstore", "gcs", "otlp", "serve")
CHECKERS: Final = {"codespell", "import-linter", "mypy", "pre-commit", "pyright", "ruff"}
"""Tools of ``make check``. They restrict the versions of what they share with ckpt."""
CLIENTS: Final = ("httpx<0.28",)  # starlette's tests need it when starlette has its lowest version
UNFIT: Final = ("tests/test_architecture.py", "tests/test_docs_site.py")  # they need more tools
_NAME: Final = re.compile(r"[\w-]+")


def requirements() -> Iterator[str]:
    """Return the packages to install: those at their floors first, then the tools."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras: dict[str, list[str]] = project["optional-dependencies"]
    pins = dict(
        line.lower().replace("_", "-").split("==", 1)
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    )
    names = {"torch"}
    yield f"torch=={pins['torch']}"
    at_floor = [each for name in EXTRAS for part in extras[name] for each in _parts(part, extras)]
    for each in [*project["dependencies"], *at_floor]:
        if _name(each) not in names:
            names.add(_name(each))
            yield re.sub(r">=([\d.]+).*", r"==\1", each)
    for each in sorted({each for part in extras["dev"] for each in _parts(part, extras)}):
        if _name(each) not in names | CHECKERS:
            names.add(_name(each))
            yield f"{re.split('[<>=]', each)[0]}=={pins[_name(each)]}"  # with its own extras
    yield from CLIENTS


def _parts(requirement: str, extras: dict[str, list[str]]) -> list[str]:
    """Return a requirement, or those of the extras of ckpt that it names, also indirectly."""
    if not requirement.startswith("ckpt-stream["):
        return [requirement]
    names = requirement.partition("[")[2].rstrip("]").split(",")
    return [part for name in names for each in extras[name] for part in _parts(each, extras)]


def _name(requirement: str) -> str:
    found = _NAME.match(requirement)
    assert found is not None, requirement
    return found[0].lower()


def main(words: list[str]) -> int:
    """Return the status of pytest."""
    uv("venv", "-q", "--clear", "--python", sys.executable, str(BUILD))
    interpreter = BUILD / "bin" / "python"
    uv("pip", "install", "-q", "--python", str(interpreter), *requirements())
    command = [str(interpreter), "-m", "pytest", "-n", "3", "--dist", "loadfile", "-m", "not slow"]
    command += ["--no-loadscope-reorder", "-p", "no:cacheprovider"]
    env = {
        **os.environ,
        "PATH": os.pathsep.join([str(BUILD / "bin"), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "backends")]),
    }
    ignored = [f"--ignore={path}" for path in UNFIT]
    return subprocess.run([*command, *ignored, *words], cwd=ROOT, env=env, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""A release of a framework that no test ran with is reported."""

from __future__ import annotations

import importlib
import logging
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from ckpt.integrations.shared import once_warnings
from ckpt.integrations.shared.once_warnings import warn_of_untested

FOLDER = Path(once_warnings.__file__).parents[1]


@pytest.mark.parametrize(
    ("installed", "warns"),
    [
        ("1.0.0", False),
        ("1.15.9", False),
        ("1.15.0.dev0+cpu", False),
        ("0.34.2", True),
        ("1.16", True),
        ("2.0.0.dev0", True),
    ],
)
def test_a_release_outside_of_the_range_is_reported_once(
    installed: str, warns: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(once_warnings, "_logged_lines", set())
    monkeypatch.setattr(once_warnings, "version", lambda _: installed)
    with caplog.at_level(logging.WARNING, "ckpt"):
        for _ in range(2):
            warn_of_untested("frame", ("1.0", "1.15"), advice="resume once")
    assert len(caplog.records) == warns
    assert not warns or f"frame {installed} is installed" in caplog.text
    assert not warns or "tested with frame 1.0 to 1.15 only: resume once before" in caplog.text


def test_one_tested_release_is_no_range(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(once_warnings, "_logged_lines", set())
    monkeypatch.setattr(once_warnings, "version", lambda _: "3.1")
    warn_of_untested("frame", ("3.0", "3.0"), advice="resume once")
    assert "tested with frame 3.0 only" in caplog.text


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(FOLDER).with_suffix("").parts)


CALLS = {
    name_of(path): found[1]
    for path in sorted(FOLDER.rglob("*.py"))
    if (found := re.search(r'warn_of_untested\(\s*"([a-z]+)",\s*TESTED_RANGE', path.read_text()))
}


def test_every_integration_with_a_range_reports() -> None:
    ranges = {
        name_of(path) for path in FOLDER.rglob("*.py") if "\nTESTED_RANGE: " in path.read_text()
    }
    assert ranges == CALLS.keys()


@pytest.mark.parametrize("module", sorted(CALLS))
def test_the_version_that_is_installed_is_a_tested_one(
    module: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    try:
        version(CALLS[module])
    except PackageNotFoundError:
        pytest.skip(f"{CALLS[module]} is not installed")
    door = importlib.import_module(f"ckpt.integrations.{module}")
    monkeypatch.setattr(once_warnings, "_logged_lines", set())
    warn_of_untested(CALLS[module], door.TESTED_RANGE, advice="")
    assert not caplog.records

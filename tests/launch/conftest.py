"""One uninterrupted run, with which all launchers are compared."""

from __future__ import annotations

import pytest

from tests.launch import training


@pytest.fixture(scope="session")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, str]]:
    return training.uninterrupted(tmp_path_factory.mktemp("reference") / "run")

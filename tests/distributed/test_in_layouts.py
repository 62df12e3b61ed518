"""What one torchrun world shows of layouts.

The worker runs all cases, and each test checks one of them.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.distributed.launch import WORKERS
from tests.kit.worlds import world

pytestmark = pytest.mark.distributed

WORKER = "in_layouts.py"


def cases() -> list[str]:
    """Return the functions of the worker that are marked as cases."""
    tree = ast.parse((WORKERS / WORKER).read_text())
    return [
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and any(isinstance(each, ast.Name) and each.id == "case" for each in node.decorator_list)
    ]


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return what the worker says of each case."""
    output = world(2, WORKERS / WORKER, tmp_path_factory.mktemp("in_layouts"))
    parts = [part.partition("\n") for part in output.split("=== ")[1:]]
    return {name: text.strip() for name, _, text in parts}


@pytest.mark.parametrize("name", cases())
def test_in_a_world_of_two_ranks(reported: dict[str, str], name: str) -> None:
    assert reported[name].startswith("well"), reported[name]


@pytest.mark.torture
def test_in_all_combinations(tmp_path: Path) -> None:
    name = "fsdp1_computes_with_what_was_restored"
    assert f"=== {name}\nwell" in world(2, WORKERS / WORKER, tmp_path, "all", name)

"""With any manifest, each command ends with one of our errors, and touches nothing outside."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from ckpt import CheckpointManager
from ckpt.cli.main import main
from tests.fuzz.mutations import mutated
from tests.fuzz.records import fuzz, target
from tests.kit.damage import sealed
from tests.kit.marks import torture

VERBS = (
    "ls --root runs",
    "ls --root runs --json",
    "show --root runs --files",
    "show --root runs --json",
    "verify --root runs --all",
    "diff runs --step 1 --step 2 --values",
    "diff runs --step 1 --step 2 --json",
    "export runs out/x.safetensors",
    "export runs out/x.pt",
    "export runs out/x --format dcp",
    "export runs out/y.pt --name *o* --json",
    "restore --root runs",
    "restore --root runs --to out/there --json",
    "copy runs out/copy --all",
    "finalize --root runs",
    "prune --root runs --keep-last 1 --force --dry-run",
    "prune --root runs --keep-best loss:min --keep-last 1 --force",
)
CODES = {0, 1, 2, 3, 4, 5, 7, 8}
SCALE = pytest.mark.parametrize(
    "examples",
    [
        len(VERBS),
        pytest.param(20_000, marks=[pytest.mark.torture, pytest.mark.timeout(7_200)]),
    ],
    ids=["few", "many"],
)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the root ``runs`` of two steps, a copy of it, and files that do not belong to
    it.
    """
    os.mkdir(tmp_path / "place")
    monkeypatch.chdir(tmp_path / "place")
    monkeypatch.delenv("CKPT_ROOT", raising=False)
    with CheckpointManager("runs", metadata={"team": "x"}, journal=False) as manager:
        for step in (1, 2):
            manager.save(target(), step, metrics={"loss": 1 / step})
    Path("victim").write_text("mine")
    os.mkdir("rank-00000.safetensors")
    shutil.copytree("runs", tmp_path / "pristine")
    return tmp_path / "place"


@SCALE
def test_a_manifest_changed_anywhere_ends_in_our_errors(
    place: Path, examples: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    [path] = Path("runs").glob("step-000000002.*/manifest.json")
    body = json.loads(path.read_bytes())["body"]
    number = 0

    def check(changed: Any) -> None:
        """Run the next command."""
        nonlocal number
        words = VERBS[number % len(VERBS)]
        number += 1
        path.write_bytes(sealed(changed))
        monkeypatch.setattr("sys.argv", ["ckpt", *words.split()])
        capsys.readouterr()
        code = main()
        reported = capsys.readouterr()
        assert code in CODES, (words, code, reported.err)
        assert "internal error" not in reported.err, (words, reported.err, changed)
        assert all(line.isprintable() for line in (reported.err + reported.out).split("\n")), words
        assert code != 1 or words.startswith("diff"), (words, reported.err)
        assert Path("victim").read_text() == "mine"
        assert set(os.listdir()) <= {"runs", "victim", "rank-00000.safetensors", "out"}
        assert set(os.listdir(place.parent)) == {"place", "pristine"}
        shutil.rmtree("out", ignore_errors=True)
        if not path.exists() or len(list(Path("runs").iterdir())) != 2:
            shutil.rmtree("runs")
            shutil.copytree(place.parent / "pristine", "runs")

    assert fuzz(examples, mutated(body), check) >= examples // 2
    assert number >= examples // 2


BODIES: tuple[dict[str, Any], ...] = (
    {"per_rank": {"x": {}}},
    {"per_rank": {"0": []}},
    {"per_rank": {}},
    {"tree": []},
    {"tree": None},
    {"tree": {"a": {"$": "tensor"}}},
    {"tree": {"a": {"$": "tensor", "n": ["x"]}}},
    {"tree": {"a": {"$": "tensor", "n": "nothing"}}},
    {"tree": {"a": {"$": "module", "values": 3}}},
    {"tree": {"a": {"$": "module"}}},
    {"tree": {"a": {"$": "optimizer", "groups": [3], "state": {}}}},
    {"tree": {"a": {"$": "optimizer", "groups": [{"params": [5], "values": {}}], "state": {}}}},
    {"tree": {"a": {"$": "optimizer", "groups": [{"params": ["w"], "values": [1]}], "state": {}}}},
    {"tree": {"a": {"$": "optimizer"}}},
    {"tree": {"a": {"$": "object"}}},
    {"tree": {"a": {"$": "per_rank"}}},
    {"tree": {"a": {"$": "dict", "v": [[1]]}}},
    {"tree": {"a": {"$": "dict", "v": [[{"$": "int", "v": "f" * 9_000}, 1]]}}},
    {"tree": {"a": {"$": "int", "v": "f" * 9_000}}},
    {"tree": {"a": {"$": "set", "v": [{"$": "int", "v": "f" * 9_000}]}}},
    {"tree": {"a": {"$": "device", "v": "nonsense"}}},
    {"tree": {"a": {"$": "size", "v": [1 << 62, -(1 << 62)]}}},
    {"tree": {"a": {"$": "dtype", "v": "__class__"}}},
    {"tree": {"a": {"$": "numpy", "d": "<M8", "v": ""}}},
    {"tree": {"a": {"$": "Counter", "v": [["x", "y"]]}}},
    {"metadata": {"metrics": {"loss": "x"}}},
    {"metadata": [1, {"$": "tensor"}]},
    {"created_at": 1e300},
    {"created_at": -1e300},
)  # fmt: skip


@pytest.mark.parametrize("stride", [3, *torture(1)])
@pytest.mark.parametrize("change", BODIES, ids=lambda change: json.dumps(change)[:50])
def test_a_tree_that_no_save_writes_ends_in_our_errors(
    place: Path,
    change: dict[str, Any],
    stride: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    [path] = Path("runs").glob("step-000000002.*/manifest.json")
    body = json.loads(path.read_bytes())["body"]
    path.write_bytes(sealed({**body, **change}))
    for words in VERBS[BODIES.index(change) % stride : 11 : stride]:
        monkeypatch.setattr("sys.argv", ["ckpt", *words.split()])
        code = main()
        reported = capsys.readouterr()
        assert code in CODES, (words, reported.err)
        assert "internal error" not in reported.err, (words, reported.err)

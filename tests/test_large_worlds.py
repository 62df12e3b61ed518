"""What a large world writes, at two ranks: every verb does with a manifest by reference what it does with one that has everything in it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckpt import CheckpointManager, PerRank, Tier
from ckpt.catalog.index import committed, read_manifest, read_packed
from ckpt.errors import ObjectNotFound
from ckpt.model import manifest as model
from ckpt.storage.api import StorageBackend
from ckpt.storage.registry import open_backend
from tests.checkpoints import write_checkpoint
from tests.cli.conftest import ARRAYS, TREE, Cli, cli
from tests.cli.test_finalize import DEAD, own

__all__ = ["cli"]


def write(root: str, step: int, *, arrays: Any = ARRAYS, commit: bool = True) -> None:
    write_checkpoint(
        open_backend(root), step, arrays, world_size=2, tree=TREE, metadata={"team": "speech"}, commit=commit,
        per_rank={rank: {"rng": rank} for rank in range(2)}, tied={"model/head": "model/embed"},
    )  # fmt: skip


@pytest.fixture
def roots(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """The same steps as a small and as a large world writes them."""
    for root, least in (("plain", 3), ("large", 2)):
        monkeypatch.setattr(model, "REFERENCE_FROM", least)
        for step in (100, 200, 300):
            write(root, step)
    return "plain", "large"


def test_the_manifest_put_together_is_that_of_a_small_world(roots: tuple[str, str]) -> None:
    plain, large = map(open_backend, roots)
    for ref in committed(plain):
        outline, _ = read_packed(large, ref)
        assert (outline.by_reference, outline.format) == (True, model.REFERENCE_FORMAT)
        assert not any(file.chunks for file in outline.files)
        one, two = read_manifest(plain, ref), read_manifest(large, ref)
        assert (one.tensors, one.files, one.per_rank, one.tree) == (
            two.tensors,
            two.files,
            two.per_rank,
            two.tree,
        )
        assert (outline.nbytes, outline.stored_bytes) == (one.nbytes, one.stored_bytes)


@pytest.mark.parametrize(
    "args",
    [
        ("show", "300", "--root", "{root}", "--json"),
        ("ls", "--root", "{root}", "--json"),
        ("verify", "--root", "{root}", "--all", "--json"),
        ("diff", "{root}", "--step", "200", "--step", "300", "--json"),
        ("prune", "--root", "{root}", "--keep-last", "1", "--json"),
    ],
)
def test_verbs_say_the_same_of_both(cli: Cli, roots: tuple[str, str], args: tuple[str, ...]) -> None:
    told = [cli(*(each.format(root=root) for each in args)) for root in roots]
    assert [ran.code for ran in told] == [0, 0], [ran.err for ran in told]
    assert told[0].json
    assert comparable(told[0].json) == comparable(told[1].json)


def comparable(node: Any) -> Any:
    """Without what may differ: places, seconds, the format, and the sizes of fragments and with them of folders."""
    if isinstance(node, dict):
        skipped = ("seconds", "format", "root", "checkpoint", "fragments", "bytes")
        return {key: comparable(value) for key, value in node.items() if key not in skipped}
    if isinstance(node, list):
        return [comparable(each) for each in node]
    return "root" if isinstance(node, str) and ("plain" in node or "large" in node) else node


def test_a_copy_is_byte_for_byte_and_verifies(cli: Cli, roots: tuple[str, str]) -> None:
    assert cli("copy", "large", "there", "--all").code == 0
    assert files("large") == files("there")
    assert cli("verify", "--root", "there", "--all").code == 0
    assert "0 B copied" in cli("copy", "large", "there", "--all").out
    del roots


def files(root: str) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in Path(root).rglob("step-*/*")}


def test_an_export_has_the_same_bytes(cli: Cli, roots: tuple[str, str]) -> None:
    for root in roots:
        ran = cli("export", root, f"{root}.safetensors")
        assert ran.code == 0, ran.err
    assert Path("plain.safetensors").read_bytes() == Path("large.safetensors").read_bytes()


def test_a_restore_by_the_command_line_has_the_same_files(cli: Cli, roots: tuple[str, str]) -> None:
    ran = cli("restore", "--root", "large", "--to", "here")
    assert ran.code == 0, ran.err
    assert files("here") == {key: data for key, data in files("large").items() if "300" in key}
    del roots


def test_a_commit_whose_leader_died_is_finished_with_the_same_bytes(cli: Cli, roots: tuple[str, str]) -> None:
    before = files("large")
    shutil.copytree("large", "dead")
    for path in Path("dead").glob("step-000000300*/manifest.json"):
        path.unlink()
    own(open_backend("dead"), DEAD)
    ran = cli("finalize", "dead")
    assert ran.code == 0, ran.err
    assert files("dead") == before
    del roots


@pytest.fixture
def large(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> StorageBackend:
    monkeypatch.setattr(model, "REFERENCE_FROM", 2)
    for step in (100, 200):
        write("large", step)
    del cli
    return open_backend("large")


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("harm", [flip, Path.unlink, lambda path: path.write_bytes(path.read_bytes() + b" ")])
def test_a_damaged_fragment_is_found_by_verify_and_refused_by_all_that_need_it(
    cli: Cli, large: StorageBackend, harm: Callable[[Path], object]
) -> None:
    (path,) = Path("large").glob("step-000000200*/rank-00001.json")
    harm(path)
    (data,) = Path("large").glob("step-000000200*/rank-00000.safetensors")
    flip(data)  # of a rank whose fragment is intact
    ran = cli("verify", "200", "--root", "large", "--json")
    assert ran.code == 4
    faults = [fault["file"].rsplit("/")[-1] for fault in ran.json["steps"][0]["faults"]]
    assert faults == ["rank-00001.json", "rank-00000.safetensors"]
    assert cli("export", "large", "out.safetensors", "--step", "200").code != 0
    assert cli("ls", "--root", "large").code == 0  # as it was: asks for manifests only
    ref = committed(large)[0]
    with pytest.raises((Exception, ObjectNotFound), match="rank-00001"):
        read_manifest(large, ref)


def test_a_fragment_that_is_gone_is_told_where_files_are_encoded_too(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "REFERENCE_FROM", 1)
    with CheckpointManager(Tier(str(tmp_path), codec="zstd")) as manager:
        manager.save({"x": torch.zeros(100_000)}, 1)
    (path,) = tmp_path.glob("step-*/rank-00000.json")
    path.unlink()
    ran = cli("verify", "--root", str(tmp_path), "--json")
    assert ran.code == 4, ran.err
    assert [fault["file"].rsplit("/")[-1] for fault in ran.json["steps"][0]["faults"]] == ["rank-00000.json"]


def test_a_fragment_that_is_damaged_near_is_no_loss_where_the_far_tier_is_encoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its fragments are others than those that the near manifest was merged from: it has a manifest of its own."""
    monkeypatch.setattr(model, "REFERENCE_FROM", 1)
    tiers = [Tier(str(tmp_path / "near")), Tier(str(tmp_path / "far"), codec="zstd")]
    value = torch.randn(50_000)
    with CheckpointManager(tiers) as manager:
        manager.save({"x": value, "own": PerRank(4)}, 1)
        (path,) = (tmp_path / "near").glob("step-*/rank-00000.json")
        for harm in (flip, Path.unlink):
            harm(path)
            state = {"x": torch.zeros(50_000), "own": PerRank(0)}
            report = manager.restore(state, read_through=False)
            assert report is not None
            assert (report.skipped, state["own"].value) == ((), 4)
            assert torch.equal(state["x"], value)
            assert report.tier.endswith("far")


def test_steps_of_both_kinds_lie_side_by_side(
    cli: Cli, large: StorageBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "REFERENCE_FROM", 3)
    changed = {**ARRAYS, "model/bias": np.arange(5, dtype=np.int64) + 1}
    write("large", 300, arrays=changed)
    ran = cli("diff", "large", "--step", 200, "--step", 300, "--json")
    assert ran.code == 1, ran.err
    assert "model/bias" in ran.out
    assert cli("verify", "--root", "large", "--all").code == 0
    del large


def test_without_a_fragment_it_is_no_reason_to_give_up_an_older_one(cli: Cli, roots: tuple[str, str]) -> None:
    """A large world's manifest leaves to its fragments where the tensors lie."""
    for root in roots:
        (fragment,) = Path(root).glob("step-000000300.*/rank-00001.json")
        fragment.unlink()
        assert cli("prune", "--root", root, "--keep-last", "1").code == 0
    left = [sorted({ref.step for ref in committed(open_backend(root))}) for root in roots]
    assert left[0] == [300]
    assert 200 in left[1]

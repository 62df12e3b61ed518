"""Every command that reads the fragments of a step, intact and damaged, on two ranks."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt import CheckpointManager, PerRank, Tier
from ckpt.catalog.inventory import Inventory
from ckpt.catalog.step_listing import committed, read_manifest, read_packed
from ckpt.catalog.tiered_reader import TieredReader
from ckpt.errors import FormatTooOld, ObjectNotFound
from ckpt.model.box import Box, tiling_fault
from ckpt.model.checksum import checksum
from ckpt.model.values import parse
from ckpt.pipeline.retry import RetryPolicy
from ckpt.plan.leaf import Leaf
from ckpt.storage.registry import open_backend
from ckpt.storage.testing import FaultyBackend
from tests.checkpoints import DEAD, own, write_checkpoint
from tests.cli.conftest import ARRAYS, TREE, Cli, cli

__all__ = ["cli"]


def write(root: str, step: int, *, arrays: Any = ARRAYS, commit: bool = True) -> None:
    write_checkpoint(
        open_backend(root),
        step,
        arrays,
        world_size=2,
        tree=TREE,
        metadata={"team": "speech"},
        commit=commit,
        per_rank={rank: {"rng": rank} for rank in range(2)},
        tied={"model/head": "model/embed"},
    )


@pytest.fixture
def root(cli: Cli) -> str:
    for step in (100, 200, 300):
        write("runs", step)
    del cli
    return "runs"


def test_a_manifest_says_what_is_in_its_fragments_only_by_layouts(root: str) -> None:
    backend = open_backend(root)
    for ref in committed(backend):
        stored, _ = read_packed(backend, ref)
        whole = read_manifest(backend, ref)
        assert (stored.is_filled, whole.is_filled) == (False, True)
        assert not any(file.chunks for file in stored.files)
        assert not any(tensor.shards for tensor in stored.tensors)
        assert all(file.chunks for file in whole.files)
        assert {rank: parse(raw) for rank, raw in whole.per_rank.items()} == {
            "0": {"rng": 0},
            "1": {"rng": 1},
        }
        for tensor in whole.tensors:
            assert tiling_fault(tensor.shape, [shard.box for shard in tensor.shards]) is None
        assert (stored.nbytes, stored.stored_bytes) == (whole.nbytes, whole.stored_bytes)


def test_listing_steps_reads_no_fragment(root: str) -> None:
    backend = FaultyBackend(open_backend(root))
    assert [held.ref.step for held in Inventory(backend, for_display=True).look()] == [
        300,
        200,
        100,
    ]
    read = {call.key.rpartition("/")[2] for call in backend.calls if call.verb == "read_into"}
    assert read == {"manifest.json"}


def test_a_restore_of_one_rank_reads_its_fragment_once(tmp_path: Path) -> None:
    with CheckpointManager(str(tmp_path)) as manager:
        manager.save({"x": torch.ones(9), "own": PerRank(4)}, 1)
    ref = committed(open_backend(str(tmp_path)))[0]
    backend = FaultyBackend(open_backend(str(tmp_path)))
    reader = TieredReader([backend], ref, retry=RetryPolicy())
    found = reader.manifest()
    assert parse(found.manifest.per_rank["0"]) == {"own": 4}
    filled = reader.with_fragments(found, [Leaf("x", "float32", (9,), (Box.whole((9,)),))])
    assert filled.manifest.tensors[0].shards
    requests = [(call.verb, call.key.rpartition("/")[2]) for call in backend.calls]
    assert requests == [
        (verb, name)
        for name in ("manifest.json", "rank-00000.json")
        for verb in ("head", "read_into")
    ]


def test_show_tells_of_everything_that_is_in_the_fragments(cli: Cli, root: str) -> None:
    reported = cli("show", "300", "--root", root, "--json")
    assert reported.code == 0, reported.err
    found = {tensor["name"]: tensor for tensor in reported.json["tensors"]}
    assert set(found) == set(ARRAYS)
    assert reported.json["per_rank"] == {"0": {"rng": 0}, "1": {"rng": 1}}
    assert all(tensor["shards"] for tensor in found.values())
    assert all(file["chunks"] for file in reported.json["files"])


def test_a_copy_is_byte_for_byte_and_verifies(cli: Cli, root: str) -> None:
    assert cli("copy", "runs", "there", "--all").code == 0
    assert files("runs") == files("there")
    assert cli("verify", "--root", "there", "--all").code == 0
    assert "0 B copied" in cli("copy", "runs", "there", "--all").out
    del root


def files(root: str) -> dict[str, bytes]:
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in Path(root).rglob("step-*/*")
    }


def test_a_restore_by_the_command_line_has_the_same_files(cli: Cli, root: str) -> None:
    ran = cli("restore", "--root", "runs", "--to", "here")
    assert ran.code == 0, ran.err
    assert files("here") == {key: data for key, data in files("runs").items() if "300" in key}
    del root


def test_a_commit_whose_leader_died_is_finished_with_the_same_bytes(cli: Cli, root: str) -> None:
    before = files("runs")
    shutil.copytree("runs", "dead")
    for path in Path("dead").glob("step-000000300*/manifest.json"):
        path.unlink()
    own(open_backend("dead"), DEAD)
    ran = cli("finalize", "dead")
    assert ran.code == 0, ran.err
    assert files("dead") == before
    del root


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "harm", [flip, Path.unlink, lambda path: path.write_bytes(path.read_bytes() + b" ")]
)
def test_a_damaged_fragment_is_found_by_verify_and_refused_by_all_that_need_it(
    cli: Cli, root: str, harm: Callable[[Path], object]
) -> None:
    (path,) = Path("runs").glob("step-000000200*/rank-00001.json")
    harm(path)
    (data,) = Path("runs").glob("step-000000200*/rank-00000.safetensors")
    flip(data)  # of a rank whose fragment is intact
    ran = cli("verify", "200", "--root", "runs", "--json")
    assert ran.code == 4
    faults = [fault["file"].rsplit("/")[-1] for fault in ran.json["steps"][0]["faults"]]
    assert faults == ["rank-00001.json", "rank-00000.safetensors"]
    assert cli("export", "runs", "out.safetensors", "--step", "200").code != 0
    assert cli("ls", "--root", "runs").code == 0  # unchanged: it asks for manifests only
    large = open_backend(root)
    ref = next(ref for ref in committed(large) if ref.step == 200)
    with pytest.raises((Exception, ObjectNotFound), match="rank-00001"):
        read_manifest(large, ref)


def test_a_fragment_that_is_gone_is_told_where_files_are_encoded_too(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with CheckpointManager(Tier(str(tmp_path), codec="zstd")) as manager:
        manager.save({"x": torch.zeros(100_000)}, 1)
    (path,) = tmp_path.glob("step-*/rank-00000.json")
    path.unlink()
    ran = cli("verify", "--root", str(tmp_path), "--json")
    assert ran.code == 4, ran.err
    assert [fault["file"].rsplit("/")[-1] for fault in ran.json["steps"][0]["faults"]] == [
        "rank-00000.json"
    ]


def test_a_fragment_that_is_damaged_near_is_no_loss_where_the_far_tier_is_encoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its fragments differ from those that the near manifest was merged from, since it has a
    manifest of its own.
    """
    tiers = [Tier(str(tmp_path / "near")), Tier(str(tmp_path / "far"), codec="zstd")]
    value = torch.randn(50_000)
    with CheckpointManager(tiers) as manager:
        manager.save({"x": value, "own": PerRank(4)}, 1)
        (path,) = (tmp_path / "near").glob("step-*/rank-00000.json")
        for harm in (flip, Path.unlink):
            harm(path)
            state: dict[str, Any] = {"x": torch.zeros(50_000), "own": PerRank(0)}
            report = manager.restore(state, read_through=False)
            assert report is not None
            assert (report.skipped, state["own"].value) == ((), 4)
            assert torch.equal(state["x"], value)
            assert report.tier.endswith("far")


def test_a_step_without_a_fragment_is_no_reason_to_give_up_an_older_one(
    cli: Cli, root: str
) -> None:
    (fragment,) = Path(root).glob("step-000000300.*/rank-00001.json")
    fragment.unlink()
    assert "damaged" in cli("ls", "--root", root).out
    assert cli("prune", "--root", root, "--keep-last", "1").code == 0
    assert 200 in {ref.step for ref in committed(open_backend(root))}


@pytest.mark.parametrize("version", [1, 2, 3])
def test_a_step_of_an_earlier_format_is_refused_and_stays(
    cli: Cli, root: str, version: int
) -> None:
    ref = committed(open_backend(root))[0]
    body = b'{"format":%d,"step":300}' % version
    record = b'{"checksum":"' + checksum(body).encode() + b'","body":' + body + b"}"
    (Path(root) / ref.manifest).write_bytes(record)
    ran = cli("verify", "300", "--root", root)
    assert ran.code == 4
    assert f"has format {version}, this ckpt reads format 4" in ran.err
    with CheckpointManager(root) as manager, pytest.raises(FormatTooOld):
        manager.restore({})
    assert cli("prune", "--root", root, "--keep-last", "1").code == 0
    assert (Path(root) / ref.manifest).read_bytes() == record

"""Files that are odd, or whose tables are wrong.

An import reads them, or refuses them in one sentence. Nothing is an internal error.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import subprocess
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ckpt import CheckpointManager
from tests.cli.conftest import Cli

ONE = torch.ones(2)
MODEL = {"w": ONE}


def nested() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it is a prototype
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


def optimizer(groups: list[Any], state: dict[Any, Any] | None = None) -> dict[str, Any]:
    return {"model": MODEL, "odd": {"state": state or {}, "param_groups": groups}}


@pytest.mark.parametrize(
    ("state", "becomes"),
    [
        (optimizer([]), "dict"),
        (optimizer([{"params": 5}]), "dict"),
        (optimizer([{"params": [0]}, {"params": [0]}]), "dict"),
        (optimizer([{"params": [0]}], {0: 3}), "dict"),
        (optimizer([{"params": [0], "param_names": 5}]), "dict"),
        (optimizer([{"params": [0], "param_names": [5]}]), "dict"),
        ({"odd": [ONE, ONE]}, "list"),
    ],
)
def test_what_only_looks_like_an_optimizer_is_kept_as_it_is(
    cli: Cli, state: dict[str, Any], becomes: str
) -> None:
    torch.save(state, "c.pt")
    ran = cli("import", "c.pt", "runs", "--step", 1, "--json")
    assert ran.code == 0, ran.err
    assert ran.json["names"]["odd"] == becomes


def test_a_folder_with_one_tensor_in_a_file_is_that_file(cli: Cli) -> None:
    os.mkdir("c")
    torch.save(ONE, "c/x.pt")
    pairs = (("c/x.pt", "one"), ("c", "two"))
    names = [cli("import", *pair, "--step", 1, "--json").json["names"] for pair in pairs]
    assert names == [{"model": "module of 1 entries"}] * 2  # as "value"


def test_two_files_of_one_stem_are_both_there(cli: Cli) -> None:
    os.mkdir("c")
    for name in ("x.pt", "x.bin"):
        torch.save(MODEL, f"c/{name}")
    assert set(cli("import", "c", "runs", "--step", 1, "--json").json["names"]) == {"x.pt", "x.bin"}


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ({1: ONE}, "'1' is a key of type int"),
        ({1: ONE, "model": MODEL}, "'1' is a key of type int"),
        ({"model": {"w": torch.eye(2).to_sparse()}}, "sparse"),
        ({"model": {"w": torch.ones(2, 2, device="meta")}}, "meta device"),
        ({"model": {"w": nested()}}, "nested"),
        (optimizer([{"params": [0]}]) | {"model": {"w": torch.eye(2).to_sparse()}}, "sparse"),
    ],
)
def test_what_a_checkpoint_does_not_hold_is_named(
    cli: Cli, state: dict[Any, Any], expected: str
) -> None:
    torch.save(state, "c.pt")
    ran = cli("import", "c.pt", "runs", "--step", 1)
    assert ran.code == 8, ran.err
    assert expected in ran.err
    assert ran.err.count("\n") == 1


def test_an_index_that_cannot_be_read_is_told(cli: Cli) -> None:
    os.mkdir("c")
    torch.save(MODEL, "c/a.bin")
    os.symlink("nowhere", "c/pytorch_model.bin.index.json")
    ran = cli("import", "c", "runs", "--step", 1)
    assert ran.code == 2
    assert "pytorch_model.bin.index.json cannot be read" in ran.err


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_two_files_with_a_tensor_of_one_name_are_not_one_state(cli: Cli, suffix: str) -> None:
    os.mkdir("c")
    names = [f"model.{suffix}", f"model_ema.{suffix}"]
    for number, name in enumerate(names):
        tensors = {"a.w": ONE + number, f"b{number}": ONE.clone()}
        if suffix == "bin":
            torch.save(tensors, f"c/{name}")
        else:
            save_file(tensors, f"c/{name}")
    if suffix == "bin":  # Only an index makes these files one state
        table = {f"b{number}": name for number, name in enumerate(names)}
        Path("c/pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": table}))
    ran = cli("import", "c", "runs", "--step", 1)
    assert ran.code == 2
    assert all(name in ran.err for name in (*names, "'a.w'", "name the one file"))
    assert cli("import", f"c/{names[0]}", "runs", "--step", 1).code == 0


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_two_indexes_are_not_one_state(cli: Cli, suffix: str) -> None:
    os.mkdir("c")
    for name in ("model", "ema"):
        if suffix == "bin":
            torch.save(MODEL, f"c/{name}.bin")
        else:
            save_file(MODEL, f"c/{name}.safetensors")
        table = {"weight_map": dict.fromkeys(MODEL, f"{name}.{suffix}")}
        Path(f"c/{name}.{suffix}.index.json").write_text(json.dumps(table))
    ran = cli("import", "c", "runs", "--step", 1)
    assert ran.code == 2
    assert f"ema.{suffix}.index.json, model.{suffix}.index.json" in ran.err


# -- wrong tables of torch.distributed.checkpoint --------------------------------------------------


def sized(size: Any) -> Callable[[Any], None]:
    def change(table: Any) -> None:
        table.state_dict_metadata["m.w"].size = size

    return change


def placed(paths: Any) -> Callable[[Any], None]:
    def change(table: Any) -> None:
        table.planner_data = paths

    return change


def kept(**where: Any) -> Callable[[Any], None]:
    def change(table: Any) -> None:
        for place in table.storage_data.values():
            for name, value in where.items():
                setattr(place, name, value)

    return change


LIES: dict[str, tuple[Callable[[Any], None], int]] = {
    "as large as no disk": (sized(torch.Size([2**50])), 4),
    "larger than a number": (sized(torch.Size([2**62])), 4),
    "less than nothing": (sized([-5]), 4),
    "no number": (sized(["x"]), 4),
    "no paths": (placed(5), 4),
    "a path that is none": (placed({"m.w": 7}), 4),
    "a value in a tensor": (placed({"m.w": ("m",), "n": ("m", "w")}), 4),
    "a tensor over a dict": (placed({"n": ("m", "w"), "m.w": ("m",)}), 4),
    "a path without end": (placed({"m.w": ("a",) * 5000}), 4),
    "two values of one name": (placed({"m.w": (1,), "n": ("1",)}), 4),
    "no end": (sized([float("inf")]), 4),
    "nothing, of no shape": (sized(torch.Size([0, 2**62, 2**62])), 4),
    "a folder": (kept(relative_path="folder"), 2),
    "a file of no name": (kept(relative_path="a\0b"), 4),
    "before the file": (kept(offset=-1), 4),
    "behind the file": (kept(offset=1 << 70), 4),
    "less than no bytes": (kept(length=-1), 4),
    "more bytes than memory": (kept(length=1 << 62), 4),
    "more bytes than a number": (kept(length=1 << 70), 4),
}


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("lie", LIES)
def test_a_table_that_lies_is_found_out(cli: Cli, lie: str) -> None:
    dcp.save({"m": {"w": torch.ones(1000)}, "n": 3}, checkpoint_id="c", no_dist=True)
    os.mkdir("c/folder")
    change, code = LIES[lie]
    table = pickle.loads(Path("c/.metadata").read_bytes())
    change(table)
    Path("c/.metadata").write_bytes(pickle.dumps(table, protocol=4))
    ran = cli("import", "c", "runs", "--step", 1)
    assert ran.code == code, ran.err
    assert ran.err.count("\n") == 1
    assert "internal error" not in ran.err
    assert not Path("runs").exists()


def write_parts(parts: dict[tuple[int, ...], torch.Tensor]) -> None:
    """Write a folder of torch.distributed.checkpoint with the tensor "w" of four elements, which
    has these parts by their offsets.
    """
    os.mkdir("c")
    places: dict[MetadataIndex, _StorageInfo] = {}
    for number, (offsets, part) in enumerate(parts.items()):
        buffer = io.BytesIO()
        torch.save(part, buffer)
        Path(f"c/__{number}_0.distcp").write_bytes(buffer.getvalue())
        index = MetadataIndex("w", torch.Size(offsets), number)
        places[index] = _StorageInfo(f"__{number}_0.distcp", 0, len(buffer.getvalue()))
    kind = TensorStorageMetadata(TensorProperties(dtype=ONE.dtype), torch.Size([4]), [])
    Path("c/.metadata").write_bytes(pickle.dumps(Metadata({"w": kind}, {"w": ("w",)}, places)))


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ({(0,): ONE, (1,): ONE}, "boxes overlap at (1,)"),
        ({(0,): ONE, (1,): torch.ones(3)}, "boxes overlap at (1,)"),
        ({(0,): ONE, (3,): torch.ones(1)}, "1 of 4 elements are in no box"),
        ({(0,): ONE, (3,): ONE}, "outside of it"),
        ({(0, 0): torch.ones(4)}, "outside of it"),
        ({(0,): ONE, (2,): ONE.to_sparse()}, "is not what the table of contents says"),
        ({(0,): ONE, (2,): ONE.to("meta")}, "is not what the table of contents says"),
    ],
)
def test_parts_that_do_not_make_a_tensor_are_refused(
    cli: Cli, parts: dict[tuple[int, ...], torch.Tensor], expected: str
) -> None:
    write_parts(parts)
    ran = cli("import", "c", "runs", "--step", 1)
    assert ran.code == 4, ran.err
    assert ran.err.count("\n") == 1
    assert expected in ran.err
    assert not Path("runs").exists()


def test_a_disk_without_room_for_the_tensors_is_told(cli: Cli, tmp_path: Path) -> None:
    if shutil.which("mount") is None:
        pytest.skip("no mount here")
    dcp.save({"m": {"w": torch.ones(1 << 19)}}, checkpoint_id="c", no_dist=True)
    os.mkdir("small")
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "t", "small"], check=False, capture_output=True
    )
    if done.returncode:
        pytest.skip(
            f"NOT TESTED, mounting a tmpfs is not permitted here: {done.stderr.decode().strip()}"
        )
    try:
        ran = cli("import", "c", "small/runs", "--step", 1)
        assert ran.code == 3, ran.err
        assert "no space left" in ran.err
    finally:
        subprocess.run(["umount", "-l", "small"], check=True)


# -- what an import leaves aside -------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_files_that_an_import_does_not_take_are_named(
    cli: Cli, caplog: pytest.LogCaptureFixture
) -> None:
    """Megatron writes ``common.pt`` beside the table of contents, and Lightning ``meta.pt``."""
    dcp.save({"model": MODEL}, checkpoint_id="c", no_dist=True)
    torch.save({"iteration": 7}, "c/common.pt")
    os.mkdir("c/logs")
    with caplog.at_level("INFO", logger="ckpt"):
        ran = cli("import", "c", "runs", "--step", 1)
    assert ran.code == 0, ran.err
    assert "warning: not taken from c: common.pt, logs" in ran.err
    assert "does not take common.pt, logs" in caplog.text
    ran = cli("import", "c", "runs", "--step", 2, "--json")
    assert ran.json["left_aside"] == ["common.pt", "logs"]


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_a_folder_whose_state_is_in_subfolders_is_refused(cli: Cli) -> None:
    """FSDP under accelerate: the files beside the subfolders are not the state."""
    for name in ("optimizer_0", "pytorch_model_fsdp_0"):
        dcp.save({"model": MODEL}, checkpoint_id=f"c/{name}", no_dist=True)
    for others in ((), ("scheduler.bin",)):
        for name in others:
            torch.save({"last_epoch": 3}, f"c/{name}")
        ran = cli("import", "c", "runs", "--step", 1)
        assert ran.code == 2
        assert "name the one that you need, such as c/pytorch_model_fsdp_0" in ran.err
    assert cli("import", "c/pytorch_model_fsdp_0", "runs", "--step", 1).code == 0


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_a_folder_of_accelerate_that_has_only_subfolders_is_read(cli: Cli) -> None:
    """accelerate writes no file of torch beside them if there is no scheduler."""
    for name, kind in (("optimizer_0", "optimizer"), ("pytorch_model_fsdp_0", "model")):
        dcp.save({kind: MODEL}, checkpoint_id=f"c/{name}", no_dist=True)
    torch.save({"step": 5}, "c/random_states_0.pkl")
    ran = cli("import", "c", "runs", "--step", 1)
    assert ran.code == 0, ran.err
    assert "from accelerate" in ran.out
    state: dict[str, Any] = {"model": {"w": torch.zeros_like(ONE)}, "accelerate": {}}
    with CheckpointManager("runs") as manager:
        manager.restore(state, only=["model", "accelerate"])
    assert torch.equal(state["model"]["w"], MODEL["w"])
    assert state["accelerate"]["step"] == 5


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_an_empty_source_is_refused(cli: Cli) -> None:
    torch.save({}, "c.pt")
    save_file({}, "c.safetensors")
    dcp.save({}, checkpoint_id="c", no_dist=True)
    for source in ("c.pt", "c.safetensors", "c"):
        ran = cli("import", source, "runs", "--step", 1)
        assert ran.code == 2, ran.out
        assert f"{source} is empty" in ran.err
        assert not Path("runs").exists()

"""Folders of torchsnapshot are imported and adopted as torchsnapshot itself reads them."""

from __future__ import annotations

import json
import math
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt import Tier
from ckpt.errors import (
    CkptError,
    ConfigError,
    ForeignFileMismatch,
    IntegrityError,
    UnsupportedValue,
)
from ckpt.exchange.foreign.foreign_objects import ImportReport
from ckpt.exchange.foreign.imports import ForeignCheckpoint, import_checkpoint
from ckpt.exchange.foreign.torchsnapshot_reader import TABLE
from tests.exchange.foreign.adopted import adopted, check
from tests.exchange.states import same, trained
from tests.kit.open_files import few_open_files
from tests.kit.worlds import world

torchsnapshot = pytest.importorskip("torchsnapshot")

TENSORS = {
    "c64": torch.randn(3).to(torch.complex64),
    "bf16": torch.randn(4, 4).to(torch.bfloat16),
    "bool": torch.tensor([True, False, True]),
    "zero": torch.tensor(7),
    "turned": torch.arange(12.0).reshape(3, 4).t(),
    "long": torch.arange(40.0).reshape(20, 2),
}
PLAIN = {
    "count": 1 << 80,
    "rate": 0.1,
    "infinite": -math.inf,
    "flag": True,
    "text": "naïve \u2713",
    "raw": b"\x00\xff",
    "nothing": None,
    "pair": (1, [2, 3.5]),
    "list": [1, {"x": 2}, []],
    "dict": {3: "three", "a/b%2F": 4, "none": {}},
}


def imported(folder: Path, root: Path, step: int = 7) -> ImportReport:
    return import_checkpoint(ForeignCheckpoint(path=str(folder)), Tier(str(root)), step)


MOVES: list[Callable[..., ImportReport]] = [imported, adopted]


@pytest.fixture(scope="module")
def taken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A snapshot in which a tensor of more than 100 bytes is in chunks."""
    net, optimizer = trained()
    other = torchsnapshot.StateDict(tensors=TENSORS, **PLAIN)
    state = {"model": net, "optimizer": optimizer, "other": other}
    place = tmp_path_factory.mktemp("torchsnapshot") / "taken"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHSNAPSHOT_MAX_CHUNK_SIZE_BYTES_OVERRIDE", "100")
        torchsnapshot.Snapshot.take(str(place), state)
    return place


@pytest.fixture
def folder(taken: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(taken, tmp_path / "taken"))


def entries(folder: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((folder / TABLE).read_text())["manifest"]
    return manifest


def change(folder: Path, name: str, **fields: Any) -> None:
    table = json.loads((folder / TABLE).read_text())
    table["manifest"][name] |= fields
    (folder / TABLE).write_text(json.dumps(table))


@pytest.mark.parametrize("move", MOVES)
def test_a_snapshot_restores_as_torchsnapshot_restores_it(
    folder: Path, tmp_path: Path, move: Callable[..., ImportReport]
) -> None:
    kinds = {entry["type"] for entry in entries(folder).values()}
    assert {"Tensor", "ChunkedTensor", "object", "dict", "list", "int", "float"} <= kinds
    assert any(entry.get("byte_range") for entry in entries(folder).values())
    report = move(folder, tmp_path / "run")
    assert report.kind == "torchsnapshot"
    assert report.leftovers == []
    other = torchsnapshot.StateDict(
        tensors={name: torch.zeros_like(value) for name, value in TENSORS.items()},
        **dict.fromkeys(PLAIN),
    )
    torchsnapshot.Snapshot(str(folder)).restore({"other": other})
    read = ckpt.load(str(tmp_path / "run"), "other")
    assert same(read.pop("tensors"), {**TENSORS, "turned": TENSORS["turned"].contiguous()})
    assert same(read, PLAIN)
    assert {name: other[name] for name in PLAIN if name != "dict"} == {
        name: value for name, value in PLAIN.items() if name != "dict"
    }
    check(tmp_path / "run", other=None)


def test_an_adopted_snapshot_copies_no_large_tensor(folder: Path, tmp_path: Path) -> None:
    report = adopted(folder, tmp_path / "run")
    assert report.copied_bytes < 200
    assert report.nbytes > 20 * report.copied_bytes


@pytest.mark.parametrize("move", MOVES)
def test_sharded_and_replicated_values_of_two_ranks_become_whole(
    tmp_path: Path, move: Callable[..., ImportReport]
) -> None:
    world(2, Path(__file__).with_name("torchsnapshot_ranks.py"), tmp_path / "taken")
    report = move(tmp_path / "taken", tmp_path / "run")
    assert any("each rank has written 'progress/rank'" in note for note in report.notes)
    assert torch.equal(
        ckpt.load(str(tmp_path / "run"), "tables")["table"], torch.arange(60.0).reshape(10, 6)
    )
    progress = ckpt.load(str(tmp_path / "run"), "progress")
    assert (progress["rank"], progress["step"]) == (0, 7)
    assert [progress[f"of_{rank}"].tolist() for rank in range(2)] == [[0] * 3, [1] * 3]
    check(tmp_path / "run", tables={"table": torch.zeros(10, 6)}, progress=None)


@pytest.mark.parametrize("move", MOVES)
def test_a_snapshot_may_have_more_files_than_a_process_may_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, move: Callable[..., ImportReport]
) -> None:
    monkeypatch.setenv("TORCHSNAPSHOT_DISABLE_BATCHING", "1")
    values = torchsnapshot.StateDict(**{f"w{n}": torch.full((2,), n) for n in range(80)})
    torchsnapshot.Snapshot.take(str(tmp_path / "taken"), {"values": values})
    assert len(list(tmp_path.glob("taken/0/values/*"))) == 80
    with few_open_files():
        move(tmp_path / "taken", tmp_path / "run")
    assert ckpt.load(str(tmp_path / "run"), "values")["w79"].tolist() == [79, 79]


class Pickled:
    """A class that only pickle could load."""


def test_what_only_pickle_could_load_is_refused_by_name(tmp_path: Path) -> None:
    values = torchsnapshot.StateDict(good=1, bad=Pickled())
    torchsnapshot.Snapshot.take(str(tmp_path / "taken"), {"values": values})
    for move in MOVES:
        with pytest.raises(UnsupportedValue, match="values/bad"):
            move(tmp_path / "taken", tmp_path / "run")
    assert not (tmp_path / "run").exists() or not list((tmp_path / "run").glob("step-*"))


def test_a_quantized_tensor_is_refused_by_name(tmp_path: Path) -> None:
    with warnings.catch_warnings(action="ignore"):
        tensor = torch.quantize_per_tensor(torch.randn(4), 0.1, 0, torch.qint8)
    torchsnapshot.Snapshot.take(
        str(tmp_path / "taken"), {"values": torchsnapshot.StateDict(bad=tensor)}
    )
    with pytest.raises(UnsupportedValue, match="'values/bad'"):
        adopted(tmp_path / "taken", tmp_path / "run")


WEIGHT = "0/model/embed.weight"


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize(
    ("name", "fields", "error", "words"),
    [
        ("0/other/count", {"serialized_value": "x"}, IntegrityError, "not a table"),
        ("0/other/flag", {"serialized_value": "1"}, IntegrityError, "not a table"),
        ("0/other/list", {"type": "Tensor"}, IntegrityError, "not a table"),
        ("0/other/list", {"type": "strange"}, UnsupportedValue, "strange"),
        ("0/other", {"keys": ["count"]}, IntegrityError, "other keys than it says"),
        ("0/other/tensors/bool", {"location": "../x"}, IntegrityError, "outside of itself"),
        ("0/other/tensors/bool", {"location": "/etc/passwd"}, IntegrityError, "outside of itself"),
        ("0/other/tensors/bool", {"location": "nowhere"}, IntegrityError, "nowhere is missing"),
        ("0/other/tensors/bool", {"shape": [1 << 40]}, IntegrityError, "bytes has 3 bytes"),
        ("0/other/tensors/bool", {"shape": [-1]}, IntegrityError, "dimensions"),
        ("0/other/tensors/bool", {"byte_range": [0, 4]}, IntegrityError, "has 4 bytes"),
        ("0/other/tensors/bool", {"byte_range": [1 << 40, (1 << 40) + 3]}, IntegrityError, "cut"),
        ("0/other/tensors/bool", {"dtype": "torch.qint8"}, UnsupportedValue, "tensor of qint8"),
        ("0/other/tensors/c64", {"shape": [4]}, IntegrityError, "not of the dtype and the shape"),
        ("0/other/tensors/c64", {"shape": [1 << 40]}, IntegrityError, "of 8796093022208 bytes has"),
        ("0/other/nothing", {"serializer": "strange"}, UnsupportedValue, "strange"),
    ],
)
def test_a_table_that_lies_is_one_error_and_nothing_is_written(
    folder: Path,
    tmp_path: Path,
    move: Callable[..., ImportReport],
    name: str,
    fields: dict[str, Any],
    error: type[CkptError],
    words: str,
) -> None:
    change(folder, name, **fields)
    with pytest.raises(error, match=words):
        move(folder, tmp_path / "run")
    assert not list(tmp_path.glob("run/step-*"))


def test_parts_that_do_not_make_a_tensor_are_refused(folder: Path, tmp_path: Path) -> None:
    chunks = entries(folder)["0/other/tensors/long"]["chunks"]
    change(folder, "0/other/tensors/long", chunks=chunks[:-1])
    with pytest.raises(IntegrityError, match="the parts of 'other/tensors/long' are wrong"):
        adopted(folder, tmp_path / "run")


def test_a_tensor_that_has_another_shape_on_each_rank_is_refused(
    folder: Path, tmp_path: Path
) -> None:
    table = json.loads((folder / TABLE).read_text())
    table["world_size"] = 2
    entry = table["manifest"]["0/other/tensors/bf16"]
    table["manifest"]["1/other/tensors/bf16"] = {**entry, "shape": [4, 3]}
    (folder / TABLE).write_text(json.dumps(table))
    with pytest.raises(UnsupportedValue, match=r"'other/tensors/bf16'.*another shape on each rank"):
        imported(folder, tmp_path / "run")


@pytest.mark.parametrize(
    ("name", "other"),
    [("0/other/tensors/turned", "0/other/tensors/bf16"), ("0/other/nothing", "0/other/pair")],
)
def test_values_that_share_bytes_are_refused(
    folder: Path, tmp_path: Path, name: str, other: str
) -> None:
    change(folder, name, **entries(folder)[other])
    with pytest.raises(IntegrityError, match="overlap"):
        imported(folder, tmp_path / "run")


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("", ConfigError, "is YAML"),
        ("manifest: {}", ConfigError, "is YAML"),
        ('{"manifest": ', IntegrityError, "not a table of torchsnapshot"),
        ("{" * 100_000, IntegrityError, "not a table of torchsnapshot"),
        ('{"world_size": 1, "manifest": {"1/x": {}}}', IntegrityError, "of rank 1"),
    ],
)
def test_another_table_is_refused(
    folder: Path, tmp_path: Path, text: str, error: type[CkptError], words: str
) -> None:
    (folder / TABLE).write_text(text)
    with pytest.raises(error, match=words):
        adopted(folder, tmp_path / "run")


def test_an_adopted_snapshot_that_changes_is_told(folder: Path, tmp_path: Path) -> None:
    adopted(folder, tmp_path / "run")
    [slab] = (folder / "batched").iterdir()
    data = bytearray(slab.read_bytes())
    data[-1] ^= 1
    slab.write_bytes(data)
    with pytest.raises(ForeignFileMismatch, match=slab.name):
        ckpt.load(str(tmp_path / "run"))


def test_the_folder_above_names_the_way(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="snapshots of torchsnapshot in it: name one of them"):
        adopted(tmp_path, tmp_path.with_name("run"))

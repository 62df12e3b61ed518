from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from ckpt import CheckpointManager
from ckpt.catalog.tensor_reader import StepReader
from ckpt.exchange.exports import export as module
from ckpt.pipeline.workers import Workers
from ckpt.storage.api import StorageBackend
from tests.checkpoints import write_checkpoint
from tests.cli.conftest import ARRAYS, Cli, flip
from tests.exchange.states import Net, odd_state, same, trained
from tests.kit.disks import mount

__all__ = ["mount"]

ODD = odd_state()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Step 5 holds a trained model and optimizer, and values of all odd kinds."""
    root = tmp_path_factory.mktemp("saved")
    net, optimizer = trained()
    with CheckpointManager(root, chunk_size=64) as manager:
        manager.save({"model": net, "optimizer": optimizer, **ODD}, step=5)
    return root


def notes(found: Any, kind: str) -> dict[str, str]:
    return {note["name"]: note["why"] for note in found[kind]}


# -- safetensors -----------------------------------------------------------------------------------


def test_safetensors_loads_what_was_saved(cli: Cli, saved: Path) -> None:
    ran = cli("export", saved, "out.safetensors", "--json")
    assert ran.code == 0, ran.err
    loaded = load_file("out.safetensors")
    net, _ = trained()
    for name, value in net.state_dict().items():
        if name != "head.weight":
            assert same(loaded[f"model/{name}"], value), name
    for name, value in ODD["tensors"].items():
        key = "tensors/" + name.replace("~", "~0").replace("/", "~1")
        assert same(loaded[key], torch.view_as_real(value) if name == "c128" else value), name
    assert same(loaded["array"], torch.from_numpy(ODD["array"]))
    assert same(loaded["listed/1"], ODD["listed"][1])
    assert notes(ran.json, "changed") == {
        "tensors/c128": "complex128: F64 with one more dimension now"
    }
    left = notes(ran.json, "left_out")
    assert {"epoch", "flags/a", "optimizer/param_groups", "model/head.weight"} <= left.keys()


def test_a_file_url_is_the_path_that_it_names(cli: Cli, saved: Path, tmp_path: Path) -> None:
    ran = cli("export", saved, f"file://{tmp_path}/my%20out.safetensors", "--json")
    assert ran.code == 0, ran.err
    assert load_file(tmp_path / "my out.safetensors")
    assert not Path("file:").exists()


def test_a_list_of_tensors_is_not_said_to_be_left_out(cli: Cli, tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "run") as manager:
        state = {"list": [torch.ones(2), torch.zeros(3)], "mixed": [torch.ones(2), 3]}
        manager.save(state, 1)
    ran = cli("export", tmp_path / "run", "out.safetensors", "--json")
    assert load_file("out.safetensors").keys() == {"list/0", "list/1", "mixed/0"}
    assert "list" not in notes(ran.json, "left_out")
    assert "mixed" in notes(ran.json, "left_out")


def test_a_model_alone_loads_into_a_model_with_tied_weights(cli: Cli, saved: Path) -> None:
    args = ("--name", "model/*", "--strip", "model/")
    ran = cli("export", saved, "net.safetensors", *args, "--json")
    net, _ = trained(seed=1)
    assert load_model(net, "net.safetensors") == (set(), [])
    assert same(dict(net.state_dict()), dict(trained()[0].state_dict()))
    assert list(notes(ran.json, "left_out")) == ["model/head.weight"]
    with safe_open("net.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "embed.weight"}


def test_shards_have_an_index_as_hugging_face_has_it(cli: Cli, saved: Path) -> None:
    ran = cli("export", saved, "hf", "--format", "safetensors", "--max-shard-size", "300", "--json")
    assert ran.code == 0
    index = json.loads(Path("hf/model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files == [
        f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)
    ]
    assert sorted(os.listdir("hf")) == [*files, "model.safetensors.index.json"]
    shards = {name: load_file(f"hf/{name}") for name in files}
    cli("export", saved, "one.safetensors")
    whole = load_file("one.safetensors")
    assert {name: file for file, shard in shards.items() for name in shard} == index["weight_map"]
    assert all(same(shards[file][name], whole[name]) for name, file in index["weight_map"].items())
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in whole.values())
    sizes = [[value.nbytes for value in shard.values()] for shard in shards.values()]
    assert all(sum(each) <= 300 or len(each) == 1 for each in sizes)


def test_what_is_small_needs_no_index(cli: Cli, saved: Path) -> None:
    assert cli("export", saved, "hf", "--format", "safetensors").code == 0
    assert os.listdir("hf") == ["model.safetensors"]


def test_tensors_of_several_ranks_are_whole(cli: Cli, backend: StorageBackend) -> None:
    write_checkpoint(backend, 1, ARRAYS, world_size=3, tied={"model/head": "model/embed"})
    assert cli("export", "runs", "x.safetensors").code == 0
    loaded = load_file("x.safetensors")
    assert {name: value.numpy().tobytes() for name, value in loaded.items()} == {
        name: value.tobytes() for name, value in ARRAYS.items()
    }


def test_a_large_tensor_is_read_in_parts(backend: StorageBackend) -> None:
    array = np.arange(40_000, dtype=np.float32).reshape(100, 400)
    written = write_checkpoint(
        backend, 1, {"x": array, "y": array[:1], "z": array[:1]}, world_size=2
    )
    with Workers("test", 2) as workers:
        reader = StepReader(backend, written.ref, written.manifest, workers)
        pieces = [
            (piece.tensor.name, piece.offset, bytes(piece.data))
            for piece in reader.stream(written.manifest.tensors, most_bytes=5000)
        ]
    assert max(len(data) for _, _, data in pieces) <= 5000
    assert b"".join(data for name, _, data in pieces if name == "x") == array.tobytes()
    assert [name for name, _, _ in pieces[-2:]] == ["y", "z"]
    offsets = [offset for name, offset, _ in pieces if name == "x"]
    assert offsets == list(np.cumsum([0, *(len(d) for n, _, d in pieces if n == "x")])[:-1])


# -- torch -----------------------------------------------------------------------------------------


def test_torch_loads_the_nested_state_without_pickle(cli: Cli, saved: Path) -> None:
    ran = cli("export", saved, "out.pt", "--json")
    assert ran.code == 0, ran.err
    loaded = torch.load("out.pt", weights_only=True)
    expected = {**ODD, "frozen": {1}, "np": 0.5, "array": torch.from_numpy(ODD["array"])}
    for name, value in expected.items():
        assert same(loaded[name], value), name
    assert set(notes(ran.json, "changed")) == {"frozen", "np", "array"}
    assert notes(ran.json, "left_out") == {}


def test_model_and_optimizer_load_themselves_and_train_on_alike(cli: Cli, saved: Path) -> None:
    cli("export", saved, "out.pt")
    loaded = torch.load("out.pt", weights_only=True)
    net, optimizer = trained(seed=1)
    net.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    other, other_optimizer = trained()
    optimizer.zero_grad()
    other_optimizer.zero_grad()
    for each in (net, other):
        each(torch.arange(12)).square().mean().backward()
    optimizer.step()
    other_optimizer.step()
    assert all(same(a, b) for a, b in zip(net.parameters(), other.parameters(), strict=True))
    assert loaded["model"]["head.weight"].data_ptr() == loaded["model"]["embed.weight"].data_ptr()


def test_a_state_dict_keeps_the_versions_of_its_modules(cli: Cli, backend: StorageBackend) -> None:
    state = Net().state_dict()
    with CheckpointManager(backend.url) as manager:
        manager.save({"net": state})
    assert cli("export", "runs", "out.pt").code == 0
    loaded = torch.load("out.pt", weights_only=True)
    assert same(vars(loaded["net"])["_metadata"], vars(state)["_metadata"])


def test_a_column_major_tensor_stays_one(cli: Cli, backend: StorageBackend) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.bool)
    state = {str(dtype): torch.arange(6).view(2, 3).to(dtype).t() for dtype in dtypes}
    with CheckpointManager(backend.url) as manager:
        manager.save(state)
    assert cli("export", "runs", "out.pt").code == 0
    loaded = torch.load("out.pt", weights_only=True)
    assert same(loaded, state)
    assert {each.stride() for each in loaded.values()} == {(1, 3)}


def test_each_tensor_has_a_storage_of_its_own(cli: Cli, saved: Path) -> None:
    cli("export", saved, "out.pt", "--name", "tensors/*")
    loaded = torch.load("out.pt", weights_only=True)
    assert set(loaded) == {"tensors"}
    assert all(
        value.untyped_storage().nbytes() == value.nbytes for value in loaded["tensors"].values()
    )


def test_torch_has_the_parameters_in_the_order_of_the_state(cli: Cli, tmp_path: Path) -> None:
    net = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(net.parameters())
    net.weight.requires_grad = False  # The bias takes its first step before the weight
    for _ in range(2):
        net(torch.ones(2)).sum().backward()
        optimizer.step()
        net.weight.requires_grad = True
    with CheckpointManager(tmp_path / "root") as manager:
        manager.save({"model": net, "optimizer": optimizer}, step=1)
    assert cli("export", tmp_path / "root", "out.pt").code == 0
    loaded = torch.load("out.pt", weights_only=True)
    assert list(loaded["optimizer"]["state"]) == [1, 0]


# -- dcp -------------------------------------------------------------------------------------------


def test_dcp_loads_into_a_model_and_optimizer(cli: Cli, saved: Path) -> None:
    ran = cli("export", saved, "out", "--format", "dcp", "--json")
    assert ran.code == 0, ran.err
    net, optimizer = trained(seed=1)
    model_state, optimizer_state = get_state_dict(net, optimizer)
    zeros = {name: torch.zeros_like(value) for name, value in ODD["tensors"].items()}
    state: dict[str, Any] = {
        "model": model_state,
        "optimizer": optimizer_state,
        "epoch": 0,
        "note": "",
        "pair": (),
        "tensors": zeros,
        "listed": [torch.zeros(2), torch.ones(3)],
    }
    dcp.load(state, checkpoint_id="out")
    set_state_dict(
        net, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    source, source_optimizer = trained()
    assert same(dict(net.state_dict()), dict(source.state_dict()))
    assert same(optimizer.state_dict()["state"], source_optimizer.state_dict()["state"])
    assert optimizer.param_groups[0]["lr"] == 0.01
    assert (state["epoch"], state["note"], state["pair"]) == (3, ODD["note"], ODD["pair"])
    assert same(state["tensors"], ODD["tensors"])
    assert same(state["listed"], ODD["listed"])
    assert notes(ran.json, "left_out") == {"empty": "a dict without entries"}


def test_dcp_holds_what_is_in_tuples(cli: Cli, saved: Path) -> None:
    """In DCP a tuple is one entry, with its tensors in it."""
    assert cli("export", saved, "out", "--format", "dcp").code == 0
    dcp_to_torch_save("out", "out.pt")
    loaded = torch.load("out.pt", weights_only=True)
    for name in ("tuple", "tuples", "listed", "tensors"):
        assert same(loaded[name], ODD[name]), name
    state: dict[str, Any] = {"tuple": None}
    dcp.load(state, checkpoint_id="out")
    assert same(state["tuple"], ODD["tuple"])


def test_dcp_tells_of_empty_dicts_wherever_they_are(cli: Cli) -> None:
    """In a list they leave None: DCP does not read a list with gaps."""
    listed = [{}, {"c": {}}, torch.ones(1)]
    with CheckpointManager("first") as manager:
        manager.save({"a": {"b": {}}, "list": listed, "bare": [{}, 1], "kept": ({}, [{}])}, step=1)
    ran = cli("export", "first", "out", "--format", "dcp", "--json")
    assert notes(ran.json, "left_out") == {"a.b": "a dict without entries"}
    assert notes(ran.json, "changed") == dict.fromkeys(
        ("list.0", "list.1.c", "bare.0"), "a dict without entries: None now"
    )
    dcp_to_torch_save("out", "out.pt")
    loaded = torch.load("out.pt", weights_only=True)
    assert same(
        loaded, {"list": [None, {"c": None}, torch.ones(1)], "bare": [None, 1], "kept": ({}, [{}])}
    )


def test_dcp_does_not_take_two_values_of_one_name(cli: Cli) -> None:
    with CheckpointManager("first") as manager:
        manager.save({"x": torch.ones(2), "d": {1: 2, "1": 3}}, step=1)
    ran = cli("export", "first", "out", "--format", "dcp")
    assert ran.code == 2
    assert "two values of the state would both be 'd.1' there" in ran.err
    assert sorted(os.listdir()) == ["first", "first.journal"]


def test_per_rank_values_become_a_list(cli: Cli, backend: StorageBackend) -> None:
    tree = {"rng": {"$": "per_rank"}, "count": {"$": "array", "n": "count", "d": "<f8"}}
    write_checkpoint(
        backend, 1, ARRAYS, world_size=2, tree=tree, per_rank={0: {"rng": 10}, 1: {"rng": 11}}
    )
    ran = cli("export", "runs", "out.pt", "--json")
    assert torch.load("out.pt", weights_only=True)["rng"] == [10, 11]
    assert notes(ran.json, "changed")["rng"] == "a value of each of 2 ranks: a list now"


# -- bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "code", "expected"),
    [
        (["nowhere", "x.pt"], 7, "empty, or does not exist"),
        (["{saved}", "x.pt", "--step", 7], 7, "step 7 is not there"),
        (["{saved}", "there.pt"], 2, "is there already"),
        (["{saved}", "x"], 2, "give --format"),
        (["{saved}", "s3://bucket/x.pt"], 2, "is a URL"),
        (["{saved}", "x.pt", "--name", "nothing*"], 7, "has no 'nothing*'"),
        (["{saved}", "x.safetensors", "--max-shard-size", "1GB"], 2, "is one file"),
        (["{saved}", "x.pt", "--strip", "model/"], 2, "--strip"),
        (["{saved}", "x", "--format", "dcp", "--max-shard-size", "1GB"], 2, "--max-shard-size"),
        (
            ["{saved}", "x", "--format", "safetensors", "--max-shard-size", "0.25"],
            2,
            "--max-shard-size='0.25': give a size",
        ),
        (
            ["{saved}", "x", "--format", "safetensors", "--max-shard-size", "many"],
            2,
            "such as '200GB'",
        ),
        (["{saved}", "x.safetensors", "--strip", "array"], 2, "which is not a name there"),
        (["{saved}", "there.pt/x.pt"], 3, "File exists"),
    ],
)
def test_a_wrong_call_says_what_is_wrong(
    cli: Cli, saved: Path, args: list[object], code: int, expected: str
) -> None:
    Path("there.pt").write_text("mine")
    ran = cli("export", *(str(arg).format(saved=saved) for arg in args))
    assert (ran.code, ran.out) == (code, ""), ran.err
    assert expected in ran.err
    assert ran.err.count("\n") == 1
    assert os.listdir() == ["there.pt"]
    assert Path("there.pt").read_text() == "mine"


@pytest.mark.parametrize(("out", "kind"), [("x.pt", "torch"), ("x", "dcp")])
def test_a_step_of_plain_values_is_exported(cli: Cli, out: str, kind: str) -> None:
    with CheckpointManager("plain") as manager:
        manager.save({"epoch": 3, "log": {"loss": [0.5, 0.25]}}, 1)
    ran = cli("export", "plain", out, "--format", kind)
    assert ran.code == 0, ran.err
    assert cli("import", out, "runs", "--step", 1).code == 0
    state: dict[str, Any] = {"epoch": 0, "log": None}
    with CheckpointManager("runs") as manager:
        manager.restore(state)
    assert state == {"epoch": 3, "log": {"loss": [0.5, 0.25]}}


def test_plain_values_alone_can_be_chosen(cli: Cli, saved: Path) -> None:
    with CheckpointManager("mixed") as manager:
        manager.save({"epoch": 3, "weight": torch.ones(2)}, 1)
    assert cli("export", "mixed", "x.pt", "--name", "epoch").code == 0
    assert torch.load("x.pt", weights_only=True) == {"epoch": 3}


@pytest.mark.parametrize("words", [[], ["--name", "epo*"]])
def test_safetensors_without_a_tensor_says_what_there_is(cli: Cli, words: list[str]) -> None:
    with CheckpointManager("plain") as manager:
        manager.save({"epoch": 3, **({"weight": torch.ones(2)} if words else {})}, 1)
    ran = cli("export", "plain", "x.safetensors", *words)
    assert ran.code == 2
    assert "step 1 has no tensor to export, only plain values ('epoch')" in ran.err
    assert "OUT.pt" in ran.err
    assert sorted(os.listdir()) == ["plain", "plain.journal"]


def test_a_name_that_is_not_there_is_compared_with_plain_values_too(cli: Cli) -> None:
    with CheckpointManager("plain") as manager:
        manager.save({"epoch": 3}, 1)
    ran = cli("export", "plain", "x.pt", "--name", "epochs")
    assert ran.code == 7
    assert "has no 'epochs'; it has 'epoch'" in ran.err


@pytest.mark.parametrize(
    ("out", "kind"), [("x.safetensors", "safetensors"), ("x.pt", "torch"), ("x", "dcp")]
)
def test_damage_leaves_nothing_behind(cli: Cli, saved: Path, out: str, kind: str) -> None:
    assert cli("copy", saved, "runs").code == 0
    file = next(Path("runs").glob("*/*.safetensors"))
    flip(file, file.stat().st_size - 1)
    ran = cli("export", "runs", out, "--format", kind)
    assert ran.code == 4
    assert os.listdir() == ["runs"]


@pytest.mark.parametrize(
    ("out", "kind"), [("x.safetensors", "safetensors"), ("x.pt", "torch"), ("x", "dcp")]
)
def test_an_export_that_was_cut_runs_again(cli: Cli, saved: Path, out: str, kind: str) -> None:
    """It does not touch what is left under its own name, or the name that older releases used."""
    for left in (Path(f".{out}.ckpt-partial"), Path(f".{out}.ckpt-partial-cut")):
        left.mkdir()
        (left / "out").write_text("half")
    assert cli("export", saved, out, "--format", kind).code == 0
    assert sorted(os.listdir()) == sorted([out, f".{out}.ckpt-partial", f".{out}.ckpt-partial-cut"])
    assert (left / "out").read_text() == "half"


KINDS = [("x.safetensors", "safetensors"), ("y", "safetensors"), ("x.pt", "torch"), ("x", "dcp")]


@pytest.mark.parametrize(("out", "kind"), KINDS)
def test_an_export_follows_no_link_that_was_planted(
    cli: Cli, saved: Path, out: str, kind: str
) -> None:
    """Another user of a shared folder knows the name of the output. Through a link, an export would
    overwrite other files.
    """
    victim = Path("victim")
    victim.mkdir()
    for name in ("__0_0.distcp", ".metadata", "model.safetensors"):
        (victim / name).write_text("mine")
    before = {path: path.read_text() for path in victim.iterdir()}
    Path("file").write_text("mine")
    Path(f".{out}.ckpt-partial").symlink_to(victim if "." not in out else "file")
    assert cli("export", saved, out, "--format", kind).code == 0
    assert {path: path.read_text() for path in victim.iterdir()} == before
    assert Path("file").read_text() == "mine"


def no_links(*_: object, **__: object) -> None:
    raise OSError(errno.ENOTSUP, "not supported")


def test_an_export_needs_no_hard_links(
    cli: Cli, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", no_links)
    assert cli("export", saved, "out.pt").code == 0
    assert "model" in torch.load("out.pt", weights_only=True)


@pytest.mark.parametrize("links", [True, False])
@pytest.mark.parametrize(("out", "kind"), KINDS)
def test_what_appears_during_an_export_stays(
    cli: Cli, saved: Path, out: str, kind: str, links: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("victim").write_text("mine")
    real = module._move
    if not links:
        monkeypatch.setattr(os, "link", no_links)

    def late(place: str, to: str) -> None:
        os.symlink("victim", to)
        real(place, to)

    monkeypatch.setattr(module, "_move", late)
    ran = cli("export", saved, out, "--format", kind)
    assert ran.code == 2, ran.err
    assert "is there already" in ran.err
    assert Path("victim").read_text() == "mine"
    assert sorted(os.listdir()) == sorted([out, "victim"])


@pytest.mark.parametrize("what", ["file", "link", "folder"])
@pytest.mark.parametrize("kind", ["safetensors", "dcp"])
def test_what_appears_just_before_a_folder_is_moved_stays(
    cli: Cli, saved: Path, kind: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("victim").mkdir()
    Path("victim", "note").write_text("mine")
    real, made = os.rename, Path("out").absolute()

    def late(place: str, to: str) -> None:
        if Path(to) == made and what == "link":
            made.symlink_to("victim")
        elif Path(to) == made and what == "file":
            made.write_text("mine")
        elif Path(to) == made:
            shutil.copytree("victim", made)
        real(place, to)

    monkeypatch.setattr(os, "rename", late)
    ran = cli("export", saved, "out", "--format", kind)
    assert ran.code == 2, ran.err
    assert "is there already" in ran.err
    assert (made if what == "file" else made / "note").read_text() == "mine"
    assert sorted(os.listdir()) == ["out", "victim"]


def test_a_full_disk_is_told(cli: Cli, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    ran = cli("export", saved, "x.pt")
    assert ran.code == 3
    assert "no space left" in ran.err
    assert os.listdir() == []


def test_a_disk_that_is_full_before_the_file_ends_is_told(
    cli: Cli, mount: Callable[[str], Path]
) -> None:
    place = mount("size=6m")  # It has room for the scratch file alone
    with CheckpointManager("runs") as manager:
        manager.save({"a": torch.ones(1 << 20)}, step=1)
    ran = cli("export", "runs", place / "x.pt")
    assert ran.code == 3, ran.err
    assert "no space left" in ran.err
    assert os.listdir(place) == []


def test_another_format_of_the_same_net_is_the_same_net(cli: Cli, saved: Path) -> None:
    cli("export", saved, "net.pt", "--name", "model/*")
    net = Net()
    net.load_state_dict(torch.load("net.pt", weights_only=True)["model"])
    assert same(dict(net.state_dict()), dict(trained()[0].state_dict()))


@pytest.mark.parametrize("format_name", ["torch", "dcp"])
@pytest.mark.parametrize("tree", [{"$": "int", "v": "0xff"}, {"$": "tuple", "v": []}])
def test_a_tree_that_is_not_that_of_a_state_is_damage(
    cli: Cli, backend: StorageBackend, tree: object, format_name: str
) -> None:
    write_checkpoint(backend, 1, ARRAYS, tree=tree)
    ran = cli("export", "runs", "out", "--format", format_name)
    assert ran.code
    assert "it is not that of a dict" in ran.err
    assert not Path("out").exists()

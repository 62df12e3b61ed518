"""A folder of Hugging Face has every weight once, under its name, or is not there."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from ckpt import CheckpointManager, HfFolders, Tier
from ckpt.catalog.step_listing import find
from ckpt.cli.main import main
from ckpt.errors import ConfigError
from ckpt.exchange.exports.hf_folder import HfOptions
from ckpt.exchange.scratch import scratch_folder
from ckpt.root.pins import all_pins
from ckpt.storage.registry import open_backend
from tests.cli.conftest import Cli, cli
from tests.exchange.exports.export_run import export_here
from tests.kit.damage import files, flip
from tests.kit.waiting import until
from tests.processes import fork

__all__ = ["cli"]


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.lm_head = nn.Linear(4, 8, bias=False)
        self.lm_head.weight = self.embed.weight
        self.norm = nn.LayerNorm(4)
        self.register_buffer("steps", torch.tensor(7))


@pytest.fixture
def model() -> Tiny:
    torch.manual_seed(0)
    return Tiny()


@pytest.fixture
def root(tmp_path: Path, model: Tiny) -> Path:
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save({"model": model, "optimizer": torch.optim.SGD(model.parameters())}, step=5)
    return tmp_path / "run"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    folder = tmp_path / "config"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "tiny", "dtype": "float32"}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"old weights")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    return folder


def read(folder: Path) -> dict[str, torch.Tensor]:
    values: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        values |= load_file(path)
    return values


def test_a_folder_has_weights_configuration_and_tokenizer(
    cli: Cli, root: Path, config: Path, model: Tiny
) -> None:
    ran = cli("export", root, "out", "--format", "hf", "--config", config, "--json")
    assert ran.code == 0, ran.err
    assert sorted(os.listdir("out")) == ["config.json", "model.safetensors", "tokenizer.json"]
    values = read(Path("out"))
    assert values.keys() == {"embed.weight", "norm.weight", "norm.bias", "steps"}
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in values.items())
    assert {note["name"] for note in ran.json["left_out"]} == {"model/lm_head.weight"}


def test_another_dtype_is_that_of_the_weights_and_of_the_configuration(
    cli: Cli, root: Path, config: Path, model: Tiny
) -> None:
    cli("export", root, "out", "--format", "hf", "--config", config, "--dtype", "bfloat16")
    values = read(Path("out"))
    assert torch.equal(values["embed.weight"], model.embed.weight.to(torch.bfloat16))
    assert values["steps"].dtype == torch.int64
    assert json.loads(Path("out/config.json").read_text()) == {
        "model_type": "tiny",
        "dtype": "bfloat16",
    }


def test_files_are_bounded_and_the_index_names_each_tensor_once(
    cli: Cli, root: Path, config: Path
) -> None:
    words = ["--format", "hf", "--config", config, "--max-shard-size", "100B"]
    assert cli("export", root, "out", *words).code == 0
    index = json.loads(Path("out/model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == read(Path("out")).keys()
    assert set(index["weight_map"].values()) == {
        path.name for path in Path("out").glob("*.safetensors")
    }


def test_an_attempt_is_exported_although_a_newer_one_has_its_number(
    cli: Cli, tmp_path: Path, root: Path, config: Path, model: Tiny
) -> None:
    bias, refs = model.norm.bias.detach(), {}
    with CheckpointManager(root) as manager:
        manager.save({"model": model}, step=6)
        for value in (1.0, 2.0):
            manager.restore({"model": model}, step=5, strict=False)
            bias.fill_(value)
            manager.save({"model": model}, step=6)
            refs[value] = find(open_backend(str(root)), 6)[0]
    words = ["--format", "hf", "--config", config, "--step", "6", "--attempt", refs[1.0].attempt]
    ran = cli("export", root, "out", *words, "--json")
    assert ran.json["attempt"] == refs[1.0].attempt != refs[2.0].attempt
    assert read(Path("out"))["norm.bias"][0] == 1.0
    ran = cli("export", root, "again", *words[:-2], "--attempt", "abcdefghij")
    assert ran.code == 7
    assert "step 6 has the attempts" in ran.err
    ran = cli("export", root, "again", *words[:-4], "--attempt", refs[1.0].attempt)
    assert ran.code == 2
    assert "--attempt is of a number: give --step N too" in ran.err


def test_names_are_mapped(cli: Cli, root: Path, config: Path) -> None:
    mapping: dict[str, str | None] = {
        "embed.weight": "wte.weight", "lm_head.weight": None, "norm.weight": "ln.weight",
        "norm.bias": "ln.bias", "steps": None,
    }  # fmt: skip
    Path("names.json").write_text(json.dumps(mapping))
    words = ["--format", "hf", "--config", config, "--names", "names.json"]
    assert cli("export", root, "out", *words).code == 0
    assert read(Path("out")).keys() == {"wte.weight", "ln.weight", "ln.bias"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"norm.bias": "embed.weight"}, "would both be 'embed.weight': map it to another name"),
        ({"norm.bias": "lm_head.weight"}, "would both be 'lm_head.weight': map it to another name"),
        ({"norm.bias": ...}, "the mapping of names lacks 'norm.bias'"),
        ({"nrom.bias": "x"}, "nrom.bias"),
        ({"norm.bias": 3}, "names.json gives 'norm.bias' the name 3"),
        ({"norm.bias": ""}, "names.json gives 'norm.bias' the name ''"),
        (
            {"norm.bias": ..., "model/norm.bias": "x"},
            "has 'model/norm.bias', and the part has 'norm.bias': take 'model/' off",
        ),
    ],
)
def test_a_mapping_that_does_not_fit_is_refused(
    cli: Cli, root: Path, config: Path, change: dict[str, Any], words: str
) -> None:
    names = ["embed.weight", "lm_head.weight", "norm.weight", "norm.bias", "steps"]
    mapping = {name: name for name in names} | change
    Path("names.json").write_text(
        json.dumps({name: item for name, item in mapping.items() if item is not ...})
    )
    ran = cli("export", root, "out", "--format", "hf", "--config", config, "--names", "names.json")
    assert ran.code != 0
    assert words in ran.err
    assert not os.path.exists("out")


def test_a_file_without_a_mapping_is_refused_with_an_example_of_one(
    cli: Cli, root: Path, config: Path
) -> None:
    Path("names.json").write_text('["norm.bias"]')
    ran = cli("export", root, "out", "--format", "hf", "--config", config, "--names", "names.json")
    assert ran.code == 2
    example = ran.err.partition("such as ")[2].strip()
    assert json.loads(example) == {"head.weight": "lm_head.weight"}


@pytest.mark.parametrize("names", [{"norm.bias": ""}, {"norm.bias": 3}])
def test_the_options_of_a_folder_refuse_what_is_no_name(names: Any, config: Path) -> None:
    with pytest.raises(ConfigError, match=r"^names gives 'norm.bias' the name"):
        HfOptions(files=str(config), names=names)


def test_a_number_that_the_dtype_cannot_hold_is_refused(
    cli: Cli, tmp_path: Path, config: Path, model: Tiny
) -> None:
    with torch.no_grad():
        model.norm.bias[1] = 1e6
        model.norm.weight[1] = float("inf")
    with CheckpointManager(tmp_path / "large") as manager:
        manager.save({"model": model}, step=1)
    words = ["--format", "hf", "--config", config, "--dtype"]
    ran = cli("export", tmp_path / "large", "out", *words, "float16")
    assert ran.code == 2
    assert (
        "'model/norm.bias' has a number that is too large for float16: take bfloat16 or float32"
        in ran.err
    )
    assert not os.path.exists("out")
    assert cli("export", tmp_path / "large", "out", *words, "bfloat16").code == 0


@pytest.mark.parametrize(
    ("number", "dtype", "way"),
    [(3.4e38, "bfloat16", "take float32"), (1e300, "float32", "export it in the saved dtype")],
)
def test_a_dtype_that_is_advised_can_hold_the_number(
    cli: Cli, tmp_path: Path, config: Path, number: float, dtype: str, way: str
) -> None:
    with CheckpointManager(tmp_path / "large") as manager:
        manager.save({"model": {"w": torch.tensor([number], dtype=torch.float64)}}, step=1)
    words = ["--format", "hf", "--config", config, "--dtype", dtype]
    ran = cli("export", tmp_path / "large", "out", *words)
    assert ran.err.strip().endswith(f"too large for {dtype}: {way}")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--format", "hf"], "needs --config"),
        (["--format", "hf", "--config", "nowhere"], "config.json cannot be read"),
        (["--format", "torch", "--config", "CONFIG"], "--config: only --format hf takes this"),
        (["--dtype", "float16"], "--dtype: only --format hf takes this"),
        (["--format", "hf", "--config", "CONFIG", "--dtype", "int8"], "dtype='int8'"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    cli: Cli, root: Path, config: Path, words: list[str], message: str
) -> None:
    ran = cli("export", root, "out", *(str(config) if word == "CONFIG" else word for word in words))
    assert ran.code == 2
    assert message in ran.err
    assert not os.path.exists("out")


@pytest.mark.parametrize("kind", ["hf", "dcp"])
def test_a_folder_does_not_get_the_name_of_a_file(
    cli: Cli, root: Path, config: Path, kind: str
) -> None:
    words = ["--config", config] if kind == "hf" else []
    ran = cli("export", root, "x.safetensors", "--format", kind, *words)
    assert ran.code == 2
    assert f"x.safetensors has the name of a file, and {kind} is a folder" in ran.err
    assert not os.path.exists("x.safetensors")


def test_the_folders_show_their_place_without_its_password(config: Path) -> None:
    with HfFolders("s3://user:secret@bucket/hf", config, every=3) as folders:
        assert re.fullmatch(r"HfFolders\('s3://.*bucket/hf', every=3\)", repr(folders))
    assert "secret" not in repr(folders)


def test_a_damaged_step_leaves_no_folder(cli: Cli, root: Path, config: Path) -> None:
    flip(files(root, 5)["data"])
    assert cli("export", root, "out", "--format", "hf", "--config", config).code == 4
    assert not os.path.exists("out")


def die_at(event: int, folder: Path) -> None:
    """Kill this process when it touches a file below ``folder`` for this time."""
    count = itertools.count()

    def hook(name: str, arguments: tuple[Any, ...]) -> None:
        changes = name in ("open", "os.rename", "os.mkdir", "os.rmdir", "os.remove")
        if changes and str(arguments[0]).startswith(str(folder)) and next(count) == event:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def loads(folder: Path) -> bool:
    """Return True if a program that knows the form would load the folder."""
    if not (folder / "config.json").exists():
        return False
    index = folder / "model.safetensors.index.json"
    shards = set(json.loads(index.read_text())["weight_map"].values())
    return all(load_file(folder / name) for name in shards)


def test_a_kill_at_any_file_leaves_no_half_that_loads(
    tmp_path: Path, root: Path, config: Path
) -> None:
    place, deaths = tmp_path / "hf" / "out", 0
    words = ["export", str(root), str(place), "--format", "hf", "--config", str(config)]
    words += ["--max-shard-size", "100B"]
    for event in itertools.count():

        def export(event: int = event) -> None:
            die_at(event, tmp_path / "hf")
            sys.argv = ["ckpt", *words]
            assert main() == 0

        status = os.waitstatus_to_exitcode(os.waitpid(fork(export), 0)[1])
        folders = {path.parent for path in (tmp_path / "hf").rglob("config.json")}
        if status == 0:
            break
        assert status == -signal.SIGKILL
        deaths += 1
        assert all(len(read(folder)) == 4 and loads(folder) for folder in folders)
        if place.exists():
            break  # It died after the move
        shutil.rmtree(tmp_path / "hf", ignore_errors=True)
    assert loads(place)
    assert deaths > 8


@pytest.mark.parametrize(
    "event", [4, *(pytest.param(n, marks=pytest.mark.torture) for n in range(5, 9))]
)
def test_what_a_killed_export_has_left_is_removed_by_the_next_one(
    tmp_path: Path, root: Path, config: Path, model: Tiny, event: int, monkeypatch: Any
) -> None:
    """Also what is left of another step. What a living process uses stays."""
    hf = tmp_path / "hf"

    def export(place: Path, *, dies: bool) -> None:
        if dies:
            die_at(event, hf)
        sys.argv = ["ckpt", "export", str(root), str(place), "--format", "hf"]
        sys.argv += ["--config", str(config)]
        assert main() == 0

    def leave(place: Path) -> None:
        status = os.waitpid(fork(lambda: export(place, dies=True)), 0)[1]
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL

    leave(hf / "out")
    leave(hf / "step-000000001")
    assert len(list(hf.iterdir())) == 2
    with scratch_folder(str(hf), ".out.ckpt-partial-") as room:
        assert os.waitpid(fork(lambda: export(hf / "out", dies=False)), 0)[1] == 0
        assert os.path.exists(room)
    assert sorted(os.listdir(hf))[1:] == ["out"]
    export_here(monkeypatch)
    folders = HfFolders(hf, config)
    with CheckpointManager(tmp_path / "other", observers=[folders]) as manager, folders:
        manager.save({"model": model}, 2)
    assert sorted(os.listdir(hf)) == ["out", "step-000000002"]


@pytest.mark.parametrize("process", ["here", pytest.param("new", marks=pytest.mark.torture)])
def test_a_job_makes_folders_beside_its_steps(
    tmp_path: Path, config: Path, model: Tiny, process: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if process == "here":
        export_here(monkeypatch)
    folders = HfFolders(tmp_path / "hf", config, every=2, keep_last=1, dtype="bfloat16")
    with CheckpointManager(tmp_path / "run", observers=[folders]) as manager, folders:
        for step in (1, 2, 3, 4):
            with torch.no_grad():
                model.norm.bias.add_(1)
            manager.save({"model": model}, step)
    [folder] = (tmp_path / "hf").iterdir()
    assert folder.name == "step-000000004"
    values = read(folder)
    assert torch.equal(values["norm.bias"], model.norm.bias.detach().to(torch.bfloat16))


def test_a_job_that_goes_back_replaces_the_folders_of_its_abandoned_steps(
    tmp_path: Path, config: Path, model: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    export_here(monkeypatch)
    folders = HfFolders(tmp_path / "hf", config, every=2, keep_last=1)
    bias = model.norm.bias.detach()
    with CheckpointManager(tmp_path / "run", observers=[folders]) as manager, folders:
        for step, names in ((2, [2]), (4, [4]), (6, [6])):
            manager.save({"model": model}, step)
            assert until(lambda names=names: folder_numbers(tmp_path) == names)  # type: ignore[misc]
        manager.restore({"model": model}, step=2)
        bias.fill_(9.0)
        manager.save({"model": model}, 4)
        assert until(lambda: folder_numbers(tmp_path) == [4])
    values = read(tmp_path / "hf" / "step-000000004")
    assert torch.equal(values["norm.bias"], bias)


def folder_numbers(tmp_path: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (tmp_path / "hf").glob("step-*"))


def test_a_step_stays_until_it_is_exported(
    tmp_path: Path, config: Path, model: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that exports takes seconds to begin, and the job goes on meanwhile."""
    export_here(monkeypatch)
    begin = threading.Event()
    export = HfFolders._export

    def late(self: HfFolders, step: Any) -> None:
        assert begin.wait(60)
        export(self, step)

    monkeypatch.setattr(HfFolders, "_export", late)
    folders = HfFolders(tmp_path / "hf", config, every=2)
    tier = Tier(str(tmp_path / "run"), keep_last=1)
    with CheckpointManager(tier, observers=[folders]) as manager, folders:
        manager.save({"model": model}, 2)
        backend = open_backend(tier.url)
        assert until(lambda: all_pins(backend))
        for step in (3, 5, 7):
            manager.save({"model": model}, step)
        begin.set()
    assert [path.name for path in (tmp_path / "hf").iterdir()] == ["step-000000002"]
    assert all_pins(backend) == []


def test_the_attempt_that_is_pinned_is_exported_although_its_number_was_saved_again(
    tmp_path: Path, config: Path, model: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    export_here(monkeypatch)
    begin, values = threading.Event(), list[float]()
    export = HfFolders._export

    def late(self: HfFolders, step: Any) -> None:
        assert begin.wait(60)
        export(self, step)
        values.append(read(tmp_path / "hf" / "step-000000002")["norm.bias"][0].item())

    monkeypatch.setattr(HfFolders, "_export", late)
    folders = HfFolders(tmp_path / "hf", config, every=2)
    bias, backend = model.norm.bias.detach(), open_backend(str(tmp_path / "run"))
    with CheckpointManager(tmp_path / "run", observers=[folders]) as manager, folders:
        manager.save({"model": model}, 1)
        bias.fill_(2.0)
        manager.save({"model": model}, 2)
        assert until(lambda: len(all_pins(backend)) == 1)
        manager.restore({"model": model}, step=1)
        bias.fill_(9.0)
        manager.save({"model": model}, 2)
        assert until(lambda: len(all_pins(backend)) == 2)
        begin.set()
    assert values == [2.0, 9.0]


def test_an_export_that_fails_is_a_warning(
    tmp_path: Path, config: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    export_here(monkeypatch)
    folders = HfFolders(tmp_path / "hf", config, dtype="float16")
    with CheckpointManager(tmp_path / "run", observers=[folders]) as manager, folders:
        manager.save({"model": {"weight": torch.tensor([1e30])}}, 1)
    assert "step 1 has no folder of Hugging Face: " in caplog.text
    assert list((tmp_path / "hf").iterdir()) == []


@pytest.mark.parametrize(
    "settings", [{"every": 0}, {"keep_last": 0}, {"dtype": "int8"}, {"names": "vllm"}]
)
def test_bad_settings_are_refused(config: Path, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        HfFolders("hf", config, **settings)
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        HfFolders("hf", "nowhere")

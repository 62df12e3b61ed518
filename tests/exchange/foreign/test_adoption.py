from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

from ckpt import CheckpointManager, Tier
from ckpt import load as load_state
from ckpt.catalog.step_listing import committed, read_manifest
from ckpt.errors import (
    CkptError,
    ConfigError,
    ForeignFileMismatch,
    IntegrityError,
    NoCheckpoint,
    OutOfSpace,
    StepExists,
    UnsupportedValue,
)
from ckpt.exchange.foreign.adoption import AdoptionReport, adopt_checkpoint
from ckpt.exchange.foreign.imports import ForeignCheckpoint
from ckpt.storage.registry import open_backend
from tests.exchange.folders.compare import compare
from tests.exchange.foreign.adopted import adopted, check, content, restored, save_dcp
from tests.exchange.states import same, trained
from tests.kit.open_files import few_open_files
from tests.kit.worlds import world

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")
HERE = Path(__file__).parent
FOLDERS = HERE.parent / "folders"


def test_a_folder_of_dcp_is_restored_with_its_optimizer_and_stays_as_it_was(
    tmp_path: Path,
) -> None:
    folder, root = tmp_path / "step-12", tmp_path / "runs"
    save_dcp(folder, epoch=3, big=torch.arange(1 << 20))
    before = content(folder)
    report = adopted(folder, root, None)
    assert content(folder) == before
    assert report.step == 12
    assert report.files == 1
    assert report.nbytes == (folder / "__0_0.distcp").stat().st_size
    written = sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
    assert written == report.written_bytes < report.nbytes / 50
    assert not list(root.rglob("*.safetensors"))
    check(root, epoch=0, big=torch.zeros(1 << 20, dtype=torch.int64))
    state = load_state(str(root))
    assert state["epoch"] == 3
    assert torch.equal(state["big"], torch.arange(1 << 20))


@pytest.mark.parametrize("kind", ["dcp", "safetensors"])
def test_a_folder_may_have_more_files_than_a_process_may_open(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "step-7"
    folder.mkdir()
    state = {f"w{number}": torch.full((2,), number) for number in range(80)}
    if kind == "dcp":
        writer = dcp.FileSystemWriter(folder, single_file_per_rank=False)
        dcp.save(state, storage_writer=writer, no_dist=True)
    else:
        names = {name: f"model-{name}.safetensors" for name in state}
        for name, file in names.items():
            save_file({name: state[name]}, folder / file)
        index = folder / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": names}))
    with few_open_files():
        assert adopted(folder, tmp_path / "run").files == 80
        assert load_state(str(tmp_path / "run"), "model/w79").tolist() == [79, 79]


def test_the_progress_ends_with_all_bytes_of_the_files(tmp_path: Path) -> None:
    folder, calls = tmp_path / "step-12", list[tuple[int, int]]()
    save_dcp(folder, big=torch.arange(5 << 20))
    foreign = ForeignCheckpoint(path=str(folder))
    report = adopt_checkpoint(
        foreign, Tier(str(tmp_path / "runs")), on_progress=lambda *call: calls.append(call)
    )
    assert calls[-1] == (report.nbytes, report.nbytes)
    assert [count for count, _ in calls] == sorted({count for count, _ in calls})
    assert len(calls) > 2


def test_names_step_and_root_are_checked_before_a_byte_is_read(tmp_path: Path) -> None:
    folder, root = tmp_path / "c", tmp_path / "runs"
    save_dcp(folder)
    with pytest.raises(ConfigError, match="no number in its name: give --step N"):
        adopted(folder, root, None)
    with pytest.raises(ConfigError, match="name a root beside it"):
        adopted(folder, folder / "runs")
    assert not root.exists()
    adopted(folder, root, 7)
    with pytest.raises(StepExists):
        adopted(folder, root, 7)


def test_an_error_while_the_records_are_written_leaves_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, root = tmp_path / "c", tmp_path / "runs"
    save_dcp(folder)
    before = content(folder)

    def full(*_: object) -> None:
        raise OutOfSpace("manifest.json")

    monkeypatch.setattr("ckpt.exchange.foreign.adoption.commit_copy", lambda *_, **__: full())
    with pytest.raises(OutOfSpace):
        adopted(folder, root)
    assert not list(root.rglob("step-*"))
    assert content(folder) == before
    monkeypatch.undo()
    adopted(folder, root)
    check(root)


def test_a_root_that_is_no_folder_has_absolute_paths(tmp_path: Path) -> None:
    folder, root = tmp_path / "c", f"shm://adopted-{tmp_path.name}"
    save_dcp(folder)
    try:
        adopt_checkpoint(ForeignCheckpoint(path=str(folder)), Tier(root), 7)
        assert same(load_state(root, "model/norm.weight"), trained()[0].norm.weight.detach())
        with closing(open_backend(root)) as backend:
            [ref] = committed(backend)
            manifest = read_manifest(backend, ref)
        assert [item.path for item in manifest.locations] == [str(folder / "__0_0.distcp")]
    finally:
        with closing(open_backend(root)) as backend:
            for info in list(backend.list("")):
                backend.delete(info.key)


# -- what the foreign files may not do -------------------------------------------------------------


def forge(folder: Path, change: Callable[[Any], None]) -> None:
    """Change the table of contents of a folder of DCP."""
    table = folder / ".metadata"
    metadata = pickle.loads(table.read_bytes())
    change(metadata)
    table.write_bytes(pickle.dumps(metadata))


def shift(metadata: Any) -> None:
    for info in metadata.storage_data.values():
        info.offset += 8


def lengthen(metadata: Any) -> None:
    max(metadata.storage_data.values(), key=lambda info: info.offset).length += 1 << 20


def overlap(metadata: Any) -> None:
    first, second, *_ = sorted(metadata.storage_data.values(), key=lambda info: info.offset)
    second.offset = first.offset


def reshape(metadata: Any) -> None:
    item = metadata.state_dict_metadata["model.norm.weight"]
    item.size = torch.Size([9])


def transform(metadata: Any) -> None:
    for info in metadata.storage_data.values():
        info.transform_descriptors = ["zstd"]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (shift, "ends before the entries"),
        (lengthen, "ends before the entries"),
        (overlap, "overlap"),
        (reshape, "elements are in no box"),
        (transform, "save it without compression or other extensions"),
    ],
)
def test_a_table_that_lies_is_refused_and_nothing_is_written(
    tmp_path: Path, change: Callable[[Any], None], text: str
) -> None:
    folder, root = tmp_path / "c", tmp_path / "runs"
    save_dcp(folder)
    forge(folder, change)
    with pytest.raises(CkptError, match=text):
        adopted(folder, root)
    assert not root.exists()


def test_a_file_that_is_missing_or_no_file_is_refused(tmp_path: Path) -> None:
    folder, root = tmp_path / "c", tmp_path / "runs"
    save_dcp(folder)
    data = folder / "__0_0.distcp"
    data.rename(tmp_path / "away")
    with pytest.raises(IntegrityError, match=r"__0_0.distcp is missing"):
        adopted(folder, root)
    os.mkfifo(data)
    with pytest.raises(ConfigError, match="is not an ordinary file"):
        adopted(folder, root)
    assert not root.exists()


class Tagged(torch.Tensor):
    """A subclass that torch saves by its class."""


def test_a_tensor_subclass_is_refused_by_name(tmp_path: Path) -> None:
    folder, root = tmp_path / "c", tmp_path / "runs"
    tensor = torch.ones(4).as_subclass(Tagged)
    dcp.save({"model": {"w": tensor}}, checkpoint_id=folder, no_dist=True)
    with pytest.raises(UnsupportedValue, match=r"model\.w.*ckpt import"):
        adopted(folder, root)
    assert not root.exists()


# -- what happens to the foreign files later -------------------------------------------------------


def test_a_changed_file_is_noticed_by_every_reader(tmp_path: Path) -> None:
    folder, root = tmp_path / "c", tmp_path / "runs"
    save_dcp(folder)
    adopted(folder, root)
    data = folder / "__0_0.distcp"
    whole = data.read_bytes()
    mean = trained()[0].norm.running_mean
    assert isinstance(mean, torch.Tensor)
    place = whole.index(mean.numpy().tobytes())
    data.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    with pytest.raises(
        ForeignFileMismatch,
        match=r"from which a step was adopted, has other bytes from \d+ to .*ckpt adopt",
    ):
        load_state(str(root))
    with pytest.raises(NoCheckpoint, match="from which a step was adopted, has other"):
        restored(root)
    data.write_bytes(whole)
    check(root)


@pytest.mark.parametrize("kind", ["gone", "cut", "longer", "pipe"])
def test_a_file_that_is_gone_or_cut_is_a_clear_error(tmp_path: Path, kind: str) -> None:
    folder, root = tmp_path / "c", tmp_path / "runs"
    save_dcp(folder)
    adopted(folder, root)
    data = folder / "__0_0.distcp"
    whole = data.read_bytes()
    data.unlink()
    if kind == "cut":
        data.write_bytes(whole[:5000])
    elif kind == "longer":
        data.write_bytes(whole + b"x")
    elif kind == "pipe":
        os.mkfifo(data)
    if kind == "longer":  # Each chunk is still the one that was adopted
        check(root)
        return
    text = r"has 5000 bytes now, and had \d+:" if kind == "cut" else "is gone, or is no"
    with pytest.raises(NoCheckpoint, match=f"from which a step was adopted, {text}"):
        restored(root)


def test_a_step_before_a_changed_one_is_taken(tmp_path: Path) -> None:
    folder, root = tmp_path / "c", tmp_path / "runs"
    save_dcp(folder)
    shutil.copytree(folder, tmp_path / "d")
    adopted(folder, root, 6)
    adopted(tmp_path / "d", root, 7)
    shutil.rmtree(tmp_path / "d")
    check(root)


def test_the_first_save_after_an_adopted_step_is_whole_and_the_next_one_refers_to_it(
    tmp_path: Path,
) -> None:
    folder, root = tmp_path / "c", tmp_path / "runs"
    layers = [torch.nn.Linear(64, 64) for _ in range(8)]
    net = torch.nn.Sequential(*layers)
    net[:7].requires_grad_(False)
    dcp.save({"model": net.state_dict()}, checkpoint_id=folder, no_dist=True)
    adopted(folder, root)
    with CheckpointManager(str(root)) as manager:
        manager.restore({"model": net})
        for step in (8, 9):
            with torch.no_grad():
                layers[7].weight.add_(1)
            manager.save({"model": net}, step)
    with closing(open_backend(str(root))) as backend:
        refs = {ref.step: ref for ref in committed(backend)}
        manifests = {step: read_manifest(backend, ref) for step, ref in refs.items()}
    assert manifests[8].increments == ()
    assert [item.base for item in manifests[9].increments] == [refs[8].folder]
    assert (manifests[8].locations, manifests[9].locations) == ((), ())


# -- places ----------------------------------------------------------------------------------------


def test_a_folder_beside_the_root_may_move_with_it(tmp_path: Path) -> None:
    job = tmp_path / "job"
    save_dcp(job / "dcp" / "7")
    adopted(job / "dcp" / "7", job / "runs")
    job.rename(tmp_path / "elsewhere")
    check(tmp_path / "elsewhere" / "runs")


def test_the_root_may_move_away_from_a_folder_elsewhere(tmp_path: Path) -> None:
    save_dcp(tmp_path / "dcp")
    root = tmp_path / "job" / "runs"
    adopted(tmp_path / "dcp", root)
    root.rename(tmp_path / "runs")
    check(tmp_path / "runs")


def test_a_root_that_is_a_link_has_the_same_files(tmp_path: Path) -> None:
    save_dcp(tmp_path / "far" / "dcp")
    (tmp_path / "far" / "runs").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "far" / "runs")
    adopted(tmp_path / "far" / "dcp", tmp_path / "link")
    check(tmp_path / "link")
    check(tmp_path / "far" / "runs")


def test_links_in_the_folder_are_followed_once(tmp_path: Path) -> None:
    save_dcp(tmp_path / "blobs")
    folder = tmp_path / "c"
    folder.mkdir()
    for path in (tmp_path / "blobs").iterdir():
        (folder / path.name).symlink_to(path)
    adopted(folder, tmp_path / "runs")
    shutil.rmtree(folder)
    check(tmp_path / "runs")


# -- parts that cannot stay ------------------------------------------------------------------------


def test_a_tensor_in_channels_last_is_copied_and_keeps_its_order(tmp_path: Path) -> None:
    folder, root = tmp_path / "c", tmp_path / "runs"
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 4, 5)
    conv.weight.data = conv.weight.data.contiguous(memory_format=torch.channels_last)
    model = {**conv.state_dict(), "empty": torch.ones(0, 3), "none": torch.tensor(2.0)}
    dcp.save({"model": model}, checkpoint_id=folder, no_dist=True)
    report = adopted(folder, root)
    assert any("'model/weight', are copied to the root" in note for note in report.notes)
    assert any("in another order, or as other values" in note for note in report.notes)
    state = load_state(str(root))["model"]
    assert same(dict(state), model)
    assert state["weight"].stride() == conv.weight.stride()


def test_eight_bit_floats_and_odd_types_stay_where_they_are(tmp_path: Path) -> None:
    folder, root = tmp_path / "c", tmp_path / "runs"
    model = {
        "f8": torch.randn(5, 3).to(torch.float8_e4m3fn),
        "bf16": torch.randn(7).to(torch.bfloat16),
        "u16": torch.arange(5, dtype=torch.int16).view(torch.uint16),
        "c64": torch.randn(3, dtype=torch.complex64),
        "bool": torch.tensor([True, False]),
    }
    dcp.save({"model": model}, checkpoint_id=folder, no_dist=True)
    report = adopted(folder, root)
    assert report.notes == []
    state = load_state(str(root))["model"]
    assert {name: value.dtype for name, value in state.items()} == {
        name: value.dtype for name, value in model.items()
    }
    assert all(
        torch.equal(state[name].view(torch.uint8), model[name].view(torch.uint8)) for name in model
    )


# -- ranks -----------------------------------------------------------------------------------------


IMPORTS = (
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "ckpt.exchange.foreign.adoption",
)


@pytest.mark.distributed
def test_two_ranks_restore_what_two_ranks_wrote_as_dcp_does(tmp_path: Path) -> None:
    folder, root = tmp_path / "dcp", tmp_path / "runs"
    out = world(2, HERE / "adopt_ranks.py", root, folder, "fsdp2", imports=IMPORTS)
    assert "values are equal" in out
    whole = load_state(str(root))
    assert whole["step"] == 2
    target = {"model": {name: torch.zeros_like(value) for name, value in whole["model"].items()}}
    dcp.load(target, checkpoint_id=folder, no_dist=True)
    assert same(target["model"], dict(whole["model"]))


@pytest.mark.torture
@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["fsdp2", "tp", "hsdp"])
def test_four_ranks_are_restored_on_one_two_and_three_as_dcp_does(
    tmp_path: Path, kind: str
) -> None:
    (tmp_path / "out").mkdir()
    world(4, FOLDERS / "write_dcp.py", tmp_path / "out", kind)
    folder, root = tmp_path / "out" / "state", tmp_path / "runs"
    adopted(folder, root, 2)
    for ranks in (1, 2, 3):
        how = (
            "fsdp2" if ranks == 3 else kind
        )  # Rows of 8 are no columns of 3 for tensor parallelism
        assert "values are equal" in world(
            ranks, HERE / "adopt_ranks.py", root, folder, how, imports=IMPORTS
        )


# -- other formats ---------------------------------------------------------------------------------


def files_of(report: AdoptionReport) -> tuple[int, int]:
    return report.files, report.copied_bytes


def test_safetensors_with_an_index_stay_where_they_are(tmp_path: Path) -> None:
    folder, root = tmp_path / "c", tmp_path / "runs"
    folder.mkdir()
    torch.manual_seed(0)
    shards = {
        "a.safetensors": {"x": torch.randn(30, 7), "y": torch.randn(3).to(torch.bfloat16)},
        "b.safetensors": {"z": torch.randn(5).to(torch.float8_e5m2), "n": torch.tensor(3)},
    }
    for name, tensors in shards.items():
        save_file(tensors, folder / name)
    weight_map = {key: name for name, tensors in shards.items() for key in tensors}
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    before = content(folder)
    assert files_of(adopted(folder, root)) == (2, 0)
    model = load_state(str(root))["model"]
    expected = {key: value for tensors in shards.values() for key, value in tensors.items()}
    assert {name: value.dtype for name, value in model.items()} == {
        name: value.dtype for name, value in expected.items()
    }
    assert all(
        torch.equal(model[name].reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8))
        for name, value in expected.items()
    )
    assert content(folder) == before


def test_tensors_that_are_not_aligned_stay_where_they_are(tmp_path: Path) -> None:
    """DCP consolidates so: see findings/dcp-consolidated-alignment.sh."""
    path, root = tmp_path / "c.safetensors", tmp_path / "runs"
    values = torch.arange(5, dtype=torch.float64)
    header = {"w": {"dtype": "F64", "shape": [5], "data_offsets": [0, 40]}}
    text = json.dumps(header).encode()
    text += b" " * (3 - len(text) % 8 + 8 * (len(text) % 8 > 3))
    assert len(text) % 8 == 3
    path.write_bytes(len(text).to_bytes(8, "little") + text + values.numpy().tobytes())
    assert files_of(adopted(path, root)) == (1, 0)
    assert torch.equal(load_state(str(root))["model"]["w"], values)
    with CheckpointManager(str(root)) as manager:
        state = {"model": {"w": torch.zeros(5, dtype=torch.float64)}}
        manager.restore(state)
    assert torch.equal(state["model"]["w"], values)


def test_a_file_of_torch_save_stays_where_it_is_and_views_are_copied(tmp_path: Path) -> None:
    net, optimizer = trained()
    flat = torch.arange(10.0)
    state = {
        "model": net.state_dict(),
        "optimizer": optimizer.state_dict(),
        "views": [flat[:6], flat[4:], flat.reshape(5, 2).t()],
    }
    path, root = tmp_path / "c-7.pt", tmp_path / "runs"
    torch.save(state, path)
    report = adopted(path, root, None)
    assert report.files == 1
    assert 0 < report.copied_bytes < 200  # Those of the views that share bytes
    views = load_state(str(root), "views")
    assert same(list(views), state["views"])
    net, optimizer = trained(seed=1, steps=1)
    with CheckpointManager(str(root)) as manager:
        manager.restore({"model": net, "optimizer": optimizer}, only=["model", "optimizer"])
    assert same(dict(net.state_dict()), dict(trained()[0].state_dict()))
    assert same(optimizer.state_dict()["state"], trained()[1].state_dict()["state"])


def test_the_parts_of_ranks_in_safetensors_are_joined_where_they_are(tmp_path: Path) -> None:
    folder, root = tmp_path / "c", tmp_path / "runs"
    folder.mkdir()
    whole = torch.arange(60.0).reshape(10, 6)
    for number, rows in enumerate((slice(0, 5), slice(5, 10)), start=1):
        part = whole[rows].clone()
        table = {"w": {"saved_offsets": [rows.start, 0]}}
        save_file(
            {"w": part},
            folder / f"shard-0000{number}-model-00001-of-00001.safetensors",
            metadata={"DCP_SHARDING_INFO": json.dumps(table)},
        )
    assert files_of(adopted(folder, root)) == (2, 0)
    assert torch.equal(load_state(str(root))["model"]["w"], whole)


@pytest.mark.distributed
def test_the_files_of_ranks_with_dtensors_stay_where_they_are(tmp_path: Path) -> None:
    world(2, FOLDERS / "write_rank_files.py", tmp_path, imports=IMPORTS)
    folder, root = tmp_path / "actor", tmp_path / "runs"
    before = content(folder)
    report = adopted(folder, root)
    assert files_of(report)[1] == 0
    assert compare(root, tmp_path) == {"weights": "yes", "optimizer": "yes", "position": "yes"}
    assert content(folder) == before

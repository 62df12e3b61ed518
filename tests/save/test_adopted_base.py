"""A run leaves out the frozen tensors that the files of an adopted step have."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from urllib.parse import urlencode

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import save_file
from torch import nn

import ckpt
from ckpt import CheckpointManager, Tier
from ckpt.catalog.inventory import Inventory
from ckpt.coordination.coordinator import Coordinator
from ckpt.errors import ForeignFileMismatch, IntegrityError, ManifestCorrupt
from ckpt.model.checksum import checksum
from ckpt.model.fragment_columns import fragment_of, pack_fragment, read_fragment
from ckpt.model.manifest import FILE_SPACE, AdoptedBase, AdoptedFile, Manifest, Packed
from ckpt.model.record_encoding import pack, unpack
from ckpt.retention.policy import PruneContext, Retention
from ckpt.retention.pruner import prune
from ckpt.storage.registry import open_backend
from tests.cli.conftest import Cli
from tests.cli.conftest import cli as cli
from tests.coordination.world import World
from tests.save.adapted import (
    Adapted,
    Lora,
    base_pins,
    bases,
    check_model,
    mend,
    outer_bases,
    ref_of,
    save_lora,
    size_of,
)
from tests.servers import KEY, SECRET

ADAPTER_BYTES = 60_000
"""More than a file with the adapter and its optimizer has, and less than one with the model."""


def write_folder(folder: Path) -> None:
    """Write the base model of `Lora` as a Hugging Face folder of two files, in another order."""
    state = Lora().base.state_dict()
    folder.mkdir(parents=True, exist_ok=True)
    names, weight_map = sorted(state, reverse=True), dict[str, str]()
    for index in range(2):
        file = f"model-{index + 1:05d}-of-00002.safetensors"
        save_file({name: state[name] for name in names[index::2]}, folder / file)
        weight_map |= dict.fromkeys(names[index::2], file)
    text = json.dumps({"metadata": {}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(text)


@pytest.fixture
def adopted(roots, cli: Cli) -> tuple[Path, Path, Path]:
    """The root of a run, that of an adopted step, and the folder that it was adopted from."""
    run, base = roots
    folder = base.with_name("hf")
    write_folder(folder)
    ran = cli("adopt", folder, base, "--step", 0)
    assert ran.code == 0, ran.err
    return run, base, folder


def change_byte(file: Path) -> None:
    """Change the last byte of a file, as a program does that writes another model there."""
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    os.utime(file, (file.stat().st_atime, file.stat().st_mtime + 1))


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_the_first_save_over_an_adopted_folder_is_the_adapter_alone(
    adopted, codec, cli: Cli, caplog
):
    run, base, _ = adopted
    model = save_lora(Tier(str(run), codec=codec, base=str(base)), 8, 3)
    assert not caplog.records
    assert [outer_bases(run, step) for step in (1, 2, 3)] == [{"../base 0"}] * 3
    assert size_of(run, 1) < ADAPTER_BYTES
    check_model(run, model)
    ran = cli("verify", run, "--all")
    assert ran.code == 0, ran.out
    with CheckpointManager(run) as manager:
        resumed = Lora(8)
        for parameter in resumed.parameters():
            parameter.data.zero_()
        manager.restore({"model": resumed}, only="model")
    for name, value in model.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_a_farther_tier_over_an_adopted_folder_is_the_adapter_alone(adopted, codec, cli: Cli):
    run, base, _ = adopted
    near = run.with_name("near")
    tiers = [Tier(str(near)), Tier(str(run), codec=codec, base=str(base))]
    model = save_lora(tiers)
    assert (outer_bases(near, 1), outer_bases(run, 1)) == (set(), {"../base 0"})
    shutil.rmtree(near)
    check_model(run, model)
    assert cli("verify", run, "--all").code == 0


@pytest.mark.torture
def test_a_state_larger_than_the_ring_is_compared_as_it_passes(tmp_path, cli: Cli):
    folder, base, run = (tmp_path / name for name in ("hf", "base", "run"))
    model = nn.Linear(1024, 100 << 10, bias=False)
    model.weight.data.random_(0, 100)
    model.requires_grad_(False)
    folder.mkdir()
    save_file(model.state_dict(), folder / "model.safetensors")
    assert cli("adopt", folder, base, "--step", 0).code == 0
    with CheckpointManager(Tier(str(run), base=str(base))) as manager:
        for step in (1, 2):
            manager.save({"model": {"frozen": model, "trained": nn.Linear(8, 8)}}, step)
    assert size_of(run, 1) < 2 << 20
    loaded = ckpt.load(run, "model/frozen")
    assert torch.equal(loaded["weight"], model.weight)


def test_the_listing_names_the_step_that_holds_the_frozen_tensors(adopted, cli: Cli):
    run, base, _ = adopted
    save_lora(Tier(str(run), base=str(base)))
    folder = ref_of(base, 0).folder
    (row, _) = cli("ls", run, "--json").json["steps"]
    assert (row["state"], row["outer_bases"]) == ("committed", [f"../base/{folder}"])
    files = cli("show", run, 2, "--json").json["files"]
    assert (files[0]["base"], files[0]["base_chunks"]) == (f"../base/{folder}", 8)
    assert "8 chunks in step 0 of ../base" in cli("show", run, 2, "--files").out


def test_the_adopted_step_stays_while_a_run_needs_it(adopted, cli: Cli):
    run, base, _ = adopted
    save_lora(Tier(str(run), base=str(base)))
    assert base_pins(base) == [0]
    ran = cli("rm", base, 0)
    assert ran.code != 0
    assert f"{run} saves increments of it" in ran.err
    assert cli("rm", run, "--run").code == 0
    assert base_pins(base) == []
    assert cli("rm", base, "--run").code == 0


def test_a_copy_of_such_a_step_needs_no_foreign_file(adopted, cli: Cli):
    run, base, folder = adopted
    model = save_lora(Tier(str(run), codec="zstd", base=str(base)))
    target = run.with_name("target")
    assert cli("copy", run, target, "--all").code == 0
    for path in (run, base, folder):
        shutil.rmtree(path)
    check_model(target, model)
    assert cli("verify", target, "--all").code == 0


@pytest.mark.parametrize("change", [change_byte, Path.unlink])
def test_a_foreign_file_that_changed_before_the_first_save_is_named_and_not_referred_to(
    adopted, change, caplog, cli: Cli
):
    run, base, folder = adopted
    for file in folder.glob("*.safetensors"):
        change(file)
    model = save_lora(Tier(str(run), base=str(base)))
    assert any("../hf/model-0000" in entry.message for entry in caplog.records), caplog.text
    shutil.rmtree(folder)
    check_model(run, model)
    assert cli("verify", run, "--all").code == 0


def replace_with_equal_times(file: Path) -> None:
    """Put another file of the same size and times in the place of a file."""
    times = file.stat()
    changed = file.rename(file.with_name("changed"))
    change_byte(changed)
    os.utime(changed, ns=(times.st_atime_ns, times.st_mtime_ns))
    changed.rename(file)


@pytest.mark.parametrize("change", [change_byte, Path.unlink, replace_with_equal_times])
@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_a_foreign_file_that_changes_in_the_midst_of_a_run_costs_no_further_step(
    adopted, change, codec, caplog
):
    run, base, folder = adopted
    model = Lora()
    with CheckpointManager(Tier(str(run), codec=codec, base=str(base))) as manager:
        manager.save({"model": model}, 1)
        for file in folder.glob("*.safetensors"):
            change(file)
        manager.save({"model": model}, 2)
        manager.save({"model": model}, 3)
    (warning,) = (entry.message for entry in caplog.records)
    assert "../hf/model-0000" in warning
    shutil.rmtree(folder)
    for step in (2, 3):
        check_model(run, model, step)


@pytest.mark.parametrize(
    ("change", "text"),
    [(change_byte, "has other bytes"), (Path.unlink, "is gone")],
)
def test_a_step_whose_foreign_file_changed_is_one_error_that_names_the_file(
    adopted, change, text, cli: Cli
):
    run, base, folder = adopted
    save_lora(Tier(str(run), base=str(base)))
    (folder / "kept").mkdir()
    file = folder / "model-00001-of-00002.safetensors"
    shutil.copy2(file, folder / "kept")
    change(file)
    with pytest.raises(IntegrityError, match=f"'../hf/{file.name}'.* {text}"):
        ckpt.load(run, "model")
    ran = cli("verify", run)
    assert ran.code == 4
    assert f"../hf/{file.name}" in ran.out
    shutil.copy2(folder / "kept" / file.name, file)
    assert cli("verify", run).code == 0


def test_a_foreign_file_that_is_gone_shows_in_the_listing(adopted, cli: Cli):
    run, base, folder = adopted
    save_lora(Tier(str(run), base=str(base)))
    shutil.rmtree(folder)
    rows = cli("ls", run, "--json").json["steps"]
    assert {row["state"] for row in rows} == {"damaged"}
    assert "'../hf/model-0000" in cli("ls", run).out
    assert "damaged, base of another run: '../hf/model-0000" in cli("ls", base).out


@pytest.mark.parametrize("place", ["hf", "base"])
def test_retention_keeps_a_step_whose_base_is_away(adopted, place, cli: Cli):
    run, base, _ = adopted
    model = save_lora(Tier(str(run), base=str(base)))
    path = base.with_name(place)
    path.rename(path.with_name("away"))  # As an unmounted disk
    with CheckpointManager(run) as manager:
        manager.save({"model": model}, 3)
    store = open_backend(str(run))
    prune(store, Retention(keep_last=1), PruneContext(includes_undated=True))
    path.with_name("away").rename(path)
    assert [row["step"] for row in cli("ls", run, "--json").json["steps"]] == [1, 2, 3]
    check_model(run, model, 2)
    assert cli("prune", run, "--keep-last", 1).code == 0
    assert [row["step"] for row in cli("ls", run, "--json").json["steps"]] == [3]


@pytest.mark.parametrize("place", ["hf", "base"])
def test_a_step_that_others_refer_to_stays_while_their_base_is_away(adopted, place, cli: Cli):
    """The file of rank 0 has its base in the folder, and that of rank 1 in step 1 of the run."""
    run, base, _ = adopted
    other = Adapted().model
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1)

    def job(coordinator: Coordinator) -> None:
        model = other if coordinator.rank else Lora()
        tier = Tier(str(run), base=str(base))
        with CheckpointManager(tier, coordinator=coordinator, journal=False) as manager:
            for step in (1, 2):
                manager.save({f"model-{coordinator.rank}": model}, step)

    assert World(2, patience=60).run(job) == {0: None, 1: None}
    assert (bases(run, 2), outer_bases(run, 2)) == ({1}, {"../base 0"})
    path = base.with_name(place)
    path.rename(path.with_name("away"))
    ran = cli("rm", run, 1)
    assert ran.code != 0
    assert "holds a part of other steps (2)" in ran.err
    path.with_name("away").rename(path)
    assert cli("verify", run, "--all").code == 0


def test_a_moved_folder_is_found_by_a_link_and_the_next_job_takes_the_step_adopted_again(
    adopted, cli: Cli
):
    run, base, folder = adopted
    model = save_lora(Tier(str(run), base=str(base)))
    moved = folder.with_name("moved")
    folder.rename(moved)
    ran = cli("adopt", moved, base, "--step", 0)
    assert ran.code == 0, ran.err
    with CheckpointManager(Tier(str(run), base=str(base))) as manager:
        manager.save({"model": model}, 3)
    assert size_of(run, 3) < ADAPTER_BYTES
    check_model(run, model, 3)
    with pytest.raises(ForeignFileMismatch, match="a link to its folder"):
        ckpt.load(run, "model", step=2)
    folder.symlink_to(moved)
    check_model(run, model, 2)


def test_a_nearer_tier_without_the_step_is_not_called_damaged(adopted, tmp_path, caplog):
    run, base, _ = adopted
    model = save_lora(Tier(str(run), base=str(base)))
    near = tmp_path / "another" / "folder" / "near"  # From here, the root of the base is not there
    resumed = Lora()
    with CheckpointManager([str(near), str(run)]) as manager:
        report = manager.restore({"model": resumed}, only="model")
    assert report is not None
    assert not caplog.records
    for name, value in model.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name


def test_the_next_job_takes_the_step_adopted_again_also_while_a_link_keeps_the_one_before(
    adopted, cli: Cli, caplog
):
    run, base, folder = adopted
    model = save_lora(Tier(str(run), base=str(base)))
    moved = folder.with_name("moved")
    folder.rename(moved)
    assert cli("adopt", moved, base, "--step", 0).code == 0
    folder.symlink_to(moved)
    with CheckpointManager(Tier(str(run), base=str(base))) as manager:
        manager.restore({"model": model}, only="model")
        manager.save({"model": model}, 3)
    assert not caplog.records
    assert size_of(run, 3) < ADAPTER_BYTES
    folder.unlink()
    check_model(run, model, 3)


def test_a_damaged_step_is_mended_as_a_whole_from_a_farther_tier(adopted, cli: Cli):
    run, base, folder = adopted
    far = run.with_name("far")
    model = save_lora([Tier(str(run), base=str(base)), Tier(str(far))])
    for file in folder.glob("*.safetensors"):
        change_byte(file)
    assert cli("verify", run).code == 4
    mend(run, 2, far)
    shutil.rmtree(folder)
    check_model(run, model, 2)


def test_a_frozen_tensor_that_is_not_in_the_folder_is_saved(adopted, cli: Cli):
    run, base, _ = adopted
    model = Lora()
    with torch.no_grad():
        list(model.base.parameters())[4].add_(1)
    with CheckpointManager(Tier(str(run), base=str(base))) as manager:
        manager.save({"model": model}, 1)
    assert size_of(run, 1) > ADAPTER_BYTES
    check_model(run, model)
    assert cli("verify", run).code == 0


def test_a_folder_of_another_model_is_no_base_and_the_warning_says_so(roots, cli: Cli, caplog):
    run, base = roots
    folder = base.with_name("other")
    folder.mkdir()
    save_file({"weight": torch.ones(128, 128)}, folder / "model.safetensors")
    assert cli("adopt", folder, base, "--step", 7).code == 0
    model = save_lora(Tier(str(run), base=str(base)))
    (warning,) = (entry.message for entry in caplog.records)
    assert warning.endswith("step 7 has no tensor like the first frozen parameter of rank 0")
    assert outer_bases(run, 1) == set()
    check_model(run, model)


@pytest.mark.parametrize("codec", ["none", "zstd"])
@pytest.mark.parametrize(
    "change",
    [
        lambda base: replace(base, files=()),
        lambda base: replace(base, files=base.files[:1]),
        lambda base: replace(base, files=(*base.files, AdoptedFile("", 4))),
        lambda base: replace(base, files=(AdoptedFile("a\0", 9000), *base.files[1:])),
        lambda base: replace(base, files=(AdoptedFile("a", 10), *base.files[1:])),
        lambda base: replace(base, files=(AdoptedFile("a", 1 << 50), *base.files[1:])),
        lambda base: replace(base, positions=(1, 2)),
        lambda base: None,
    ],
)
def test_a_record_with_impossible_files_is_refused(adopted, codec, change):
    run, base, _ = adopted
    save_lora(Tier(str(run), codec=codec, base=str(base)))
    record = fragment_of_rank_0(run)
    (increment,) = record.increments
    wrong = replace(increment, adoption=change(increment.adoption))
    with pytest.raises(ManifestCorrupt):
        read_fragment(pack(replace(record, increments=(wrong,))), key="fragment")


@pytest.mark.parametrize(
    "positions", [[-1] * 7, [0] * 6, [2 * FILE_SPACE] * 7, [1 << 62] * 7, [10**6] * 7]
)
def test_a_record_with_impossible_positions_is_refused(adopted, positions):
    run, base, _ = adopted
    save_lora(Tier(str(run), base=str(base)))
    record = fragment_of_rank_0(run)
    column = np.array(positions, "<i8").tobytes()
    with pytest.raises(ManifestCorrupt):
        read_fragment(pack(replace(record, positions=column)), key="fragment")
    whole = pack(replace(record, increments=()))
    with pytest.raises(ManifestCorrupt):
        read_fragment(whole, key="fragment")


def test_a_record_that_names_another_file_is_damage(adopted, cli: Cli):
    run, base, folder = adopted
    save_lora(Tier(str(run), base=str(base)), count=1)
    secret = folder / "secret"
    secret.write_bytes(os.urandom(400_000))
    os.mkfifo(folder / "pipe")
    for name in ("secret", "pipe"):
        file = AdoptedFile(f"../hf/{name}", 400_000)
        rewrite_first_file(run, file)
        with pytest.raises(IntegrityError, match=f"'../hf/{name}'"):
            ckpt.load(run, "model")
        assert cli("verify", run).code == 4
    assert secret.stat().st_size == 400_000


def test_an_adopted_step_with_a_fragment_of_no_file_is_no_base(adopted, caplog):
    run, base, _ = adopted
    ref = ref_of(base, 0)
    path = base / ref.manifest
    manifest = unpack(path.read_bytes(), Manifest, key="manifest")
    records = [(base / ref.key(part.name)).read_bytes() for part in manifest.fragments]
    fragments = [fragment_of(unpack(data, Packed, key=""), key="") for data in records]
    carried = [
        replace(
            pack_fragment(replace(fragment, file=None, locations=(), tensors=())), in_manifest=True
        )
        for fragment in fragments
    ]
    path.write_bytes(pack(replace(manifest, carried=tuple(carried))))
    model = save_lora(Tier(str(run), base=str(base)))
    (warning,) = (entry.message for entry in caplog.records)
    assert "the fragment of rank 0 names another file" in warning
    check_model(run, model)


def fragment_of_rank_0(run: Path) -> Packed:
    path = run / ref_of(run, 1).folder / "rank-00000.json"
    return unpack(path.read_bytes(), Packed, key="fragment")


def rewrite_first_file(run: Path, file: AdoptedFile) -> None:
    """Let the records of step 1 name another file."""
    ref = ref_of(run, 1)
    paths = run / ref.key("rank-00000.json"), run / ref.manifest
    fragment = unpack(paths[0].read_bytes(), Packed, key="fragment")
    manifest = unpack(paths[1].read_bytes(), Manifest, key="manifest")
    (increment,) = manifest.increments
    assert increment.adoption is not None
    adoption = AdoptedBase((file, *increment.adoption.files[1:]))
    increments = (replace(increment, adoption=adoption, base_size=adoption.end),)
    data = pack(replace(fragment, increments=increments))
    paths[0].write_bytes(data)
    (present,) = manifest.fragments
    fragments = (replace(present, size=len(data), checksum=checksum(data)),)
    paths[1].write_bytes(pack(replace(manifest, increments=increments, fragments=fragments)))


@pytest.mark.parametrize("codec", ["none", pytest.param("zstd", marks=pytest.mark.torture)])
def test_a_run_in_a_bucket_reads_the_frozen_tensors_from_the_folder(
    rclone_s3, tmp_path, codec, cli: Cli
):
    options = {
        "endpoint_url": rclone_s3.url,
        "key": KEY,
        "secret": SECRET,
        "region": "us-east-1",
    }
    base, run = (f"s3://bucket/adopted-base-{codec}/{name}" for name in ("base", "runs/b"))
    folder = tmp_path / "hf"
    write_folder(folder)
    query = urlencode(options)
    assert cli("adopt", folder, f"{base}?{query}", "--step", 0).code == 0
    tier = Tier(run, options, codec=codec, base=base)
    model = save_lora(tier, 8)
    (step,) = [step for step in Inventory(open_backend(run, options)).look() if step.ref.step == 1]
    assert step.stored_bytes < ADAPTER_BYTES
    check_model(tier, model, 2)
    ran = cli("verify", f"{run}?{query}")
    assert ran.code == 0, ran.out
    shutil.rmtree(folder)
    with pytest.raises(ForeignFileMismatch, match=str(folder)):
        ckpt.load(tier, "model")


def test_what_the_adoption_had_to_copy_is_saved_with_the_adapter(roots, cli: Cli):
    run, base = roots
    state = {"model": {name: value.clone() for name, value in Lora().base.state_dict().items()}}
    state["model"]["1.weight"] = state["model"]["1.weight"].t().contiguous().t()
    torch.save(state, base.with_name("model-0.pt"))
    ran = cli("adopt", base.with_name("model-0.pt"), base)
    assert ran.code == 0, ran.err
    model = save_lora(Tier(str(run), base=str(base)))
    assert outer_bases(run, 1) == {"../base 0"}
    check_model(run, model)
    assert cli("verify", run, "--all").code == 0

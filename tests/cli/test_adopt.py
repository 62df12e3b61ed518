from __future__ import annotations

import re
import shlex
import shutil
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from ckpt import CheckpointManager, Tier
from ckpt import load as load_state
from ckpt.catalog.step_listing import committed
from ckpt.catalog.step_repair import mend_step
from ckpt.catalog.transfer import fetch_step
from ckpt.catalog.verify import StepFolder, verify_step
from ckpt.errors import IntegrityError
from ckpt.pipeline.workers import Workers
from ckpt.storage.registry import open_backend
from ckpt_backends.folder.posix import PosixBackend
from tests.cli.conftest import Cli
from tests.exchange.foreign.adopted import check, content, save_dcp
from tests.exchange.states import same, trained
from tests.kit.pages import block, blocks
from tests.kit.worlds import ROOT

PAGE = "docs/from-other-checkpoints.md"
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def test_every_command_reads_an_adopted_step(cli: Cli) -> None:
    save_dcp(Path("dcp/step-12"), big=torch.arange(1 << 18))
    before = content(Path("dcp/step-12"))
    ran = cli("adopt", "dcp/step-12", "runs", "--json")
    assert ran.code == 0, ran.err
    assert (ran.json["step"], ran.json["format"], ran.json["files"]) == (12, "dcp", 1)
    assert ran.json["written_bytes"] < ran.json["bytes"] / 50
    assert cli("import", "dcp/step-12", "copied", "--step", 12).code == 0
    assert "(adopted: " in cli("ls").out
    [listed] = cli("ls", "--json").json["steps"]
    assert (listed["adopted"], listed["bytes"]) == (True, ran.json["bytes"])
    assert re.search(r"  -  +\d+  ", cli("ls").out), "its files are no ranks"
    assert "1 file of another program" in cli("show", 12).out
    shown = cli("show", 12, "--json").json
    assert shown["files"][0]["location"] == "../dcp/step-12/__0_0.distcp"
    assert "../dcp/step-12/__0_0.distcp" in cli("show", 12, "--files").out
    assert cli("verify", 12).code == 0
    assert cli("diff", "runs", "copied", "--step", 12).code == 0
    assert cli("export", "runs", "out.pt").code == 0
    assert torch.equal(torch.load("out.pt")["big"], torch.arange(1 << 18))
    assert content(Path("dcp/step-12")) == before


def test_a_changed_file_is_a_fault_of_verify(cli: Cli) -> None:
    save_dcp(Path("dcp"))
    assert cli("adopt", "dcp", "--step", 1).code == 0
    data = Path("dcp/__0_0.distcp")
    whole = data.read_bytes()
    data.write_bytes(whole[:-1] + b"x")  # A byte of no tensor
    ran = cli("verify", 1)
    assert ran.code == 4
    assert "has other bytes from" in ran.out
    data.write_bytes(whole + b"x")
    assert cli("verify", 1).code == 4
    data.unlink()
    assert "is gone" in cli("ls").out
    assert cli("verify", 1).code == 4
    data.write_bytes(whole)
    assert cli("verify", 1).code == 0


def test_verify_names_the_way_out_once_for_all_chunks(cli: Cli) -> None:
    save_dcp(Path("dcp"))
    assert cli("adopt", "dcp", "--step", 1).code == 0
    data = Path("dcp/__0_0.distcp")
    data.write_bytes(bytes(len(data.read_bytes())))
    ran = cli("verify", 1)
    assert ran.out.count("has other bytes from") > 3
    assert ran.out.count("ckpt adopt FOLDER ROOT --step N") == 1
    data.write_bytes(bytes(9))
    assert re.search(r"has 9 bytes now, and had \d+", cli("ls").out)
    assert "ckpt adopt" not in cli("ls").out


# -- another adoption ------------------------------------------------------------------------------


def changed(folder: Path, **others: object) -> None:
    shutil.rmtree(folder)
    save_dcp(folder, **others)


@pytest.mark.parametrize("later", [False, True])
def test_a_changed_folder_is_adopted_again_under_its_number(cli: Cli, later: bool) -> None:
    folder = Path("dcp/step-12")
    save_dcp(folder, big=torch.zeros(9))
    assert cli("adopt", folder, "runs").code == 0
    if later:
        with CheckpointManager("runs") as manager:
            manager.save({"big": torch.ones(3)}, step=13)
    changed(folder, big=torch.ones(99))
    assert cli("verify", "runs", 12).code == 4
    ran = cli("adopt", folder, "runs", "--step", 12)
    assert ran.code == 0, ran.err
    assert "step 12 was adopted before" in ran.err
    assert cli("verify", "runs", "--all").code == 0
    assert torch.equal(load_state("runs", "big", step=12), torch.ones(99))
    assert load_state("runs", "big").numel() == (3 if later else 99)
    assert len(list(Path("runs").glob("step-000000012.*"))) == 1


def test_a_step_whose_folder_is_away_is_not_replaced_by_another_folder(cli: Cli) -> None:
    save_dcp(Path("dcp/step-12"))
    save_dcp(Path("other/step-12"), big=torch.ones(9))
    assert cli("adopt", "dcp/step-12", "runs").code == 0
    Path("dcp").rename("unmounted")
    ran = cli("adopt", "other/step-12", "runs")
    assert ran.code == 5, ran.err
    assert f"was adopted from '{Path('dcp/step-12').absolute()}': mount or move that" in ran.err
    assert "give another number by --step" in ran.err
    Path("unmounted").rename("dcp")
    assert cli("verify", "runs", 12).code == 0


def test_a_folder_that_was_moved_with_its_root_is_adopted_again(cli: Cli) -> None:
    folder = Path("old/dcp/step-12")
    save_dcp(folder)
    path = folder.absolute() / "__0_0.distcp"
    assert cli("adopt", folder, "old/runs/gpt").code == 0
    Path("old").rename("new")
    ran = cli("restore", "--root", "new/runs/gpt", "--step", 12, "--to", "near")
    assert ran.code == 4
    assert f"{str(path)!r}, from which a step was adopted, is gone" in ran.err
    assert "if the folder was moved" in ran.err
    assert "ckpt adopt FOLDER ROOT --step N" in ran.err
    ran = cli("adopt", "new/dcp/step-12", "new/runs/gpt", "--step", 12)
    assert ran.code == 0, ran.err
    assert f"step 12 was adopted before, from {folder.absolute()}" in ran.err
    assert len(list(Path("new/runs/gpt").glob("step-*"))) == 1
    assert cli("verify", "new/runs/gpt").code == 0
    check(Path("new/runs/gpt"))


def test_a_folder_beside_its_root_that_moved_with_it_may_change(cli: Cli) -> None:
    save_dcp(Path("old/dcp"), big=torch.zeros(9))
    assert cli("adopt", "old/dcp", "old/runs", "--step", 12).code == 0
    Path("old").rename("new")
    assert cli("verify", "new/runs", 12).code == 0
    changed(Path("new/dcp"), big=torch.ones(99))
    ran = cli("adopt", "new/dcp", "new/runs", "--step", 12)
    assert ran.code == 0, ran.err
    assert torch.equal(load_state("new/runs", "big"), torch.ones(99))


def test_a_step_that_is_pinned_stays_beside_the_one_that_replaces_it(cli: Cli) -> None:
    save_dcp(Path("dcp"), big=torch.zeros(9))
    assert cli("adopt", "dcp", "runs", "--step", 12).code == 0
    assert cli("pin", "runs", 12).code == 0
    changed(Path("dcp"), big=torch.ones(99))
    ran = cli("adopt", "dcp", "runs", "--step", 12)
    assert ran.code == 0, ran.err
    assert re.search(r"attempt [a-s]{12} stays beside it", ran.err)
    assert torch.equal(load_state("runs", "big"), torch.ones(99))


def test_no_other_step_is_replaced(cli: Cli) -> None:
    save_dcp(Path("a/step-12"))
    save_dcp(Path("b/step-12"), big=torch.ones(9))
    assert cli("adopt", "a/step-12", "runs").code == 0
    ran = cli("adopt", "a/step-12", "runs")
    assert ran.code == 5
    assert "its files are as they were adopted" in ran.err
    changed(Path("a/step-12"), big=torch.ones(99))
    ran = cli("adopt", "b/step-12", "runs")
    assert ran.code == 5, "the step is of another folder"
    assert "give another number by --step" in ran.err
    assert cli("import", "a/step-12", "runs", "--step", 12).code == 5
    with CheckpointManager("own") as manager:
        manager.save({"x": torch.ones(3)}, step=12)
    assert cli("adopt", "a/step-12", "own").code == 5, "the step is no adopted one"


def test_a_step_that_was_abandoned_is_not_adopted_again(cli: Cli) -> None:
    save_dcp(Path("dcp"))
    for step in (1, 2):
        assert cli("adopt", "dcp", "runs", "--step", step).code == 0
    assert cli("rollback", "runs", 1).code == 0
    changed(Path("dcp"), big=torch.ones(99))
    assert cli("adopt", "dcp", "runs", "--step", 2).code == 5


def test_the_folder_is_looked_at_before_the_number_in_its_name(cli: Cli) -> None:
    ran = cli("adopt", "nowhere", "runs")
    assert ran.code == 2
    assert "nowhere is not there: name a local file or folder" in ran.err
    save_dcp(Path("many/a"))
    ran = cli("adopt", "many", "runs")
    assert "name the one that you need, such as many/a" in ran.err
    assert "ckpt import" not in ran.err
    Path("empty").mkdir()
    assert ".snapshot_metadata of torchsnapshot" in cli("adopt", "empty", "runs").err
    save_dcp(Path("dcp"))
    assert "dcp has no number in its name: give --step N" in cli("adopt", "dcp", "runs").err


# -- removal ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("inside", [True, False])
def test_no_command_and_no_retention_touches_a_foreign_file(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, inside: bool
) -> None:
    folder = Path("dcp/a" if inside else tmp_path.parent / f"{tmp_path.name}-dcp")
    save_dcp(folder)
    before = content(folder)
    touched: list[str] = []
    for verb in ("delete", "put", "upload", "discard"):
        method = getattr(PosixBackend, verb)

        def noted(self: PosixBackend, key: object, *rest: object, of=method, **named: object):  # type: ignore[no-untyped-def]
            touched.append(f"{self.url}/{key}")
            return of(self, key, *rest, **named)

        monkeypatch.setattr(PosixBackend, verb, noted)
    for step in (1, 2, 3, 4):
        assert cli("adopt", folder, "--step", step).code == 0
    assert cli("rm", "runs", 1).code == 0
    assert cli("prune", "runs", "--keep-last", 2).code == 0
    assert [path.name[:14] for path in sorted(Path("runs").glob("step-*"))] == [
        "step-000000003", "step-000000004",
    ]  # fmt: skip
    with CheckpointManager(Tier("runs", keep_last=1)) as manager:
        state = {"x": torch.ones(3)}
        manager.save(state, step=5)
        manager.save(state, step=6)
    assert [path.name[:14] for path in Path("runs").glob("step-*")] == ["step-000000006"]
    assert content(folder) == before
    assert touched
    assert not [key for key in touched if str(folder) in key]


def test_a_damaged_adopted_step_is_removed_without_its_files(cli: Cli) -> None:
    save_dcp(Path("dcp"))
    before = content(Path("dcp"))
    assert cli("adopt", "dcp", "--step", 1).code == 0
    [manifest] = Path("runs").glob("step-*/manifest.json")
    manifest.write_bytes(manifest.read_bytes()[:-5])
    assert cli("rm", "runs", "--run").code == 0
    assert not list(Path("runs").glob("step-*"))
    assert content(Path("dcp")) == before


# -- copies ----------------------------------------------------------------------------------------


def test_a_copy_needs_no_foreign_file(cli: Cli) -> None:
    save_dcp(Path("dcp"))
    assert cli("adopt", "dcp", "--step", 1).code == 0
    ran = cli("copy", "runs", "copy", "--step", 1)
    assert ran.code == 0, ran.err
    again = cli("copy", "runs", "copy", "--step", 1)
    assert again.code == 0, again.err
    records = {path.name: path.read_bytes() for path in Path("copy").glob("step-*/*")}
    assert cli("copy", "runs", "other", "--step", 1).code == 0
    assert records == {path.name: path.read_bytes() for path in Path("other").glob("step-*/*")}
    assert cli("diff", "runs", "copy", "--step", 1).code == 0
    shutil.rmtree("dcp")
    assert cli("verify", "--root", "copy", 1).code == 0
    check(Path("copy"))
    [data] = Path("copy").glob("step-*/rank-00000.safetensors")
    with safe_open(data, "pt") as file:  # type: ignore[no-untyped-call]
        weight = file.get_tensor("model/norm.weight")
    assert torch.equal(weight, load_state("copy", "model/norm.weight"))
    assert [step["adopted"] for step in cli("ls", "--root", "copy", "--json").json["steps"]] == [
        False
    ]


def test_a_copy_of_a_changed_file_is_refused(cli: Cli) -> None:
    save_dcp(Path("dcp"))
    assert cli("adopt", "dcp", "--step", 1).code == 0
    data = Path("dcp/__0_0.distcp")
    data.write_bytes(data.read_bytes()[:-4000])
    ran = cli("copy", "runs", "copy", "--step", 1)
    assert ran.code == 4
    assert re.search(r"from which a step was adopted, has \d+ bytes now", ran.err)
    assert not list(Path("copy").glob("step-*/manifest.json"))


def test_a_restore_into_a_folder_and_a_copy_with_a_codec_are_self_contained(cli: Cli) -> None:
    save_dcp(Path("dcp"))
    assert cli("adopt", "dcp", "--step", 1).code == 0
    ran = cli("restore", "--root", "runs", "--step", 1, "--to", "near")
    assert ran.code == 0, ran.err
    with closing(open_backend("runs")) as source, closing(open_backend("far")) as target:
        [ref] = committed(source)
        with Workers("test", 2) as workers:
            for _ in range(2):  # The second copy finds all files
                fetch_step([source], StepFolder(target, ref, workers), codec="zstd")
    assert list(Path("far").glob("step-*/*.encoded"))
    shutil.rmtree("dcp")
    for root in ("near", "far"):
        assert cli("verify", "--root", root, 1).code == 0
        check(Path(root))


def test_tiers_of_a_job_read_an_adopted_step_where_it_is(cli: Cli) -> None:
    save_dcp(Path("dcp"))
    assert cli("adopt", "dcp", "far", "--step", 1).code == 0
    tiers = [Tier("near"), Tier("far")]
    net, optimizer = trained(seed=1, steps=1)
    with CheckpointManager(tiers) as manager:
        state = {"model": net, "optimizer": optimizer}
        assert manager.restore(state) is not None
        assert not list(Path("near").glob("step-*"))
        manager.save(state, step=2)
    true_net, _ = trained()
    assert same(dict(net.state_dict()), dict(true_net.state_dict()))
    assert cli("verify", "--root", "far", 1).code == 0


def test_the_agent_does_not_write_to_a_foreign_file(cli: Cli) -> None:
    save_dcp(Path("dcp"))
    assert cli("adopt", "dcp", "--step", 1).code == 0
    assert cli("copy", "runs", "copy", "--step", 1).code == 0
    data = Path("dcp/__0_0.distcp")
    whole = data.read_bytes()
    data.write_bytes(whole[:-1] + b"x")
    with closing(open_backend("runs")) as target, closing(open_backend("copy")) as source:
        [ref] = committed(target)
        with Workers("test", 2) as workers:
            folder = StepFolder(target, ref, workers)
            faults = verify_step(target, ref, workers=workers).faults
            with pytest.raises(IntegrityError, match="a file of another program"):
                mend_step(
                    [source], folder, faults, codec="none", confirm=lambda: None,
                    on_bytes=lambda _: None,
                )  # fmt: skip
    assert data.read_bytes() == whole[:-1] + b"x"


# -- the page -------------------------------------------------------------------------------------


def test_the_page_begins_a_job_and_copies_renews_and_removes_the_step(cli: Cli) -> None:
    folder = Path("dcp/step-1200")
    save_dcp(folder)
    net, optimizer = trained(seed=1, steps=1)
    commands = [
        text for page, _, text in blocks("") if page == ROOT / PAGE and "deepspeed" not in text
    ]
    adopt, copy, remove, again = commands
    for line in adopt.splitlines():
        ran = cli(*shlex.split(line)[1:])
        assert ran.code == 0, ran.err
    names = {"model": net, "optimizer": optimizer, "CheckpointManager": CheckpointManager}
    exec(block(PAGE, "manager.restore(state)"), names)
    true_net, true_optimizer = trained()
    assert same(dict(net.state_dict()), dict(true_net.state_dict()))
    assert same(optimizer.state_dict()["state"], true_optimizer.state_dict()["state"])
    names["manager"].save({"model": net}, step=1201)  # type: ignore[attr-defined]
    names["manager"].close()  # type: ignore[attr-defined]
    ran = cli(*shlex.split(copy)[1:])
    assert ran.code == 0, ran.err
    changed(folder, big=torch.ones(99))
    for text in (again, remove):
        ran = cli(*shlex.split(text)[1:])
        assert ran.code == 0, ran.err
    assert cli("verify", "--root", "backup", 1200).code == 0
    assert len(list(folder.iterdir())) == 2

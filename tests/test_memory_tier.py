"""The tier "memory": slots that are the checkpoint, and outlive the process."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from torch import nn

from ckpt import CheckpointManager, Tier
from ckpt.catalog.step_listing import committed
from ckpt.config import load_config
from ckpt.errors import ConfigError, SaveSkipped
from ckpt.storage.registry import open_backend
from ckpt.storage.tiers import open_tiers, urls_of
from tests.kit.states import restored
from tests.kit.stores import whole
from tests.kit.worlds import run_code

MEMORY = Path("/dev/shm")

WORKER = """
import os, sys, torch
from torch import nn
from ckpt import CheckpointManager, Tier
root, steps, end = sys.argv[1], int(sys.argv[2]), sys.argv[3]
torch.set_num_threads(1)  # with more, torch's own sums differ on a busy machine
torch.manual_seed(0)
model = nn.Linear(300, 300)
optimizer = torch.optim.AdamW(model.parameters())
manager = CheckpointManager([Tier("memory"), Tier(root, every=4)])
state = {"model": model, "optimizer": optimizer, "step": 0}
report = manager.restore(state)
print("from", report and (report.step, report.tier.split(":")[0]), flush=True)
for step in range(state["step"] + 1, state["step"] + 1 + steps):
    model(torch.ones(2, 300) * step).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    state["step"] = step
    manager.save(state)
print("sum", model.weight.double().sum().item(), flush=True)
if end == "kill":
    os.kill(os.getpid(), 9)
manager.close()
"""


@pytest.fixture
def near(tmp_path: Path):
    """Return a manager's two tiers, and the folder of the first."""
    tiers = [Tier("memory"), Tier(str(tmp_path / "disk"))]
    folder = MEMORY / f"ckpt-memory-{os.getuid()}-{urls_of(tiers)[0].removeprefix('shm://')}"
    yield tiers, folder
    for path in sorted(folder.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    folder.rmdir() if folder.exists() else None


def work(root: Path, steps: int, end: str) -> list[str]:
    status = -signal.SIGKILL if end == "kill" else 0
    said = run_code(WORKER, root, steps, end, status=status, timeout=60)
    # without warnings
    return [line for line in said.splitlines() if line.startswith(("from ", "sum "))]


def test_a_killed_trainer_resumes_from_memory_and_from_disk_where_that_is_gone(tmp_path, near):
    _, folder = near
    assert work(tmp_path / "disk", 6, "kill")[0] == "from None"
    assert whole(tmp_path / "disk") == [4]
    resumed = work(tmp_path / "disk", 1, "kill")  # 5 and 6 were in memory only
    assert resumed[0] == "from (6, 'shm')"
    for path in folder.rglob("*.safetensors"):
        path.unlink()
    assert work(tmp_path / "disk", 3, "close") == [
        "from (4, 'disk')".replace("disk", str(tmp_path / "disk")),
        resumed[1],
    ]


def test_nothing_is_copied_and_what_lies_in_a_slot_goes_before_the_slot_is_filled_again(near):
    tiers, folder = near
    with CheckpointManager(tiers) as manager:
        for step in range(5):
            manager.save({"x": torch.full((1 << 20,), step)}, step)
            listed = {
                ref.step for ref in committed(open_backend(f"shm://{folder.name.split('-')[-1]}"))
            }
            assert listed == {step, step - 1} - {-1}
            files = list(folder.rglob("*.safetensors"))
            # the slot itself, under a second name
            assert all(path.stat().st_nlink == 2 for path in files)
        assert restored(manager, {"x": torch.zeros(1 << 20, dtype=torch.int64)}).tier.startswith(
            "shm://"
        )


def test_damage_in_memory_is_found_and_the_disk_is_next(near, tmp_path):
    tiers, folder = near
    with CheckpointManager(tiers) as manager:
        manager.save({"x": torch.arange(1000)}, 3)
        (image,) = folder.rglob("*.safetensors")
        data = bytearray(image.read_bytes())
        data[-5] ^= 1
        image.write_bytes(data)
        state = {"x": torch.zeros(1000, dtype=torch.int64)}
        report = restored(manager, state)
        assert (report.step, report.tier) == (3, str(tmp_path / "disk"))
        assert state["x"].tolist() == list(range(1000))


def test_closing_frees_the_memory_unless_it_holds_the_newest_step(near, tmp_path):
    tiers, folder = near
    with CheckpointManager(tiers) as manager:
        manager.save({"x": torch.ones(3)}, 1)
    assert not folder.exists()
    with CheckpointManager([Tier("memory"), Tier(tiers[1].url, every=10)]) as manager:
        manager.save({"x": torch.ones(3)}, 10)
        manager.save({"x": torch.ones(3)}, 11)
    assert {path.parent.name.split(".")[0] for path in folder.rglob("manifest.json")} == {
        "step-000000011"
    }
    with CheckpointManager(tiers) as manager:
        assert manager.steps() == [1, 10, 11]
        # the first commit removes what an earlier job left
        manager.save({"x": torch.ones(3)}, 12)
        assert manager.steps() == [1, 10, 12]


def test_an_older_step_that_was_restored_stays_in_memory_until_there_is_a_new_one(near):
    tiers, _ = near
    only_memory = [tiers[0], Tier(tiers[1].url, every=10)]
    with CheckpointManager(only_memory) as manager:
        for step in (1, 2):
            manager.save({"x": torch.full((3,), step)}, step)
    with CheckpointManager(only_memory) as manager:
        manager.restore({"x": torch.zeros(3, dtype=torch.int64)}, step=1, rollback=False)
        assert manager.steps() == [1, 2]
        manager.restore({"x": torch.zeros(3, dtype=torch.int64)}, step=1)
        assert manager.steps() == [1]
        manager.save({"x": torch.ones(3)}, 3)
        assert manager.steps() == [3]


def test_a_look_at_a_part_of_a_step_removes_no_step_from_memory(near):
    """The caller may then restore another step than the newest one."""
    tiers, _ = near
    work(Path(tiers[1].url), 6, "kill")
    with CheckpointManager([tiers[0], Tier(tiers[1].url, every=4)]) as manager:
        assert manager.steps() == [4, 5, 6]
        model = nn.Linear(300, 300)
        for part in ("model", ["model/weight"]):
            report = manager.restore({"model": model}, only=part)
            assert report is not None
            assert (report.step, manager.steps()) == (6, [4, 5, 6])
        optimizer = torch.optim.AdamW(model.parameters())
        state = {"model": model, "optimizer": optimizer, "step": 0}
        manager.restore(state, 5, rollback=False)
        manager.restore(state)
        assert state["step"] == 6
        assert manager.steps() == [4, 6], "a restore of the whole step frees the memory of others"


def test_a_state_that_grows_takes_a_larger_slot_and_leaves_nothing_of_the_small_one(near):
    tiers, folder = near
    with CheckpointManager(tiers) as manager:
        for step, size in enumerate([1000, 3 << 20, 10, 5 << 20]):
            model = nn.Linear(size, 1)
            manager.save({"model": model}, step)
            held = {
                path.stat().st_ino: path.stat().st_size for path in folder.rglob("*.safetensors")
            }
            slots = {path.stat().st_ino for path in MEMORY.glob(f"ckpt-slot-{os.getpid()}-*")}
            assert set(held) <= slots  # no memory but that of slots


def test_a_step_goes_where_it_is_asked_for(tmp_path):
    with CheckpointManager(Tier(str(tmp_path), every=3)) as manager:
        results = [manager.save_async({"x": torch.ones(2)}, step) for step in range(7)]
        assert [type(result.exception()) for result in results] == [
            type(None) if step % 3 == 0 else SaveSkipped for step in range(7)
        ]
        assert manager.steps() == [0, 3, 6]
        assert manager.skipped == 0


def test_memory_that_cannot_take_an_image_costs_only_itself(near, tmp_path, caplog):
    tiers, _ = near
    with CheckpointManager(tiers, host_memory=176 << 20) as manager:  # in waves
        manager.save({"x": torch.ones(60 << 20)}, 1)
    assert "step 1 is not kept in shm://" in caplog.text
    assert whole(tmp_path / "disk") == [1]


def test_memory_belongs_to_the_next_tier(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="name one, or give the memory a name"):
        CheckpointManager(Tier("memory"))
    one, two = (open_tiers([Tier("memory"), Tier(str(tmp_path / name))])[0].url for name in "ab")
    assert one != two
    monkeypatch.chdir(tmp_path)
    assert open_tiers([Tier("memory"), Tier("a")])[0].url == one
    (tmp_path / "ckpt.toml").write_text(
        '[[tiers]]\nurl = "memory"\n[[tiers]]\nurl = "a"\nevery = 5\nrequired = true\n'
    )
    assert load_config().tiers == (Tier("memory"), Tier("a", every=5, required=True))


@pytest.mark.parametrize("url", ["shm://", "shm://../x", "shm://a/b", "shm://" + "a" * 90])
def test_a_name_cannot_lead_out_of_memory(url):
    with pytest.raises(ConfigError, match="shm://NAME"):
        open_backend(url)


@pytest.mark.parametrize("wrong", [{"every": 0}, {"every": True}, {"required": "yes"}])
def test_a_wrong_policy_is_refused(wrong):
    with pytest.raises(ConfigError):
        Tier("x", **wrong)


def test_the_only_good_image_in_memory_is_not_given_up_for_a_slot_that_is_empty(
    near, tmp_path, monkeypatch
):
    tiers, _ = near
    with CheckpointManager([Tier("memory"), Tier(tiers[1].url, every=100)]) as manager:
        manager.save({"x": torch.ones(9)}, 1)
        manager.save({"x": torch.ones(9)}, 2)
        with monkeypatch.context() as broken:
            broken.setattr("ckpt.save.rank_files.adopt_image", lambda *_, **__: 1 / 0)
            assert manager.save_async({"x": torch.ones(9)}, 3).exception(10) is not None
        seen: list[list[int]] = []
        from ckpt.pipeline import image_writer

        original = image_writer.adopt_image
        monkeypatch.setattr(
            "ckpt.save.rank_files.adopt_image",
            lambda *a, **k: (seen.append(manager.steps()), original(*a, **k))[1],
        )
        manager.save({"x": torch.ones(9)}, 4)
    assert seen == [[2]]


def test_a_step_that_cannot_be_taken_off_memory_is_not_overwritten(near, monkeypatch):
    from ckpt.errors import AccessDenied
    from ckpt_backends.folder.shm import ShmBackend

    tiers, folder = near
    with CheckpointManager(tiers) as manager:
        for step in (1, 2):
            manager.save({"x": torch.full((9,), step)}, step)
        with monkeypatch.context() as broken:
            broken.setattr(
                ShmBackend,
                "delete",
                lambda self, key: (_ for _ in ()).throw(AccessDenied(key, "no")),
            )
            with pytest.raises(AccessDenied):
                manager.save({"x": torch.full((9,), 3)}, 3)
        assert whole(f"shm://{folder.name.split('-')[-1]}") == [1, 2]
        manager.save({"x": torch.full((9,), 4)}, 4)
        assert whole(f"shm://{folder.name.split('-')[-1]}") == [2, 4]


@pytest.mark.parametrize("wrong", ["mode", "link", "owner", "file"])
def test_a_folder_in_shared_memory_that_is_not_ours_alone_is_left_out(
    near, tmp_path, wrong, caplog
):
    """Nothing is read from it, and the job goes on with the other tiers.

    The log says so once, and not for every step.
    """
    tiers, folder = near
    with CheckpointManager(str(tmp_path / "planted")) as other:
        other.save({"x": torch.zeros(3)}, 99)
    if wrong == "link":
        folder.symlink_to(tmp_path / "planted")
    elif wrong == "file":
        folder.write_text("")
    else:
        shutil.copytree(tmp_path / "planted", folder)
        os.chmod(folder, 0o777 if wrong == "mode" else 0o700)
        if wrong == "owner":
            os.chown(folder, 65534, -1)
    try:
        with CheckpointManager(tiers) as manager:
            assert manager.restore({"x": torch.zeros(3)}) is None
            for step in (1, 2, 3):
                manager.save({"x": torch.ones(3)}, step)
            assert manager.steps() == [1, 2, 3]
            assert restored(manager, {"x": torch.zeros(3)}).step == 3
        assert f"is left out: {folder} is not a folder of this user alone" in caplog.text
        assert caplog.text.count("left out") == 1
        assert caplog.text.count("is not kept in") == 1
    finally:
        if wrong in ("link", "file"):
            folder.unlink()
        else:
            shutil.rmtree(folder)


def test_a_step_for_memory_alone_that_finds_no_room_is_skipped(near):
    tiers, _ = near
    with CheckpointManager(
        [Tier("memory"), Tier(tiers[1].url, every=10)], host_memory=176 << 20
    ) as manager:
        save = manager.save_async({"x": torch.ones(60 << 20)}, 3)
        assert isinstance(save.exception(20), SaveSkipped)
        manager.save({"x": torch.ones(60 << 20)}, 10)


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        (10, "no durable tier has any step of this run"),
        (0, "newest durable step is 0, older than 10"),
    ],
)
def test_closing_says_when_even_what_was_restored_is_in_memory_only(near, caplog, before, expected):
    """``before`` is the first step that is saved. Step 10 is the last before the job dies, and no
    durable tier takes it.
    """
    tiers, _ = near
    disk = tiers[1].url
    start = f"""
import os, torch
from ckpt import CheckpointManager, Tier
manager = CheckpointManager([Tier("memory"), Tier({disk!r}, every=100)])
for step in {sorted({before, 10})}:
    manager.save({{"x": torch.ones(3)}}, step)
os.kill(os.getpid(), 9)
"""
    run_code(start, status=-signal.SIGKILL, timeout=60)
    with CheckpointManager([Tier("memory"), Tier(disk, every=100)]) as manager:
        assert restored(manager, {"x": torch.zeros(3)}).step == 10
        for step in range(11, 15):
            manager.save({"x": torch.ones(3)}, step)
    assert expected in caplog.text
    assert caplog.text.count("step 14 is in this machine's memory only") == 1
    assert caplog.text.lower().count("save the last step to a durable tier too") == 1


def test_closing_names_only_the_newest_step_that_is_in_memory_only(near, caplog):
    """The step before it is in the other slot, which is no reason for a second warning."""
    tiers, _ = near
    with CheckpointManager([Tier("memory"), Tier(tiers[1].url, every=100)]) as manager:
        for step in (0, 1, 2, 3):
            manager.save({"x": torch.ones(3)}, step)
    reported = [
        record.message for record in caplog.records if "a durable tier too" in record.message
    ]
    assert len(reported) == 1
    assert "step 3 is in memory only" in reported[0]


def test_closing_says_so_also_where_nothing_was_saved(near, caplog):
    tiers, _ = near
    disk = tiers[1].url
    with CheckpointManager(tiers) as manager:
        manager.save({"x": torch.ones(3)}, 8)
    start = f"""
import os, torch
from ckpt import CheckpointManager, Tier
manager = CheckpointManager([Tier("memory"), Tier({disk!r}, every=100)])
assert manager.restore({{"x": torch.zeros(3)}}).step == 8
manager.save({{"x": torch.ones(3)}}, 9)
os.kill(os.getpid(), 9)
"""
    run_code(start, status=-signal.SIGKILL, timeout=60)
    with CheckpointManager([Tier("memory"), Tier(disk, every=100)]) as manager:
        assert restored(manager, {"x": torch.zeros(3)}).step == 9
    assert "the newest durable step is 8, older than 9" in caplog.text


def test_closing_says_nothing_of_that_where_the_restored_step_is_durable(near, caplog):
    tiers, _ = near
    with CheckpointManager(tiers) as manager:
        manager.save({"x": torch.ones(3)}, 10)
    with CheckpointManager([Tier("memory"), Tier(tiers[1].url, every=100)]) as manager:
        assert restored(manager, {"x": torch.zeros(3)}).step == 10
        manager.save({"x": torch.ones(3)}, 11)
    assert "step 11 is in memory only" in caplog.text
    assert "lost with" not in caplog.text


def test_slots_that_vanish_from_shared_memory_are_replaced_and_every_step_is_saved(near, tmp_path):
    """logind removes a user's files in /dev/shm when the user's last session ends (RemoveIPC).

    Programs that clean the folder do so too.
    """
    tiers, folder = near
    with CheckpointManager(tiers) as manager:
        for step in range(1, 7):
            manager.save({"x": torch.full((9,), step)}, step)
            if step in (2, 4):
                for path in MEMORY.glob(f"ckpt-slot-{os.getpid()}-*"):
                    path.unlink()
            if step == 4:
                shutil.rmtree(folder)
        assert whole(tmp_path / "disk") == [1, 2, 3, 4, 5, 6]
        assert whole(f"shm://{folder.name.split('-')[-1]}") == [5, 6]

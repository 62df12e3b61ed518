from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from msgspec.structs import replace

from ckpt.model.keys import OWNER
from ckpt.model.manifest import Packed
from ckpt.model.record_encoding import pack, unpack
from ckpt.root.owner import Owner
from ckpt.storage.api import StorageBackend
from tests.checkpoints import DEAD, Written, own, write_checkpoint
from tests.cli.conftest import ARRAYS, Cli, data_file, flip
from tests.kit.worlds import run_code

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture
def left(backend: StorageBackend) -> Written:
    """Step 300 is committed. Step 400 has everything but the manifest, and the job is dead."""
    write_checkpoint(backend, 300, ARRAYS, world_size=2)
    own(backend, DEAD)
    return write_checkpoint(backend, 400, ARRAYS, world_size=2, tree={"epoch": 3}, commit=False)


def manifest_of(written: Written) -> Path:
    return Path("runs") / written.ref.manifest


def test_what_is_whole_becomes_the_checkpoint_it_would_have_been(cli: Cli, left: Written) -> None:
    ran = cli("finalize", "runs")
    assert ran.code == 0
    assert ran.out.startswith("step 400 (attempt abcxyz) is a checkpoint now: ")
    assert ran.out.endswith("of 2 ranks, verified\n")
    assert manifest_of(left).read_bytes() == pack(left.stored)
    assert cli("verify", 400).code == 0
    again = cli("finalize", "runs")
    assert again.code == 0
    assert again.out == "nothing is unfinished: 2 steps committed\n"


def test_json_says_what_was_finished(cli: Cli, left: Written) -> None:
    ran = cli("finalize", "runs", "--json")
    assert ran.json["steps"] == [
        {
            "step": 400,
            "attempt": "abcxyz",
            "finished": True,
            "bytes": left.manifest.nbytes,
            "world_size": 2,
            "reason": None,
        }
    ]


def refused(cli: Cli, left: Written, *args: object, code: int = 5) -> str:
    before = sorted(Path("runs").rglob("*"))
    ran = cli("finalize", "runs", *args)
    assert (ran.code, ran.out) == (code, "")
    assert not manifest_of(left).exists()
    assert sorted(Path("runs").rglob("*")) == before
    return ran.err


def test_a_missing_rank_is_named(cli: Cli, left: Written) -> None:
    (Path("runs") / left.ref.key("rank-00001.json")).unlink()
    reported = refused(cli, left)
    assert "rank(s) 1 of 2 did not finish their part" in reported
    assert "ckpt prune removes what is left of it once it is a day old" in reported


def test_damaged_data_is_told(cli: Cli, left: Written) -> None:
    flip(data_file(left), 4100)
    assert "checksum mismatch" in refused(cli, left, code=4)


def test_a_data_file_that_is_gone_is_told(cli: Cli, left: Written) -> None:
    data_file(left, rank=1).unlink()
    assert "rank-00001.safetensors': is missing" in refused(cli, left, code=4)


def test_a_damaged_fragment_is_told(cli: Cli, left: Written) -> None:
    flip(Path("runs") / left.ref.key("rank-00001.json"), 60)
    assert "rank-00001.json" in refused(cli, left, code=4)


def test_a_fragment_of_another_save_is_told(cli: Cli, left: Written) -> None:
    other = Path("runs/step-000000300.abcxyz/rank-00001.json")
    (Path("runs") / left.ref.key("rank-00001.json")).write_bytes(other.read_bytes())
    assert "belongs to another save" in refused(cli, left, code=4)


@pytest.fixture(autouse=True)
def no_ended_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the jobs of this process that other tests with the same attempt have ended."""
    for name in ("_ended_attempts", "_collected_attempts"):
        monkeypatch.setattr(f"ckpt.root.owner.{name}", set())


def test_a_job_that_lives_commits_by_itself(
    cli: Cli, left: Written, backend: StorageBackend
) -> None:
    own(backend, Owner.of_this_process("abcxyz"))
    assert f"process {os.getpid()}" in refused(cli, left)


def test_of_several_saves_that_all_stay_as_they_are_each_reason_is_shown_once(
    cli: Cli, left: Written, backend: StorageBackend
) -> None:
    write_checkpoint(backend, 500, ARRAYS, world_size=2, commit=False)
    own(backend, Owner.of_this_process("abcxyz"))
    lines = refused(cli, left).splitlines()
    assert [f"step {step} (attempt abcxyz) was left alone" in "".join(lines) for step in (400, 500)]
    assert len([line for line in lines if f"process {os.getpid()}" in line]) == 2


def test_a_job_of_another_machine_must_be_known_to_be_dead(
    cli: Cli, left: Written, backend: StorageBackend
) -> None:
    own(backend, replace(DEAD, machine="elsewhere", host="node7"))
    reported = refused(cli, left)
    assert "on node7" in reported
    assert "--job-is-dead" in reported
    assert cli("finalize", "runs", "--job-is-dead").code == 0


def test_a_manager_that_was_closed_had_its_verdict(
    cli: Cli, left: Written, backend: StorageBackend
) -> None:
    backend.delete(OWNER)
    assert "the leader had decided" in refused(cli, left)


def test_a_root_that_was_taken_over_has_another_history(
    cli: Cli, left: Written, backend: StorageBackend
) -> None:
    own(backend, replace(DEAD, attempt="latera"))
    assert "attempt latera has taken the root over" in refused(cli, left)
    own(backend, replace(DEAD, attempt="abcxy"))  # 'abcxyz' begins with it, and is another attempt
    assert "attempt abcxy has taken the root over" in refused(cli, left)


def test_a_leader_that_went_on_had_refused_it(
    cli: Cli, left: Written, backend: StorageBackend
) -> None:
    write_checkpoint(backend, 500, ARRAYS, world_size=2, commit=False)
    ran = cli("finalize", "runs", "--step", 400)
    assert ran.code == 5
    assert "the leader went on to step 500 after it, so this save may have been refused" in ran.err
    both = cli("finalize", "runs")
    assert both.code == 0
    assert both.out.startswith("step 500 ")
    assert "step 400 (attempt abcxyz) was left alone" in both.err


def test_a_save_that_was_tried_again_had_been_refused(
    cli: Cli, left: Written, backend: StorageBackend
) -> None:
    write_checkpoint(backend, 400, ARRAYS, world_size=2, attempt="abcxyztb", commit=False)
    found = {
        step["attempt"]: step["finished"]
        for step in cli("finalize", "runs", "--json").json["steps"]
    }
    assert found == {"abcxyz": False, "abcxyztb": True}


def test_ranks_that_diverged_are_refused_here_too(
    cli: Cli, left: Written, backend: StorageBackend
) -> None:
    other = write_checkpoint(
        backend, 400, ARRAYS, world_size=2, attempt="abcxyw", tree={"epoch": 4}, commit=False
    )
    path = Path("runs") / other.ref.key("rank-00001.json")
    fragment = replace(unpack(path.read_bytes(), Packed, key="x"), attempt="abcxyz")
    (Path("runs") / left.ref.key("rank-00001.json")).write_bytes(pack(fragment))
    assert "'epoch' differs between ranks 0, 1" in refused(cli, left, "--step", 400)


@pytest.mark.parametrize(
    ("args", "expected"),
    [(["nowhere"], "empty, or does not exist"), (["runs", "--step", 7], "step 7 is not there")],
)
def test_there_is_nothing_to_finish(
    cli: Cli, left: Written, args: list[object], expected: str
) -> None:
    ran = cli("finalize", *args)
    assert ran.code == 7
    assert expected in ran.err


LEADER_DIES = """
import os, signal, sys
import torch
import ckpt.coordination.committer as committer
from ckpt import CheckpointManager

manager = CheckpointManager(sys.argv[1])
state = {"x": torch.arange(1000), "step": 1}
manager.save(state, step=1)
def dies(backend, key, data):
    open(sys.argv[2], "wb").write(data)  # what it would have put
    os.kill(os.getpid(), signal.SIGKILL)
committer.put_manifest = dies
manager.save(state, step=2)
"""


def test_a_real_leader_that_dies_before_its_put(cli: Cli, tmp_path: Path) -> None:
    run_code(LEADER_DIES, tmp_path / "runs", tmp_path / "put", status=-signal.SIGKILL)
    ran = cli("finalize", "runs", "--step", 2)
    assert ran.code == 0, ran.err
    place = next(Path("runs").glob("step-000000002.*"))
    assert (place / "manifest.json").read_bytes() == Path("put").read_bytes()
    assert cli("verify", 2).code == 0

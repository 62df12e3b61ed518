"""``engine.save_checkpoint`` and ``load_checkpoint`` of real engines of DeepSpeed through ckpt."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import processes
from tests.integrations.deepspeed.on_deepspeed import MARKS
from tests.kit.worlds import ENVIRONMENT, ROOT, environment_of, run_forks, world
from tests.servers import free_port

WORKER = Path(__file__).parents[1] / "workers" / "zero_engine.py"
PAGE = ROOT / "docs" / "integrations" / "deepspeed.md"
KINDS = ("0-fp32", "0-bf16", "1-fp32", "1-bf16-sums", "2-bf16", "3-fp32", "3-bf16")
OFFLOADED = ("2-bf16-offload", "3-bf16-offload")

pytestmark = MARKS


@pytest.fixture(autouse=True)
def on_cpus() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS_ACCELERATOR", "cpu")
        yield


def ranks(count: int, *words: object) -> None:
    assert "ALL WELL" in world(count, WORKER, *words, timeout=600)


@pytest.mark.parametrize("count", [1, 2])
def test_a_load_goes_on_with_the_same_losses(tmp_path: Path, count: int) -> None:
    ranks(count, tmp_path, *(f"same:{kind}" for kind in (*KINDS, *OFFLOADED)))


def test_a_part_of_a_checkpoint_is_loaded_as_deepspeed_does(tmp_path: Path) -> None:
    orders = [f"partly:{kind}:load_module_only" for kind in ("0-fp32", "2-bf16", "3-bf16")]
    ranks(1, tmp_path, *orders, "partly:2-bf16:load_optimizer_states", "weights_of_3:3-bf16")


@pytest.mark.parametrize("count", [1, 2])
def test_tags_and_tiers(tmp_path: Path, count: int) -> None:
    ranks(count, tmp_path, "tags:0-fp32", "farther:2-bf16", "exported:1-fp32", "exported:3-bf16")


def test_a_tag_that_is_absent_is_one_error_on_all_ranks(tmp_path: Path) -> None:
    ranks(2, tmp_path, "absent:0-fp32", "absent:2-bf16", "absent:3-bf16")


def test_a_file_that_is_damaged_for_one_rank_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    ranks(2, tmp_path, "damaged:2-bf16", "damaged:3-bf16")


def test_a_second_job_on_the_root_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    ranks(1, tmp_path, "second_job:1-bf16")


def test_what_cannot_be_saved_or_loaded_is_refused(tmp_path: Path) -> None:
    ranks(1, tmp_path, "refused:1-bf16", "not_made:1-bf16")
    ranks(2, tmp_path, "peer:0-fp32", "apart:0-fp32", "apart:2-bf16", "apart:3-bf16")
    ranks(2, tmp_path, "save:2-bf16", "save:3-bf16")
    ranks(1, tmp_path, "other_world:2-bf16", "other_world:3-bf16")


@pytest.mark.parametrize(("kind", "count"), [("3-bf16", 1), ("2-bf16", 2)])
def test_a_job_killed_in_mid_save_goes_on_with_the_same_losses(
    tmp_path: Path, kind: str, count: int
) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "killed").mkdir()
    ranks(count, tmp_path / "whole", f"train:{kind}:8")
    port = free_port()
    environments = [environment_of(rank, count, port) for rank in range(count)]
    words = [WORKER, tmp_path / "killed", f"train:{kind}:8:dies"]
    ended = run_forks(words, environments, timeout=300)
    assert -signal.SIGKILL in ended.statuses, ended.said
    assert (tmp_path / "killed" / "run" / "latest").read_text() == "global_step4"
    ranks(count, tmp_path / "killed", f"train:{kind}:8")
    for rank in range(count):
        expected = (tmp_path / "whole" / f"losses-{rank}").read_text().splitlines()
        said = (tmp_path / "killed" / f"losses-{rank}").read_text().splitlines()
        assert said[0] == expected[0] == "from 0"
        second = said.index("from 4")
        assert expected[1:second] == said[1:second]
        assert expected[5:] == said[second + 1 :]
        assert len(expected) == 9


def test_the_example_of_the_page_runs_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    block = next(each for each in PAGE.read_text().split("```python\n")[1:] if "CkptEngine" in each)
    script = tmp_path / "train.py"
    script.write_text(block.partition("```")[0])
    assert "at step 0 last None" in world(2, script, timeout=300)
    assert "at step 20 last 19" in world(2, script, timeout=300)


def test_the_example_that_is_killed_goes_on_with_the_same_losses(tmp_path: Path) -> None:
    def started(root: Path) -> subprocess.Popen[str]:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        words = [ROOT / "examples" / "train_deepspeed.py", "--epochs", "1", "--save-every", "5"]
        command = [*launch, "--nproc-per-node=2", *map(str, words), "--root", str(root)]
        environment = {**os.environ, **ENVIRONMENT, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        both: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen(command, env=environment, **both)

    def said_by(root: Path) -> list[str]:
        with processes.ended(started(root)) as process:
            output, _ = process.communicate(timeout=400)
        assert process.returncode == 0, output
        return re.findall(r"^(?:step|accuracy|resumed) .*", output, re.MULTILINE)

    whole = said_by(tmp_path / "whole")
    with processes.ended(started(tmp_path / "killed")) as process:
        assert process.stdout is not None
        assert any(line.startswith("step   12") for line in process.stdout)
        processes.kill_all(process)
    first, *rest = said_by(tmp_path / "killed")
    resumed = re.match(r"resumed from step (\d+): epoch 0", first)
    assert resumed is not None, first
    assert rest == whole[int(resumed[1]) :]
    assert rest[-1].startswith("accuracy")

"""``engine.save_checkpoint`` and ``load_checkpoint`` of real engines of DeepSpeed through ckpt."""

from __future__ import annotations

import importlib.util
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.worlds import environment_of, run_forks, world
from tests.servers import free_port

WORKER = Path(__file__).parent / "workers" / "zero_engine.py"
PAGE = Path(__file__).parents[2] / "docs" / "integrations" / "deepspeed.md"
KINDS = ("0-fp32", "0-bf16", "1-fp32", "1-bf16-sums", "2-bf16", "3-fp32", "3-bf16")
OFFLOADED = ("2-bf16-offload", "3-bf16-offload")

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.integration,
    pytest.mark.timeout(900),  # DeepSpeed builds an extension of its own the first time
    pytest.mark.skipif(
        importlib.util.find_spec("deepspeed") is None,
        reason="deepspeed is not installed: pip install -e '.[deepspeed]'",
    ),
    pytest.mark.skipif(
        shutil.which("c++") is None, reason="deepspeed builds its CPU backend with a C++ compiler"
    ),
]


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


def test_what_cannot_be_saved_or_loaded_is_refused(tmp_path: Path) -> None:
    ranks(1, tmp_path, "refused:1-bf16", "not_made:1-bf16")
    ranks(2, tmp_path, "peer:0-fp32", "save:2-bf16", "save:3-bf16")
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


def test_the_change_of_a_script_has_at_most_five_lines() -> None:
    diff = PAGE.read_text().split("```diff\n")[1].partition("```")[0]
    changed = [line for line in diff.splitlines() if line.startswith(("+", "-"))]
    assert 1 <= len(changed) <= 5

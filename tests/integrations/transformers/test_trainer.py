"""Real trainers of transformers and TRL resume with exactly what they saved, to the bit."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[hf]'")
pytest.importorskip("accelerate", reason="the Trainer needs accelerate: pip install '.[hf]'")

import transformers

import ckpt
from ckpt import CheckpointManager, Tier
from ckpt.catalog.step_listing import committed, read_manifest
from ckpt.errors import ConfigError, NoCheckpoint, OutOfSpace, RestoreError, RootInUse
from ckpt.integrations.transformers import trainer as door
from ckpt.integrations.transformers import trainer_folder
from ckpt.model.metrics import metrics_of
from ckpt.storage.registry import open_backend
from ckpt.storage.testing import Raise, Rule
from tests import processes
from tests.distributed.launch import torchrun
from tests.integrations.trainers import (
    At,
    CkptTrainer,
    Stopped,
    Trainer,
    Words,
    arguments,
    flip,
    losses,
    model,
    same,
    stop,
    trainer,
    weights,
)
from tests.kit.stores import faulty

HERE = Path(__file__).parents[1]
SHORT = "max_steps=4, save_steps=2"
ROOT = HERE.parents[1]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
ENVIRONMENT["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "backends")])
pytestmark = [
    pytest.mark.integration,
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def steps(folder: Path) -> list[int]:
    return ckpt_steps(folder / "ckpt")


def ckpt_steps(root: Path) -> list[int]:
    with CheckpointManager(root) as manager:
        return manager.steps()


def metrics(root: Path, step: int) -> dict[str, float]:
    backend = open_backend(str(root))
    (found,) = [ref for ref in committed(backend) if ref.step == step]
    return metrics_of(read_manifest(backend, found).metadata)


def folders(folder: Path) -> list[int]:
    return sorted(int(each.name.split("-")[1]) for each in folder.glob("checkpoint-*"))


def interrupted(folder: Path, at: int, **options: Any) -> None:
    """Run until an exception after the step ``at``."""
    with pytest.raises(Stopped):
        trainer(folder, callbacks=[At(at, stop)], **options).train()


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "gradient accumulation": {"gradient_accumulation_steps": 3, "per_device_train_batch_size": 2},
    "each epoch": {"save_strategy": "epoch", "num_train_epochs": 4, "max_steps": -1},
    "a schedule with restarts": {
        "lr_scheduler_type": "cosine_with_restarts",
        "warmup_steps": 2,
        "lr_scheduler_kwargs": {"num_cycles": 2},
    },
}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_resumed_run_has_the_losses_of_one_that_was_not_interrupted(
    tmp_path: Path, name: str
) -> None:
    options = {"count": 20, **VARIANTS[name]}
    whole = trainer(tmp_path / "whole", **options)
    whole.train()
    interrupted(tmp_path / "cut", 8, **options)
    last = {"each epoch": 5}.get(name, 6)
    assert folders(tmp_path / "cut")[-1] == last

    resumed = trainer(tmp_path / "cut", **options)
    resumed.train(resume_from_checkpoint=True)

    assert resumed._initial_global_step == last
    assert losses(resumed) == losses(whole)
    assert same(weights(resumed), weights(whole))
    assert steps(tmp_path / "cut") == folders(tmp_path / "cut") == steps(tmp_path / "whole")


def test_a_run_killed_in_mid_save_resumes_from_the_step_before(tmp_path: Path) -> None:
    width = 256  # large enough: the kill comes long before the step is written
    whole = trainer(tmp_path / "whole", width=width)
    whole.train()
    killed = processes.run(
        [
            sys.executable,
            "-m",
            "tests.integrations.workers.trainer_kill",
            tmp_path / "cut",
            6,
            width,
        ],
        timeout=120,
        env=ENVIRONMENT,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stdout
    assert folders(tmp_path / "cut") == [3]
    begun = {each.name.partition(".")[0] for each in (tmp_path / "cut" / "ckpt").glob("step-*")}
    assert begun == {"step-000000003", "step-000000006"}

    resumed = trainer(tmp_path / "cut", width=width)
    resumed.train(resume_from_checkpoint=True)

    assert resumed._initial_global_step == 3
    assert losses(resumed) == losses(whole)
    assert same(weights(resumed), weights(whole))


def test_two_ranks_go_on_after_one_was_killed(tmp_path: Path) -> None:
    worker = HERE / "workers" / "trainer_ddp.py"
    said = torchrun(2, str(worker), tmp_path, options=["--max-restarts=1"])
    assert "and equal" in said


def test_a_folder_that_was_not_written_is_written_when_the_run_resumes(tmp_path: Path) -> None:
    """The process may die between the commit and the folder."""
    interrupted(tmp_path, 8)
    text = (tmp_path / "checkpoint-6" / "trainer_state.json").read_text()
    shutil.rmtree(tmp_path / "checkpoint-6")

    resumed = trainer(tmp_path, callbacks=[At(7, stop)])
    with pytest.raises(Stopped):
        resumed.train(resume_from_checkpoint=True)

    assert resumed._initial_global_step == 6
    assert (tmp_path / "checkpoint-6" / "trainer_state.json").read_text() == text


def test_a_folder_names_the_step_to_go_back_to(tmp_path: Path) -> None:
    whole = trainer(tmp_path)
    whole.train()
    state = tmp_path / "checkpoint-3" / "trainer_state.json"
    state.write_text(noted := state.read_text() + "\n")
    stopped = trainer(tmp_path, callbacks=[At(4, stop)])
    with pytest.raises(Stopped):
        stopped.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert steps(tmp_path) == [3]
    assert len(list((tmp_path / "ckpt").glob("step-*"))) == 4, "nothing is removed"
    assert state.read_text() != noted
    again = trainer(tmp_path)
    again.train(resume_from_checkpoint=True)
    assert again._initial_global_step == 3
    assert losses(again) == losses(whole)
    assert folders(tmp_path) == [3, 6, 9, 10]


@pytest.mark.parametrize("asked", [True, "auto"])
def test_a_damaged_newest_step_gives_way_to_the_one_before(tmp_path: Path, asked: Any) -> None:
    whole = trainer(tmp_path / "whole")
    whole.train()
    interrupted(tmp_path / "cut", 8)
    flip(tmp_path / "cut", 6)
    with pytest.raises(RestoreError, match="step 6"):  # the step was requested by its name
        trainer(tmp_path / "cut").train(
            resume_from_checkpoint=str(tmp_path / "cut" / "checkpoint-6")
        )
    resumed = trainer(tmp_path / "cut")
    resumed.train(resume_from_checkpoint=asked)
    assert resumed._initial_global_step == 3
    assert losses(resumed) == losses(whole)
    assert same(weights(resumed), weights(whole))


def test_two_ranks_go_back_to_one_step_from_a_damaged_one(tmp_path: Path) -> None:
    worker = HERE / "workers" / "trainer_damaged.py"
    assert "resumed from 3 and equal" in torchrun(2, str(worker), tmp_path)


def test_an_error_names_the_step_if_all_are_damaged(tmp_path: Path) -> None:
    interrupted(tmp_path, 5)
    flip(tmp_path, 3)
    with pytest.raises(RestoreError, match="step 3"):
        trainer(tmp_path).train(resume_from_checkpoint=True)


class SaveToo(transformers.TrainerCallback):  # type: ignore[misc]
    """A callback that requests a save at the end of each epoch."""

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_save = True


def test_a_second_save_of_a_step_is_none(tmp_path: Path) -> None:
    trainer(tmp_path, callbacks=[SaveToo()], count=12).train()  # an epoch has three steps
    assert steps(tmp_path) == folders(tmp_path) == [3, 6, 9, 10]


def test_two_nodes_write_one_folder(tmp_path: Path) -> None:
    """Two nodes may have processes with the same id, as two threads have."""

    def write(_: int) -> None:
        for step in range(40):
            trainer_folder.write_folder(str(tmp_path), step, "{}")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    assert folders(tmp_path) == list(range(40))
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("on_error", ["warn", "raise"])
def test_the_last_save_may_fail_if_the_configuration_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_error: Any
) -> None:
    full = Rule(verb="upload", key="safetensors", nth=4, fault=Raise(OutOfSpace))
    faulty(monkeypatch, tmp_path / "ckpt", [full])
    trained = trainer(tmp_path, ckpt_config=ckpt.SaveConfig(on_error=on_error))
    expected = nullcontext() if on_error == "warn" else pytest.raises(OutOfSpace)
    with expected:
        trained.train()
    assert trained.state.global_step == 10
    assert folders(tmp_path) == [3, 6, 9]


def test_a_checkpoint_of_transformers_own_is_resumed_and_saved_in_ours(tmp_path: Path) -> None:
    whole = trainer(tmp_path / "whole")
    whole.train()
    with pytest.raises(Stopped):
        trainer(tmp_path / "cut", kind=Trainer, callbacks=[At(8, stop)]).train()
    assert (tmp_path / "cut" / "checkpoint-6" / "optimizer.pt").exists()

    resumed = trainer(tmp_path / "cut")
    resumed.train(resume_from_checkpoint=True)

    assert resumed._initial_global_step == 6
    assert losses(resumed) == losses(whole)
    assert steps(tmp_path / "cut") == [9, 10]


@pytest.mark.parametrize(("limit", "kept"), [(1, [10]), (2, [9, 10]), (None, [3, 6, 9, 10])])
def test_the_limit_keeps_the_newest(tmp_path: Path, limit: int | None, kept: list[int]) -> None:
    trainer(tmp_path, save_total_limit=limit).train()
    assert folders(tmp_path) == steps(tmp_path) == kept


BEST = {
    "eval_strategy": "steps",
    "eval_steps": 2,
    "save_steps": 2,
    "load_best_model_at_end": True,
    "metric_for_best_model": "made_up",
}


class Graded:
    """A trainer whose evaluations return the results of a plan."""

    def __init__(self, trained: Any, plan: dict[int, float]) -> None:
        self.trained, self.plan, self.seen = trained, plan, dict[int, dict[str, torch.Tensor]]()

    def __call__(self, _: object) -> dict[str, float]:
        step = self.trained.state.global_step
        self.seen[step] = weights(self.trained)
        return {"made_up": self.plan[step]}


@pytest.mark.parametrize(
    ("plan", "limit", "best", "kept"),
    [
        ({2: 1.0, 4: 3.0, 6: 2.0, 8: 3.0, 10: 0.5}, 2, 4, [4, 10]),  # of equal ones the first
        ({2: 1.0, 4: 3.0, 6: 2.0, 8: 3.0, 10: 9.0}, 3, 10, [6, 8, 10]),
        ({2: 1.0, 4: 2.0, 6: 3.0, 8: 4.0, 10: 9.0}, 2, 10, [8, 10]),
        ({2: 1.0, 4: 2.0, 6: 3.0, 8: 9.0, 10: 4.0}, 3, 8, [6, 8, 10]),
        ({2: 7.0, 4: 3.0, 6: 2.0, 8: 3.0, 10: 1.0}, 1, 2, [2]),
    ],
)
def test_the_best_model_is_kept_and_loaded(
    tmp_path: Path, plan: dict[int, float], limit: int, best: int, kept: list[int]
) -> None:
    plain = trainer(tmp_path / "plain", kind=Trainer, save_total_limit=limit, **BEST)
    plain.compute_metrics = Graded(plain, plan)
    plain.train()
    assert folders(tmp_path / "plain") == kept
    trained = trainer(tmp_path, save_total_limit=limit, **BEST)
    graded = trained.compute_metrics = Graded(trained, plan)
    trained.train()
    assert trained.state.best_model_checkpoint == str(tmp_path / f"checkpoint-{best}")
    assert same(weights(trained), graded.seen[best])
    assert folders(tmp_path) == kept
    assert set(kept) <= set(steps(tmp_path))
    assert len(steps(tmp_path)) <= max(limit, 2)
    assert metrics(tmp_path / "ckpt", best)["eval_made_up"] == plan[best]


def test_the_best_step_of_an_earlier_life_is_known(tmp_path: Path) -> None:
    plan = {2: 7.0, 4: 3.0, 6: 2.0, 8: 3.0, 10: 1.0}
    first = trainer(tmp_path, save_total_limit=2, callbacks=[At(7, stop)], **BEST)
    graded = first.compute_metrics = Graded(first, plan)
    with pytest.raises(Stopped):
        first.train()
    second = trainer(tmp_path, save_total_limit=2, **BEST)
    second.compute_metrics = Graded(second, plan)
    second.train(resume_from_checkpoint=True)
    assert second._initial_global_step == 6
    assert same(weights(second), graded.seen[2])
    assert folders(tmp_path) == steps(tmp_path) == [2, 10]


def test_the_tiers_are_those_that_are_given(tmp_path: Path) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    options = {"ckpt_tiers": [near, Tier(str(far), keep_last=1)], "save_total_limit": 2}
    trainer(tmp_path / "out", **options).train()
    assert ckpt_steps(near) == folders(tmp_path / "out") == [9, 10]
    assert ckpt_steps(far) == [10]
    shutil.rmtree(near)
    again = trainer(tmp_path / "out", **options)
    again.train(resume_from_checkpoint=True)
    assert again._initial_global_step == 10


def test_the_scaler_is_saved_and_restored(tmp_path: Path) -> None:
    def scaled(**options: Any) -> Any:
        made = trainer(tmp_path, callbacks=[At(7, stop)], **options)
        made.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=float(2**10))
        return made

    first, second = scaled(), scaled()
    first.accelerator.scaler.load_state_dict(
        {"scale": 8.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000,
         "_growth_tracker": 5}
    )  # fmt: skip
    for made, resume in ((first, None), (second, True)):
        with pytest.raises(Stopped):
            made.train(resume_from_checkpoint=resume)
    assert second.accelerator.scaler.state_dict() == first.accelerator.scaler.state_dict()


# -- the page and the example ----------------------------------------------------------------------


def test_the_lines_of_the_page_run_and_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs" / "integrations" / "transformers.md").read_text()
    (lines,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "train.py").write_text(lines.replace("max_steps=60, save_steps=20", SHORT))
    monkeypatch.chdir(tmp_path)
    for first in (0, 4):
        names = runpy.run_path("train.py")
        assert names["trainer"]._initial_global_step == first
    assert {2, 4} <= set(steps(tmp_path / "runs" / "gpt2"))


def test_the_example_killed_and_resumed_ends_with_the_same_weights(tmp_path: Path) -> None:
    def command(name: str) -> list[object]:
        script = ROOT / "examples" / "train_transformers.py"
        options = ["--epochs", 1, "--save-steps", 5, "--output-dir", tmp_path / name]
        return [sys.executable, script, *options]

    whole = processes.run(command("whole"), env=ENVIRONMENT, timeout=120)
    assert whole.returncode == 0, whole.stdout
    words = [str(word) for word in command("cut")]
    with processes.ended(subprocess.Popen(words, env=ENVIRONMENT)) as process:
        while not any(tmp_path.glob("cut/checkpoint-10")) and process.poll() is None:
            time.sleep(0.001)
        processes.kill_all(process)
    assert process.returncode == -signal.SIGKILL
    resumed = processes.run(command("cut"), env=ENVIRONMENT, timeout=120)
    assert resumed.stdout.splitlines()[-1].startswith("accuracy")
    assert resumed.stdout.splitlines()[-1] == whole.stdout.splitlines()[-1]


# -- TRL and PEFT ----------------------------------------------------------------------------------


def words_tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = {f"w{index}": index for index in range(62)} | {"<pad>": 62, "<eos>": 63}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<pad>")),
        pad_token="<pad>",
        eos_token="<eos>",
    )


def sft(folder: Path, **options: Any) -> Any:
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install '.[hf]'")
    trl = pytest.importorskip("trl", reason="trl is not installed: pip install '.[hf]'")
    from datasets import Dataset

    rows = torch.randint(0, 62, (32, 12), generator=torch.Generator().manual_seed(0)).tolist()
    transformers.set_seed(3)
    net = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=12,
        )
    )  # fmt: skip
    plain = arguments(folder).to_dict()
    names = ("max_steps", "save_steps", "logging_steps", "per_device_train_batch_size", "seed")
    chosen = {name: plain[name] for name in (*names, "learning_rate", "use_cpu", "disable_tqdm")}
    callbacks = options.pop("callbacks", [])
    args = trl.SFTConfig(str(folder), report_to=[], max_length=12, **chosen | options)
    return door.make_ckpt_trainer(trl.SFTTrainer)(
        model=net,
        args=args,
        train_dataset=Dataset.from_dict({"input_ids": rows}),
        processing_class=words_tokenizer(),
        peft_config=peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"]),
        callbacks=callbacks,
    )


def test_an_sft_trainer_with_lora_saves_the_adapter_alone_and_resumes(tmp_path: Path) -> None:
    whole = sft(tmp_path / "whole")
    whole.train()
    with pytest.raises(Stopped):
        sft(tmp_path / "cut", callbacks=[At(8, stop)]).train()
    with ckpt.open(tmp_path / "cut" / "ckpt") as opened:
        saved = [name for name in opened.names() if name.startswith("model/")]
    assert saved
    assert all("lora_" in name for name in saved)

    resumed = sft(tmp_path / "cut")
    resumed.train(resume_from_checkpoint=True)

    assert resumed._initial_global_step == 6
    assert losses(resumed) == losses(whole)
    assert same(weights(resumed), weights(whole))


def with_pissa(folder: Path, seed: int, **options: Any) -> Any:
    """Return a trainer of a script that has drawn random numbers by ``seed`` before it puts the
    adapter in place.
    """
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install '.[hf]'")
    lora = peft.LoraConfig(
        r=4, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights="pissa_niter_4"
    )
    net = model(width=64)
    torch.manual_seed(seed)
    adapted = peft.get_peft_model(net, lora)
    return CkptTrainer(adapted, arguments(folder), train_dataset=Words(32), **options)


def test_the_frozen_weights_that_an_adapter_has_changed_are_saved_and_restored(
    tmp_path: Path,
) -> None:
    whole = with_pissa(tmp_path / "whole", seed=1)
    whole.train()
    with pytest.raises(Stopped):
        with_pissa(tmp_path / "cut", seed=1, callbacks=[At(8, stop)]).train()

    resumed = with_pissa(tmp_path / "cut", seed=2)
    resumed.train(resume_from_checkpoint=True)

    assert resumed._initial_global_step == 6
    assert losses(resumed) == losses(whole)
    assert same(weights(resumed), weights(whole))


# -- bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"fsdp": "full_shard"}, "does not support FSDP"),
        ({"save_only_model": True}, "save_only_model=True leaves out"),
        ({"auto_find_batch_size": True}, "set per_device_train_batch_size"),
        ({"enable_jit_checkpoint": True}, "enable_jit_checkpoint=True"),
        ({"push_to_hub": True, "hub_strategy": "checkpoint", "hub_token": "none"}, "hub_strategy"),
    ],
)
def test_arguments_that_are_not_supported_are_refused(
    tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        trainer(tmp_path, **options)


def test_a_tier_that_may_remove_the_best_step_is_refused(tmp_path: Path) -> None:
    tier = Tier(str(tmp_path / "far"), keep_last=1, keep_best=("eval_loss", "min", 3))
    with pytest.raises(ConfigError, match="leave keep_best out"):
        trainer(tmp_path, ckpt_tiers=[tier], **BEST)


def test_an_entropy_that_adapts_is_refused(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl", reason="trl is not installed: pip install '.[hf]'")
    from datasets import Dataset

    args = trl.GRPOConfig(
        str(tmp_path), use_adaptive_entropy=True, use_cpu=True, bf16=False, report_to=[]
    )
    with pytest.raises(ConfigError, match="use_adaptive_entropy=True"):
        door.make_ckpt_trainer(trl.GRPOTrainer)(
            model=model(),
            reward_funcs=lambda completions, **_: [0.0 for _ in completions],
            args=args,
            train_dataset=Dataset.from_dict({"prompt": ["w1"]}),
            processing_class=words_tokenizer(),
        )


def test_deepspeed_is_refused(tmp_path: Path) -> None:
    args = arguments(tmp_path)
    args.deepspeed = {"zero_optimization": {"stage": 2}}
    with pytest.raises(ConfigError, match="does not support DeepSpeed"):
        CkptTrainer(model=model(), args=args)


def test_a_class_that_is_no_trainer_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"transformers\.Trainer or a subclass"):
        door.make_ckpt_trainer(dict)
    assert door.make_ckpt_trainer(CkptTrainer) is CkptTrainer


def test_a_search_over_hyperparameters_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="hyperparameter_search"):
        trainer(tmp_path).train(trial=object())


def test_a_second_manager_that_saves_to_the_root_ends_the_saves_of_the_trainer(
    tmp_path: Path,
) -> None:
    managers: list[CheckpointManager] = []

    def second() -> None:
        managers.append(CheckpointManager(tmp_path / "ckpt"))
        managers[0].save({"x": 1}, 100)

    with pytest.raises(RootInUse, match="another CheckpointManager of this very process"):
        trainer(tmp_path, callbacks=[At(5, second)]).train()
    managers[0].close()


def test_a_new_run_in_the_folder_of_an_earlier_one_is_refused(tmp_path: Path) -> None:
    interrupted(tmp_path, 5)
    with pytest.raises(ConfigError, match="holds step 3 of an earlier run") as caught:
        trainer(tmp_path).train()
    assert str(caught.value).endswith("True, or give this run another output_dir")


@pytest.mark.parametrize("asked", ["", "ckpt", "ckpt/step", "Auto", "checkpoint-99", 3])
def test_a_value_that_is_no_checkpoint_is_refused_with_one_that_is(
    tmp_path: Path, asked: Any
) -> None:
    interrupted(tmp_path, 8)
    (step,) = (tmp_path / "ckpt").glob("step-000000006.*")
    given = {"": str(tmp_path), "ckpt": str(tmp_path / "ckpt"), "ckpt/step": str(step)}
    for value in (given.get(asked, asked), asked):
        with pytest.raises(ConfigError, match="is not the folder of a checkpoint") as caught:
            trainer(tmp_path).train(resume_from_checkpoint=value)
        said = str(caught.value)
        assert f"resume_from_checkpoint={value!r}" in said
        assert f"give {str(tmp_path / 'checkpoint-6')!r}, or True" in said
        assert "remove" not in said
    with pytest.raises(ConfigError, match=r'has no step of ckpt: give .* or "auto"'):
        trainer(tmp_path / "other").train(resume_from_checkpoint=asked)


@pytest.mark.parametrize("asked", [True, "auto", "checkpoint-6"])
def test_folders_whose_steps_are_all_gone_are_refused_with_the_ways_out(
    tmp_path: Path, asked: Any
) -> None:
    interrupted(tmp_path, 8)
    shutil.rmtree(tmp_path / "ckpt")
    value = str(tmp_path / asked) if asked == "checkpoint-6" else asked
    with pytest.raises(NoCheckpoint, match=r"checkpoint-3, checkpoint-6 in .* remove these"):
        trainer(tmp_path).train(resume_from_checkpoint=value)
    assert folders(tmp_path) == [3, 6]
    for step in (3, 6):
        shutil.rmtree(tmp_path / f"checkpoint-{step}")
    interrupted(tmp_path, 4)
    assert folders(tmp_path) == steps(tmp_path) == [3]


def test_a_folder_whose_step_is_gone_is_refused_by_name(tmp_path: Path) -> None:
    interrupted(tmp_path, 8)
    shutil.copytree(tmp_path / "checkpoint-3", tmp_path / "checkpoint-4")
    (tmp_path / "checkpoint-4" / "ckpt.json").write_text(json.dumps({"step": 4}))
    with pytest.raises(RestoreError, match="checkpoint-4 points to step 4"):
        trainer(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))


def test_a_pointer_that_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    interrupted(tmp_path, 5)
    (tmp_path / "checkpoint-3" / "ckpt.json").write_text("{")
    with pytest.raises(ConfigError, match=r"ckpt\.json cannot be read"):
        trainer(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))


def test_a_folder_of_another_run_is_refused_by_name(tmp_path: Path) -> None:
    interrupted(tmp_path / "one", 5)
    with pytest.raises(ConfigError, match="train with output_dir="):
        trainer(tmp_path / "two").train(
            resume_from_checkpoint=str(tmp_path / "one" / "checkpoint-3")
        )


def test_an_empty_folder_is_refused_as_the_trainer_does_unless_it_may_be_empty(
    tmp_path: Path,
) -> None:
    with pytest.raises(ValueError, match="No valid checkpoint found"):
        trainer(tmp_path).train(resume_from_checkpoint=True)
    for expected in (0, 3):
        each = trainer(tmp_path, callbacks=[At(4, stop)])
        with pytest.raises(Stopped):
            each.train(resume_from_checkpoint="auto")
        assert each._initial_global_step == expected


def test_a_plain_trainer_refuses_our_folder(tmp_path: Path) -> None:
    interrupted(tmp_path, 5)
    with pytest.raises(ValueError, match="Can't find a valid checkpoint"):
        trainer(tmp_path, kind=Trainer).train(resume_from_checkpoint=True)


def test_only_the_first_rank_lists_the_steps_before_a_damaged_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that cannot list its tiers must not leave the others in a collective."""
    asked: list[str] = []

    def first_result(failure: str, look: Any) -> list[int]:
        asked.append(failure)
        return [10, 20]  # Of the first rank; this rank does not look

    monkeypatch.setattr(door, "first_result", first_result)
    manager = SimpleNamespace(steps=lambda: pytest.fail("another rank has listed the steps"))
    restored: list[int] = []
    trained: Any = SimpleNamespace(
        args=SimpleNamespace(output_dir=str(tmp_path)),
        _ckpt_run=SimpleNamespace(manager=manager),
        _ckpt_write_folder_of=lambda _, step: restored.append(step),
    )
    damaged = door._StepDamaged(30, NoCheckpoint(str(tmp_path)))
    found = door.CkptTrainerMixin._ckpt_folder_before(trained, damaged)
    assert (found, restored) == (str(tmp_path / "checkpoint-20"), [20])
    assert asked == ["cannot list the steps"]


def test_a_folder_whose_step_is_on_the_tiers_of_another_node_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new node has no step on its own tiers, and gets the files of a step from other nodes."""

    def all_results(_: str, look: Any) -> list[Any]:
        return [look(), [10]]  # The other rank has step 10

    for step in (10, 15):
        trainer_folder.write_folder(str(tmp_path), step, "{}")
    monkeypatch.setattr(door, "all_results", all_results)
    trained: Any = SimpleNamespace(
        args=SimpleNamespace(output_dir=str(tmp_path)),
        accelerator=SimpleNamespace(wait_for_everyone=lambda: None),
        is_local_process_zero=lambda: True,
    )
    manager: Any = SimpleNamespace(steps=list)
    door.CkptTrainerMixin._ckpt_write_text(trained, manager, 20, "{}")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["checkpoint-10", "checkpoint-20"]


def test_the_best_model_is_that_of_a_step_that_was_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save of the best step, 30, has failed, or was skipped by another rank."""
    folders_of = [trainer_folder.folder_of(str(tmp_path), step) for step in (10, 20, 30)]
    trainer_folder.write_folder(str(tmp_path), 20, "{}")
    run = door._Run(str(tmp_path), trainer_folder.SaveLimit.of(None, has_best=True), writes=True)
    run.best_folders = [None, *folders_of[:2]]
    trained: Any = SimpleNamespace(
        _ckpt_run=run, state=SimpleNamespace(best_model_checkpoint=folders_of[2])
    )
    assert door.CkptTrainerMixin._ckpt_best_folder(trained) == folders_of[1]
    trainer_folder.write_folder(str(tmp_path), 30, "{}")
    assert door.CkptTrainerMixin._ckpt_best_folder(trained) == folders_of[2]


def test_all_ranks_load_the_best_model_of_the_first_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that skips a save does not take that step for the best one."""
    monkeypatch.setattr(door, "first_result", lambda *_: "checkpoint-10")
    trained: Any = object.__new__(door.CkptTrainerMixin)
    trained.state = SimpleNamespace(best_model_checkpoint=None)
    trained._ckpt_run = SimpleNamespace(finish=lambda: None)
    trained.accelerator = SimpleNamespace(wait_for_everyone=lambda: None)
    finalized: list[Any] = []

    class Base:
        def _finalize_training(self) -> None:
            finalized.append(trained.state.best_model_checkpoint)

    class Both(door.CkptTrainerMixin, Base):  # type: ignore[misc]
        pass

    trained.__class__ = Both
    trained._finalize_training()
    assert finalized == ["checkpoint-10"]

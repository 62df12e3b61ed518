"""Real trainers of Lightning resume to the bit what ``CkptCheckpoint`` saves."""

from __future__ import annotations

import logging
import re
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.strategies import FSDPStrategy

from ckpt import CheckpointManager, Tier
from ckpt.errors import CkptError, ConfigError, NoCheckpoint, RestoreError
from ckpt.integrations.lightning import CkptCheckpoint
from ckpt.integrations.lightning.strategy import mix_in
from tests.integrations.conftest import after
from tests.kit.marks import torture
from tests.kit.worlds import run_forks, world

WORKER = Path(__file__).parents[1] / "workers" / "lightning_nets.py"
IMPORTS = ("lightning.pytorch",)
PAGE = Path(__file__).parents[3] / "docs" / "integrations" / "lightning.md"

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:lightning.*"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:lightning.*"),
    pytest.mark.filterwarnings("ignore::FutureWarning:lightning.*"),
]


def steps(root: Path) -> list[int]:
    with CheckpointManager(root) as manager:
        return manager.steps()


# -- resuming --------------------------------------------------------------------------------------


def test_every_step_resumes_with_the_same_losses(nets: Any, tmp_path: Path) -> None:
    """This includes steps within an epoch, at its last batch, and with dropout and a shuffled
    order.
    """
    root = tmp_path / "whole"
    every: dict[str, Any] = {"save_top_k": -1, "every_n_train_steps": 1}
    losses = nets.fit(nets.Net(), CkptCheckpoint(root, **every))
    assert steps(root) == list(range(1, 9))
    for step in (1, 3, 4, 5):
        place = nets.only_step(root, step, tmp_path / f"from-{step}")
        resumed = nets.fit(nets.Net(), CkptCheckpoint(place, **every), "last")
        assert resumed == after(losses, step), step


def test_a_training_that_goes_back_goes_on_with_its_new_branch(nets: Any, tmp_path: Path) -> None:
    every: dict[str, Any] = {"save_top_k": -1, "every_n_train_steps": 1}
    losses = nets.fit(nets.Net(), CkptCheckpoint(tmp_path, **every))
    assert steps(tmp_path) == list(range(1, 9))
    (step,) = tmp_path.glob("step-000000003.*")
    rare: dict[str, Any] = {"save_top_k": -1, "every_n_train_steps": 5}
    again = nets.fit(nets.Net(), CkptCheckpoint(tmp_path, **rare), str(step))
    assert again == after(losses, 3)
    assert steps(tmp_path) == [1, 2, 3, 5], "the later steps of the first branch are abandoned"
    resumed = nets.fit(nets.Net(), CkptCheckpoint(tmp_path, **every), "last")
    assert resumed == after(losses, 5)
    assert steps(tmp_path) == [1, 2, 3, 5, 6, 7, 8]


def test_an_epoch_end_resumes_with_a_plain_loader(nets: Any, tmp_path: Path) -> None:
    def fit(root: Path, path: str | None = None) -> dict[int, float]:
        nets.seed_everything(3, verbose=False)
        net = nets.Net()
        trainer = nets.trainer(CkptCheckpoint(root, save_top_k=-1), epochs=3)
        trainer.fit(net, nets.shuffled(), nets.validation(), ckpt_path=path)
        losses: dict[int, float] = net.losses
        return losses

    losses = fit(tmp_path / "whole")
    for step in (4, 8):
        place = nets.only_step(tmp_path / "whole", step, tmp_path / f"from-{step}")
        assert fit(place, "last") == after(losses, step)


def test_other_callbacks_schedulers_and_loops_are_restored(nets: Any, tmp_path: Path) -> None:
    def stopping() -> EarlyStopping:
        return EarlyStopping("val_loss", patience=50)

    first = stopping()
    nets.trainer(CkptCheckpoint(tmp_path), first).fit(nets.Net(), nets.Loader(), nets.validation())
    second, net = stopping(), nets.Net()
    trainer = nets.trainer(CkptCheckpoint(tmp_path), second)  # no epoch is left
    trainer.fit(net, nets.Loader(), nets.validation(), ckpt_path="last")
    assert net.losses == {}
    assert (trainer.global_step, trainer.current_epoch) == (8, 2)
    assert torch.equal(second.best_score, first.best_score)
    assert second.state_dict() == first.state_dict()
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 8


@pytest.mark.slow
def test_a_kill_in_mid_save_resumes_from_the_last_committed_step(nets: Any, tmp_path: Path) -> None:
    command = [WORKER, tmp_path / "killed", "kill", "3"]
    done = run_forks(command, [{}], timeout=120, imports=IMPORTS)
    assert done.statuses == (-signal.SIGKILL,), done.said
    assert list((tmp_path / "killed").glob("step-000000003.*")), "the save had begun"
    committed = max(steps(tmp_path / "killed"))
    assert committed < 3

    torch.set_num_threads(1)
    every: dict[str, Any] = {"save_top_k": -1, "every_n_train_steps": 1}
    width = 1 << 17
    whole = nets.fit(nets.Net(width), CkptCheckpoint(tmp_path / "whole", every_n_epochs=9))
    resumed = nets.fit(nets.Net(width), CkptCheckpoint(tmp_path / "killed", **every), "last")
    assert resumed == after(whole, committed)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fsdp2", *torture("ddp", "ddp-steps")])
def test_two_ranks_resume_in_the_same_process(nets: Any, tmp_path: Path, mode: str) -> None:
    """Lightning's part of a save copies no tensor."""
    said = world(2, WORKER, tmp_path, mode, imports=IMPORTS)
    assert "equal losses on rank 0 2" in said
    assert "equal losses on rank 1 2" in said
    net = nets.Net()
    if mode == "fsdp2":
        net.net[1] = torch.nn.Identity()
    one = nets.trainer(CkptCheckpoint(tmp_path / "resumed"))  # it restores what two ranks saved
    (found,) = one.validate(net, nets.validation(), ckpt_path="last")
    assert f"val_loss {found['val_loss']:.4f}" in said


# -- the policy ------------------------------------------------------------------------------------


def fit_with(nets: Any, root: Path | Tier, scores: list[float], **policy: Any) -> CkptCheckpoint:
    """Train one epoch per score, which becomes the monitored metric."""

    class Scored(nets.Net):  # type: ignore[misc, name-defined]
        def on_validation_epoch_end(self) -> None:
            self.log("score", scores[self.current_epoch])

    nets.seed_everything(3, verbose=False)
    callback = CkptCheckpoint(root, monitor="score", **policy)
    trainer = nets.trainer(callback, epochs=len(scores))
    trainer.fit(Scored(), nets.Loader(), nets.validation())
    return callback


@pytest.mark.parametrize(
    ("policy", "kept", "best"),
    [
        ({"save_top_k": 2}, [4, 8], 8),
        ({"save_top_k": 2, "save_last": True}, [4, 8, 16], 8),
        ({"save_top_k": 2, "mode": "max"}, [12, 16], 12),
        ({"save_top_k": -1}, [4, 8, 12, 16], 8),
        ({"save_top_k": 1, "every_n_epochs": 2}, [8], 8),
        ({"save_top_k": 1, "every_n_train_steps": 6, "save_last": True}, [6, 12], 6),
    ],
)
def test_the_policy_decides_which_steps_are_kept(
    nets: Any, tmp_path: Path, policy: dict[str, Any], kept: list[int], best: int
) -> None:
    callback = fit_with(nets, tmp_path, [2.0, 1.0, 4.0, 3.0], **policy)
    assert steps(tmp_path) == kept
    assert callback.best_model_path.endswith(f"#{best}")


@pytest.mark.parametrize("save_last", [True, False])
def test_a_step_before_the_metric_has_a_value_is_saved_or_named(
    nets: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, *, save_last: bool
) -> None:
    tier = Tier(str(tmp_path), keep_last=9)
    callback = fit_with(nets, tier, [2.0, 1.0], every_n_train_steps=3, save_last=save_last)
    assert steps(tmp_path) == ([3, 6] if save_last else [6])
    assert callback.best_model_path.endswith("#6")
    named = "step 3 is not saved, since the metric 'score' has no value yet" in caplog.text
    assert named != save_last


def test_of_equal_scores_the_newest_is_kept_and_is_the_best(nets: Any, tmp_path: Path) -> None:
    callback = fit_with(nets, tmp_path, [1.0, 1.0, 2.0], save_top_k=1, save_last=True)
    assert steps(tmp_path) == [8, 12]
    assert callback.best_model_path.endswith("#8")


@pytest.mark.parametrize(
    ("scores", "policy", "kept", "best"),
    [
        ([1.0, 2.0, 3.0, 4.0], {}, [8], 8),
        ([4.0, 3.0, 2.0, 1.0], {"mode": "max"}, [8], 8),
        ([4.0, 3.0, 2.0, 5.0], {"save_top_k": 2}, [8, 16], 8),
        ([2.0, 3.0, 1.0, 2.5], {"save_top_k": -1}, [8, 16], 16),
    ],
)
def test_a_step_that_was_skipped_is_not_one_of_the_best(
    nets: Any, tmp_path: Path, scores: list[float], policy: dict[str, Any], kept: Any, best: int
) -> None:
    """The tier takes every second step, and the saves of the other steps are skipped."""
    callback = fit_with(nets, Tier(str(tmp_path), every=8, keep_last=9), scores, **policy)
    assert steps(tmp_path) == kept
    assert callback.best_model_path.endswith(f"#{best}")


def test_a_step_whose_save_has_failed_is_not_one_of_the_best(nets: Any, tmp_path: Path) -> None:
    root = tmp_path / "root"
    tier = Tier(str(root), keep_last=9)
    callback = CkptCheckpoint(tier, monitor="score", on_error="warn")

    class Blocks(nets.Net):  # type: ignore[misc, name-defined]
        def on_validation_epoch_end(self) -> None:
            self.log("score", float(self.current_epoch))

        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 0:
                root.write_text("a file in the place of the folder")
            elif self.current_epoch == 1:
                assert callback._manager is not None
                for pending in callback._manager._ledger.pending:
                    pending.wait()
                root.unlink()

    nets.trainer(callback, epochs=3).fit(Blocks(), nets.Loader(), nets.validation())
    assert steps(root) == [8]
    assert callback.best_model_path.endswith("#8")
    assert callback.best_model_score == 1.0


def test_the_step_that_a_lost_one_had_replaced_is_the_best_again(nets: Any, tmp_path: Path) -> None:
    callback = fit_with(nets, Tier(str(tmp_path), every=8, keep_last=9), [3.0, 2.0, 1.0])
    assert steps(tmp_path) == [8]
    assert callback.best_model_path.endswith("#8")
    assert {path[-2:]: float(score) for path, score in callback.best_k_models.items()} == {
        "#8": 2.0
    }
    assert (callback.best_model_score, callback.kth_value) == (2.0, 2.0)


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("agreed", [True, False])
def test_all_ranks_decide_together_whether_an_equal_score_is_saved(
    tmp_path: Path, mode: Any, *, agreed: bool
) -> None:
    """Otherwise a rank with an equal score leaves the others in their collective."""
    callback = CkptCheckpoint(tmp_path, monitor="score", mode=mode, save_top_k=1)
    callback.best_k_models = {"first": torch.tensor(1.0)}
    callback.kth_best_model_path, callback.kth_value = "first", torch.tensor(1.0)
    asked: list[bool] = []

    def decide(own: bool) -> bool:
        asked.append(own)
        return agreed

    trainer: Any = SimpleNamespace(strategy=SimpleNamespace(reduce_boolean_decision=decide))
    assert callback.check_monitor_top_k(trainer, torch.tensor(1.0)) == agreed
    assert asked == [True]


@pytest.mark.parametrize("policy", [{}, {"monitor": "val_loss"}, {"every_n_train_steps": 1}])
def test_a_fast_dev_run_saves_nothing(nets: Any, tmp_path: Path, policy: dict[str, Any]) -> None:
    callback = CkptCheckpoint(tmp_path, save_last=True, **policy)
    trainer = nets.trainer(callback, fast_dev_run=True)
    trainer.fit(nets.Net(), nets.Loader(), nets.validation())
    assert list(tmp_path.iterdir()) == []


def test_a_tier_keeps_what_it_says_itself(nets: Any, tmp_path: Path) -> None:
    fit_with(nets, Tier(str(tmp_path), keep_last=3), [1.0, 2.0, 3.0, 4.0], save_last=True)
    assert steps(tmp_path) == [8, 12, 16]


@pytest.mark.parametrize("memory", ["memory", Tier("memory")], ids=["name", "Tier"])
def test_memory_is_left_to_its_slots(nets: Any, tmp_path: Path, memory: str | Tier) -> None:
    nets.fit(nets.Net(), CkptCheckpoint([memory, tmp_path]))
    assert steps(tmp_path) == [8]


def test_best_is_found_by_the_callback_and_by_a_new_process(nets: Any, tmp_path: Path) -> None:
    nets.seed_everything(3, verbose=False)
    first = nets.trainer(CkptCheckpoint(tmp_path, monitor="val_loss", save_last=True), epochs=3)
    first.fit(nets.Net(), nets.Loader(), nets.validation())
    (own,) = first.validate(dataloaders=nets.validation(), ckpt_path="best")
    second = nets.trainer(CkptCheckpoint(tmp_path, monitor="val_loss"))
    (found,) = second.validate(nets.Net(), nets.validation(), ckpt_path="best")
    assert own == found
    assert found["val_loss"] == pytest.approx(float(first.checkpoint_callback.best_model_score))


def test_a_run_continues_after_the_end_of_the_first(nets: Any, tmp_path: Path) -> None:
    """One trainer and one callback fit, validate, and fit again."""
    callback, net = CkptCheckpoint(tmp_path), nets.Net()
    trainer = nets.trainer(callback, epochs=1)
    trainer.fit(net, nets.Loader(), nets.validation())
    trainer.validate(net, nets.validation(), ckpt_path="last")
    trainer.fit_loop.max_epochs = 2
    trainer.fit(net, nets.Loader(), nets.validation(), ckpt_path="last")
    assert steps(tmp_path) == [8]


def test_an_optimizer_may_call_its_closure_several_times(nets: Any, tmp_path: Path) -> None:
    class Several(nets.Net):  # type: ignore[misc, name-defined]
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=4)

    def losses(*callbacks: Callback, **how: Any) -> dict[int, float]:
        nets.seed_everything(3, verbose=False)
        net = Several()
        nets.trainer(*callbacks, **how).fit(net, nets.Loader(), nets.validation())
        found: dict[int, float] = net.losses
        return found

    assert losses(CkptCheckpoint(tmp_path)) == losses(enable_checkpointing=False)


def test_a_save_copies_while_forward_and_backward_run(nets: Any, tmp_path: Path) -> None:
    """Lightning runs them inside of the optimizer's step, which waits for the copy."""
    order: list[str] = []

    class Watched(nets.Net):  # type: ignore[misc, name-defined]
        def backward(self, loss: torch.Tensor) -> None:
            order.append("backward")
            super().backward(loss)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), 0.1)
            optimizer.register_step_pre_hook(lambda *_: order.append("step"))
            return optimizer

    trainer = nets.trainer(CkptCheckpoint(tmp_path), epochs=1)
    trainer.fit(Watched(), nets.Loader(), nets.validation())
    assert order == ["backward", "step"] * nets.BATCHES


# -- bad input -------------------------------------------------------------------------------------


def test_a_checkpoint_of_lightning_itself_is_written_and_read(nets: Any, tmp_path: Path) -> None:
    callback = ModelCheckpoint(tmp_path, filename="plain")
    nets.trainer(callback, epochs=1).fit(nets.Net(), nets.Loader(), nets.validation())
    expected, found = nets.Net(), nets.Net()
    how = {"ckpt_path": str(tmp_path / "plain.ckpt"), "weights_only": False}
    for net, saved in ((expected, ModelCheckpoint(tmp_path / "a")), (found, _ckpt(tmp_path / "b"))):
        nets.seed_everything(4, verbose=False)
        trainer = nets.trainer(saved)
        trainer.fit(net, nets.Loader(), nets.validation(), **how)
        trainer.save_checkpoint(tmp_path / f"{type(saved).__name__}.ckpt")
    assert found.losses == expected.losses != {}
    assert steps(tmp_path / "b") == [8]
    own, other = (
        torch.load(tmp_path / f"{name}.ckpt", weights_only=False)
        for name in ("ModelCheckpoint", "CkptCheckpoint")
    )
    assert all(
        torch.equal(own["state_dict"][name], value) for name, value in other["state_dict"].items()
    )
    assert (
        own["optimizer_states"][0]["state"].keys() == other["optimizer_states"][0]["state"].keys()
    )


def _ckpt(root: Path) -> CkptCheckpoint:
    return CkptCheckpoint(root)


def test_last_in_an_empty_folder_begins_from_the_start(
    nets: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fresh = nets.fit(nets.Net(), CkptCheckpoint(tmp_path / "a"))
    with caplog.at_level(logging.WARNING, "ckpt"):
        found = nets.fit(nets.Net(), CkptCheckpoint(tmp_path / "b"), "last")
    assert found == fresh
    assert f"there is no checkpoint in {tmp_path / 'b'}" in caplog.text


def test_two_callbacks_on_one_folder_are_refused(nets: Any, tmp_path: Path) -> None:
    trainer = nets.trainer(
        CkptCheckpoint(tmp_path), CkptCheckpoint(f"{tmp_path}/", every_n_train_steps=2)
    )
    with pytest.raises(ConfigError, match="two CkptCheckpoint callbacks write to"):
        trainer.fit(nets.Net(), nets.Loader())
    assert list(tmp_path.iterdir()) == []


def test_best_without_a_metric_is_refused_by_lightning(nets: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not configured to save the best model"):
        nets.trainer(CkptCheckpoint(tmp_path)).fit(nets.Net(), nets.Loader(), ckpt_path="best")


def test_best_by_a_metric_that_no_step_has_is_refused(nets: Any, tmp_path: Path) -> None:
    nets.fit(nets.Net(), CkptCheckpoint(tmp_path))
    trainer = nets.trainer(CkptCheckpoint(tmp_path, monitor="val_loss"))
    with pytest.raises(NoCheckpoint, match="best:val_loss:min is not there"):
        trainer.fit(nets.Net(), nets.Loader(), ckpt_path="best")


@pytest.mark.parametrize("path", ["{other}", "ckpt://{other}#newest", "{other}/{step}"])
def test_a_path_of_another_folder_is_refused(nets: Any, tmp_path: Path, path: str) -> None:
    nets.fit(nets.Net(), CkptCheckpoint(tmp_path / "other"))
    (step,) = (tmp_path / "other").glob("step-*")
    path = path.format(other=tmp_path / "other", step=step.name)
    with pytest.raises(ConfigError, match="is not below the folder of a CkptCheckpoint"):
        nets.fit(nets.Net(), CkptCheckpoint(tmp_path / "own"), path)


@pytest.mark.parametrize("path", ["{root}", "{step}", "ckpt://{root}#8"])
def test_a_folder_and_a_step_in_it_are_paths(nets: Any, tmp_path: Path, path: str) -> None:
    nets.fit(nets.Net(), CkptCheckpoint(tmp_path))
    (step,) = tmp_path.glob("step-*")
    callback = CkptCheckpoint(tmp_path)
    assert nets.fit(nets.Net(), callback, path.format(root=tmp_path, step=step)) == {}


def test_a_step_that_is_gone_is_named(nets: Any, tmp_path: Path) -> None:
    nets.fit(nets.Net(), CkptCheckpoint(tmp_path))
    with pytest.raises(NoCheckpoint, match="7"):
        nets.fit(nets.Net(), CkptCheckpoint(tmp_path), f"ckpt://{tmp_path}#7")


def test_another_model_is_refused_and_keeps_its_weights(nets: Any, tmp_path: Path) -> None:
    nets.fit(nets.Net(), CkptCheckpoint(tmp_path))
    net = nets.Net(width=7)
    before = [value.clone() for value in net.parameters()]
    with pytest.raises(RestoreError, match=r"net\.0\.weight"):
        nets.trainer(CkptCheckpoint(tmp_path)).fit(net, nets.Loader(), ckpt_path="last")
    assert all(map(torch.equal, before, net.parameters()))


def test_a_strategy_that_ckpt_does_not_know_is_refused() -> None:
    with pytest.raises(ConfigError, match="CkptCheckpoint cannot save for FSDPStrategy"):
        mix_in(FSDPStrategy(), ())


def test_a_hook_that_changes_the_weights_to_be_saved_is_refused(nets: Any, tmp_path: Path) -> None:
    class Halved(nets.Net):  # type: ignore[misc, name-defined]
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            name, value = next(iter(checkpoint["state_dict"].items()))
            checkpoint["state_dict"][name] = value / 2

    with pytest.raises(ConfigError, match="on_save_checkpoint hook has changed"):
        nets.fit(Halved(), CkptCheckpoint(tmp_path))
    assert steps(tmp_path) == []


def test_a_hook_adds_to_the_checkpoint_and_gets_it_back(nets: Any, tmp_path: Path) -> None:
    class Adds(nets.Net):  # type: ignore[misc, name-defined]
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["mine"] = {"table": torch.arange(3), "name": "a"}

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.mine, self.weights = checkpoint["mine"], checkpoint["state_dict"]

    nets.fit(Adds(), CkptCheckpoint(tmp_path))
    net = Adds()
    nets.fit(net, CkptCheckpoint(tmp_path), "last")
    assert net.mine["name"] == "a"
    assert net.mine["table"].tolist() == [0, 1, 2]
    assert torch.equal(net.weights["net.0.weight"], net.net[0].weight)


@pytest.mark.parametrize("whole", [True, False])
def test_a_hook_changes_the_weights_that_were_restored(
    nets: Any, tmp_path: Path, *, whole: bool
) -> None:
    """It may change an entry or replace the dict, as with a plain checkpoint."""

    class Changes(nets.Net):  # type: ignore[misc, name-defined]
        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            changed = {"net.0.bias": torch.full((16,), 7.0)}
            if whole:
                checkpoint["state_dict"] = {**checkpoint["state_dict"], **changed}
            else:
                checkpoint["state_dict"].update(changed)

    trained = nets.Net()
    nets.fit(trained, CkptCheckpoint(tmp_path))
    net = Changes()
    assert nets.fit(net, CkptCheckpoint(tmp_path), "last") == {}
    assert net.net[0].bias.tolist() == [7.0] * 16
    assert torch.equal(net.net[0].weight, trained.net[0].weight)


def test_a_hook_that_sets_the_states_of_optimizers_is_refused(nets: Any, tmp_path: Path) -> None:
    class Resets(nets.Net):  # type: ignore[misc, name-defined]
        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["optimizer_states"] = []

    nets.fit(Resets(), CkptCheckpoint(tmp_path))
    with pytest.raises(ConfigError, match="on_load_checkpoint hook has set"):
        nets.fit(Resets(), CkptCheckpoint(tmp_path), "last")
    nets.trainer(CkptCheckpoint(tmp_path)).validate(Resets(), nets.validation(), ckpt_path="last")


def test_hyper_parameters_that_only_pickle_could_save_are_left_out(
    nets: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Configured(nets.Net):  # type: ignore[misc, name-defined]
        def __init__(self, rate: float, place: Path) -> None:
            super().__init__()
            self.save_hyperparameters()

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.found = checkpoint["hyper_parameters"]

    with caplog.at_level(logging.WARNING, "ckpt"):
        nets.fit(Configured(0.1, tmp_path), CkptCheckpoint(tmp_path))
    assert caplog.text.count("a hyper-parameter is not saved: 'place'") == 1
    net = Configured(0.2, tmp_path)
    nets.fit(net, CkptCheckpoint(tmp_path), "last")
    assert net.found == {"rate": 0.1}


def test_hyper_parameters_of_a_data_module_are_left_out_as_well(
    nets: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Data(LightningDataModule):
        def __init__(self, size: int, transform: Any) -> None:
            super().__init__()
            self.save_hyperparameters()

        def train_dataloader(self) -> Any:
            return nets.Loader()

    class Looks(nets.Net):  # type: ignore[misc, name-defined]
        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.found = checkpoint["datamodule_hyper_parameters"]

    with caplog.at_level(logging.WARNING, "ckpt"):
        nets.trainer(CkptCheckpoint(tmp_path)).fit(Looks(), datamodule=Data(4, print))
    assert caplog.text.count("a hyper-parameter is not saved: 'transform'") == 1
    net = Looks()
    nets.trainer(CkptCheckpoint(tmp_path)).fit(net, datamodule=Data(5, print), ckpt_path="last")
    assert net.found == {"size": 4}


def test_an_exception_in_the_training_keeps_the_steps_before_it(nets: Any, tmp_path: Path) -> None:
    class Failing(nets.Net):  # type: ignore[misc, name-defined]
        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                raise RuntimeError("in the second epoch")

    with pytest.raises(RuntimeError, match="in the second epoch"):
        nets.fit(Failing(), CkptCheckpoint(tmp_path))
    assert steps(tmp_path) == [4]
    whole = nets.fit(nets.Net(), CkptCheckpoint(tmp_path / "whole"))
    assert nets.fit(nets.Net(), CkptCheckpoint(tmp_path), "last") == after(whole, 4)


def test_a_save_that_fails_ends_the_training_with_its_error(nets: Any, tmp_path: Path) -> None:
    root = tmp_path / "root"

    class Blocks(nets.Net):  # type: ignore[misc, name-defined]
        def on_train_start(self) -> None:
            root.write_text("a file in the place of the folder")

    with pytest.raises(CkptError, match=str(root)):
        nets.fit(Blocks(), CkptCheckpoint(root))


# -- the page --------------------------------------------------------------------------------------


def block(part: str) -> str:
    text = PAGE.read_text()
    (found,) = [each for each in re.findall(r"```python\n(.*?)```", text, re.S) if part in each]
    return str(found)


def test_the_lines_of_the_page_run_and_a_second_run_visibly_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They run as the page says: the test does not change them so that there is something to
    resume.
    """
    monkeypatch.chdir(tmp_path)
    commands = re.findall(r"`python (boring\.py [0-9]+)`", PAGE.read_text())
    assert len(commands) == 2
    lines = block("BoringModel").replace('accelerator="cpu"', 'accelerator="cpu", **QUIET')
    for command, (begin, end) in zip(commands, ((0, 128), (128, 256)), strict=True):
        monkeypatch.setattr("sys.argv", command.split())
        names: dict[str, Any] = {
            "QUIET": {"enable_progress_bar": False, "enable_model_summary": False}
        }
        capsys.readouterr()
        exec(lines, names)
        reported = capsys.readouterr().out
        assert f"begins at step {begin}\n" in reported
        assert f"ends at step {end}\n" in reported
        assert steps(tmp_path / "runs/boring") == [end]
    assert names["trainer"].fit_loop.epoch_progress.total.completed == 4


def test_the_weights_alone_are_restored_as_the_page_shows(
    nets: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trained, model = nets.Net(), nets.Net()
    nets.fit(trained, CkptCheckpoint("runs/digits"))
    exec(block('only="model"'), {"CheckpointManager": CheckpointManager, "model": model})
    assert all(map(torch.equal, model.state_dict().values(), trained.state_dict().values()))


def test_the_fabric_loop_of_the_page_resumes_with_the_same_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def last_loss(folder: str, loop: str) -> float:
        (tmp_path / folder).mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / folder)
        names: dict[str, Any] = {}
        exec(loop, names)
        return float(names["loss"].detach())

    loop = block("fabric.setup")
    whole = last_loss("whole", loop)
    assert last_loss("parts", loop.replace(", 7):", ", 5):")) != whole
    assert last_loss("parts", loop) == whole
    assert steps(tmp_path / "parts/runs/fabric") == [2, 4, 6]

"""The ways in which users change a state, one for each row of the table in docs/safety.md."""

from __future__ import annotations

import copy
import ctypes
import importlib
import importlib.util
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import set_model_state_dict
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, update_bn

from ckpt.config import CheckMode
from tests.overlap.jobs import WIDTH, Net
from tests.overlap.sam import SAM
from tests.safety.jobs import COLUMNS, Build, Job, laid_out

Act = Callable[[Job], object]
Parameters = Iterable[nn.Parameter]

ADAMW: Final[Build] = partial(torch.optim.AdamW, lr=0.01)
WITHOUT_DTENSORS: Final = ("plain", "DDP")
ONE_KIND: Final = ("plain", "DDP", "FSDP2")
"""Where all parameters are of one kind: under TP some are plain, which ``torch._foreach_*`` and
fused steps do not take beside DTensors.
"""


def nothing(job: Job) -> None:
    """Add nothing to the job."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A row.

    Attributes:
        group: The table that it belongs to.
        way: Its first cell.
        act: The change, made between the call of ``save_async`` and the copy.
        before: What exists at the call.
        changes: Whether ``act`` changes the state.
        columns: The layouts in which PyTorch, or the package, can do it.
        quick: Whether it is measured in every run of the tests, and not only in ``make
            torture``.
        checks: The settings of ``check`` that it is measured with. With "sampled" alone the
            result
            is the same for all of them.
        sparse: Whether it changes so little that "sampled" need not detect it.
        needs: A package without which it is skipped.
    """

    group: str
    way: str
    act: Act
    build: Build = ADAMW
    before: Act = nothing
    changes: bool = True
    columns: tuple[str, ...] = COLUMNS
    quick: bool = False
    checks: tuple[CheckMode, ...] = ("sampled",)
    sparse: bool = False
    needs: str = ""

    def job(self, column: str, seed: int) -> Job:
        return Job(column, self.build, seed)

    def may_be_missed(self, check: CheckMode) -> bool:
        """Return whether ``check`` is documented to allow a wrong checkpoint."""
        return check == "off" or (self.sparse and check == "sampled")

    def runs(self, which: str) -> bool:
        """Return whether it runs for ``which``: "quick" or "all"."""
        if self.needs and importlib.util.find_spec(self.needs) is None:
            return False
        return self.quick or which == "all"


# -- what the acts do ------------------------------------------------------------------------------


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def step(job: Job) -> None:
    """Take a step with the gradients that are there, or with a closure for LBFGS."""
    job.optimizer.step(lambda: job.loss(2))


def plain_step(job: Job) -> None:
    job.optimizer.step()


def with_gradients(job: Job) -> None:
    job.optimizer.zero_grad()
    job.backward(2)


def in_another_thread(job: Job) -> None:
    thread = threading.Thread(target=plain_step, args=(job,))
    thread.start()
    thread.join()


def scaled(job: Job) -> None:
    job.state["scaler"] = torch.amp.GradScaler("cpu", init_scale=2.0)
    job.optimizer.zero_grad()
    job.state["scaler"].scale(job.model(torch.ones(8, WIDTH))).backward()


def scaled_step(job: Job) -> None:
    job.state["scaler"].step(job.optimizer)
    job.state["scaler"].update()


def schedule_free(kind: str, parameters: Parameters) -> Optimizer:
    made = getattr(importlib.import_module("schedulefree"), kind)(
        parameters, lr=0.01, foreach=False
    )
    if hasattr(made, "train"):
        made.train()
    return made


def of_package(module: str, kind: str, parameters: Parameters, **settings: Any) -> Optimizer:
    return getattr(importlib.import_module(module), kind)(parameters, lr=0.01, **settings)


def with_large(parameters: Parameters) -> Optimizer:
    """Add a parameter that is large enough for moments in 8 bits."""
    large = nn.Parameter(torch.ones(64, 64))
    return of_package("torchao.optim", "AdamW8bit", [*parameters, large])


def quantised(job: Job) -> None:
    large = job.optimizer.param_groups[0]["params"][-1]
    large.grad = torch.ones_like(large)
    job.optimizer.step()


def sharp(parameters: Parameters) -> Optimizer:
    return SAM(parameters, torch.optim.AdamW, lr=0.01)


def with_base(job: Job) -> None:
    job.state["base"] = job.optimizer.base_optimizer
    with_gradients(job)


def base_alone(job: Job) -> None:
    job.state["optimizer"] = job.optimizer.base_optimizer
    with_gradients(job)


def climbed(job: Job) -> None:
    with_base(job)
    job.optimizer.first_step(zero_grad=True)
    job.backward(2)


def two_models(job: Job) -> None:
    """Return a generator and a discriminator, with an optimizer each."""
    torch.manual_seed(job.parameters[0].numel())
    judge = laid_out(Net(), job.column)
    optimizer = torch.optim.AdamW(judge.parameters(), lr=0.01)
    judge(torch.ones(8, WIDTH)).backward()
    optimizer.step()
    judge(torch.ones(8, WIDTH)).backward()
    job.state |= {"judge": judge, "judge optimizer": optimizer}
    with_gradients(job)


def both_steps(job: Job) -> None:
    job.state["judge optimizer"].step()
    job.optimizer.step()


@torch.no_grad()
def clip_judge(job: Job) -> None:
    """Clip weights, as a Wasserstein GAN bounds its critic."""
    for parameter in job.state["judge"].parameters():
        parameter.data.clamp_(-0.01, 0.01)


def captured(job: Job) -> None:
    """Simulate a step that is captured in a graph before the first save.

    A CPU has no graphs.
    """
    job.backward(2)
    with mock.patch("ckpt.staging.fence.is_capturing", return_value=True):
        job.optimizer.step()


def capturable(job: Job) -> None:
    job.backward(2)
    for group in job.optimizer.param_groups:
        group["capturable"] = True  # only the hooks see it: a step on a CPU refuses it


def replay(job: Job) -> None:
    """Do what ckpt sees of a graph's replay.

    That is the step without its hooks, and without a change of a version counter.
    """
    for group in job.optimizer.param_groups:
        group["capturable"] = False
    moved = [
        *job.parameters,
        *(held for state in job.optimizer.state.values() for held in state.values()),
    ]
    with torch.autograd._unsafe_preserve_version_counter(tuple(map(local, moved))):
        type(job.optimizer).step.__wrapped__(job.optimizer)


def compiled_model(job: Job) -> None:
    job.state["model"] = torch.compile(job.model, backend="aot_eager")
    job.optimizer.zero_grad()
    job.state["model"](torch.ones(8, WIDTH)).backward()


def compiled_step(job: Job) -> None:
    job.other()


def traced(job: Job) -> None:
    """Return a compiled step that was traced before the save. It needs no C++ compiler."""
    job.other = torch.compile(job.optimizer.step, backend="aot_eager")
    for number in (2, 3):
        job.optimizer.zero_grad()
        job.backward(number)
        job.other()


def averaged(job: Job) -> None:
    """Put shadow parameters in the state, as an exponential moving average keeps them."""
    job.state["ema"] = [parameter.detach().clone() for parameter in job.parameters]


@torch.no_grad()
def average(job: Job) -> None:
    for shadow, parameter in zip(job.state["ema"], job.parameters, strict=True):
        shadow.mul_(0.9).add_(parameter, alpha=0.1)


def shadowed(job: Job) -> None:
    """Keep an average outside of the state."""
    job.other = [parameter.detach() * 0.5 for parameter in job.parameters]


def swa(job: Job) -> None:
    job.state["swa"] = AveragedModel(job.model)


def swa_update(job: Job) -> None:
    job.state["swa"].update_parameters(job.model)
    job.state["swa"].update_parameters(job.model)
    update_bn([torch.randn(8, WIDTH)], job.state["swa"])


def scheduled(job: Job) -> None:
    job.state["scheduler"] = torch.optim.lr_scheduler.StepLR(job.optimizer, 1, gamma=0.5)


def schedule(job: Job) -> None:
    job.state["scheduler"].step()


def clip_gradients(job: Job) -> None:
    nn.utils.clip_grad_norm_(job.parameters, 0.01)
    nn.utils.clip_grad_value_(job.parameters, 0.001)


def each(change: Callable[[nn.Parameter], object]) -> Act:
    """Change every parameter that this rank has a part of."""

    @torch.no_grad()
    def act(job: Job) -> None:
        for parameter in job.parameters:
            if local(parameter).numel():
                change(parameter)

    return act


@torch.no_grad()
def swap_in(job: Job) -> None:
    for parameter, shadow in zip(job.parameters, job.other, strict=True):
        parameter.copy_(shadow)


def swap_in_by_data(job: Job) -> None:
    for parameter, shadow in zip(job.parameters, job.other, strict=True):
        parameter.data.copy_(shadow)


def swap_in_by_pointer(job: Job) -> None:
    for parameter, shadow in zip(job.parameters, job.other, strict=True):
        parameter.data = shadow


def other_model(job: Job) -> None:
    job.other = {key: value * 0.5 for key, value in job.model.state_dict().items()}


def other_optimizer(job: Job) -> None:
    job.other = copy.deepcopy(job.optimizer.state_dict())
    for state in job.other["state"].values():
        state["exp_avg"].mul_(2)


def one_element(job: Job) -> None:
    local(job.weight).detach().numpy()[-1, -1] += 1


def by_numpy(parameter: nn.Parameter) -> None:
    local(parameter).detach().numpy()[...] *= 0.5


def by_address(parameter: nn.Parameter) -> None:
    ctypes.memset(local(parameter).data_ptr(), 0, local(parameter).nbytes)


def foreach(names: Callable[[Job], Sequence[torch.Tensor]]) -> Act:
    @torch.no_grad()
    def act(job: Job) -> None:
        tensors = names(job)
        for kind in (True, False):
            if same := [tensor for tensor in tensors if isinstance(tensor, DTensor) is kind]:
                torch._foreach_mul_(same, 0.5)

    return act


# -- the rows --------------------------------------------------------------------------------------

STEP: Final = "A step of an optimizer"
AROUND: Final = "Around a step"
IN_PLACE: Final = "In-place operations"
ELSEWHERE: Final = "Other memory under the same name"
UNSEEN: Final = "Writes that no version counter sees"


def stepping(way: str, build: Build, act: Act = step, **more: Any) -> Case:
    return Case(group=STEP, way=way, build=build, act=act, **more)


def of_torch(kind: str, columns: tuple[str, ...] = COLUMNS, **settings: Any) -> Case:
    build = partial(getattr(torch.optim, kind), **{"lr": 0.01} | settings)
    return stepping(f"`step()` of `torch.optim.{kind}`", build, columns=columns)


around = partial(Case, group=AROUND)
in_place = partial(Case, group=IN_PLACE)
elsewhere = partial(Case, group=ELSEWHERE)
unseen = partial(Case, group=UNSEEN, checks=("sampled", "full"))

CASES: Final[tuple[Case, ...]] = (
    stepping("`step()` of `torch.optim.AdamW`", ADAMW, quick=True),
    stepping(
        "the same, `foreach=True`",
        partial(torch.optim.AdamW, lr=0.01, foreach=True),
        columns=ONE_KIND,
    ),
    stepping(
        "the same, `fused=True`", partial(torch.optim.AdamW, lr=0.01, fused=True), columns=ONE_KIND
    ),
    *(
        of_torch(kind)
        for kind in ("Adam", "NAdam", "RAdam", "Adamax", "RMSprop", "Adadelta", "Adagrad", "ASGD")
    ),
    *(of_torch(kind, WITHOUT_DTENSORS) for kind in ("Rprop", "Adafactor")),
    of_torch("SGD", momentum=0.9),
    of_torch("LBFGS", lr=0.1, max_iter=2, columns=ONE_KIND),
    stepping(
        "`step()` of `torch.optim.Muon`",
        lambda ps: torch.optim.Muon([p for p in ps if p.ndim == 2], lr=0.01),
    ),
    stepping(
        "`step()` of `ZeroRedundancyOptimizer`",
        lambda ps: ZeroRedundancyOptimizer(ps, torch.optim.AdamW, lr=0.01),
        columns=("DDP",),
    ),
    stepping("`step()` in another thread", ADAMW, in_another_thread, before=with_gradients),
    stepping(
        "`GradScaler.step()` and `update()`", ADAMW, scaled_step, before=scaled, columns=ONE_KIND
    ),
    stepping("`step()` compiled by `torch.compile`", ADAMW, compiled_step, before=traced),
    stepping(
        "a graph of the step, captured before the first save, replayed (simulated)",
        ADAMW,
        replay,
        before=captured,
        quick=True,
    ),
    stepping("a step of `capturable=True`, replayed (simulated)", ADAMW, replay, before=capturable),
    stepping("`step()` of a model compiled by `torch.compile`", ADAMW, before=compiled_model),
    stepping(
        "a GAN's two optimizers, one after the other",
        ADAMW,
        both_steps,
        before=two_models,
        quick=True,
    ),
    stepping(
        "schedule-free: `train()` after `eval()` and the save",
        partial(schedule_free, "AdamWScheduleFree"),
        lambda job: job.optimizer.train(),
        before=lambda job: job.optimizer.eval(),
        needs="schedulefree",
        quick=True,
    ),
    stepping(
        "schedule-free: `eval()` after the save",
        partial(schedule_free, "SGDScheduleFree"),
        lambda job: job.optimizer.eval(),
        needs="schedulefree",
    ),
    stepping(
        "schedule-free: `step(closure)` of `AdamWScheduleFreeClosure`",
        partial(schedule_free, "AdamWScheduleFreeClosure"),
        needs="schedulefree",
    ),
    stepping(
        "SAM: `first_step()`, with `base_optimizer` in the state too",
        sharp,
        lambda job: job.optimizer.first_step(),
        before=with_base,
        quick=True,
    ),
    stepping(
        "SAM: `second_step()`, with `base_optimizer` in the state too",
        sharp,
        lambda job: job.optimizer.second_step(),
        before=climbed,
    ),
    stepping(
        "SAM: `first_step()`, with `base_optimizer` alone in the state",
        sharp,
        lambda job: job.optimizer.first_step(),
        before=base_alone,
    ),
    stepping("SAM without its `base_optimizer` in the state", sharp, before=with_gradients),
    stepping(
        "`step()` of `lion_pytorch.Lion`",
        partial(of_package, "lion_pytorch", "Lion"),
        needs="lion_pytorch",
    ),
    stepping(
        "`step()` of `pytorch_optimizer.AdaBelief`",
        partial(of_package, "pytorch_optimizer", "AdaBelief"),
        needs="pytorch_optimizer",
        columns=ONE_KIND,
    ),
    stepping(
        "`step()` of `torchao.optim.AdamW8bit`, moments in 32 bits",
        partial(of_package, "torchao.optim", "AdamW8bit"),
        needs="torchao",
    ),
    stepping(
        "`step()` of `torchao.optim.AdamW8bit`, moments in 8 bits",
        with_large,
        before=quantised,
        needs="torchao",
    ),
    stepping(
        "`step()` of `bitsandbytes.optim.AdamW`",
        partial(of_package, "bitsandbytes.optim", "AdamW"),
        needs="bitsandbytes",
        columns=WITHOUT_DTENSORS,
    ),
    around(
        way="forward and backward, BatchNorm in training mode",
        act=lambda job: job.backward(7),
        quick=True,
    ),
    around(
        way="`clip_grad_norm_`, `clip_grad_value_`",
        act=clip_gradients,
        before=with_gradients,
        changes=False,
        columns=ONE_KIND,
    ),
    around(
        way="`zero_grad()`",
        act=lambda job: job.optimizer.zero_grad(set_to_none=False),
        before=with_gradients,
        changes=False,
    ),
    around(way="`step()` of an LR scheduler", act=schedule, before=scheduled),
    around(way="an EMA in the state: its update", act=average, before=averaged),
    around(
        way="`AveragedModel` in the state: `update_parameters`, `update_bn`",
        act=swa_update,
        before=swa,
        columns=("plain", "DDP", "TP"),
    ),
    in_place(way="`p.mul_()`", act=each(lambda p: p.mul_(0.5))),
    in_place(way="`p.clamp_()`", act=each(lambda p: p.clamp_(-0.01, 0.01)), quick=True),
    in_place(way="`p.lerp_()`", act=each(lambda p: p.lerp_(torch.zeros_like(p), 0.5))),
    in_place(
        way="`p.copy_()`: an average swapped in for an evaluation", act=swap_in, before=shadowed
    ),
    in_place(way="`nn.init.normal_(p)`", act=each(nn.init.normal_)),
    in_place(
        way="`model.load_state_dict()`",
        act=lambda job: job.model.load_state_dict(job.other),
        before=other_model,
    ),
    in_place(
        way="`set_model_state_dict()`",
        act=lambda job: set_model_state_dict(job.model, job.other),
        before=lambda job: setattr(
            job,
            "other",
            {
                key.removeprefix("module."): value * 0.5
                for key, value in job.model.state_dict().items()
            },
        ),
    ),
    in_place(way="a view: `p[1:].zero_()`", act=lambda job: local(job.weight).detach()[1:].zero_()),
    in_place(way="a moment: `exp_avg.zero_()`", act=lambda job: job.moment.zero_()),
    elsewhere(
        way="`p.data = other`: an average swapped in",
        act=swap_in_by_pointer,
        before=shadowed,
        columns=WITHOUT_DTENSORS,
        quick=True,
    ),
    elsewhere(
        way="`optimizer.load_state_dict()`",
        act=lambda job: job.optimizer.load_state_dict(job.other),
        before=other_optimizer,
    ),
    elsewhere(way="`optimizer.state.clear()`", act=lambda job: job.optimizer.state.clear()),
    elsewhere(way="`model.double()`", act=lambda job: job.model.double()),
    elsewhere(
        way="`load_state_dict(assign=True)`",
        act=lambda job: job.model.load_state_dict(job.other, assign=True),
        before=other_model,
    ),
    unseen(
        way="`torch._foreach_mul_(parameters)`", act=foreach(lambda job: job.parameters), quick=True
    ),
    unseen(
        way="`p.data.clamp_()`",
        act=each(lambda p: p.data.clamp_(-0.01, 0.01)),
        checks=("sampled", "full", "off"),
        quick=True,
    ),
    unseen(way="a GAN's `p.data.clamp_()` of its critic", act=clip_judge, before=two_models),
    unseen(
        way="`p.data.copy_()`: an average swapped in for an evaluation",
        act=swap_in_by_data,
        before=shadowed,
    ),
    unseen(way="a moment: `exp_avg.data.zero_()`", act=lambda job: job.moment.data.zero_()),
    unseen(
        way="`torch._foreach_mul_` on `p.data`",
        act=foreach(lambda job: [p.data for p in job.parameters]),
    ),
    unseen(
        way="a graph of the step, captured before the manager was built, replayed (simulated)",
        act=replay,
    ),
    unseen(way="`dist.all_reduce(p)`", act=each(dist.all_reduce), columns=("DDP",)),
    unseen(
        way="`dist.all_reduce(p.data)`",
        act=each(lambda p: dist.all_reduce(p.data)),
        columns=("DDP",),
    ),
    unseen(way="a NumPy view: `p.detach().numpy()[...] *= 0.5`", act=each(by_numpy)),
    unseen(way="another library, by address (`memset`)", act=each(by_address)),
    unseen(
        way="one element of a large parameter, through a NumPy view",
        act=one_element,
        sparse=True,
        quick=True,
    ),
)

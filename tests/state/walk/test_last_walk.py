"""A walk that remembers the last one finds what a first walk finds, after any change in between."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ckpt import declare_part, torch_private
from ckpt.errors import ConfigError
from ckpt.model.box import Box
from ckpt.state.walk import last_walk as last_walk_module
from ckpt.state.walk import segments
from ckpt.state.walk.collect import WalkResult, collect
from ckpt.state.walk.last_walk import LastWalk
from ckpt.state.walk.modules import raw_state
from ckpt.state.walk.plan_cache import PlanCache
from ckpt.state.walk.segments import Segment
from tests.state.ranks import rank_of

State = dict[str, Any]


@pytest.fixture(params=[True, False], ids=["guards", "passes"], autouse=True)
def with_guards(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run with and without the comparison in torch, which another version of torch may lack."""
    assert torch_private.guards_of([torch.ones(2)]) is not torch_private.always_false
    if not request.param:
        monkeypatch.setattr(segments, "guards_of", lambda _: torch_private.always_false)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)


class Extra(nn.Linear):
    more = 0

    def get_extra_state(self) -> object:
        return {"more": self.more}

    def set_extra_state(self, state: object) -> None:
        del state


def trained() -> State:
    torch.manual_seed(0)
    net = Net()
    groups: list[dict[str, Any]] = [
        {"params": [*net.one.parameters(), *net.two.parameters()]},
        {"params": net.three.parameters()},
    ]
    optimizer = torch.optim.AdamW(groups)
    state = {"model": net, "optimizer": optimizer, "step": 3}
    step(state)
    return state


def step(state: State) -> None:
    for parameter in state["model"].parameters():
        parameter.grad = torch.ones_like(parameter)
    state["optimizer"].step()


def first_state(state: State) -> dict[str, Any]:
    found: dict[str, Any] = next(iter(state["optimizer"].state.values()))
    return found


def same_form_by_data(state: State) -> None:
    state["model"].one.weight.data = torch.randn(6, 6)


def transposed_by_data(state: State) -> None:
    state["model"].one.weight.data = state["model"].one.weight.data.t()


def another_dtype_by_data(state: State) -> None:
    memory = state["model"].one.weight.data.view(torch.bfloat16).as_strided((6, 6), (6, 1))
    state["model"].one.weight.data = memory


def negated_by_data(state: State) -> None:
    lazy = torch.complex(torch.zeros(6, 6), torch.ones(6, 6)).conj().imag
    state["model"].one.weight.data = lazy
    assert lazy.is_neg()


def moment_of_another_form(state: State) -> None:
    first_state(state)["exp_avg"].resize_(9)


def frozen(state: State) -> None:
    state["model"].one.weight.requires_grad_(False)


def another_parameter(state: State) -> None:
    state["model"].one.weight = nn.Parameter(torch.randn(6, 6))


def another_parameter_of_the_optimizer(state: State) -> None:
    state["optimizer"].param_groups[0]["params"][0] = nn.Parameter(torch.randn(6, 6))
    del state["optimizer"].state[state["model"].one.weight]


def swapped_parameters(state: State) -> None:
    net = state["model"]
    net.one.weight, net.two.weight = net.two.weight, net.one.weight


def swapped_contents(state: State) -> None:
    one, two = state["model"].one.weight, state["model"].two.weight
    one.data, two.data = two.data, one.data


def reversed_group(state: State) -> None:
    state["optimizer"].param_groups[0]["params"].reverse()


def reversed_groups(state: State) -> None:
    state["optimizer"].param_groups.reverse()


def moved_between_groups(state: State) -> None:
    first, second = state["optimizer"].param_groups
    second["params"].append(first["params"].pop())


def another_lr(state: State) -> None:
    state["optimizer"].param_groups[1]["lr"] = 0.25


def lr_that_is_a_tensor(state: State) -> None:
    state["optimizer"].param_groups[0]["lr"] = torch.tensor(0.25)


def capturable(state: State) -> None:
    state["optimizer"].param_groups[0]["capturable"] = True


def another_group(state: State) -> None:
    state["model"].more = nn.Linear(2, 2)
    state["optimizer"].add_param_group(
        {"params": list(state["model"].more.parameters()), "lr": 0.5}
    )


def loaded(state: State) -> None:
    state["optimizer"].load_state_dict(copy.deepcopy(state["optimizer"].state_dict()))


def state_in_another_order(state: State) -> None:
    held = state["optimizer"].state
    items = list(held.items())
    held.clear()
    held.update(reversed(items))


def key_added(state: State) -> None:
    first_state(state)["more"] = torch.ones(3)


def key_removed(state: State) -> None:
    del first_state(state)["exp_avg_sq"]


def key_renamed(state: State) -> None:
    held = first_state(state)
    held["other"] = held.pop("exp_avg_sq")


def swapped_keys(state: State) -> None:
    held = first_state(state)
    held["exp_avg"], held["exp_avg_sq"] = held["exp_avg_sq"], held["exp_avg"]


def counter_that_is_a_number(state: State) -> None:
    first_state(state)["step"] = 7


def counters_that_count(state: State) -> None:
    for count, held in enumerate(state["optimizer"].state.values()):
        held["step"] = count


def state_cleared(state: State) -> None:
    state["optimizer"].state.clear()


def another_optimizer(state: State) -> None:
    state["optimizer"] = torch.optim.SGD(state["model"].parameters(), lr=0.1, momentum=0.9)
    step(state)


def optimizer_with_methods_of_its_own(state: State) -> None:
    class Own(torch.optim.AdamW):
        def train(self) -> None: ...

    held = state["optimizer"]
    state["optimizer"] = Own(state["model"].parameters())
    state["optimizer"].param_groups, state["optimizer"].state = held.param_groups, held.state


def optimizer_for_a_part(state: State) -> None:
    state["optimizer"].param_groups.pop()
    for parameter in state["model"].three.parameters():
        del state["optimizer"].state[parameter]


def module_added(state: State) -> None:
    state["model"].more = nn.Linear(2, 2)


def module_removed(state: State) -> None:
    del state["model"].norm


def buffer_again(state: State) -> None:
    state["model"].norm.register_buffer("running_mean", torch.ones(6))


def buffer_not_persistent(state: State) -> None:
    norm = state["model"].norm
    norm.register_buffer("running_mean", norm.running_mean, persistent=False)


def tied(state: State) -> None:
    state["model"].two.weight = state["model"].one.weight


def tied_by_memory(state: State) -> None:
    state["model"].norm.running_mean = state["model"].one.bias.detach()


def tied_to_the_optimizer(state: State) -> None:
    first_state(state)["exp_avg"] = state["model"].norm.running_mean


def moment_that_is_a_buffer_too(state: State) -> None:
    state["model"].register_buffer("kept", first_state(state)["exp_avg"])


def memory_of_a_moment_that_is_a_buffer_too(state: State) -> None:
    state["model"].register_buffer("kept", first_state(state)["exp_avg"].detach())


def hook_that_adds(state: State) -> None:
    def add(module: nn.Module, held: dict[str, Any], prefix: str, _: object) -> None:
        held[f"{prefix}added"] = module.get_parameter("one.weight")

    state["model"].register_state_dict_post_hook(add)


def hook_that_removes(state: State) -> None:
    def remove(_: nn.Module, held: dict[str, Any], prefix: str, __: object) -> None:
        del held[f"{prefix}one.weight"]

    state["model"].register_state_dict_post_hook(remove)


def hook_of_a_child(state: State) -> None:
    def rename(_: nn.Module, held: dict[str, Any], prefix: str, __: object) -> None:
        held[f"{prefix}renamed"] = held.pop(f"{prefix}weight")

    state["model"].two.register_state_dict_post_hook(rename)


def hook_before(state: State) -> None:
    other = torch.full((6,), 7.0)

    def replace(module: nn.Module, *_: object) -> None:
        module._buffers["running_mean"] = other

    state["model"].norm.register_state_dict_pre_hook(replace)


def method_of_an_instance(state: State) -> None:
    net = state["model"]
    usual = net.state_dict
    net.state_dict = lambda **kwargs: {"first": next(iter(usual(**kwargs).values()))}


def method_of_a_child(state: State) -> None:
    def save(held: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        held[f"{prefix}other"] = child.weight if keep_vars else child.weight.detach()

    child = state["model"].one
    child._save_to_state_dict = save


def class_with_a_method(state: State) -> None:
    class Own(Net):
        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            held = super().state_dict(*args, **kwargs)
            return {name: held[name] for name in held if name.startswith("one")}

    state["model"].__class__ = Own


def table_replaced(state: State) -> None:
    one = state["model"].one
    one._parameters = {"weight": one.bias, "bias": one.weight}


def attributes_replaced(state: State) -> None:
    state["model"].one.__dict__ = nn.Linear(6, 6).__dict__


def values_moved_between_tables(state: State) -> None:
    one, two = state["model"].one, state["model"].two
    two._parameters = {"bias": one._parameters.pop("bias"), **two._parameters}


def extra_state(state: State) -> None:
    state["model"].more = Extra(2, 2)


def tensor_before(state: State) -> None:
    rest = dict(state)
    state.clear()
    state |= {"a": rest["model"].one.weight, **rest}


def optimizer_first(state: State) -> None:
    state["model"] = state.pop("model")


CHANGES: list[Callable[[State], None]] = [
    same_form_by_data,
    transposed_by_data,
    another_dtype_by_data,
    negated_by_data,
    moment_of_another_form,
    frozen,
    another_parameter,
    another_parameter_of_the_optimizer,
    swapped_parameters,
    swapped_contents,
    reversed_group,
    reversed_groups,
    moved_between_groups,
    another_lr,
    lr_that_is_a_tensor,
    capturable,
    another_group,
    loaded,
    state_in_another_order,
    key_added,
    key_removed,
    key_renamed,
    swapped_keys,
    counter_that_is_a_number,
    counters_that_count,
    state_cleared,
    another_optimizer,
    optimizer_with_methods_of_its_own,
    optimizer_for_a_part,
    module_added,
    module_removed,
    buffer_again,
    buffer_not_persistent,
    tied,
    tied_by_memory,
    tied_to_the_optimizer,
    moment_that_is_a_buffer_too,
    memory_of_a_moment_that_is_a_buffer_too,
    hook_that_adds,
    hook_that_removes,
    hook_of_a_child,
    hook_before,
    method_of_an_instance,
    method_of_a_child,
    class_with_a_method,
    table_replaced,
    attributes_replaced,
    values_moved_between_tables,
    extra_state,
    tensor_before,
    optimizer_first,
]


def found(walk: WalkResult) -> list[tuple[Any, ...]]:
    """Return names and memory of what a walk found, as it is saved.

    For a segment, this is what the segment has kept of it.
    """
    rows: list[tuple[Any, ...]] = []
    for part in walk.parts:
        if isinstance(part, Segment):
            for held, form in zip(part.named_tensors, part.forms, strict=True):
                memory = [
                    (each.data_ptr(), each.dtype, each.shape, each.stride(), each.is_neg())
                    for each in form.tensors
                ]
                rows.append(
                    (
                        held.name,
                        id(held.tensor),
                        held.is_late,
                        held.replicas,
                        form.signature,
                        memory,
                    )
                )
        else:
            rows.append((part.name, id(part.tensor), part.is_late, part.replicas))
    return rows


def assert_finds_what_is_there(state: State, last_walk: LastWalk, plans: PlanCache) -> None:
    known, fresh = collect(state, rank=0, last_walk=last_walk), collect(state, rank=0)
    assert found(known) == found(fresh)
    assert (known.tree, known.ties) == (fresh.tree, fresh.ties)
    assert list(map(id, known.optimizers)) == list(map(id, fresh.optimizers))
    # A plan keeps where it has put a parameter that was frozen since: only bytes depend on that.
    leaves = plans.prepare(known).leaves, PlanCache(0, 1 << 20).prepare(fresh).leaves
    remembered, new = ([replace(leaf, is_frozen=False) for leaf in part] for part in leaves)
    assert remembered == new


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_has_changed_since_the_last_walk_is_found(change: Callable[[State], None]) -> None:
    state, last_walk, plans = trained(), LastWalk(), PlanCache(0, 1 << 20)
    for _ in range(2):
        assert_finds_what_is_there(state, last_walk, plans)
    change(state)
    for _ in range(3):
        assert_finds_what_is_there(state, last_walk, plans)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_is_as_it_was_before_the_change_is_found(change: Callable[[State], None]) -> None:
    state, last_walk, plans = trained(), LastWalk(), PlanCache(0, 1 << 20)
    other = trained()
    change(other)
    for held in (state, other, state, other):
        assert_finds_what_is_there(held, last_walk, plans)


def test_nothing_is_named_again_while_nothing_changes() -> None:
    state, last_walk = trained(), LastWalk()
    first = collect(state, rank=0, last_walk=last_walk)
    step(state)
    state["optimizer"].param_groups[0]["lr"] = 0.5
    state["model"].one.weight.requires_grad_(False)
    again = collect(state, rank=0, last_walk=last_walk)
    assert [one is two for one, two in zip(first.parts, again.parts, strict=True)] == [True, True]


def test_a_state_dict_is_asked_for_once_while_nothing_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[nn.Module] = []
    usual = raw_state
    monkeypatch.setattr(
        last_walk_module,
        "raw_state",
        lambda path, module: asked.append(module) or usual(path, module),
    )
    state, last_walk = trained(), LastWalk()
    for _ in range(3):
        collect(state, rank=0, last_walk=last_walk)
        step(state)
    assert len(asked) == 1
    # a buffer that is not saved and is another one each time costs one state_dict() each time
    for count in range(3):
        state["model"].norm.register_buffer("cached", torch.ones(count), persistent=False)
        for _ in range(2):
            collect(state, rank=0, last_walk=last_walk)
    assert len(asked) == 4


def test_a_method_that_all_modules_get_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    state, last_walk, plans = trained(), LastWalk(), PlanCache(0, 1 << 20)
    assert_finds_what_is_there(state, last_walk, plans)

    def state_dict(self: nn.Module, **_: Any) -> dict[str, Any]:
        return {"only": next(self.parameters())}

    monkeypatch.setattr(nn.Linear, "state_dict", state_dict, raising=False)
    assert_finds_what_is_there(state, last_walk, plans)
    monkeypatch.setattr(nn.Module, "state_dict", state_dict)
    assert_finds_what_is_there(state, last_walk, plans)


class Hiding(nn.Module):
    """A module whose ``modules()`` does not show its child, which its ``state_dict()`` does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def named_modules(self, *_: Any, **__: Any) -> Any:
        return iter([("", self)])


def test_a_child_that_a_module_does_not_name_is_compared_too() -> None:
    state, last_walk, plans = {"model": Hiding()}, LastWalk(), PlanCache(0, 1 << 20)
    for _ in range(2):
        assert_finds_what_is_there(state, last_walk, plans)
        state["model"].inner.weight = nn.Parameter(torch.randn(6, 6))
    assert_finds_what_is_there(state, last_walk, plans)


def test_tied_weights_do_not_keep_segments_from_being_used_again() -> None:
    state, last_walk = trained(), LastWalk()
    tied(state)
    first, again = (collect(state, rank=0, last_walk=last_walk) for _ in range(2))
    assert [one is two for one, two in zip(first.parts, again.parts, strict=True)] == [True, True]


def replaced_spec(tensor: DTensor) -> None:
    tensor._spec = DTensor.from_local(tensor._local_tensor, tensor.device_mesh, [Replicate()])._spec


def changed_spec(tensor: DTensor) -> None:
    tensor._spec.placements = (Replicate(),)


def replaced_local_tensor(tensor: DTensor) -> None:
    tensor._local_tensor = torch.randn(tensor._local_tensor.shape)


@pytest.mark.parametrize("change", [replaced_spec, changed_spec, replaced_local_tensor])
def test_a_dtensor_with_another_layout_or_memory_is_found(
    change: Callable[[DTensor], None],
) -> None:
    with rank_of(0, 1):
        net = nn.Linear(4, 4)
        mesh = init_device_mesh("cpu", (1,))
        tensor = distribute_tensor(net.weight.detach(), mesh, [Shard(0)])
        net.weight = nn.Parameter(tensor)
        state, last_walk, plans = {"model": net}, LastWalk(), PlanCache(0, 1 << 20)
        for _ in range(2):
            assert_finds_what_is_there(state, last_walk, plans)
        held = net.weight
        assert isinstance(held, DTensor)
        change(held)
        for _ in range(2):
            assert_finds_what_is_there(state, last_walk, plans)


@pytest.mark.parametrize("shared", [lambda tensor: tensor, lambda tensor: tensor.detach()])
def test_what_an_earlier_module_shares_from_now_on_is_found(
    shared: Callable[[torch.Tensor], Any],
) -> None:
    """The second module itself does not change."""
    state: State = {"first": nn.Linear(3, 3), "second": nn.Linear(3, 3)}
    last_walk, plans = LastWalk(), PlanCache(0, 1 << 20)
    for _ in range(2):
        assert_finds_what_is_there(state, last_walk, plans)
    state["first"].register_buffer("kept", shared(state["second"].weight))
    for _ in range(2):
        assert_finds_what_is_there(state, last_walk, plans)
    assert collect(state, rank=0, last_walk=last_walk).ties == {"second/weight": "first/kept"}


def test_a_part_that_is_declared_again_is_found() -> None:
    """The optimizer's state of the parameter is the same part."""
    state, last_walk, plans = trained(), LastWalk(), PlanCache(0, 1 << 20)
    weight, shape = state["model"].one.weight, (18, 6)
    plans.prepare(collect(state, rank=0, last_walk=last_walk))
    for first in (0, 6, 12, 6):
        declare_part(weight, shape, (first, 0))
        for _ in range(2):
            leaves = plans.prepare(collect(state, rank=0, last_walk=last_walk)).leaves
            found = {leaf.name: leaf.boxes for leaf in leaves if leaf.shape == shape}
            assert len(found) == 3
            assert set(found.values()) == {(Box((first, 0), (6, 6)),)}


def test_a_part_whose_declaration_has_not_changed_is_not_named_again() -> None:
    state, last_walk = trained(), LastWalk()

    def declared() -> WalkResult:
        declare_part(state["model"].one.weight, (12, 6), (6, 0))
        return collect(state, rank=0, last_walk=last_walk)

    first, again = declared(), declared()
    assert [one is two for one, two in zip(first.parts, again.parts, strict=True)] == [True, True]


def test_a_part_of_another_shape_can_be_declared_again() -> None:
    state, last_walk = {"model": nn.Linear(6, 6)}, LastWalk()
    weight = state["model"].weight
    declare_part(weight, (12, 6), (6, 0))
    collect(state, rank=0, last_walk=last_walk)
    weight.data = torch.zeros(3, 6)
    with pytest.raises(ConfigError, match="call it again"):
        collect(state, rank=0, last_walk=last_walk)
    declare_part(weight, (12, 6), (9, 0))
    (part, _) = PlanCache(0, 1 << 20).prepare(collect(state, rank=0, last_walk=last_walk)).leaves
    assert (part.name, part.boxes) == ("model/weight", (Box((9, 0), (3, 6)),))

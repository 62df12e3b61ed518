"""Tensors whose elements are in other tensors, as their class says by ``__tensor_flatten__``.

They are saved and filled as the tensors inside of them.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.testing._internal.two_tensor import TwoTensor

from ckpt import CheckpointManager, PerRank
from ckpt.errors import (
    CkptError,
    DtypeMismatch,
    EntryMissing,
    KindMismatch,
    RestoreError,
    ShapeMismatch,
    UnsupportedValue,
)
from ckpt.state.match.match_state import match
from ckpt.state.tensors.wrapped import take_apart
from ckpt.state.walk.collect import collect
from ckpt.state.walk.last_walk import LastWalk
from tests.state.saving import bits, manifest_of, new_root, restored, saved, tree_of
from tests.state.wrapping import Blocks, Quantised

State = dict[str, Any]


def parts(value: Any, path: str = "") -> dict[str, bytes]:
    """Return the bytes of a state's tensors. Those inside of wrappers are named by their
    attributes.
    """
    inside: dict[Any, Any]
    match value:
        case PerRank():
            return parts(value.value, path)
        case nn.Module():
            inside = value.state_dict(keep_vars=True)
        case torch.optim.Optimizer():
            inside = dict(enumerate(value.state.values()))
        case list():
            inside = dict(enumerate(value))
        case dict():
            inside = value
        case torch.Tensor() if hasattr(value, "__tensor_flatten__"):
            inside = {name: getattr(value, name) for name in value.__tensor_flatten__()[0]}
        case torch.Tensor():
            return {path: bits(value)}
        case _:
            return {path: repr(value).encode()}
    found = (parts(each, f"{path}/{key}") for key, each in inside.items())
    return {name: data for each in found for name, data in each.items()}


def blocks(seed: int) -> Blocks:
    values = torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))
    return Blocks.of(values)


def two(seed: int) -> TwoTensor:
    return TwoTensor(torch.full((6, 4), float(seed)), torch.full((6, 4), float(-seed)))


def nested(seed: int) -> TwoTensor:
    return TwoTensor(two(seed), two(seed + 7))


def jagged(seed: int) -> torch.Tensor:
    rows = [torch.full((n, 3), float(seed + n)) for n in (2, 4)]
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


KINDS: dict[str, Callable[[int], torch.Tensor]] = {
    "two tensors": two,
    "blocks of codes": blocks,
    "a wrapper in a wrapper": nested,
    "jagged": jagged,
}


def in_a_module(tensor: torch.Tensor) -> State:
    model = nn.Linear(4, 6)
    model.weight = nn.Parameter(tensor, requires_grad=False)
    model.bias.data.fill_(float(bits(model.bias)[0]))
    return {"model": model}


def in_a_buffer(tensor: torch.Tensor) -> State:
    model = nn.Linear(4, 6)
    model.register_buffer("table", tensor)
    return {"model": model}


def in_an_optimizer(tensor: torch.Tensor) -> State:
    model = nn.Linear(4, 6, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.state[model.weight]["momentum_buffer"] = tensor
    return {"model": model, "optimizer": optimizer}


PLACES: dict[str, tuple[str, Callable[[torch.Tensor], State]]] = {
    "alone": ("t", lambda tensor: {"t": tensor}),
    "in a dict": ("d/t", lambda tensor: {"d": {"t": tensor, "n": 1}}),
    "in a list": ("d/1", lambda tensor: {"d": [torch.ones(2), tensor]}),
    "in a large dict": (
        "d/t",
        lambda tensor: {"d": {f"k{i}": torch.ones(2) for i in range(40)} | {"t": tensor}},
    ),
    "a parameter": ("model/weight", in_a_module),
    "a buffer": ("model/table", in_a_buffer),
    "optimizer state": ("optimizer/model/weight/momentum_buffer", in_an_optimizer),
    "of each rank": ("t", lambda tensor: {"t": PerRank(tensor)}),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_a_wrapper_is_filled_in_place_from_the_tensors_inside(
    place: str, make: Callable[[int], torch.Tensor]
) -> None:
    _, put = PLACES[place]
    state, target = put(make(1)), put(make(2))
    assert parts(state) != parts(target)
    report = restored(saved(state), target)
    assert parts(target) == parts(state)
    assert (report.missing, report.unexpected) == ((), ())


def test_the_tensors_that_the_target_holds_stay_the_same_objects() -> None:
    target = blocks(2)
    held = (target.codes, target.scale, target.table)
    state = {"t": target}
    restored(saved({"t": blocks(1)}), state)
    assert state["t"] is target
    assert all(
        a is b for a, b in zip((target.codes, target.scale, target.table), held, strict=True)
    )


def test_the_tree_has_class_metadata_and_the_names_of_the_bytes() -> None:
    root = saved({"t": blocks(1)})
    assert tree_of(root)["t"] == {
        "$": "subclass",
        "class": "tests.state.wrapping.Blocks",
        "inner": {name: {"$": "tensor", "n": f"t/{name}"} for name in ("codes", "scale", "table")},
        "v": {"signed": True, "shape": [6, 4]},
    }
    assert {tensor.name for tensor in manifest_of(root).tensors} == {
        "t/codes",
        "t/scale",
        "t/table",
    }


def test_names_of_a_wrapper_in_a_wrapper_are_nested() -> None:
    names = {tensor.name for tensor in manifest_of(saved({"t": nested(1)})).tensors}
    assert names == {"t/a/a", "t/a/b", "t/b/a", "t/b/b"}


class Named(TwoTensor):
    """A class of another name."""


class Odd(TwoTensor):
    """A class whose attributes have slashes in their names."""

    def __tensor_flatten__(self) -> Any:
        setattr(self, "a/b", self.a)
        return ["a/b", "b"], None


def test_a_slash_in_an_attribute_is_escaped() -> None:
    names = {
        tensor.name
        for tensor in manifest_of(saved({"t": Odd(torch.ones(2), torch.zeros(2))})).tensors
    }
    assert names == {"t/a~1b", "t/b"}


def test_a_name_that_a_module_makes_twice_is_refused() -> None:
    model = nn.Module()
    model.register_buffer("t", two(1))
    model.register_buffer("t/a", torch.ones(2))
    with pytest.raises(UnsupportedValue, match="'model/t/a' is a name that two values share"):
        saved({"model": model})


# -- what does not fit -----------------------------------------------------------------------------


def jagged_of(*lengths: int) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(n, 3) for n in lengths], layout=torch.jagged)


MISFITS: dict[str, tuple[Any, Any, type[Exception], str]] = {
    "another class": (
        two(1),
        Named(torch.ones(6, 4), torch.ones(6, 4)),
        KindMismatch,
        r"'t' is a torch\.testing\._internal\.two_tensor\.TwoTensor in the checkpoint and a "
        r"tests\.state\.test_wrappers\.Named in the target",
    ),
    "other metadata": (
        Blocks.of(torch.ones(6, 4), signed=True),
        Blocks.of(torch.ones(6, 4), signed=False),
        KindMismatch,
        r"true.* in the checkpoint and a .*false",
    ),
    "1 is not True": (
        Blocks.of(torch.ones(6, 4), signed=True),
        Blocks.of(torch.ones(6, 4), signed=1),
        KindMismatch,
        "true.* in the checkpoint and a .*1",
    ),
    "another block size": (
        blocks(1),
        Blocks(torch.zeros(6, 4, dtype=torch.int8), torch.ones(3), torch.ones(4)),
        ShapeMismatch,
        "t/scale",
    ),
    "another dtype inside": (
        blocks(1),
        Blocks(torch.zeros(6, 4, dtype=torch.uint8), torch.ones(6), torch.ones(4)),
        DtypeMismatch,
        "t/codes",
    ),
    "a wrapper for a tensor": (torch.ones(6, 4), two(1), KindMismatch, "'t' is a tensor"),
    "a tensor for a wrapper": (
        two(1),
        torch.ones(6, 4),
        KindMismatch,
        r"TwoTensor in the .* tensor",
    ),
    "an array for a wrapper": (two(1), torch.ones(6, 4).numpy(), KindMismatch, "TwoTensor"),
    "a value for a wrapper": (two(1), 3, KindMismatch, "TwoTensor"),
    "nothing for a wrapper": (two(1), None, KindMismatch, "TwoTensor"),
    "a wrapper inside for a tensor": (
        two(1),
        nested(1),
        KindMismatch,
        r"'t/a' is a tensor in the checkpoint and a .*TwoTensor",
    ),
    "a tensor inside for a wrapper": (
        nested(1),
        two(1),
        KindMismatch,
        r"'t/a' is a .*TwoTensor in the checkpoint and a tensor",
    ),
    "other lengths": (jagged_of(2, 4), jagged_of(2, 3), ShapeMismatch, "t/_values"),
    "another longest row": (jagged_of(2, 4), jagged_of(3, 3), ShapeMismatch, "t/_m.._seqlen"),
}


@pytest.mark.parametrize("case", MISFITS)
def test_what_does_not_fit_is_an_error_before_anything_changes(case: str) -> None:
    state, target, kind, text = MISFITS[case]
    root = saved({"a": torch.full((3,), 5.0), "t": state})
    there = {"a": torch.zeros(3), "t": target}
    before = parts(there)
    with pytest.raises(kind, match=text):
        restored(root, there)
    assert parts(there) == before


def test_a_cast_does_not_reach_into_a_wrapper() -> None:
    root = saved({"t": two(1)})
    halves = TwoTensor(torch.zeros(6, 4).half(), torch.zeros(6, 4).half())
    with CheckpointManager(root) as manager, pytest.raises(DtypeMismatch, match="t/a"):
        manager.restore({"t": halves}, cast=True)


def test_a_class_that_only_the_checkpoint_names_is_never_imported() -> None:
    root = saved({"t": two(1)})
    manifest = manifest_of(root)
    tree = msgspec.json.decode(manifest.tree)
    tree["t"]["class"] = "antigravity.Wrapper"
    forged = msgspec.structs.replace(manifest, tree=msgspec.Raw(msgspec.json.encode(tree)))
    with pytest.raises(KindMismatch, match=r"antigravity\.Wrapper"):
        match({"t": two(2)}, forged, rank=0, world_size=1)
    assert "antigravity" not in sys.modules


@pytest.mark.parametrize(
    "change",
    [
        {"inner": 3},
        {"inner": {"a": {"$": "tensor", "n": "gone"}, "b": {"$": "tensor", "n": "t/b"}}},
        {"inner": {"a": 1, "b": 2}},
        {"class": None},
        {"v": {"$": "nonsense"}},
    ],
    ids=str,
)
def test_a_node_that_ckpt_did_not_write_is_an_error(change: dict[str, Any]) -> None:
    manifest = manifest_of(saved({"t": two(1)}))
    tree = msgspec.json.decode(manifest.tree)
    tree["t"] |= change
    forged = msgspec.structs.replace(manifest, tree=msgspec.Raw(msgspec.json.encode(tree)))
    with pytest.raises(CkptError):
        match({"t": two(2)}, forged, rank=0, world_size=1)


# -- metadata --------------------------------------------------------------------------------------


class Way(Enum):
    UP = "up"
    DOWN = "down"


class Pair(NamedTuple):
    one: int
    way: Way


@dataclass
class Record:
    pair: Pair
    device: torch.device
    dtype: torch.dtype


class Outside:
    pass


@pytest.mark.parametrize(
    "value",
    [
        None,
        float("nan"),
        2**80,
        b"bytes",
        Way.UP,
        Pair(1, Way.UP),
        Record(Pair(1, Way.UP), torch.device("cpu"), torch.bfloat16),
        {"a": [1, (2, "three")]},
        torch.Size([3, 4]),
        {1: 2},
        {"$": "tensor"},
    ],
    ids=repr,
)
def test_metadata_of_plain_values_is_saved_and_compared(value: Any) -> None:
    root = saved({"t": Blocks.of(torch.ones(6, 4), value)})
    target = {"t": Blocks.of(torch.zeros(6, 4), value)}
    restored(root, target)
    assert parts(target) == parts({"t": Blocks.of(torch.ones(6, 4), value)})
    with pytest.raises(KindMismatch):
        restored(root, {"t": Blocks.of(torch.zeros(6, 4), "another")})


def test_members_and_fields_are_told_apart() -> None:
    root = saved({"t": Blocks.of(torch.ones(6, 4), Pair(1, Way.UP))})
    with pytest.raises(KindMismatch, match=r"UP.*DOWN"):
        restored(root, {"t": Blocks.of(torch.ones(6, 4), Pair(1, Way.DOWN))})


def test_devices_in_the_metadata_are_not_compared() -> None:
    root = saved({"t": Blocks.of(torch.ones(6, 4), torch.device("cpu"))})
    restored(root, {"t": Blocks.of(torch.ones(6, 4), torch.device("cuda", 1))})


def looped() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


@pytest.mark.parametrize(
    "value",
    [Outside(), torch.ones(2), lambda: 1, {"a": Outside}, Outside, [Outside()], looped()],
    ids=lambda value: type(value).__name__,
)
def test_other_metadata_is_refused_by_name(value: Any) -> None:
    with pytest.raises(UnsupportedValue, match="t"):
        saved({"t": Blocks.of(torch.ones(6, 4), value)})


# -- classes that say too little -------------------------------------------------------------------


class Raising(TwoTensor):
    def __tensor_flatten__(self) -> Any:
        raise ZeroDivisionError("no")


class Hollow(TwoTensor):
    def __tensor_flatten__(self) -> Any:
        return ["a", "kind"], None

    kind = "text"


class Itself(TwoTensor):
    def __tensor_flatten__(self) -> Any:
        self.me = self
        return ["me"], None


@pytest.mark.parametrize(
    ("kind", "text"),
    [(Raising, "raises ZeroDivisionError"), (Hollow, "names 'kind'"), (Itself, "names 'me'")],
)
def test_a_class_whose_flattening_fails_is_refused_by_name(kind: type, text: str) -> None:
    with pytest.raises(UnsupportedValue, match=text):
        saved({"t": kind(torch.ones(2), torch.ones(2))})


class Computed(TwoTensor):
    """A wrapper whose attribute is computed from another tensor."""

    @property
    def total(self) -> torch.Tensor:
        return self.a + self.b

    def __tensor_flatten__(self) -> Any:
        return ["a", "total"], None


class Stored(TwoTensor):
    """A wrapper that makes a tensor each time it is flattened."""

    def __tensor_flatten__(self) -> Any:
        self.total = self.a + self.b
        return ["a", "total"], None


class Viewed(TwoTensor):
    """A wrapper whose attribute is a view of a tensor that it keeps."""

    @property
    def flat(self) -> torch.Tensor:
        return self.b.view(-1)

    def __tensor_flatten__(self) -> Any:
        return ["a", "flat"], None


@pytest.mark.parametrize("kind", [Computed, Stored])
def test_an_attribute_that_is_a_new_tensor_each_time_is_refused_by_name(kind: type) -> None:
    root = saved({"t": two(1)})
    for attempt in (saved, lambda state: restored(root, state)):
        with pytest.raises(UnsupportedValue, match="'total' is a new tensor each time") as refused:
            attempt({"t": kind(torch.ones(6, 4), torch.ones(6, 4))})
        assert refused.value.name == "t"
    with pytest.raises(UnsupportedValue, match="'total' is a new tensor each time") as refused:
        saved({"t": TwoTensor(kind(torch.ones(6, 4), torch.ones(6, 4)), two(1))})
    assert refused.value.name == "t/a"


def test_an_attribute_may_be_a_view_of_a_tensor_that_the_wrapper_keeps() -> None:
    target = Viewed(torch.zeros(2), torch.zeros(2))
    restored(saved({"t": Viewed(torch.ones(2), torch.ones(2))}), {"t": target})
    assert torch.equal(target.b, torch.ones(2))


def test_a_wrapper_on_the_meta_device_is_refused_by_name() -> None:
    empty = TwoTensor(torch.empty(6, 4, device="meta"), torch.empty(6, 4, device="meta"))
    with pytest.raises(UnsupportedValue, match=r"'t' is a .*TwoTensor on the meta device"):
        saved({"t": empty})
    with pytest.raises(UnsupportedValue, match=r"'t' is a .*TwoTensor on the meta device"):
        restored(saved({"t": two(1)}), {"t": empty})


def test_a_wrapper_that_was_taken_apart_can_be_printed() -> None:
    """Programs that report errors print the variables of a function."""
    assert "Blocks" in repr(take_apart("w", Blocks.zeros((4, 4))))


def test_torch_s_masked_tensor_is_refused_by_name() -> None:
    masked = torch.masked.masked_tensor(torch.ones(3), torch.tensor([True, False, True]))
    with pytest.raises(UnsupportedValue, match="'t' is a MaskedTensor"):
        saved({"t": masked})


# -- names and patterns ----------------------------------------------------------------------------


def test_a_pattern_takes_a_wrapper_as_a_whole() -> None:
    root = new_root()
    with CheckpointManager(root) as manager:
        manager.save({"a": two(1), "b": two(2)}, 0, only="a")
        assert {tensor.name for tensor in manifest_of(root).tensors} == {"a/a", "a/b"}
        manager.save({"model": in_a_module(two(1))["model"]}, 1, exclude="model/weight")
    assert restored(root, {"a": two(3), "b": two(3)}, 0).left_alone == ("b",)
    target = {"a": two(3), "b": two(4)}
    root = saved({"a": two(1), "b": two(2)})
    with CheckpointManager(root) as manager:
        manager.restore(target, only="b")
    assert parts(target) == parts({"a": two(3), "b": two(2)})


def test_a_left_out_wrapper_need_not_be_one_that_can_be_saved() -> None:
    state = in_a_module(Raising(torch.ones(2), torch.ones(2)))
    with CheckpointManager(new_root()) as manager:
        manager.save(state, 0, exclude="model/weight")


def test_a_wrapper_follows_a_renaming() -> None:
    root = saved({"old": {"t": nested(1)}})
    target = {"new": {"t": nested(2)}}
    with CheckpointManager(root) as manager:
        manager.restore(target, rename={"new": "old"})
    assert parts(target["new"]) == parts({"t": nested(1)})


def test_a_wrapper_that_is_missing_is_missing_by_its_own_name() -> None:
    with pytest.raises(EntryMissing, match="'t'"):
        restored(saved({"a": 1}), {"a": 1, "t": two(1)})
    with CheckpointManager(saved({"a": 1, "t": two(1)})) as manager:
        report = manager.restore({"a": 1}, strict=False)
    assert report is not None
    assert report.unexpected == ("t",)


# -- ties ------------------------------------------------------------------------------------------


def test_a_wrapper_under_two_names_is_stored_once() -> None:
    model: Any = nn.Module()
    model.one = nn.Linear(4, 6)
    model.two = nn.Linear(4, 6)
    model.one.weight = model.two.weight = nn.Parameter(two(1), requires_grad=False)
    root = saved({"model": model})
    names = {tensor.name for tensor in manifest_of(root).tensors if "weight" in tensor.name}
    assert names == {"model/one.weight/a", "model/one.weight/b"}
    model.one.weight.a.zero_()
    restored(root, {"model": model})
    assert torch.equal(model.two.weight.a, torch.full((6, 4), 1.0))


def test_wrappers_that_share_a_tensor_store_it_once() -> None:
    shared = torch.arange(24.0).reshape(6, 4)
    state = {"x": TwoTensor(shared, torch.ones(6, 4)), "y": TwoTensor(shared, torch.zeros(6, 4))}
    root = saved(state)
    assert manifest_of(root).tied == {"y/a": "x/a"}
    take_apart = {"x": two(3), "y": two(4)}
    restored(root, take_apart)
    assert parts(take_apart) == parts(state)


# -- values that a restore makes -------------------------------------------------------------------


class Keeper:
    """An object that keeps what it is given."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def state_dict(self) -> State:
        return {"t": self.tensor}

    def load_state_dict(self, state: State) -> None:
        self.tensor = state["t"]


class Declared(Keeper, Stateful):
    """An object whose own tensors are filled."""


class Extra(nn.Module):
    def get_extra_state(self) -> Any:
        return {"t": two(1)}

    def set_extra_state(self, state: Any) -> None:
        raise AssertionError(state)


def test_a_restore_would_have_to_make_a_wrapper_of_an_object() -> None:
    for state in ({"k": Keeper(two(1))}, {"k": Extra()}):
        with pytest.raises(UnsupportedValue, match="a restore would have to make"):
            saved(state)


def test_an_object_that_declares_its_state_has_its_own_wrapper_filled() -> None:
    kept = Declared(two(2))
    held = kept.tensor
    restored(saved({"k": Declared(two(1))}), {"k": kept})
    assert kept.tensor is held
    assert parts(held) == parts(two(1))


# -- saves again and again -------------------------------------------------------------------------


def trained(*, replaces: bool = False, seed: int = 0) -> State:
    torch.manual_seed(seed)
    model = nn.Linear(4, 8)
    state = {"model": model, "optimizer": Quantised(model.parameters(), replaces=replaces)}
    step(state)
    return state


def step(state: State) -> float:
    state["optimizer"].zero_grad()
    loss = state["model"](torch.ones(3, 4)).square().mean()
    loss.backward()
    state["optimizer"].step()
    return float(loss.detach())


@pytest.mark.parametrize("replaces", [False, True])
def test_training_goes_on_as_if_it_had_not_stopped(replaces: bool) -> None:
    state, root = trained(replaces=replaces), new_root()
    with CheckpointManager(root) as manager:
        for number in range(4):
            pending = manager.save_async(state, number)
            losses = [step(state)]
        pending.result()
        losses += [step(state) for _ in range(5)]
        again = trained(replaces=replaces, seed=9)
        manager.restore(again, 3)
    assert [step(again) for _ in range(6)] == losses


def test_a_segment_is_used_again_until_a_wrapper_holds_another_tensor() -> None:
    state, last_walk = trained(), LastWalk()

    def segments() -> list[Any]:
        return collect(state, rank=0, last_walk=last_walk).parts

    first = segments()
    assert all(one is two for one, two in zip(segments(), first, strict=True))
    step(state)  # in place
    assert all(one is two for one, two in zip(segments(), first, strict=True))
    moment = state["optimizer"].state[state["model"].weight]["moment"]
    moment.codes = moment.codes.clone()
    now = segments()
    assert now[0] is first[0]
    assert now[1] is not first[1]
    assert any(item.tensor is moment.codes for item in now[1].named_tensors)


@pytest.mark.parametrize("make", [two, nested])
def test_a_wrapper_replaced_around_the_same_tensors_makes_a_new_segment(
    make: Callable[[int], Any],
) -> None:
    state, last_walk = in_a_buffer(make(1)), LastWalk()

    def segment() -> Any:
        return collect(state, rank=0, last_walk=last_walk).parts[0]

    first = segment()
    assert segment() is first
    held = state["model"].table
    if make is nested:
        held.a = TwoTensor(held.a.a, held.a.b)
    else:
        state["model"].table = TwoTensor(held.a, held.b)
    assert segment() is not first


def test_metadata_is_that_of_each_save() -> None:
    tensor, root = Blocks.of(torch.ones(6, 4), 1), new_root()
    state = in_a_module(tensor)
    with CheckpointManager(root) as manager:
        manager.save(state, 0)
        state["model"].weight.signed = 2
        manager.save(state, 1)
    assert tree_of(root)["model"]["values"]["weight"]["v"]["signed"] == 2


def test_a_wrapper_in_the_place_of_a_tensor_and_back() -> None:
    state: State = {"t": torch.ones(6, 4)}
    with CheckpointManager(new_root()) as manager:
        manager.save(state, 0)
        state["t"] = two(3)
        manager.save(state, 1)
        state["t"] = torch.zeros(6, 4)
        manager.save(state, 2)
        target: State = {"t": two(4)}
        manager.restore(target, 1)
    assert parts(target) == parts({"t": two(3)})


# -- an optimizer without state --------------------------------------------------------------------


def test_plain_state_is_not_put_in_the_place_of_a_wrapper() -> None:
    plain = in_an_optimizer(torch.ones(6, 4))
    target = in_an_optimizer(blocks(1))
    before = parts(target)
    with pytest.raises(KindMismatch, match="momentum_buffer' is a tensor in the checkpoint"):
        restored(saved(plain), target)
    with pytest.raises(KindMismatch, match="Blocks in the checkpoint and a tensor"):
        restored(saved(target), plain)
    assert parts(target) == before


def fresh(seed: int = 9, **settings: Any) -> State:
    torch.manual_seed(seed)
    model = nn.Linear(4, 8)
    return {"model": model, "optimizer": Quantised(model.parameters(), **settings)}


def test_an_optimizer_that_has_not_stepped_makes_its_state_by_a_step_of_its_own() -> None:
    state = trained()
    root = saved(state)
    again = fresh()
    calls: list[str] = []
    again["optimizer"].register_step_pre_hook(lambda *_: calls.append("step"))
    generator = torch.get_rng_state()
    restored(root, again)
    assert torch.equal(torch.get_rng_state(), generator)
    assert not calls
    assert parts(again) == parts(state)
    assert [step(again) for _ in range(4)] == [step(state) for _ in range(4)]


def test_a_restore_that_fails_leaves_such_an_optimizer_without_state() -> None:
    root = saved(trained())
    again = fresh()
    before = parts(again)
    again["optimizer"].param_groups[0]["more"] = 1
    with pytest.raises(EntryMissing):
        restored(root, again | {"gone": torch.ones(2)})
    assert parts(again) == before
    assert not again["optimizer"].state


class Counting(Quantised):
    """An optimizer that keeps state in its own attributes, and draws random numbers."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.count = torch.zeros(1)
        self.seen: dict[str, list[int]] = {"sizes": []}
        self.generator = torch.Generator().manual_seed(3)
        self.own_step = self.step  # bound to the optimizer itself

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        self.seen["sizes"].append(len(self.param_groups[0]["params"]))
        self.param_groups[0]["history"].append(random.random())
        torch.rand(2, generator=self.generator)
        super().step(closure)


@pytest.mark.parametrize("is_refused", [False, True])
def test_such_a_step_leaves_the_optimizer_s_own_attributes(is_refused: bool) -> None:
    state = trained()
    state["optimizer"].param_groups[0]["history"] = []
    again = fresh()
    optimizer = again["optimizer"] = Counting(again["model"].parameters())
    history: list[float] = []
    optimizer.param_groups[0]["history"] = history
    generator, numbers = optimizer.generator.get_state(), random.getstate()
    if is_refused:
        with pytest.raises(EntryMissing):
            restored(saved(state), again | {"gone": torch.ones(2)})
    else:
        restored(saved(state), again)
        assert parts(again) == parts(state)
    assert (optimizer.count.item(), optimizer.seen, history) == (0, {"sizes": []}, [])
    assert torch.equal(optimizer.generator.get_state(), generator)
    assert random.getstate() == numbers


def test_an_attribute_that_cannot_be_copied_is_an_error_before_a_step() -> None:
    again = fresh()
    again["optimizer"].lock = threading.Lock()
    with pytest.raises(RestoreError, match=r"take one optimizer step before restoring"):
        restored(saved(trained()), again)
    assert not again["optimizer"].state


class Failing(Quantised):
    def step(self, closure: Any = None) -> Any:
        raise ZeroDivisionError("no gradient")


class Plain(Quantised):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["moment"] = torch.zeros_like(parameter)


class Lazy(Quantised):
    def step(self, closure: Any = None) -> Any:
        pass


@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [
        (Failing, RestoreError, r"moment' is not there yet.*ZeroDivisionError.*take one optimizer"),
        (Plain, KindMismatch, r"moment' is a .*Blocks in the checkpoint and a tensor"),
        (Lazy, RestoreError, r"first step of Lazy does not make it"),
    ],
)
def test_a_step_that_does_not_make_the_state_is_an_error(
    kind: type[Quantised], error: type[Exception], text: str
) -> None:
    again = fresh()
    again["optimizer"] = kind(again["model"].parameters())
    before = parts(again)
    with pytest.raises(error, match=text):
        restored(saved(trained()), again)
    assert parts(again) == before
    assert not again["optimizer"].state

"""The code by which a module loads a state dict runs in a restore, as torch runs it."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.ao.quantization as ao
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ckpt
from ckpt.errors import EntryMissing, RestoreError, ShapeMismatch, UnsupportedValue
from tests.state.ranks import rank_of
from tests.state.saving import assert_same, restored, round_trip, saved, tree_of

State = dict[str, Any]


class Flag(nn.Module):
    """Keeps a flag that a post-hook derives of a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))
        self.register_buffer("done", torch.tensor(False))
        self.is_done = False
        self.register_load_state_dict_post_hook(lambda m, _: setattr(m, "is_done", bool(m.done)))

    def change(self) -> None:
        self.done.fill_(True)  # type: ignore[operator]


class Count(nn.Module):
    """Derives a number in its own ``_load_from_state_dict``."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("n", torch.zeros(()))
        self.count = 0

    def change(self) -> None:
        self.n.fill_(5)  # type: ignore[operator]

    def _load_from_state_dict(self, state_dict: State, prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        self.count = int(state_dict[f"{prefix}n"])


class Inverse(nn.Module):
    """Derives a tensor in its own ``load_state_dict``."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))
        self.inverse = 1 / self.w.detach()

    def change(self) -> None:
        self.w.data.fill_(4)

    def load_state_dict(self, *args: Any, **options: Any) -> Any:
        result = super().load_state_dict(*args, **options)
        self.inverse = 1 / self.w.detach()
        return result


class Bare(Inverse):
    """Takes no ``strict``, as in research code."""

    def load_state_dict(self, state_dict: State) -> Any:  # type: ignore[override]
        return super().load_state_dict(state_dict)


class Nested(nn.Module):
    """Has a form of its own for its state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(2, 2), nn.Linear(2, 1)

    def change(self) -> None:
        nn.init.ones_(self.head.weight)

    def state_dict(self, *_: Any, **__: Any) -> State:  # type: ignore[override]
        return {"body": self.body.state_dict(), "head": self.head.state_dict()}

    def load_state_dict(self, state_dict: State) -> None:  # type: ignore[override]
        self.body.load_state_dict(state_dict["body"])
        self.head.load_state_dict(state_dict["head"])


class Scaled(nn.Module):
    """Converts what it saves and what it loads in hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))
        self.register_load_state_dict_pre_hook(self.load)

    def change(self) -> None:
        self.w.data.fill_(3)

    @staticmethod
    def load(module: nn.Module, state_dict: State, prefix: str, *_: Any) -> None:
        state_dict[f"{prefix}w"] = state_dict[f"{prefix}w"] * 2


def attributes(module: nn.Module) -> State:
    """Return the values of a module that torch does not know, and its state dict."""
    plain = (bool, int, torch.Tensor)
    own = {key: value for key, value in vars(module).items() if isinstance(value, plain)}
    return {**own, "state": dict(module.state_dict())}


ALONE = (Inverse, Bare, Nested)
KINDS = (Flag, Count, Inverse, Bare, Nested, Scaled)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_child", [False, True])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_restored_module_is_as_after_torch_s_own_load(
    kind: Callable[[], Any], is_child: bool, device: str
) -> None:
    def build() -> tuple[nn.Module, Any]:
        inner = kind()
        return (nn.Sequential(nn.Linear(2, 2), inner), inner) if is_child else (inner, inner)

    if is_child and kind in ALONE:
        pytest.skip("torch calls this method of the outermost module alone")
    source, inner = build()
    inner.change()
    wanted, expected = build()
    wanted.load_state_dict(copy.deepcopy(source.state_dict()))
    target, found = build()
    if device == "meta":
        target.to("meta")
    restored(saved({"m": source}), {"m": target})
    if device == "cpu" or kind is not Nested:
        assert_same(attributes(found), attributes(expected))


@pytest.mark.parametrize("wrap", [nn.DataParallel, torch.compile])
def test_a_wrapper_changes_nothing(wrap: Callable[[nn.Module], nn.Module]) -> None:
    source, target = nn.Sequential(Flag(), Count()), nn.Sequential(Flag(), Count())
    for each in source:
        each.change()  # type: ignore[operator]
    restored(saved({"m": wrap(source)}), {"m": target})
    assert (target[0].is_done, target[1].count) == (True, 5)
    again = nn.Sequential(Flag(), Count())
    restored(saved({"m": source}), {"m": wrap(again)})
    assert (again[0].is_done, again[1].count) == (True, 5)


class Keeper(nn.Module):
    """Keeps its present weight when it loads a state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.v = nn.Parameter(torch.rand(2)), nn.Parameter(torch.rand(2))
        self.register_load_state_dict_pre_hook(self.keep)
        self.seen: list[torch.Tensor] = []

    @staticmethod
    def keep(module: Any, state_dict: State, prefix: str, *_: Any) -> None:
        module.seen.append(state_dict[f"{prefix}w"].clone())
        state_dict[f"{prefix}w"] = module.w.detach()


def test_a_pre_hook_finds_the_present_values_and_the_saved_ones() -> None:
    source, target = Keeper(), Keeper()
    before = target.w.detach().clone()
    round_trip({"m": source}, {"m": target})
    assert torch.equal(target.w, before)
    assert torch.equal(target.seen[0], source.w)
    assert torch.equal(target.v, source.v)


def test_a_module_without_code_is_filled_in_place_and_not_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, target = (
        nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)),
        nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)),
    )
    root = saved({"m": source})
    monkeypatch.setattr(nn.Module, "load_state_dict", None)
    places = [each.data_ptr() for each in target.parameters()]
    restored(root, {"m": target})
    assert [each.data_ptr() for each in target.parameters()] == places
    assert_same(dict(target.state_dict()), dict(source.state_dict()))


def test_post_hooks_alone_need_no_memory_of_their_own() -> None:
    source, target = Flag(), Flag()
    source.change()
    seen: list[bool] = []
    place = target.w.data_ptr()
    target.register_load_state_dict_post_hook(lambda m, _: seen.append(m.w.data_ptr() == place))
    round_trip({"m": source}, {"m": target})
    assert seen == [True]


@pytest.mark.parametrize("only", ["m/0.*", "m/1.w"])
def test_a_partial_restore_keeps_the_rest_and_gives_hooks_whole_dicts(only: str) -> None:
    source, target = nn.Sequential(Count(), Flag()), nn.Sequential(Count(), Flag())
    for each in source:
        each.change()  # type: ignore[operator]
    target[0].n.fill_(2)  # type: ignore[operator,union-attr]
    nn.init.zeros_(target[1].w)  # type: ignore[arg-type]
    restored(saved({"m": source}), {"m": target}, only=only)
    is_first = only == "m/0.*"
    assert target[0].count == (5 if is_first else 2)
    assert torch.equal(target[1].w, torch.full((2,), 0.0 if is_first else 1.0))  # type: ignore[arg-type]
    assert target[1].is_done is False
    restored(saved({"m": source, "x": 1}), {"m": nn.Sequential(), "x": 0}, only="x")


def test_the_code_of_a_trained_part_runs_over_the_whole_model() -> None:
    def build() -> nn.Sequential:
        model = nn.Sequential(Flag(), Count())
        model.append(nn.Linear(2, 2).requires_grad_(False))
        return model

    source, target = build(), build()
    source[0].change()  # type: ignore[operator]
    restored(saved({"m": ckpt.trainable(source)}), {"m": ckpt.trainable(target)})
    assert target[0].is_done is True
    assert target[1].count == 0


# -- sizes -----------------------------------------------------------------------------------------


def prepared(sizes: tuple[int, int] = (6, 8)) -> nn.Module:
    model = nn.Sequential(nn.Linear(*sizes), nn.ReLU())
    model.qconfig = ao.get_default_qat_qconfig("x86")  # type: ignore[assignment]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ao.prepare_qat(model.train())  # type: ignore[no-any-return,no-untyped-call]


def observed(kind: type[nn.Module]) -> nn.Module:
    return nn.Sequential(kind())


def test_quantisation_aware_training_goes_on_in_a_new_process() -> None:
    source, wanted, target = prepared(), prepared(), prepared()
    x = torch.randn(4, 6)
    source(x)
    wanted.load_state_dict(copy.deepcopy(source.state_dict()))
    restored(saved({"m": source}), {"m": target})
    assert_same(dict(target.state_dict()), dict(source.state_dict()))
    for _ in range(2):
        assert torch.equal(wanted(x), target(x))


@pytest.mark.parametrize(
    "kind",
    [
        ao.MinMaxObserver,
        ao.MovingAverageMinMaxObserver,
        ao.PerChannelMinMaxObserver,
        ao.MovingAveragePerChannelMinMaxObserver,
        ao.HistogramObserver,
        ao.FusedMovingAvgObsFakeQuantize,
    ],
)
@pytest.mark.parametrize("is_fresh", [True, False])
def test_every_observer_comes_back(kind: Any, is_fresh: bool) -> None:
    source, target = observed(kind), observed(kind)
    source(torch.randn(5, 3))
    if not is_fresh:
        target(torch.randn(7, 3))
    restored(saved({"m": source}), {"m": target})
    assert_same(dict(target.state_dict()), dict(source.state_dict()))
    x = torch.randn(5, 3)
    source(x), target(x)
    assert_same(dict(target.state_dict()), dict(source.state_dict()))


@pytest.mark.parametrize("reads_root", [False, True])
def test_a_size_that_the_code_does_not_take_is_an_error_before_anything_changes(
    reads_root: bool,
) -> None:
    def build(size: int) -> nn.Sequential:
        model = nn.Sequential(nn.Linear(size, size), Count())
        if reads_root:
            model.register_load_state_dict_pre_hook(lambda *_: None)
        else:
            model[0] = Wide(size)
        return model

    source, target = build(3), build(2)
    source[1].change()  # type: ignore[operator]
    before = copy.deepcopy(target.state_dict())
    with pytest.raises(ShapeMismatch) as failed:
        restored(saved({"m": source}), {"m": target})
    assert failed.value.name.startswith("m/0.")
    assert (failed.value.saved[0], failed.value.wanted[0]) == (3, 2)
    assert_same(dict(target.state_dict()), dict(before))
    assert target[1].count == 0  # type: ignore[union-attr]


class Strict(nn.Linear):
    """Refuses another size in words of its own."""

    def _load_from_state_dict(self, state_dict: State, prefix: str, *rest: Any) -> None:
        errors = rest[-1]
        if state_dict[f"{prefix}weight"].shape != self.weight.shape:
            errors.append("these weights are not mine")
        else:
            super()._load_from_state_dict(state_dict, prefix, *rest)


def test_a_size_that_is_refused_in_other_words_than_torch_s_is_named() -> None:
    target = nn.Sequential(Strict(2, 2, bias=False))
    before = copy.deepcopy(target.state_dict())
    with pytest.raises(ShapeMismatch, match=r"m/0\.weight"):
        restored(saved({"m": nn.Sequential(nn.Linear(2, 3, bias=False))}), {"m": target})
    assert_same(dict(target.state_dict()), dict(before))


class Wide(nn.Linear):
    def __init__(self, size: int) -> None:
        super().__init__(size, size)

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)


def test_a_pre_hook_may_give_a_tensor_the_size_of_the_module() -> None:
    class Table(nn.Embedding):
        def __init__(self, rows: int) -> None:
            super().__init__(rows, 2)
            self.register_load_state_dict_pre_hook(self.cut)

        @staticmethod
        def cut(module: Any, state_dict: State, prefix: str, *_: Any) -> None:
            state_dict[f"{prefix}weight"] = state_dict[f"{prefix}weight"][: module.num_embeddings]

    source, target = Table(5), Table(3)
    restored(saved({"m": source}), {"m": target})
    assert torch.equal(target.weight, source.weight[:3])


def test_tied_weights_under_code_stay_tied_and_must_not_be_saved_apart() -> None:
    def build(is_tied: bool) -> nn.Module:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        if is_tied:
            model[1].weight = model[0].weight
        model.register_load_state_dict_pre_hook(lambda *_: None)
        return model

    source, target = build(True), build(True)
    restored(saved({"m": source}), {"m": target})
    assert_same(dict(target.state_dict()), dict(source.state_dict()))
    with pytest.raises(RestoreError, match="untie them first"):
        restored(saved({"m": build(False)}), {"m": build(True)})


# -- versions --------------------------------------------------------------------------------------


class Old(nn.Module):
    """Keeps a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(4.0))
        self.register_buffer("other", torch.tensor(1.0))


class New(Old):
    """Keeps the logarithm of the scale."""

    _version = 2

    def _load_from_state_dict(
        self, state_dict: State, prefix: str, local_metadata: State, *args: Any
    ) -> None:
        if local_metadata.get("version", 1) < 2:
            state_dict[f"{prefix}scale"] = state_dict[f"{prefix}scale"].log2()
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


@pytest.mark.parametrize("as_dict", [False, True])
@pytest.mark.parametrize("wrap", [lambda m: m, nn.DataParallel])
def test_what_an_older_class_saved_is_converted_and_only_that(
    as_dict: bool, wrap: Callable[[nn.Module], nn.Module]
) -> None:
    def state(module: nn.Module) -> State:
        return {"m": module.state_dict() if as_dict else wrap(module)}

    for kind, scale in ((Old, 2.0), (New, 4.0)):
        target = nn.Sequential(New())
        restored(saved(state(nn.Sequential(kind()))), {"m": target})
        assert float(target[0].scale) == scale  # type: ignore[arg-type]


def test_a_part_of_what_an_older_class_saved_is_refused() -> None:
    root, target = saved({"m": nn.Sequential(Old())}), nn.Sequential(New())
    with pytest.raises(RestoreError, match="restore all of its entries, or none"):
        restored(root, {"m": target}, only="m/0.scale")
    assert float(target[0].scale) == 4.0  # type: ignore[arg-type]


def test_versions_stand_in_the_tree_unless_they_are_the_first() -> None:
    tree = tree_of(saved({"m": nn.Sequential(Old(), New(), nn.BatchNorm1d(2))}))
    assert tree["m"]["versions"] == {"1": {"version": 2}, "2": {"version": 2}}
    assert tree_of(saved({"m": Old()}))["m"]["versions"] == {}


# -- errors ----------------------------------------------------------------------------------------


def test_a_hook_that_fails_is_named() -> None:
    def hook(*_: Any) -> None:
        raise ValueError("no such thing")

    target = Flag()
    target.register_load_state_dict_post_hook(hook)
    with pytest.raises(RestoreError, match=r"'m' was read, but Flag .*no such thing"):
        restored(saved({"m": Flag()}), {"m": target})


def test_an_entry_that_a_hook_takes_away_is_an_error_as_in_torch() -> None:
    def hook(_: nn.Module, state_dict: State, prefix: str, *__: Any) -> None:
        del state_dict[f"{prefix}w"]

    target = Flag()
    target.register_load_state_dict_pre_hook(hook)
    root = saved({"m": Flag()})
    with pytest.raises(RestoreError, match="did not take 'w'"):
        restored(root, {"m": target})
    restored(root, {"m": target}, strict=False)


def test_an_entry_that_nothing_takes_is_refused_before_anything_changes() -> None:
    def build() -> Flag:
        made = Flag()
        made.register_state_dict_post_hook(
            lambda _, state_dict, prefix, *__: state_dict.update({f"{prefix}note": 3})
        )
        return made

    source, target = build(), build()
    source.change()
    root = saved({"m": source})
    with pytest.raises(RestoreError, match="'m/note' is added by state_dict"):
        restored(root, {"m": target})
    assert not target.done
    restored(root, {"m": target}, strict=False)
    assert target.is_done


def _copying(width: int) -> nn.Module:
    made = nn.Sequential(nn.Linear(width, 2), nn.BatchNorm1d(2))
    made.register_state_dict_post_hook(
        lambda _, state_dict, *__: state_dict.update(
            {key: value.detach().clone() for key, value in state_dict.items()}
        )
    )
    return made


def test_copies_that_a_hook_of_state_dict_makes_are_copied_back_as_in_torch() -> None:
    source, target = _copying(2), _copying(2)
    restored(saved({"m": source}), {"m": target})
    assert_same(target.state_dict(), source.state_dict())


def test_copies_of_another_shape_are_an_error_before_anything_changes() -> None:
    root, target = saved({"m": _copying(2)}), _copying(3)
    before = copy.deepcopy(target.state_dict())
    with pytest.raises(ShapeMismatch, match=r"m/0\.weight"):
        restored(root, {"m": target})
    assert_same(target.state_dict(), before)


def test_what_is_missing_is_missing_also_under_code() -> None:
    with pytest.raises(EntryMissing, match="m/n"):
        restored(saved({"m": nn.Linear(2, 2)}), {"m": Count()})


# -- sharded modules -------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")  # about the CPU, deprecations, and one rank
@pytest.mark.parametrize("named", [False, True])
def test_code_runs_inside_of_fsdp1_or_is_refused_by_name(named: bool) -> None:
    def build(*inside: nn.Module) -> FSDP:
        net = nn.Sequential(*inside, nn.Linear(2, 2))
        return FSDP(net, use_orig_params=named, device_id=torch.device("cpu"))

    with rank_of(0, 1):
        source, target = build(Count(), Flag()), build(Count(), Flag())
        source[0].change(), source[1].change()  # type: ignore[operator]
        round_trip({"m": source}, {"m": target})
        assert (target[0].count, target[1].is_done) == (5, True)
        root = saved({"m": build(Keeper())})
        if named:  # One rank holds the parameters whole
            target = build(Keeper())
            before = target[0].w.detach().clone()
            restored(root, {"m": target})
            assert torch.equal(target[0].w, before)
            return
        with pytest.raises(UnsupportedValue, match="'m/0' is a Keeper, whose own code"):
            restored(root, {"m": build(Keeper())})


@pytest.mark.parametrize("wrap", ["fsdp2", "ddp"])
def test_code_runs_on_sharded_and_replicated_modules(wrap: str) -> None:
    def build() -> Any:
        net: Any = nn.Sequential(Count(), Flag(), Scaled(), nn.Linear(2, 2))
        if wrap == "ddp":
            return DistributedDataParallel(net)
        return fully_shard(net, mesh=init_device_mesh("cpu", (1,)))

    with rank_of(0, 1):
        source, target = build(), build()
        for each in getattr(source, "module", source)[:3]:
            each.change()
        restored(saved({"m": source}), {"m": target})
        count, flag, scaled, _ = getattr(target, "module", target)
        assert (count.count, flag.is_done) == (5, True)
        assert torch.equal(getattr(scaled.w, "_local_tensor", scaled.w), torch.full((2,), 6.0))

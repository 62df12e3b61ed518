"""The tensors of a part come under other names, and a mapping that does not fit is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from ckpt import CheckpointManager
from ckpt.errors import ConfigError, EntryMissing
from ckpt.exchange.weights.load import stream_part
from ckpt.exchange.weights.part import Part

NAMES = {"embed.weight": "a.weight", "head.weight": "b.weight", "norm.weight": None, "steps": "n"}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.RMSNorm(4)
        self.register_buffer("steps", torch.tensor(7))


def follow(root: Path, name: str, **options: Any) -> Any:
    with ckpt.follow(root, name, **options) as versions:
        return next(versions)


@pytest.fixture(scope="module")
def model() -> Net:
    torch.manual_seed(0)
    return Net()


@pytest.fixture(scope="module")
def root(model: Net, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("root")
    with CheckpointManager(path) as manager:
        manager.save({"model": model, "scale": torch.ones(2), "epoch": 3}, step=1)
    return path


def test_a_mapping_gives_names_and_leaves_tensors_out(root: Path, model: Net) -> None:
    weights = ckpt.load(root, "model", names=NAMES, dtype=torch.bfloat16)
    assert sorted(weights) == ["a.weight", "b.weight", "n"]
    assert weights["a.weight"] is weights["b.weight"]
    assert torch.equal(weights["a.weight"], model.embed.weight.to(torch.bfloat16))
    assert weights["n"] == 7


def test_tied_names_may_get_one_name(root: Path, model: Net) -> None:
    weights = ckpt.load(root, "model", names=NAMES | {"head.weight": "a.weight"})
    assert sorted(weights) == ["a.weight", "n"]
    assert torch.equal(weights["a.weight"], model.embed.weight)


def test_the_names_of_a_whole_state_begin_with_those_of_its_parts(root: Path) -> None:
    names = {f"model/{name}": None for name in NAMES} | {"scale": "s"}
    assert {name: value.tolist() for name, value in ckpt.load(root, names=names).items()} == {
        "s": [1.0, 1.0]
    }


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"norm.weight": "a.weight"}, "'embed.weight' and 'norm.weight' would both be 'a.weight'"),
        ({"norm.weight": ...}, "the mapping of names lacks 'norm.weight'"),
        ({"norm.bias": "bias"}, r"step 1 has no 'norm.bias'; it has 'norm.weight'"),
        ({"norm.weight": ""}, "^names gives 'norm.weight' the name '': give a new name, or None"),
        ({"norm.weight": 3}, "^names gives 'norm.weight' the name 3: give a new name, or None"),
        ({3: "norm"}, "^names has the key 3, which is not the name of a tensor"),
        (
            {"norm.weight": ..., "model/norm.weight": "a"},
            "has 'model/norm.weight', and the part has 'norm.weight': take 'model/' off",
        ),
    ],
    ids=["twice", "forgotten", "foreign", "empty", "no name", "no key", "prefix"],
)
@pytest.mark.parametrize("read", [ckpt.load, follow], ids=["load", "follow"])
def test_a_mapping_that_does_not_fit_is_refused(
    read: Any, change: dict[Any, Any], words: str, root: Path
) -> None:
    mapping = {name: item for name, item in (NAMES | change).items() if item is not ...}
    with pytest.raises((ConfigError, EntryMissing), match=words):
        read(root, "model", names=mapping)


def test_a_word_is_no_mapping_and_the_export_is_named(root: Path) -> None:
    with pytest.raises(ConfigError, match=r"names='transformers': .*export --format hf"):
        ckpt.load(root, "model", names="transformers")  # type: ignore[arg-type]


@pytest.mark.parametrize("part", ["epoch", "optimizer"])
def test_a_part_without_tensors_has_no_names(part: str, root: Path) -> None:
    with pytest.raises(EntryMissing, match=f"step 1 has no '{part}/'"):
        ckpt.load(root, part, names={})


def test_a_version_has_the_names_and_tells_of_changes_by_them(tmp_path: Path) -> None:
    model = Net()
    follow = ckpt.follow(tmp_path, names=NAMES, poll_seconds=0.01, timeout_seconds=1)
    with CheckpointManager(tmp_path) as manager, follow as versions:
        manager.save({"model": model}, 1)
        first = next(versions)
        assert first.changes == {"a.weight", "b.weight", "n"} == set(first.weights)
        with torch.no_grad():
            model.norm.weight.add_(1)
            model.embed.weight.add_(1)
        manager.save({"model": model}, 2)
        version = next(versions)
    assert version.changes == {"a.weight", "b.weight"}
    assert torch.equal(version.weights["b.weight"], model.embed.weight)


@pytest.mark.parametrize("most_bytes", [1, 1 << 20])
@pytest.mark.parametrize("names", [None, NAMES])
def test_tensors_are_streamed(
    names: dict[str, str | None] | None, most_bytes: int, root: Path, model: Net
) -> None:
    with ckpt.open(root) as opened:
        items = list(stream_part(opened.reader, Part("model", names), most_bytes=most_bytes))
    expected = model.state_dict() if names is None else ckpt.load(root, "model", names=names)
    assert [name for name, _ in items] == sorted(expected)
    assert all(torch.equal(value, expected[name]) for name, value in items)

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckpt import CheckpointManager
from ckpt.model.dtype import DTYPES
from ckpt.storage.api import StorageBackend
from ckpt.storage.registry import open_backend
from tests.checkpoints import Written, write_checkpoint
from tests.cli.conftest import ARRAYS, Cli, data_file, flip


def test_the_same_is_the_same_without_reading(cli: Cli, steps: dict[int, Written]) -> None:
    flip(data_file(steps[300]), 4100)  # the command does not read these bytes
    ran = cli("diff", "runs", "--step", 200, "--step", 300)
    assert ran.code == 0
    assert ran.out.endswith(
        "4 tensors equal: the checkpoints are the same\ncompared by checksum alone: no data was "
        "read\n"
    )
    assert cli("diff", "runs", "--step", 200, "--step", 300, "--json").json["read"] == 0


def test_what_differs_is_told(cli: Cli, backend: StorageBackend) -> None:
    other = {
        **ARRAYS,
        "model/bias": np.arange(6),
        "new": np.ones(2),
        "model/embed": ARRAYS["model/embed"].copy(),
    }
    other["model/embed"][3, 3] += 0.5
    del other["count"]
    write_checkpoint(backend, 1, ARRAYS, tree={"epoch": 1, "lr": 0.1})
    write_checkpoint(backend, 2, other, tree={"epoch": 2, "name": "x"})
    ran = cli("diff", "runs", "--step", 1, "--step", 2, "--values")
    assert ran.code == 1
    rows = {
        line.split()[0]: " ".join(line.split()[1:])
        for line in ran.out.partition("\npart ")[0].splitlines()[4:]
        if line
    }
    assert rows["count"] == "only in A float64 []"
    assert rows["new"] == "only in B float64 [2]"
    assert rows["model/bias"] == "another kind int64 [5] in A, int64 [6] in B"
    assert rows["model/embed"] == "other values float32 [12, 8], by at most 0.5"
    assert rows["epoch"] == "plain value 1 in A, 2 in B"
    assert rows["lr"] == "plain value 0.1 in A, none in B"
    found = cli("diff", "runs", "--step", 1, "--step", 2, "--json")
    assert found.code == 1
    assert found.json["same"] is False
    assert found.json["only_a"] == ["count"]
    assert found.json["values"] == [{"name": "model/embed", "max_difference": None, "moved": None}]
    assert found.json["plain"]["epoch"] == {"a": "1", "b": "2"}


def test_the_difference_is_summed_up_by_part_with_what_moved_most(
    cli: Cli, backend: StorageBackend
) -> None:
    zeros = np.zeros(4)
    old = {f"model/layers.{n}.{name}": np.full(4, 2.0) for n in range(3) for name in "ab"}
    old |= {"model/head": zeros, "opt/model/head/step": np.array(1.0)}
    new = old | {
        "model/layers.1.a": old["model/layers.1.a"] * 1.5,
        "model/layers.2.b": old["model/layers.2.b"] * 1.1,
        "opt/model/head/step": np.array(100.0),
    }
    write_checkpoint(backend, 1, old)
    write_checkpoint(backend, 2, new)
    ran = cli("diff", "runs", 1, 2, "--values")
    lines = [line.split() for line in ran.out.splitlines()]
    start = lines.index(
        ["part", "tensors", "equal", "other", "values", "unlike", "moved", "at", "most"]
    )
    assert ["model/layers.1.a", "1", "0", "1", "0", "50", "%", "1"] in lines[start:]
    assert ran.out.endswith("moved most, in percent of the norm: model/layers.1.a by 50 %\n")
    assert cli("diff", "runs", 1, 2).out.endswith(
        "tensors with other values: 2 of model, 1 of opt; --values says how far they have moved\n"
    )
    # With more tensors, a part is a layer
    for step, factor in ((3, 1.0), (4, 1.5)):
        arrays = {f"model/layers.{n}.{name}": np.full(4, 2.0) for n in range(8) for name in "abc"}
        arrays["model/layers.5.b"] *= factor
        write_checkpoint(backend, step, arrays)
    found = cli("diff", "runs", 3, 4, "--values", "--json").json["parts"]
    assert [part["part"] for part in found] == [f"model/layers.{n}" for n in range(8)]
    (moved,) = [part for part in found if part["values"]]
    assert (moved["part"], moved["equal"], moved["most_moved"], moved["moved"]) == (
        "model/layers.5", 2, "model/layers.5.b", pytest.approx(0.5),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [(0.0, 1.0, "all of it (from 0)"), (1.0, math.inf, "inf"), (1.0, 21.0, "2,000 %")],
)
def test_any_movement_is_told(
    cli: Cli, backend: StorageBackend, old: float, new: float, expected: str
) -> None:
    write_checkpoint(backend, 1, {"x": np.full(3, old)})
    write_checkpoint(backend, 2, {"x": np.full(3, new)})
    out = cli("diff", "runs", 1, 2, "--values").out
    assert out.endswith(f"moved most, in percent of the norm: x by {expected}\n")


def test_other_layouts_are_compared_by_reading(cli: Cli) -> None:
    for folder, world, chunk in (("a", 1, 1024), ("b", 3, 64), ("c", 2, 256)):
        write_checkpoint(open_backend(folder), 1, ARRAYS, world_size=world, chunk_bytes=chunk)
    found = cli("diff", "a", "b", "--json")
    assert found.code == 0
    assert found.json["read"] == 2  # 'count' is one chunk in both
    embed = ARRAYS["model/embed"].copy()
    embed[11, 7] = -1
    write_checkpoint(
        open_backend("d"), 1, {**ARRAYS, "model/embed": embed}, world_size=3, chunk_bytes=96
    )
    assert [item["name"] for item in cli("diff", "c", "d", "--json").json["values"]] == [
        "model/embed"
    ]


VALUES: dict[str, tuple[Callable[[], torch.Tensor], float]] = {
    "bf16": (lambda: torch.tensor([1.0, 2.0], dtype=torch.bfloat16), 0.5),
    "f8": (lambda: torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn), 0.5),
    "nan": (lambda: torch.tensor([math.nan, 2.0]), 0.5),
    "int": (lambda: torch.tensor([1, 2]), 1.0),
    "flag": (lambda: torch.tensor([True, False]), 1.0),
    "complex": (lambda: torch.tensor([1j, 2 + 0j]), 0.5),
}


def test_values_of_any_dtype_are_compared(cli: Cli) -> None:
    one: dict[str, Any] = {name: make() for name, (make, _) in VALUES.items()}
    two = {name: make() for name, (make, _) in VALUES.items()}
    for name, (_, by) in VALUES.items():
        last = two[name][1]
        two[name][1] = (
            True if name == "flag" else (last if name == "complex" else last.float()) + by
        )
    one["inf"], two["inf"] = torch.tensor([0.0]), torch.tensor([math.inf])
    for folder, state in (("a", one), ("b", two)):
        with CheckpointManager(folder) as manager:
            manager.save(
                {
                    **state,
                    "lost": torch.tensor([math.nan]) if folder == "a" else torch.tensor([1.0]),
                },
                step=1,
            )
    ran = cli("diff", "a", "b", "--values", "--json")
    assert ran.code == 1
    found = {item["name"]: item["max_difference"] for item in ran.json["values"]}
    assert {name: found[name] for name in VALUES} == {name: by for name, (_, by) in VALUES.items()}
    assert found["inf"] == found["lost"] == "inf"


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tensor_of_each_dtype_can_be_compared(cli: Cli, dtype: str) -> None:
    for folder, byte in (("a", 0), ("b", 1)):
        memory = torch.zeros(32, dtype=torch.uint8)
        memory[0] = byte
        with CheckpointManager(folder) as manager:
            manager.save({"x": memory.view(getattr(torch, dtype))}, step=1)
    ran = cli("diff", "a", "b", "--values", "--json")
    assert ran.code == 1, ran.err
    difference = ran.json["values"][0]["max_difference"]
    if dtype.startswith(("bits", "float4")):  # An element is several values, or none
        assert difference is None
        assert "by at most" not in cli("diff", "a", "b", "--values").out
    else:
        assert difference > 0


@pytest.mark.parametrize(
    ("dtype", "pair", "by"),
    [
        (torch.int64, (2**60, 2**60 + 1), 1.0),
        (torch.int64, (-(2**63), 2**63 - 1), 2.0**64),
        (torch.uint64, (2**64 - 1, 2**64 - 4), 3.0),
        (torch.int8, (-128, 127), 255.0),
    ],
)
def test_large_integers_are_subtracted_exactly(
    cli: Cli, dtype: torch.dtype, pair: tuple[int, int], by: float
) -> None:
    for folder, number in zip(("a", "b"), pair, strict=True):
        with CheckpointManager(folder) as manager:
            manager.save({"x": torch.tensor([0, number], dtype=dtype)}, step=1)
    ran = cli("diff", "a", "b", "--values", "--json")
    (value,) = ran.json["values"]
    assert (value["name"], value["max_difference"]) == ("x", by)


def test_damage_is_told(cli: Cli, steps: dict[int, Written]) -> None:
    write_checkpoint(open_backend("b"), 300, ARRAYS)
    flip(data_file(steps[300]), 4200)
    ran = cli("diff", "runs", "b")
    assert ran.code == 4
    assert "checksum mismatch" in ran.err


@pytest.mark.parametrize(
    ("args", "code", "expected"),
    [
        (["runs"], 2, "compare with what?"),
        (["runs", "nowhere"], 7, "empty, or does not exist"),
        (["runs", "--step", 100, "--step", 7], 7, "step 7 is not there"),
        (["runs", "runs", "--step", 1, "--step", 2, "--step", 3], 2, "one step is for both"),
    ],
)
def test_a_wrong_call_says_what_is_wrong(
    cli: Cli, steps: dict[int, Written], args: list[object], code: int, expected: str
) -> None:
    ran = cli("diff", *args)
    assert (ran.code, ran.out) == (code, "")
    assert expected in ran.err
    assert not Path("nowhere").exists()


def test_values_of_one_rank_and_the_end_of_long_ones_count(
    cli: Cli, backend: StorageBackend
) -> None:
    for step, (seed, text) in enumerate([(1, "x" * 500), (2, "x" * 499 + "y")]):
        write_checkpoint(backend, step, ARRAYS, tree={"text": text}, per_rank={0: {"rng": seed}})
    found = cli("diff", "runs", "--step", 0, "--step", 1, "--json")
    assert found.code == 1
    assert sorted(found.json["plain"]) == ["rng of rank 0", "text"]


def test_the_end_of_a_long_object_counts(cli: Cli, backend: StorageBackend) -> None:
    for step in range(2):
        value = {"$": "stateful", "v": {"$": "tuple", "v": [*range(600), step]}}
        write_checkpoint(backend, step, ARRAYS, tree={"state": value})
    found = cli("diff", "runs", "--step", 0, "--step", 1, "--json")
    assert (found.code, list(found.json["plain"])) == (1, ["state"])

"""What the benchmark saves, and the comparison that all its figures depend on."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bench.state import Raw, Reference, Subject, Training


def training() -> Training:
    return Training.make(256 << 10, layers=1, batch=2, seed=1)


def raw() -> Raw:
    return Raw.make(10_000, 7, seed=1)


both = pytest.mark.parametrize("make", [training, raw])


@both
def test_a_loaded_state_is_the_saved_one_bit_for_bit(
    make: Callable[[], Subject], tmp_path: Path
) -> None:
    subject = make()
    subject.step = 12
    reference = Reference(str(tmp_path / "reference"), subject.nbytes)
    reference.take(subject)
    values = subject.values()
    kept = copy.deepcopy(subject.state_dict())
    subject.spoil()
    assert reference.differences(subject) == list(subject.tensors())
    assert subject.values() != values
    subject.load_state_dict(kept)
    assert reference.differences(subject) == []
    assert subject.values() == values
    assert subject.step == 12


@both
def test_the_comparison_names_the_tensor_with_one_wrong_bit(
    make: Callable[[], Subject], tmp_path: Path
) -> None:
    subject = make()
    reference = Reference(str(tmp_path / "reference"), subject.nbytes)
    reference.take(subject)
    for name, tensor in subject.tensors().items():
        bits = tensor.detach().view(-1).view(torch.uint8)
        bits[-1] ^= 1
        assert reference.differences(subject) == [name]
        bits[-1] ^= 1
    assert reference.differences(subject) == []


@both
def test_to_load_what_is_live_moves_no_tensor(make: Callable[[], Subject]) -> None:
    subject = make()
    before = {name: tensor.data_ptr() for name, tensor in subject.tensors().items()}
    subject.load_state_dict(subject.state_dict())
    assert {name: tensor.data_ptr() for name, tensor in subject.tensors().items()} == before
    assert subject.nbytes == sum(tensor.nbytes for tensor in subject.tensors().values())


@both
def test_a_state_dict_is_the_callers_own(make: Callable[[], Subject]) -> None:
    subject = make()
    for part in subject.state_dict().values():
        if isinstance(part, dict):
            part.clear()
    assert all(part for name, part in subject.state_dict().items() if name != "step")


@pytest.mark.parametrize(("size", "count"), [(1 << 20, 16), (10_000, 7), (4 * 3000, 3000)])
def test_raw_tensors_are_as_many_and_as_large_as_asked_for(size: int, count: int) -> None:
    tensors = Raw.make(size, count, seed=1).tensors()
    assert len(tensors) == count
    assert sum(tensor.nbytes for tensor in tensors.values()) == size
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}


def test_no_two_raw_tensors_are_alike_and_the_seed_makes_them() -> None:
    one, same, other = (Raw.make(10_000, 7, seed).tensors() for seed in (1, 1, 2))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not any(torch.equal(one[name], other[name]) for name in one)
    firsts = {float(tensor[0]) for tensor in one.values()}
    assert len(firsts) == 7


def test_ranks_can_hold_raw_tensors_of_their_own() -> None:
    names = [set(Raw.make(1000, 3, seed=1, prefix=f"rank{rank}").tensors()) for rank in range(2)]
    assert not names[0] & names[1]

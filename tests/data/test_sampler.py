"""A position in the data: each sample comes once in an epoch, for any number of ranks."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from ckpt import CheckpointManager
from ckpt.data import ElasticSampler
from ckpt.errors import CkptError, ConfigError, RestoreError
from tests.kit.worlds import world

WORKER = Path(__file__).parent / "workers" / "dealt.py"


def order(length: int, seed: int, epoch: int) -> list[int]:
    """Return the documented order of an epoch."""
    generator = torch.Generator().manual_seed(seed + epoch)
    found: list[int] = torch.randperm(length, generator=generator).tolist()
    return found


def loader_of(sampler: ElasticSampler, length: int, size: int | None = 4, **more: Any) -> Any:
    return DataLoader(range(length), batch_size=size, sampler=sampler, **more)  # type: ignore[arg-type]


def one(length: int = 50, **more: Any) -> ElasticSampler:
    """Return a sampler of a job with one rank."""
    return ElasticSampler(length, **{"rank": 0, "world_size": 1, **more})


class Endless(IterableDataset[int]):
    """A dataset without a length."""

    def __iter__(self) -> Iterator[int]:
        return count()

    def __repr__(self) -> str:  # the name of a test must be the same in each process
        return "Endless()"


class Life:
    """The ranks of a job, one after the other in each step."""

    def __init__(self, length: int, ranks: int, size: int, *, seed: int, shuffle: bool) -> None:
        self.samplers = [
            ElasticSampler(length, shuffle=shuffle, seed=seed, rank=rank, world_size=ranks)
            for rank in range(ranks)
        ]
        self.loaders = [loader_of(sampler, length, size) for sampler in self.samplers]

    def position(self) -> dict[str, Any]:
        """Return what a save would hold. It is the same on all ranks."""
        first, *others = (sampler.state_dict() for sampler in self.samplers)
        assert all(other == first for other in others)
        return first

    def train(self, steps: int | None) -> list[list[int]]:
        """Return the samples of each step, at most to the end of the epoch."""
        loops = (
            islice(sampler.batches(loader), steps)
            for sampler, loader in zip(self.samplers, self.loaders, strict=True)
        )
        batches = [[batch.tolist() for batch in loop] for loop in loops]
        return [  # rank 0's first, rank 1's first, ...
            [sample for row in zip(*step, strict=True) for sample in row]
            for step in zip(*batches, strict=True)
        ]


@given(
    length=st.integers(8, 60),
    lives=st.lists(
        st.tuples(st.integers(1, 8), st.integers(1, 5), st.integers(0, 4)), min_size=1, max_size=6
    ),
    ranks=st.integers(1, 8),
    seed=st.integers(0, 9),
    shuffle=st.booleans(),
)
def test_an_epoch_gives_each_sample_once_whatever_ranks_and_batches_its_lives_had(
    length: int, lives: list[tuple[int, int, int]], ranks: int, seed: int, shuffle: bool
) -> None:
    """The last life has ``ranks`` ranks. It trains to the end of the epoch, and then through the
    next one.
    """
    position = one(length, seed=seed, shuffle=shuffle).state_dict()
    trained: list[int] = []
    orders = [order(length, seed, epoch) if shuffle else list(range(length)) for epoch in (0, 1)]
    for ranks_then, size, steps in lives:
        life = Life(length, ranks_then, size, seed=seed, shuffle=shuffle)
        for sampler in life.samplers:
            sampler.load_state_dict(position)
        trained += [sample for step in life.train(steps) for sample in step]
        position = life.position()
        assert trained == orders[0][: len(trained)]
        if position["epoch"] == 1:  # this life has come to the end of the epoch
            assert position["consumed"] == 0
            assert 0 <= length - len(trained) < ranks_then
            return
        assert (position["epoch"], position["consumed"]) == (0, len(trained))
    last = Life(length, ranks, 3, seed=seed, shuffle=shuffle)
    for sampler in last.samplers:
        sampler.load_state_dict(position)
    trained += [sample for step in last.train(None) for sample in step]
    assert trained == orders[0][: len(trained)]
    assert 0 <= length - len(trained) < ranks
    assert (last.position()["epoch"], last.position()["consumed"]) == (1, 0)
    following = [sample for step in last.train(None) for sample in step]
    assert following == orders[1][: length // ranks * ranks]


@given(length=st.integers(8, 60), ranks=st.integers(1, 8), size=st.integers(1, 5))
def test_drop_last_leaves_out_less_than_a_batch_of_each_rank(
    length: int, ranks: int, size: int
) -> None:
    counts = set()
    for rank in range(ranks):
        sampler = ElasticSampler(length, rank=rank, world_size=ranks)
        loader = loader_of(sampler, length, size, drop_last=True)
        assert len(loader) == length // ranks // size
        counts.add(sum(len(batch) for batch in sampler.batches(loader)))
        assert sampler.state_dict()["epoch"] == 1
    assert counts == {length // ranks // size * size}


def test_samples_without_batches_count_one_by_one() -> None:
    sampler = one(10, shuffle=False)
    loop = sampler.batches(loader_of(sampler, 10, None))
    assert [next(loop) for _ in range(3)] == [0, 1, 2]
    assert sampler.state_dict()["consumed"] == 3


# -- workers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("persistent", [False, True])
def test_what_workers_have_read_ahead_does_not_count(tmp_path: Path, persistent: bool) -> None:
    more = {"num_workers": 2, "prefetch_factor": 4, "persistent_workers": persistent}
    sampler = one(seed=3)
    trained: list[int] = []
    with CheckpointManager(tmp_path) as manager:
        for step, batch in enumerate(sampler.batches(loader_of(sampler, 50, **more)), 1):
            trained += batch.tolist()
            manager.save({"data": sampler}, step)
            if step == 5:
                break
        assert sampler.state_dict()["consumed"] == len(trained) == 20
        again = one(seed=3)
        loader = loader_of(again, 50, **more)
        manager.restore({"data": again})
        assert len(loader) == 8
        # the loop is left and continued, with the same workers
        for batch in islice(again.batches(loader), 2):
            trained += batch.tolist()
        for batch in again.batches(loader):
            trained += batch.tolist()
        assert trained == order(50, 3, 0)
        following = [sample for batch in again.batches(loader) for sample in batch.tolist()]
        assert following == order(50, 3, 1)
        assert again.epoch == 2


def test_a_save_after_the_last_batch_of_an_epoch_continues_in_the_next(tmp_path: Path) -> None:
    sampler = one(8)
    with CheckpointManager(tmp_path) as manager:
        for step, _ in enumerate(sampler.batches(loader_of(sampler, 8)), 1):
            manager.save({"data": sampler}, step)
        again = one(8)
        loader = loader_of(again, 8)
        manager.restore({"data": again})
    assert again.epoch == 0
    assert list(again.batches(loader)) == []
    assert again.epoch == 1
    assert len(list(again.batches(loader))) == 2


@pytest.mark.distributed
def test_four_ranks_then_two_then_three_train_on_each_sample_once(tmp_path: Path) -> None:
    """Each life restores, and goes back to its own save once. All train on 12 samples a step."""
    trained: dict[int, list[int]] = {}
    for ranks, save_at, stop_at in [(4, 2, 4), (2, 6, 7), (3, 8, 100)]:
        first = max((step for step in trained), default=0)
        seen: defaultdict[int, list[list[int]]] = defaultdict(list)
        said = world(ranks, WORKER, tmp_path, save_at, stop_at, "sampler", 1)
        for line in map(json.loads, said.splitlines()):
            seen[line["step"]].append(line["samples"])
        assert min(seen) == first + 1  # batches that the life before did not save do not count
        for step, parts in seen.items():
            times = 2 if step == save_at + 1 else 1
            assert len({len(part) for part in parts}) == 1, "equal counts on all ranks"
            assert len(parts) == ranks * times
            samples = sorted(sample for part in parts for sample in part)
            assert samples[::times] == sorted({*samples}), "the same samples in both tries"
            if step <= save_at or stop_at == 100:
                trained[step] = samples[::times]
    for epoch in (0, 1):
        expected = order(103, 5, epoch)
        steps = [trained[step] for step in range(1 + 9 * epoch, 10 + 9 * epoch)]
        cuts = [expected[at : at + 12] for at in range(0, 96, 12)]
        assert steps == [sorted(cut) for cut in [*cuts, expected[96:102]]]
    assert len(trained) == 18


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"seed": 4}, ("seed=3", "seed=4")),
        ({"length": 51}, ("length=50", "length=51")),
        ({"shuffle": False}, ("shuffle=True", "shuffle=False")),
    ],
)
def test_another_order_is_refused_with_both_values_and_nothing_changes(
    tmp_path: Path, other: dict[str, Any], words: tuple[str, ...]
) -> None:
    source = one(seed=3)
    next(source.batches(loader_of(source, 50)))
    target = one(**{"seed": 3, **other})
    net = nn.Linear(2, 2)
    position, weight = target.state_dict(), net.weight.clone()
    with CheckpointManager(tmp_path) as manager:
        manager.save({"net": nn.Linear(2, 2), "data": source}, 1)
        with pytest.raises(RestoreError, match="data position was saved with") as failure:
            manager.restore({"net": net, "data": target})
        assert all(word in str(failure.value) for word in words)
        assert target.state_dict() == position
        assert torch.equal(net.weight, weight)
        with pytest.raises(RestoreError, match="data position was saved with"):
            target.load_state_dict(source.state_dict())
        assert target.state_dict() == position
        manager.restore({"net": net, "data": target}, only="net")
    assert not torch.equal(net.weight, weight)


@pytest.mark.parametrize(
    "change",
    [
        {"epoch": -1},
        {"consumed": 51},
        {"consumed": -1},
        {"consumed": 1.0},
        {"shuffle": 1},
        {"other": 1},
        {"epoch": torch.ones(2)},
    ],
    ids=str,
)
def test_what_is_no_position_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    target = one()
    before = target.state_dict()
    with CheckpointManager(tmp_path) as manager:
        manager.save({"data": {**before, **change}}, 1)
        with pytest.raises(RestoreError):
            manager.restore({"data": target})
    assert target.state_dict() == before


@pytest.mark.parametrize("loader", ["batches", "order"])
def test_a_loader_of_another_sampler_is_refused(loader: str) -> None:
    sampler = one()
    given = {
        "batches": DataLoader(range(50), batch_sampler=[[1, 2]]),  # type: ignore[arg-type]
        "order": loader_of(one(), 50),
    }[loader]
    with pytest.raises(ConfigError, match="does not take its samples from this"):
        next(sampler.batches(given))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loop_over_the_loader_itself_is_refused(workers: int) -> None:
    sampler = one()
    loader = loader_of(sampler, 50, num_workers=workers)
    with pytest.raises(ConfigError, match=r"for batch in sampler\.batches\(loader\)"):
        next(iter(loader))
    assert len(list(sampler.batches(loader))) == 13
    with pytest.raises(ConfigError, match=r"for batch in sampler\.batches\(loader\)"):
        next(iter(loader))


@given(
    length=st.integers(8, 60),
    ranks=st.integers(1, 4),
    steps=st.integers(0, 3),
    samples=st.integers(0, 80),
)
def test_samples_that_are_skipped_are_left_out_and_the_others_keep_their_order(
    length: int, ranks: int, steps: int, samples: int
) -> None:
    life = Life(length, ranks, 2, seed=1, shuffle=True)
    trained = [sample for step in life.train(steps) for sample in step]
    ends = life.position()["epoch"]
    for sampler in life.samplers:
        sampler.skip(samples)
    rest = [sample for step in life.train(None) for sample in step]
    begin = min(length, (0 if ends else len(trained)) + samples)
    stop = begin + (length - begin) // ranks * ranks
    assert rest == order(length, 1, ends)[begin:stop]
    assert (life.position()["epoch"], life.position()["consumed"]) == (ends + 1, 0)


def test_a_loop_does_not_go_on_after_a_skip() -> None:
    sampler = one()
    loop = sampler.batches(loader_of(sampler, 50))
    next(loop)
    sampler.skip(3)
    with pytest.raises(ConfigError, match="leave that loop first"):
        next(loop)


@pytest.mark.parametrize("samples", [-1, 1.5, True, "3"])
def test_a_number_of_samples_that_is_no_count_is_refused(samples: Any) -> None:
    sampler = one()
    with pytest.raises(ConfigError, match="samples"):
        sampler.skip(samples)
    assert sampler.state_dict()["consumed"] == 0


def test_a_loop_that_goes_on_after_a_restore_is_refused() -> None:
    sampler = one()
    loop = sampler.batches(loader_of(sampler, 50))
    next(loop)
    position = sampler.state_dict()
    next(loop)
    sampler.load_state_dict(position)
    with pytest.raises(ConfigError, match="leave that loop first"):
        next(loop)
    assert sampler.state_dict() == position


def test_a_loop_that_goes_on_after_another_has_begun_is_refused() -> None:
    sampler = one()
    first, second = (sampler.batches(loader_of(sampler, 50)) for _ in range(2))
    next(first)
    next(second)
    with pytest.raises(ConfigError, match="leave that loop first"):
        next(first)
    next(second)
    assert sampler.state_dict()["consumed"] == 12


@pytest.mark.parametrize(
    "wrong",
    [
        {"length": 0},
        {"length": True},
        {"length": 2, "world_size": 3},
        {"length": Endless()},
        {"rank": 1},
        {"rank": -1},
        {"rank": None},
        {"world_size": None},
        {"world_size": 0},
        {"seed": -1},
        {"seed": 1.5},
        {"shuffle": None},
    ],
    ids=str,
)
def test_a_wrong_value_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        one(**wrong)


def test_a_rank_of_a_launcher_without_a_process_group_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(CkptError, match=r"WORLD_SIZE .*init_process_group.*rank= and world_size="):
        ElasticSampler(10)
    assert len(ElasticSampler(10, rank=1, world_size=2)) == 5

"""A position in a dataset without a length.

Each sample comes once in an epoch, for any number of ranks and of workers.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from ckpt import CheckpointManager
from ckpt.data import ElasticSampler, ElasticStream
from ckpt.errors import ConfigError, RestoreError
from tests.kit.examples import examples
from tests.kit.pages import block
from tests.kit.worlds import world

WORKER = Path(__file__).parent / "workers" / "dealt.py"


class Lines(IterableDataset[int]):
    """Numbers in an order that depends on the epoch. In a worker it reads a part."""

    def __init__(self, length: int) -> None:
        self.length, self.epoch = length, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return iter(self.order(self.epoch)[first::step])

    def order(self, epoch: int) -> list[int]:
        generator = torch.Generator().manual_seed(epoch)
        found: list[int] = torch.randperm(self.length, generator=generator).tolist()
        return found


def one(length: int = 50, rank: int = 0, world_size: int = 1) -> ElasticStream:
    return ElasticStream(Lines(length), rank=rank, world_size=world_size)


def loader_of(stream: ElasticStream, size: int | None = 4, **more: Any) -> DataLoader[Any]:
    return DataLoader(stream, batch_size=size, **more)


class Life:
    """The ranks of a job, one after the other in each step."""

    def __init__(self, length: int, ranks: int, size: int, workers: int = 0) -> None:
        self.streams = [one(length, rank, ranks) for rank in range(ranks)]
        self.loaders = [loader_of(each, size, num_workers=workers) for each in self.streams]

    def restore(self, position: dict[str, Any]) -> None:
        for stream in self.streams:
            stream.load_state_dict(position)

    def position(self) -> dict[str, Any]:
        """Return what a save would hold. It is the same on all ranks."""
        first, *others = (stream.state_dict() for stream in self.streams)
        assert all(other == first for other in others)
        return first

    def train(self, steps: int | None) -> list[int]:
        """Return the samples of these steps in the order of the dataset."""
        loops = (
            islice(stream.batches(loader), steps)
            for stream, loader in zip(self.streams, self.loaders, strict=True)
        )
        batches = [[batch.tolist() for batch in loop] for loop in loops]
        return [
            sample
            for step in zip(*batches, strict=True)
            for row in zip(*step, strict=True)
            for sample in row
        ]


def through_lives(length: int, lives: list[tuple[int, int, int]], ranks: int, workers: int) -> None:
    """Train through several lives, and compare with what one process reads.

    Each life trains this many steps with these ranks and batches. The last one trains to the end of
    two epochs with ``ranks``.
    """
    orders = [Lines(length).order(epoch) for epoch in (0, 1)]
    position: dict[str, Any] = one(length).state_dict()
    trained: list[int] = []
    for ranks_then, size, steps in lives:
        life = Life(length, ranks_then, size, workers)
        life.restore(position)
        trained += life.train(steps)
        position = life.position()
        assert trained == orders[0][: len(trained)]
        if position["epoch"] == 1:  # this life has come to the end of the epoch
            assert position["consumed"] == 0
            break
        if position["consumed"] <= length:
            assert position["consumed"] == len(trained)
        else:  # the last batch was smaller, and no rank has any sample left
            assert length - len(trained) < max(each[0] for each in lives)
    else:
        life = Life(length, ranks, 3, workers)
        life.restore(position)
        trained += life.train(None)
        assert trained == orders[0][: len(trained)]
        assert (life.position()["epoch"], life.position()["consumed"]) == (1, 0)
        if position["consumed"] <= length:
            assert 0 <= length - len(trained) < ranks
    world_size = len(life.streams)
    assert life.train(None) == orders[1][: length // world_size * world_size]


@settings(max_examples=examples(40))
@given(
    length=st.integers(8, 60),
    lives=st.lists(st.tuples(st.integers(1, 8), st.integers(1, 5), st.integers(0, 4)), max_size=6),
    ranks=st.integers(1, 8),
)
def test_an_epoch_gives_each_sample_once_whatever_ranks_and_batches_its_lives_had(
    length: int, lives: list[tuple[int, int, int]], ranks: int
) -> None:
    through_lives(length, lives, ranks, workers=0)


@settings(max_examples=examples(8))
@given(
    length=st.integers(8, 40),
    lives=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 3)), max_size=2),
    ranks=st.integers(1, 3),
    workers=st.integers(1, 3),
)
@pytest.mark.slow
def test_workers_change_nothing(
    length: int, lives: list[tuple[int, int, int]], ranks: int, workers: int
) -> None:
    through_lives(length, lives, ranks, workers)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("size", [4, None])
def test_the_batches_of_a_rank_do_not_depend_on_its_workers(rank: int, size: int | None) -> None:
    seen = []
    for workers in (0, 1, 2, 3):
        stream = one(51, rank, 2)
        loop = stream.batches(loader_of(stream, size, num_workers=workers))
        seen.append([torch.as_tensor(batch).tolist() for batch in loop])
    order = Lines(51).order(0)[rank:50:2]
    assert seen[0] == ([order[at : at + 4] for at in range(0, 25, 4)] if size else order)
    assert seen[1:] == seen[:1] * 3


def test_persistent_workers_begin_where_each_loop_does(tmp_path: Path) -> None:
    stream = one()
    loader = loader_of(stream, num_workers=2, prefetch_factor=4, persistent_workers=True)
    trained: list[int] = []
    with CheckpointManager(tmp_path) as manager:
        for batch in islice(stream.batches(loader), 5):
            trained += batch.tolist()
        assert stream.state_dict()["consumed"] == len(trained) == 20
        manager.save({"data": stream}, 1)
        for _ in islice(stream.batches(loader), 2):  # a step that failed
            pass
        manager.restore({"data": stream})
    for batch in stream.batches(loader):
        trained += batch.tolist()
    assert trained == Lines(50).order(0)
    assert [sample for batch in stream.batches(loader) for sample in batch.tolist()] == (
        Lines(50).order(1)
    )


@pytest.mark.torture
def test_workers_may_be_spawned() -> None:
    stream = one()
    stream.load_state_dict({**stream.state_dict(), "epoch": 1, "consumed": 40})
    loop = stream.batches(loader_of(stream, num_workers=1, multiprocessing_context="spawn"))
    assert [batch.tolist() for batch in loop] == [
        Lines(50).order(1)[at : at + 4] for at in (40, 44, 48)
    ]


def test_samples_that_are_skipped_are_left_out() -> None:
    stream = one(20)
    loader = loader_of(stream)
    next(stream.batches(loader))
    stream.skip(6)
    rest = [sample for batch in stream.batches(loader) for sample in batch.tolist()]
    assert rest == Lines(20).order(0)[10:]
    stream.skip(21)  # More than the epoch has
    assert list(stream.batches(loader)) == []
    assert stream.epoch == 2


def test_drop_last_leaves_out_the_smaller_batch() -> None:
    stream = one(22, 1, 2)
    seen = [batch.tolist() for batch in stream.batches(loader_of(stream, 4, drop_last=True))]
    assert seen == [Lines(22).order(0)[1:9:2], Lines(22).order(0)[9:17:2]]
    assert stream.epoch == 1


# -- with the real packages ------------------------------------------------------------------------


def shuffled(datasets: Any, length: int = 103, shards: int = 5, **more: Any) -> Any:
    data = datasets.Dataset.from_dict({"number": list(range(length))})
    return data.to_iterable_dataset(num_shards=shards).shuffle(
        **{"seed": 5, "buffer_size": 10, **more}
    )


@pytest.mark.integration
@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["stream", "stateful-stream", "stateful-sampler"])
def test_four_ranks_then_two_then_three_train_on_each_sample_once(
    tmp_path: Path, kind: str
) -> None:
    """Each life has other workers, and goes back to its own save once."""
    datasets = pytest.importorskip("datasets", reason="pip install datasets")
    pytest.importorskip("torchdata", reason="pip install torchdata")
    trained: dict[int, list[int]] = {}
    for ranks, workers, save_at, stop_at in [(4, 1, 2, 4), (2, 2, 6, 7), (3, 2, 8, 100)]:
        seen: defaultdict[int, list[list[int]]] = defaultdict(list)
        said = world(ranks, WORKER, tmp_path, save_at, stop_at, kind, workers)
        # torchdata prints warnings
        for line in map(json.loads, re.findall("^{.*", said, re.MULTILINE)):
            seen[line["step"]].append(line["samples"])
        for step, parts in seen.items():
            times = 2 if step == save_at + 1 else 1
            assert len({len(part) for part in parts}) == 1, "equal counts on all ranks"
            assert len(parts) == ranks * times
            samples = sorted(sample for part in parts for sample in part)
            assert samples[::times] == sorted({*samples}), "the same samples in both tries"
            if step <= save_at or stop_at == 100:
                trained[step] = samples[::times]
    data = shuffled(datasets)
    for epoch in (0, 1):
        if kind == "stateful-sampler":
            generator = torch.Generator().manual_seed(5 + epoch)
            expected = torch.randperm(103, generator=generator).tolist()
        else:
            data.set_epoch(epoch)
            expected = [row["number"] for row in data]
        steps = [trained[step] for step in range(1 + 9 * epoch, 10 + 9 * epoch)]
        cuts = [expected[at : at + 12] for at in range(0, 96, 12)]
        assert steps == [sorted(cut) for cut in [*cuts, expected[96:102]]]
    assert len(trained) == 18


@pytest.mark.integration
@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"seed": 6}, "seed="),
        ({"length": 104}, "length=103.*length=104"),
        ({"shards": 4}, "shards=5.*shards=4"),
        ({"buffer_size": 11}, "buffer_size=10.*buffer_size=11"),
        ({"seed": None}, "seed="),
    ],
    ids=str,
)
def test_another_order_is_refused_and_nothing_changes(
    tmp_path: Path, other: dict[str, Any], words: str
) -> None:
    datasets = pytest.importorskip("datasets", reason="pip install datasets")
    source = ElasticStream(shuffled(datasets))
    next(source.batches(loader_of(source)))
    target = ElasticStream(shuffled(datasets, **other))
    position = target.state_dict()
    with CheckpointManager(tmp_path) as manager:
        manager.save({"data": source}, 1)
        with pytest.raises(RestoreError, match=f"data position was saved with .*{words}"):
            manager.restore({"data": target})
        assert target.state_dict() == position
        again = ElasticStream(shuffled(datasets))
        manager.restore({"data": again})
        assert again.state_dict() == source.state_dict()


@pytest.mark.integration
def test_a_dataset_that_is_not_shuffled_is_another_one(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="pip install datasets")
    plain = datasets.Dataset.from_dict({"number": [1, 2, 3]}).to_iterable_dataset()
    with CheckpointManager(tmp_path) as manager:
        manager.save({"data": ElasticStream(plain.shuffle(seed=1))}, 1)
        with pytest.raises(RestoreError, match=r"shuffle=True.*shuffle=False"):
            manager.restore({"data": ElasticStream(plain)})
        with pytest.raises(RestoreError, match=r"steps=.*Mapped"):
            manager.restore({"data": ElasticStream(plain.shuffle(seed=1).map(dict))})


@pytest.mark.integration
def test_a_dataset_that_datasets_deals_or_resumes_is_refused() -> None:
    datasets = pytest.importorskip("datasets", reason="pip install datasets")
    split_dataset_by_node = import_module("datasets.distributed").split_dataset_by_node
    data = shuffled(datasets)
    with pytest.raises(ConfigError, match="split by ranks already"):
        ElasticStream(split_dataset_by_node(data, rank=0, world_size=2))
    stream = ElasticStream(data)
    data.load_state_dict(data.state_dict())
    with pytest.raises(ConfigError, match="a position of its own"):
        next(stream.batches(loader_of(stream)))


@pytest.mark.integration
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_loader_that_is_restored_beside_it_is_refused(workers: int) -> None:
    stateful = pytest.importorskip(
        "torchdata.stateful_dataloader", reason="pip install torchdata"
    ).StatefulDataLoader
    stream, sampler = one(), ElasticSampler(50, rank=0, world_size=1)
    for holder, loader in (
        (stream, stateful(stream, batch_size=4, num_workers=workers)),
        (sampler, stateful(range(50), batch_size=4, sampler=sampler, num_workers=workers)),
    ):
        loop = holder.batches(loader)
        next(loop)
        loader.load_state_dict(loader.state_dict())
        with pytest.raises(ConfigError, match="not the StatefulDataLoader"):
            next(holder.batches(loader))


@pytest.mark.integration
@pytest.mark.distributed
def test_the_script_of_the_page_goes_on_with_another_number_of_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets", reason="pip install datasets")
    pytest.importorskip("torchdata", reason="pip install torchdata")
    script = tmp_path / "train.py"
    script.write_text(block("docs/data.md", "ElasticStream").replace("runs/stream", str(tmp_path)))
    seen = []
    for ranks, first in [(2, 1), (3, 11)]:
        lines = re.findall(r"^step (\d+) (\[.*\])$", world(ranks, script), re.MULTILINE)
        assert sorted(int(step) for step, _ in lines) == sorted([*range(first, first + 10)] * ranks)
        seen += [sample for _, batch in lines for sample in json.loads(batch)]
    data = datasets.Dataset.from_dict({"number": list(range(1000))})
    expected = data.to_iterable_dataset(num_shards=8).shuffle(seed=1, buffer_size=100)
    assert sorted(seen) == sorted(row["number"] for row in expected.take(500))


# -- refusals --------------------------------------------------------------------------------------


def test_another_length_is_refused(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save({"data": ElasticStream([1, 2, 3])}, 1)
        with pytest.raises(RestoreError, match=r"length=3.*length=2"):
            manager.restore({"data": ElasticStream([1, 2])})
        with pytest.raises(RestoreError, match="another value in the place of an ElasticSampler"):
            manager.restore({"data": ElasticSampler(3)})


@pytest.mark.parametrize("wrong", [3, iter([1, 2]), None, (each for each in [1])], ids=type)
def test_what_cannot_be_read_again_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="read again and again"):
        ElasticStream(wrong)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loop_over_the_loader_itself_is_refused(workers: int) -> None:
    stream = one()
    loader = loader_of(stream, num_workers=workers)
    with pytest.raises(ConfigError, match=r"for batch in stream\.batches\(loader\)"):
        next(iter(loader))
    assert len(list(stream.batches(loader))) == 13
    with pytest.raises(ConfigError, match=r"for batch in stream\.batches\(loader\)"):
        next(iter(loader))


def test_a_loader_that_mixes_batches_or_reads_elsewhere_is_refused() -> None:
    stream = one()
    with pytest.raises(ConfigError, match="does not take its samples from this ElasticStream"):
        next(stream.batches(loader_of(one())))
    with pytest.raises(ConfigError, match="leave out in_order=False"):
        next(stream.batches(loader_of(stream, num_workers=2, in_order=False)))

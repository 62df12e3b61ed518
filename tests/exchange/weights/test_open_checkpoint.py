from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckpt
from ckpt import CheckpointManager
from ckpt.errors import ChecksumMismatch, ConfigError, EntryMissing, NoCheckpoint
from ckpt.exchange.weights.open_checkpoint import Index
from tests.exchange.states import same

EMBED = torch.arange(640 * 8, dtype=torch.float32).reshape(640, 8)
STATE = {
    "embed": EMBED,
    "bf16": torch.randn(33, 5).to(torch.bfloat16),
    "f8": torch.randn(7).to(torch.float8_e4m3fn),
    "z": torch.randn(3).to(torch.complex128),
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 4),
    "flags": torch.tensor([True, False]),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("root")
    with CheckpointManager(path, chunk_size=1024) as manager:
        manager.save({"embed": EMBED + 1}, step=1)
        manager.save(STATE, step=2)
    return path


def test_steps_and_names_are_listed(root: Path) -> None:
    with ckpt.open(root) as opened:
        assert opened.step == 2
        assert opened.steps() == [2, 1]
        assert opened.names() == sorted(STATE)
        assert opened.tensor("embed").shape == (640, 8)
        assert len(opened.tensor("embed")) == 640
        assert opened.tensor("bf16").dtype is torch.bfloat16
        assert "not read" in repr(opened.tensor("f8"))


@pytest.mark.parametrize("name", sorted(STATE))
def test_a_whole_tensor_is_what_was_saved(root: Path, name: str) -> None:
    with ckpt.open(root) as opened:
        assert same(opened.tensor(name)[...], STATE[name])


@pytest.mark.parametrize(
    "index",
    [
        slice(100, 200), slice(None), 3, -1, slice(-5, None), slice(0, 640, 7), slice(9, 3), (slice(2, 4), 3), (..., 2), (5, ...),  # noqa: E501
        (slice(630, 900), slice(1, 7, 2)), (-640, -8), (slice(3, 90), ..., slice(-2, None)),
    ],
)  # fmt: skip
def test_a_slice_is_that_of_the_whole(root: Path, index: Index) -> None:
    with ckpt.open(root) as opened:
        assert same(opened.tensor("embed")[index], EMBED[index])


def test_a_slice_reads_only_the_chunks_it_lies_in(root: Path) -> None:
    with ckpt.open(root) as opened:
        before = opened.reader.read_bytes
        opened.tensor("embed")[100:130]  # 30 rows of 32 bytes, in chunks of 32 rows
        assert opened.reader.read_bytes - before <= 2 * 1024


def test_an_older_step_can_be_opened(root: Path) -> None:
    with ckpt.open(root, step=1) as opened:
        assert opened.tensor("embed")[0, 0].item() == 1.0


@pytest.mark.parametrize(
    ("index", "error"),
    [(640, IndexError), ((0, 0, 0), IndexError), ((..., ...), IndexError), (None, TypeError), (True, TypeError), (slice(None, None, -1), ConfigError)],  # noqa: E501
)  # fmt: skip
def test_an_index_that_cannot_be_read_is_refused(
    root: Path, index: Index, error: type[Exception]
) -> None:
    with ckpt.open(root) as opened, pytest.raises(error):
        opened.tensor("embed")[index]


def test_a_name_a_step_or_a_root_that_is_not_there(root: Path, tmp_path: Path) -> None:
    with ckpt.open(root) as opened, pytest.raises(EntryMissing, match="nope"):
        opened.tensor("nope")
    with pytest.raises(NoCheckpoint, match="step 7 is not there"):
        ckpt.open(root, step=7)
    with pytest.raises(NoCheckpoint):
        ckpt.open(tmp_path / "nowhere")


def test_a_damaged_chunk_is_told_and_others_can_be_read(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, chunk_size=1024) as manager:
        manager.save({"embed": EMBED}, step=1)
    file = next(tmp_path.glob("step-*/rank-00000.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with ckpt.open(tmp_path) as opened:
        assert same(opened.tensor("embed")[:10], EMBED[:10])
        with pytest.raises(ChecksumMismatch):
            opened.tensor("embed")[-1]


def test_one_that_is_not_closed_warns_when_it_is_collected_and_its_views_can_still_be_read(
    root: Path,
) -> None:
    with pytest.warns(ResourceWarning, match="unclosed <step 2 in"):
        view = ckpt.open(root).tensor("embed")
    assert same(view[...], EMBED)

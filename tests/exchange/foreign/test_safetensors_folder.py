from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ckpt.errors import ConfigError, IntegrityError
from ckpt.exchange.foreign.contents import left_aside
from ckpt.exchange.foreign.joined_tensors import Copier
from ckpt.exchange.foreign.safetensors_folder import read_safetensors

WHOLE = torch.arange(32.0).reshape(8, 4)


def write_part(
    folder: Path, rank: int, place: str = "1-of-00001", **offsets: tuple[torch.Tensor, list[int]]
) -> Path:
    """Write the part of a rank as ``HuggingFaceStorageWriter(save_distributed=True)`` does."""
    table = {name: {"saved_offsets": start} for name, (_, start) in offsets.items()}
    metadata = {"DCP_VERSION": "1.0", "format": "pt", "DCP_SHARDING_INFO": json.dumps(table)}
    path = folder / f"shard-{rank:05d}-model-0000{place}.safetensors"
    save_file({name: part.clone() for name, (part, _) in offsets.items()}, path, metadata)
    return path


def write_rows(folder: Path, rows: list[tuple[int, int]]) -> list[Path]:
    return [
        write_part(folder, rank, w=(WHOLE[start:end], [start, 0]), b=(WHOLE[:2, 0], [0]))
        for rank, (start, end) in enumerate(rows, 1)
    ]


def test_the_parts_of_all_ranks_are_put_together(tmp_path: Path) -> None:
    write_rows(tmp_path, [(0, 3), (3, 6), (6, 8)])
    state = read_safetensors(str(tmp_path), Copier(None)).state
    assert torch.equal(state["w"], WHOLE)
    assert torch.equal(state["b"], WHOLE[:2, 0])  # All ranks have the same part


def test_a_lack_of_the_last_part_cannot_be_known_so_a_note_counts_them(tmp_path: Path) -> None:
    write_rows(tmp_path, [(0, 3), (3, 6), (6, 8)])[-1].unlink()
    contents = read_safetensors(str(tmp_path), Copier(None))
    assert contents.state["w"].shape == (6, 4)
    assert any("2 rank(s)" in note for note in contents.notes)


def test_two_files_of_a_rank_count_as_one_rank(tmp_path: Path) -> None:
    """``fqn_to_index_mapping`` spreads the tensors of each rank over several files."""
    for rank, rows in enumerate([(0, 4), (4, 8)], 1):
        for place, name in enumerate("wv", 1):
            part = (WHOLE[slice(*rows)], [rows[0], 0])
            write_part(tmp_path, rank, f"{place}-of-00002", **{name: part})
    contents = read_safetensors(str(tmp_path), Copier(None))
    assert torch.equal(contents.state["v"], WHOLE)
    assert any("the parts of 2 rank(s)" in note for note in contents.notes)


def test_one_part_is_no_model(tmp_path: Path) -> None:
    _, part = write_rows(tmp_path, [(0, 4), (4, 8)])
    with pytest.raises(
        ConfigError, match=f"name the folder with the parts of all ranks, {tmp_path}$"
    ):
        read_safetensors(str(part), Copier(None))


@pytest.mark.parametrize(
    ("rows", "lost"), [([(0, 3), (3, 6), (6, 8)], 0), ([(0, 3), (3, 6), (6, 8)], 1), ([(1, 8)], -1)]
)
def test_a_part_that_is_missing_is_told(
    tmp_path: Path, rows: list[tuple[int, int]], lost: int
) -> None:
    parts = write_rows(tmp_path, rows)
    if lost >= 0:
        parts[lost].unlink()
    with pytest.raises(IntegrityError, match=r"missing|do not fill"):
        read_safetensors(str(tmp_path), Copier(None))


def test_parts_that_overlap_are_refused(tmp_path: Path) -> None:
    write_rows(tmp_path, [(0, 5), (4, 8)])
    with pytest.raises(IntegrityError, match="overlap"):
        read_safetensors(str(tmp_path), Copier(None))


@pytest.mark.parametrize("table", ["5", "{}", '{"w": {"saved_offsets": [-1, 0]}}', '{"w": 1}'])
def test_a_part_with_a_wrong_table_is_refused(tmp_path: Path, table: str) -> None:
    name = tmp_path / "shard-00001-model-00001-of-00001.safetensors"
    save_file({"w": WHOLE}, name, {"DCP_SHARDING_INFO": table})
    with pytest.raises(IntegrityError):
        read_safetensors(str(tmp_path), Copier(None))


def write_index(folder: Path, *names: str) -> None:
    table = {f"w{number}": name for number, name in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))


def test_a_model_beside_a_left_over_index_is_taken(tmp_path: Path) -> None:
    save_file({"w": WHOLE}, tmp_path / "model.safetensors")
    write_index(tmp_path, "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    contents = read_safetensors(str(tmp_path), Copier(None))
    assert torch.equal(contents.state["w"], WHOLE)
    assert contents.files == ["model.safetensors"]
    assert "model-00001-of-00002.safetensors, which is missing" in contents.notes[0]


def test_an_index_beside_an_older_model_says_which_one_it_takes(tmp_path: Path) -> None:
    save_file({"w": WHOLE}, tmp_path / "model.safetensors")
    save_file({"w0": WHOLE + 1}, tmp_path / "model-00001-of-00001.safetensors")
    write_index(tmp_path, "model-00001-of-00001.safetensors")
    contents = read_safetensors(str(tmp_path), Copier(None))
    assert torch.equal(contents.state["w0"], WHOLE + 1)
    assert f"name {tmp_path / 'model.safetensors'}" in contents.notes[0]
    names = [path.name for path in tmp_path.iterdir()]
    assert left_aside(names, contents.files) == ["model.safetensors"]


def test_an_index_without_its_files_says_what_to_do(tmp_path: Path) -> None:
    save_file({"w0": WHOLE}, tmp_path / "model-00001-of-00002.safetensors")
    write_index(tmp_path, "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    with pytest.raises(IntegrityError, match=r"model-00002-of-00002.*bring it back, or remove"):
        read_safetensors(str(tmp_path), Copier(None))


def test_an_adapter_beside_a_model_is_left_aside(tmp_path: Path) -> None:
    save_file({"w": WHOLE}, tmp_path / "model.safetensors")
    save_file({"lora_A": WHOLE}, tmp_path / "adapter_model.safetensors")
    contents = read_safetensors(str(tmp_path), Copier(None))
    assert contents.state.keys() == {"w"}
    assert contents.files == ["model.safetensors"]
    (tmp_path / "model.safetensors").unlink()
    assert read_safetensors(str(tmp_path), Copier(None)).state.keys() == {"lora_A"}

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from ckpt.errors import IntegrityError
from ckpt.exchange.foreign.dcp_reader import read_folder
from ckpt.exchange.foreign.joined_tensors import Copier
from ckpt.exchange.foreign.source_formats import detect
from tests.kit.worlds import world

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


class Planner(DefaultSavePlanner):
    """A planner that shares its cached plans with no other test."""


@pytest.mark.distributed
def test_the_tables_of_all_ranks_are_put_together(tmp_path: Path) -> None:
    """With ``use_collectives=False``, each rank writes a table of contents of its own."""
    folder = tmp_path / "c"
    world(2, Path(__file__).with_name("dcp_ranks.py"), folder)
    assert detect(str(folder)) == "dcp"
    contents = read_folder(str(folder), Copier(None))
    assert torch.equal(contents.state["model"]["w"], torch.arange(20.0).reshape(5, 4))
    assert torch.equal(contents.state["model"]["b"], torch.ones(3))
    assert contents.state["rank"] == 0
    assert contents.notes == ["each rank has written 'rank': the first rank's is taken"]
    assert sorted(contents.files) == sorted(path.name for path in folder.iterdir())
    (folder / "__1.metadata").unlink()
    with pytest.raises(IntegrityError, match="elements are in no box"):
        read_folder(str(folder), Copier(None))


def test_a_table_with_the_dtype_of_a_cached_plan_gives_way_to_the_entries(tmp_path: Path) -> None:
    whole = torch.arange(6.0) / 3
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for name, w in (("old", whole.bfloat16()), ("new", whole)):
            planner = Planner(enable_plan_caching=True)
            writer = FileSystemWriter(str(tmp_path / name))
            dcp.save({"w": w}, storage_writer=writer, planner=planner)
    finally:
        dist.destroy_process_group()
    contents = read_folder(str(tmp_path / "new"), Copier(None))
    assert torch.equal(contents.state["w"], whole)
    assert "of torch.float32, as its entries are" in contents.notes[0]


@pytest.mark.parametrize(
    "items",
    [
        [{}, {"a": torch.ones(2)}],
        [{"a": torch.ones(2)}, {}, {}, {"b": 1}],
        [{"x": {}}, {"a": torch.ones(2)}],
    ],
)
def test_an_empty_dict_in_a_list_keeps_its_place(tmp_path: Path, items: list[Any]) -> None:
    """torch's own converter loses it: see findings/dcp-empty-dict-in-list.sh."""
    dcp.save({"m": {"l": items}}, checkpoint_id=tmp_path / "c", no_dist=True)
    contents = read_folder(str(tmp_path / "c"), Copier(None))
    read = contents.state["m"]["l"]
    assert [sorted(item) for item in read] == [
        sorted(key for key, value in item.items() if value != {}) for item in items
    ]
    assert contents.notes[0].startswith("'m.l' is a list without an item")

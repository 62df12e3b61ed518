"""The folders of a Trainer that point to steps. This needs no transformers."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt.errors import ConfigError
from ckpt.integrations.trainer_folder import (
    Kept,
    check_is_checkpoint,
    remove_folders,
    write_folder,
)


def test_a_folder_that_is_suggested_exists(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as failed:
        check_is_checkpoint("elsewhere", str(tmp_path), [10, 20])
    assert str(failed.value).endswith(": give True for the newest step")
    write_folder(str(tmp_path), 10, "{}")
    with pytest.raises(ConfigError, match=rf"give '{tmp_path}/checkpoint-10', or True for the new"):
        check_is_checkpoint("elsewhere", str(tmp_path), [10, 20])


def test_what_a_killed_process_has_left_keeps_no_folder(tmp_path: Path) -> None:
    for step in (10, 20):
        write_folder(str(tmp_path), step, "{}")
    left = tmp_path / ".checkpoint-10.gone"
    left.mkdir()
    (left / "trainer_state.json").write_text("{}")
    remove_folders(str(tmp_path), keep={20})
    assert [each.name for each in tmp_path.iterdir()] == ["checkpoint-20"]


def test_a_checkpoint_of_transformers_own_is_not_mixed_with_a_step_of_its_number(
    tmp_path: Path,
) -> None:
    own = tmp_path / "checkpoint-10"
    own.mkdir()
    for name in ("trainer_state.json", "model.safetensors"):
        (own / name).write_text("old")
    for step in (10, 20):
        write_folder(str(tmp_path), step, "new")
    (kept,) = tmp_path.glob("earlier-checkpoint-10.*")
    assert {each.name: each.read_text() for each in kept.iterdir()} == {
        "trainer_state.json": "old",
        "model.safetensors": "old",
    }
    assert sorted(each.name for each in own.iterdir()) == ["ckpt.json", "trainer_state.json"]
    Kept(limit=1, has_best=False).apply(str(tmp_path), 20, None)
    assert {each.name for each in tmp_path.iterdir()} == {"checkpoint-20", kept.name}


def test_the_files_of_a_callback_stay_in_the_folder_of_their_step(tmp_path: Path) -> None:
    own = tmp_path / "checkpoint-10"
    own.mkdir()
    (own / "adapter.safetensors").write_text("new")
    for _ in range(2):
        write_folder(str(tmp_path), 10, "new")
        assert [each.name for each in tmp_path.iterdir()] == ["checkpoint-10"]
        assert len(list(own.iterdir())) == 3

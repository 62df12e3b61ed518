"""The folders of a Trainer that point to steps. This needs no transformers."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt.errors import ConfigError
from ckpt.integrations.transformers.trainer_folder import (
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

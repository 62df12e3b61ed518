"""What ``CkptCheckpoint`` refuses before a training begins, and the remedy that it names."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from ckpt import CheckpointManager
from ckpt.errors import ConfigError
from ckpt.integrations.lightning import CkptCheckpoint

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:lightning.*"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:lightning.*"),
    pytest.mark.filterwarnings("ignore::FutureWarning:lightning.*"),
]


def test_options_of_model_checkpoint_alone_are_refused_by_name(tmp_path: Path) -> None:
    known = inspect.signature(CkptCheckpoint).parameters
    foreign = [name for name in inspect.signature(ModelCheckpoint).parameters if name not in known]
    assert "save_weights_only" in foreign
    for name in foreign:
        option: Any = {name: True}
        with pytest.raises(ConfigError, match=f"has no option {name}: "):
            CkptCheckpoint(tmp_path, **option)


def test_a_wrong_setting_and_a_link_are_refused_by_the_constructor(tmp_path: Path) -> None:
    wrong: list[tuple[Any, str]] = [
        ({"save_last": "link"}, "use save_last=True"),
        ({"slot": 2}, "unknown setting 'slot'"),
        ({"slots": 0}, "slots"),
    ]
    for option, text in wrong:
        with pytest.raises(ConfigError, match=text):
            CkptCheckpoint(tmp_path, **option)


def test_a_training_from_the_start_in_a_folder_with_steps_does_not_begin(
    nets: Any, tmp_path: Path
) -> None:
    nets.fit(nets.Net(), CkptCheckpoint(tmp_path))
    net = nets.Net()
    with pytest.raises(ConfigError, match=r"holds step 8 of .*ckpt_path='last'"):
        nets.fit(net, CkptCheckpoint(tmp_path))
    assert net.losses == {}
    with CheckpointManager(tmp_path) as manager:
        assert manager.steps() == [8]

"""What is on a tier after a save."""

from __future__ import annotations

import itertools
import threading
import uuid
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import ckpt.storage.tiers
from ckpt import CheckpointManager, Tier
from ckpt.catalog.verify import verify_step
from ckpt.errors import CkptError, OutOfSpace, TransientStorageError
from ckpt.model.dtype import DTYPES
from ckpt.model.keys import OWNER, parse_folder
from ckpt.pipeline.workers import Workers
from ckpt.save.training_alarm import Suspicions
from ckpt.storage.registry import open_backend
from ckpt.storage.testing import FaultyBackend, LoseReply, Raise, Rule
from ckpt.storage.testing.faulty import Verb
from tests.kit.stores import faulty, whole
from tests.state.saving import bits

KNOWN = [
    name
    for name, dtype in DTYPES.items()
    if dtype.lanes == 1 and dtype.storage != "U8" and "bits" not in name
]


def folder_of(root: Path) -> Path:
    (found,) = (path for path in root.iterdir() if parse_folder(path.name))
    return found


@pytest.mark.parametrize("chunk_bytes", [64, 16 << 20])
def test_a_rank_file_is_a_safetensors_file_with_the_same_tensors(
    tmp_path: Path, chunk_bytes: int
) -> None:
    generator = torch.Generator().manual_seed(0)

    def some(dtype: str, *shape: int) -> torch.Tensor:
        data = torch.randint(
            0, 2, (*shape, DTYPES[dtype].itemsize), generator=generator, dtype=torch.uint8
        )
        return data.view(getattr(torch, dtype)).reshape(shape)

    state: dict[str, torch.Tensor] = {}
    for dtype in [*KNOWN, "uint8"]:
        state |= {
            f"{dtype}.{i}": some(dtype, *shape)
            for i, shape in enumerate([(), (0, 3), (5,), (3, 7)])
        }
    model = nn.Linear(30, 20)
    with CheckpointManager(tmp_path, chunk_size=chunk_bytes) as manager:
        manager.save(
            {**state, "model": model, "turned": torch.arange(12).reshape(3, 4).t(), "step": 4}
        )
    path = folder_of(tmp_path) / "rank-00000.safetensors"
    expected = {
        **state,
        "model/weight": model.weight,
        "model/bias": model.bias,
        "turned": torch.arange(12).reshape(3, 4).t(),
    }
    with safe_open(path, framework="pt") as file:
        assert set(file.keys()) == set(expected)
        assert file.metadata()["format"] == "pt"
        for name, tensor in expected.items():
            found = file.get_tensor(name)
            assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape), name
            assert bits(found) == bits(tensor), name
    assert set(load_file(path)) == set(expected)


def test_what_safetensors_does_not_know_is_held_as_something_it_does(tmp_path: Path) -> None:
    z = torch.randn(3, 2, dtype=torch.complex128)
    with CheckpointManager(tmp_path) as manager:
        manager.save({"z": z}, 0)
    found = load_file(folder_of(tmp_path) / "rank-00000.safetensors")["z"]
    assert torch.equal(torch.view_as_complex(found), z)


def test_a_step_is_three_files_and_the_root_names_its_writer_while_it_lives(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save({"x": torch.ones(5)}, 12)
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
            [folder_of(tmp_path).name, OWNER]
        )
        names = {path.name for path in folder_of(tmp_path).iterdir()}
        assert names == {"rank-00000.safetensors", "rank-00000.json", "manifest.json"}
    assert folder_of(tmp_path).name.startswith("step-000000012.")
    assert not (tmp_path / OWNER).exists()


def test_a_state_without_a_single_tensor_is_a_checkpoint_too(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save({"step": 1})
        target = {"step": 0}
        manager.restore(target)
        assert target == {"step": 1}
        manager.save({}, 2)
        assert manager.restore({}) is not None


def test_the_engine_verifies_what_it_has_written(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, chunk_size=1 << 10) as manager:
        for step in range(3):
            manager.save({"x": torch.randn(1000, 7), "y": torch.randn(3)}, step)
    backend = open_backend(str(tmp_path))
    with Workers("test", 2) as workers:
        for path in tmp_path.iterdir():
            ref = parse_folder(path.name)
            assert ref is not None
            report = verify_step(backend, ref, workers=workers)
            assert report.intact
            assert report.verified_bytes == (path / "rank-00000.safetensors").stat().st_size


@pytest.mark.parametrize("verb", ["put", "upload", "write", "finish"])
@pytest.mark.parametrize("lost", [False, True], ids=["refused", "reply-lost"])
def test_a_store_that_stumbles_once_costs_nothing_but_a_moment(
    verb: Verb, lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = f"memory://{uuid.uuid4().hex}"
    fault = LoseReply(TransientStorageError) if lost else Raise(TransientStorageError)
    rules = [
        Rule(verb=verb, key=key, nth=1, fault=fault)
        for key in ("writer", "safetensors", "rank-.*json", "manifest")
    ]
    faulty(monkeypatch, root, rules)
    with CheckpointManager(root) as manager:
        manager.save({"x": torch.arange(9)}, 1)
        target = {"x": torch.zeros(9, dtype=torch.int64)}
        assert manager.restore(target) is not None
        assert torch.equal(target["x"], torch.arange(9))


def test_a_store_that_failed_at_the_first_save_may_serve_the_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for verb in ("folders", "put", "upload", "write", "finish"):
        rules = [Rule(verb=verb, nth=1, fault=Raise(OutOfSpace))]  # type: ignore[arg-type]
        monkeypatch.setattr(
            ckpt.storage.tiers,
            "open_backend",
            lambda url, options, rules=rules: FaultyBackend(open_backend(url, options), rules),
        )
        with CheckpointManager(f"memory://{uuid.uuid4().hex}") as manager:
            with pytest.raises(CkptError, match="no space left"):
                manager.save({"x": torch.ones(3)}, 1)
            manager.save({"x": torch.ones(3)}, 1)
            manager.save({"x": torch.ones(3)}, 2)
            assert manager.steps() == [1, 2], verb


def test_a_save_that_waits_for_the_streaming_thread_keeps_its_tiers_when_a_later_one_is_the_last(
    tmp_path: Path,
) -> None:
    """The tier takes both steps only because each was the last step when it was saved."""
    state, gate = {"x": torch.ones(3)}, threading.Event()
    manager = CheckpointManager(Tier(str(tmp_path), every=10**9))
    stop = manager.on_stop_request()
    manager.request_stop()
    last = next(step for step in itertools.count(1) if stop.requested(step))
    manager._saver._streamer.submit(gate.wait)
    saves = [manager.save_async(state, step) for step in (last, last + 1)]
    gate.set()
    for save in saves:
        save.result(60)
    manager.close()
    assert whole(tmp_path) == [last, last + 1]


def test_an_error_that_nobody_expects_on_the_streaming_thread_fails_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise LookupError("of no tier")

    manager = CheckpointManager(tmp_path, slots=1)
    monkeypatch.setattr(Suspicions, "examine", fail)
    with pytest.raises(CkptError, match="of no tier"):
        manager.save_async({"x": torch.ones(3)}, 1).result(60)
    monkeypatch.undo()
    manager.save_async({"x": torch.ones(3)}, 2).result(60)
    manager.close()

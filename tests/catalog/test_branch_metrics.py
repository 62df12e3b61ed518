from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from ckpt.catalog.branch_metrics import MetricsReader, branch_metrics, step_on
from ckpt.catalog.late_metrics import put_late
from ckpt.catalog.rollbacks import put_rollback
from ckpt.catalog.step_listing import find, read_packed
from ckpt.config import Mode
from ckpt.errors import AccessDenied, NoCheckpoint
from ckpt.model.keys import StepId, StepRef
from ckpt.model.record_encoding import pack
from ckpt.model.rollback import roll_back
from ckpt.model.selector import BestStep, LatestStep, NamedStep, parse_selector
from ckpt.storage.api import StorageBackend
from ckpt.storage.registry import open_backend
from ckpt.storage.testing import FaultyBackend, Raise, Rule
from tests.catalog.small import SMALL
from tests.checkpoints import write_checkpoint

LOSS = BestStep("loss")


def save(
    store: StorageBackend,
    step: int,
    attempt: str = "abcxyz",
    created_at: float = 1.0,
    **metrics: float,
) -> StepRef:
    metadata = {"metrics": metrics} if metrics else None
    return write_checkpoint(
        store, step, SMALL, attempt=attempt, created_at=created_at, metadata=metadata
    ).ref


def memory() -> StorageBackend:
    return open_backend(f"memory://{uuid.uuid4().hex}")


@pytest.fixture
def store() -> StorageBackend:
    return memory()


def metrics_on(*stores: StorageBackend) -> dict[int, Mapping[str, float]]:
    return branch_metrics([MetricsReader(store).read(LOSS) for store in stores])


def chosen(text: str, *stores: StorageBackend, **modes: Mode) -> StepId | None:
    selector = parse_selector(text)
    assert isinstance(selector, NamedStep)
    return step_on(stores, selector, lambda: modes)


def test_the_metrics_of_all_checkpoints_are_there_and_of_nothing_else(store):
    save(store, 1, loss=0.5)
    save(store, 2)
    write_checkpoint(store, 3, SMALL, metadata={"metrics": {"loss": 0.1}}, commit=False)
    assert metrics_on(store) == {1: {"loss": 0.5}, 2: {}}


@pytest.mark.parametrize("count", [3, 20])  # An object store lists the keys of 20 steps at once
def test_late_metrics_count_and_replace_no_value(store, count):
    refs = [save(store, step, loss=1.0 - step / 100) for step in range(count)]
    put_late(store, refs[1], {"loss": 0.0, "accuracy": 0.9})
    assert metrics_on(store)[1] == {"loss": 0.99, "accuracy": 0.9}
    assert chosen("best:loss", store) == count - 1
    assert chosen("best:accuracy", store, accuracy="max") == 1


def test_a_reader_sees_metrics_that_are_added_and_reads_no_manifest_twice(store):
    ref = save(store, 1, loss=0.5)
    faults = FaultyBackend(store, [])
    reader = MetricsReader(faults)
    assert branch_metrics([reader.read(LOSS)]) == {1: {"loss": 0.5}}
    put_late(store, ref, {"accuracy": 0.9})
    strict = FaultyBackend(
        store, [Rule(verb="read_into", key="manifest", fault=Raise(AccessDenied))]
    )
    reader._backend = strict
    assert branch_metrics([reader.read(LOSS)]) == {1: {"loss": 0.5, "accuracy": 0.9}}


def test_of_two_attempts_the_younger_one_counts_and_an_abandoned_one_does_not(store):
    save(store, 1, "aaaaaa", 1.0, loss=0.9)
    save(store, 2, "aaaaaa", 3.0, loss=0.1)
    save(store, 2, "bbbbbb", 2.0, loss=0.2)
    assert metrics_on(store) == {1: {"loss": 0.9}, 2: {"loss": 0.1}}
    heads = [StepRef(2, "aaaaaa")]
    rollback = roll_back([], StepRef(1, "aaaaaa"), heads)
    assert rollback is not None
    put_rollback(store, rollback)
    assert metrics_on(store) == {1: {"loss": 0.9}, 2: {"loss": 0.2}}
    assert chosen("best:loss", store) == 2
    assert find(store, 2)[0] == StepRef(2, "bbbbbb"), "what a restore takes"


def test_a_rollback_on_any_store_counts_for_all(store):
    other = memory()
    for step in (1, 2, 3):
        save(store, step, loss=1.0 / step)
    rollback = roll_back([], StepRef(1, "abcxyz"), [StepRef(3, "abcxyz")])
    assert rollback is not None
    put_rollback(other, rollback)
    assert chosen("best:loss", store) == 3
    assert chosen("best:loss", store, other) == 1
    assert chosen("latest~0", store, other) == 1
    with pytest.raises(
        NoCheckpoint, match="there is 1 checkpoint, and the oldest is latest, step 1"
    ):
        chosen("latest~1", store, other)


def test_if_the_branch_has_no_checkpoint_all_count(store):
    for step in (1, 2):
        save(store, step, loss=1.0 / step)
    rollback = roll_back([], StepRef(0, "abcxyz"), [StepRef(2, "abcxyz")])
    assert rollback is not None
    put_rollback(store, rollback)
    assert chosen("best:loss", store) == 2


def test_the_steps_of_all_stores_are_one_run(store):
    other = memory()
    save(store, 2, loss=0.5)
    for step in (1, 2):
        put_late(other, save(other, step, loss=0.1 if step == 1 else 0.5), {"accuracy": step})
    assert metrics_on(store, other) == {
        1: {"loss": 0.1, "accuracy": 1.0},
        2: {"loss": 0.5, "accuracy": 2.0},
    }
    assert chosen("latest~1", store, other) == 1


@pytest.mark.parametrize("fault", ["damage", "link", "format"])
def test_a_manifest_that_cannot_be_read_has_no_metrics(tmp_path: Path, fault):
    root = tmp_path / "root"
    store = open_backend(str(root))
    refs = [save(store, step, loss=1.0 / step) for step in (1, 2)]
    path = root / refs[1].manifest
    if fault == "damage":
        path.write_text("no manifest")
    elif fault == "link":
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    else:
        written = msgspec.structs.replace(read_packed(store, refs[1])[0], format=9999)
        path.write_bytes(pack(written))
    assert metrics_on(store).get(2, {}) == {}
    assert chosen("best:loss", store) == 1


def test_a_store_that_denies_access_is_an_error(store):
    save(store, 1, loss=0.5)
    closed = FaultyBackend(
        store, [Rule(verb="read_into", key="manifest", fault=Raise(AccessDenied))]
    )
    with pytest.raises(AccessDenied):
        chosen("best:loss", closed)
    assert chosen("latest~0", closed) == 1, "no manifest is read"


@pytest.mark.parametrize("selector", [LOSS, LatestStep(1)])
def test_an_empty_store_says_what_it_has_instead(store, selector):
    with pytest.raises(NoCheckpoint, match="it is empty, or does not exist"):
        step_on([store], selector, dict)
    write_checkpoint(store, 3, SMALL, commit=False)
    with pytest.raises(NoCheckpoint, match="were begun, none was committed"):
        step_on([store], selector, dict)

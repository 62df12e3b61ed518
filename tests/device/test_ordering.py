"""What a checkpoint holds if the streams are slow.

Each scenario also runs with the one mistake in the engine that it must find.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

from ckpt import CheckpointManager
from ckpt.errors import CkptError
from ckpt.staging import copies
from ckpt.staging.copies import LateCopies
from ckpt.staging.device import side_stream
from ckpt.staging.fence import Fence
from ckpt.state.match import sink
from tests.device.accelerator import SECONDS, content, device, keep_busy
from tests.device.accelerator import trained as made

pytestmark = pytest.mark.device

Scenario = Callable[[str, float], None]


def differences(root: str, expected: Mapping[str, torch.Tensor], step: int = 1) -> list[str]:
    """Return the names of what differs in the checkpoint."""
    loaded = trained(device(), seed=9)
    with CheckpointManager(root, check="off") as manager:
        manager.restore(loaded, step)
    found = content(loaded)
    return [name for name, value in expected.items() if not torch.equal(found[name], value)]


class Writes(torch.optim.SGD):
    """An optimizer whose later steps only queue a write to each tensor, and move no version
    counter.

    Only the fence separates them from a copy.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if not self.state:
            return super().step()
        for tensor in [
            *self.state,
            *(value for held in self.state.values() for value in held.values()),
        ]:
            tensor.data.fill_(7)
        return None


def trained(place: torch.device, *, seed: int = 0) -> dict[str, Any]:
    return made(place, seed=seed, kind=Writes)


def step(state: dict[str, Any]) -> None:
    state["optimizer"].step()


def of_queued_work(root: str, seconds: float) -> None:
    """The state is as the queue will have made it: late copies come after what the call found
    queued.
    """
    state = trained(device())
    keep_busy(seconds)
    step(state)
    with CheckpointManager(root, check="off") as manager:
        manager.save_async(state, 1).result(60)
    assert differences(root, content(state)) == []


def before_the_next_step(root: str, seconds: float) -> None:
    """Copies are slow, and the next step is queued at once: it must not run before them."""
    place = device()
    state = trained(place)
    expected = content(state)
    with CheckpointManager(root, check="off") as manager:
        side = side_stream(place)
        assert side is not None
        keep_busy(seconds, side)
        pending = manager.save_async(state, 1)
        step(state)
        pending.result(60)
    assert differences(root, expected) == []
    assert differences(root, content(state)), "the step has changed the state"


def when_it_has_landed(root: str, seconds: float) -> None:
    """Copies are slow, and nothing is written before they are done."""
    place = device()
    state = trained(place)
    expected = content(state)
    with CheckpointManager(root, check="off") as manager:
        side = side_stream(place)
        assert side is not None
        keep_busy(seconds, side)
        manager.save_async(state, 1).result(60)
    assert differences(root, expected) == []


def of_what_no_optimizer_owns(root: str, seconds: float) -> None:
    """It may change as soon as the call has returned, and is saved as the queue makes it."""
    place = device()
    tensor = torch.zeros(4096, device=place)
    with CheckpointManager(root, check="off") as manager:
        keep_busy(seconds)
        tensor.fill_(1)
        pending = manager.save_async({"x": tensor}, 1)
        tensor.fill_(2)
        pending.result(60)
        loaded = {"x": torch.zeros(4096)}
        manager.restore(loaded, 1)
    assert loaded["x"].unique().tolist() == [1]


def over_queued_work(root: str, seconds: float) -> None:
    """What was queued on the targets before a restore does not overwrite what it reads."""
    place = device()
    state = trained(place)
    expected = content(state)
    with CheckpointManager(root, check="off") as manager:
        manager.save(state, 1)
        stream = torch.Stream(device=place)
        keep_busy(seconds, stream)
        with stream:
            for parameter in state["model"].parameters():
                parameter.data.fill_(7)
        manager.restore(state, 1)
    assert content(state).keys() == expected.keys()
    torch.accelerator.synchronize(place)
    assert all(torch.equal(value, expected[name]) for name, value in content(state).items())


def beside_a_save(root: str, seconds: float) -> None:
    """A restore on a stream of the user's own waits for the copies of a save under way.

    These hold the state from before it.
    """
    place = device()
    state = trained(place)
    with CheckpointManager(root, check="off") as manager:
        manager.save(state, 1)
        step(state)
        expected = content(state)
        side = side_stream(place)
        assert side is not None
        keep_busy(seconds, side)
        pending = manager.save_async(state, 2)
        with torch.Stream(device=place):
            manager.restore(state, 1)
        pending.result(60)
    assert differences(root, expected, 2) == []


SCENARIOS = [
    of_queued_work,
    before_the_next_step,
    when_it_has_landed,
    of_what_no_optimizer_owns,
    over_queued_work,
    beside_a_save,
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda each: each.__name__)
def test_streams_are_ordered(root: str, scenario: Scenario) -> None:
    scenario(root, SECONDS[0])


def nothing(*_: object, **__: object) -> None: ...


def no_events(*_: object) -> dict[torch.device, torch.Event]:
    return {}


def nowhere(_: object) -> AbstractContextManager[None]:
    return nullcontext()


MISTAKES: dict[str, tuple[Scenario, Sequence[tuple[object, str, object]]]] = {
    "no wait for compute": (of_queued_work, [(LateCopies, "wait_for_queued_work", nothing)]),
    "no hold on the current stream": (
        before_the_next_step,
        [(LateCopies, "hold_current_streams", nothing)],
    ),
    "the fence is skipped": (before_the_next_step, [(Fence, "wait", nothing)]),
    "no event before landing": (when_it_has_landed, [(LateCopies, "events", no_events)]),
    "no wait after eager copies": (of_what_no_optimizer_owns, [(copies, "_wait", nothing)]),
    "no draining before a restore": (over_queued_work, [(sink, "drain", nothing)]),
    "readers on streams of their own": (
        beside_a_save,
        [(sink, "drain", nothing), (sink, "use_stream", nowhere)],
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_each_mistake_is_found(root: str, mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scenario, wrongs = MISTAKES[mistake]
    for owner, name, wrong in wrongs:
        monkeypatch.setattr(owner, name, wrong)
    assert any(is_found(scenario, f"{root}-{seconds}", seconds) for seconds in SECONDS)


def is_found(scenario: Scenario, root: str, seconds: float) -> bool:
    try:
        scenario(root, seconds)
    except (AssertionError, CkptError):
        return True
    return False

"""Measure one store: what it does with steps, with a race of writers, and when it is full.

``python -m tests.stores.measure JOB`` prints a `Measured` as JSON. ``JOB`` is a `Place` as JSON.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final

import msgspec
import torch

from ckpt import CheckpointManager, Tier
from ckpt.errors import CkptError
from ckpt.storage.api import StorageBackend, read_object, read_record
from ckpt.storage.registry import open_backend
from tests.kit.stores import whole

MARK: Final = "MEASURED "
"""The start of the line that has the result."""
_WRITERS: Final = 8
_ROUNDS: Final = 20
_STEP_BYTES: Final = 2 << 20
_MOST_STEPS: Final = 40
State = Callable[[int], dict[str, torch.Tensor]]


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """A store that was started or mounted.

    Attributes:
        clients: The URLs of its root, one for each client that can see it.
        options: The options of the tier.
        fills: The bytes of a step with which to fill the store; 0 to leave that out.
    """

    clients: Sequence[str]
    options: Mapping[str, Any] = msgspec.field(default_factory=dict[str, Any])
    fills: int = 0


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured.

    Attributes:
        fault: Why steps cannot be saved, pruned, verified and restored; '' if they can.
        winners: The most writers of a race that were told to have created the object. 0 if none
            was, since the store cannot do that.
        refusal: What the other writers were told, if that was not ``ObjectExists``.
        full: The class of the error that a full store is told by; '' if the store was not filled.
        after: Why saves do not go on after a full store got room again; '' if they do.
    """

    fault: str
    winners: int
    refusal: str = ""
    full: str = ""
    after: str = ""


def measure(place: Place) -> Measured:
    """Run all checks on a store."""
    options = {name: value for name, value in place.options.items() if name != "put_if_absent"}
    winners, refusal = most_winners(place.clients, options)
    fault = _fault_of(partial(replace_object, place.clients, options))
    fault = fault or _fault_of(partial(round_trip, place))
    full = after = ""
    if place.fills and not fault:
        full, after = on_full(place)
    return Measured(fault=fault, winners=winners, refusal=refusal, full=full, after=after)


def round_trip(place: Place) -> None:
    """Save, prune, verify and restore, each through the next client."""
    urls = [place.clients[index % len(place.clients)] for index in range(3)]
    with _manager(place, f"{urls[0]}/steps", keep_last=2) as manager:
        for step in range(5):
            manager.save(_state(step, _STEP_BYTES), step, timeout=120)
    saved = whole(f"{urls[1]}/steps", place.options)
    assert saved == [3, 4], f"the steps are {saved}"
    target = _state(0, _STEP_BYTES)
    with _manager(place, f"{urls[2]}/steps") as manager:
        report = manager.restore(target)
    assert report is not None
    assert report.step == 4
    assert torch.equal(target["x"], _state(4, _STEP_BYTES)["x"])


def replace_object(urls: Sequence[str], options: Mapping[str, object]) -> None:
    """Replace an object that another client has read, and read it there again."""
    writer = open_backend(f"{urls[0]}/replaced", options)
    writer.put("record", [b"{}"])
    reader = open_backend(f"{urls[-1]}/replaced", options)
    read_record(reader, "record", msgspec.json.decode, limit=100)
    for text in ("one", "three", "five"):
        writer.put("record", [msgspec.json.encode(text)])
        received = read_record(reader, "record", msgspec.json.decode, limit=100)
        assert received == text, f"a client reads {received!r} after another has put {text!r}"


def most_winners(urls: Sequence[str], options: Mapping[str, object]) -> tuple[int, str]:
    """Let writers race for one key, several times.

    Returns:
        The largest number of winners of a race, and what else than ``ObjectExists`` the others were
        told.
    """
    backends = [
        open_backend(f"{urls[number % len(urls)]}/race", options) for number in range(_WRITERS)
    ]
    told: set[str] = set()
    most = 0
    with ThreadPoolExecutor(_WRITERS) as threads:
        for number in range(_ROUNDS):
            start = threading.Barrier(_WRITERS)
            put = partial(_put, f"folder/{number}", start)
            errors = list(threads.map(put, backends, map(str, range(_WRITERS))))
            winners = [writer for writer, error in enumerate(errors) if error is None]
            most = max(most, len(winners))
            told |= {_name(error) for error in errors if error is not None}
            if len(winners) == 1:
                for backend in backends:
                    text = read_object(backend, f"folder/{number}", limit=100)
                    assert text == str(winners[0]).encode(), (text, winners)
    return most, "; ".join(sorted(told - {"ObjectExists"}))


def on_full(place: Place) -> tuple[str, str]:
    """Fill the store with steps. Return the class of the error, and what was wrong afterwards.

    Steps that were saved before stay whole. A job that may remove them makes room with them.
    """
    url = f"{place.clients[0]}/full"
    state = partial(_state, nbytes=place.fills)
    step, error = 0, None
    with _manager(place, url) as manager:
        while error is None and step < _MOST_STEPS:
            error = manager.save_async(state(step), step).exception(300)
            step += error is None
    if error is None:
        return "", f"it took {step} steps"
    saved = whole(url, place.options)
    wrong = "" if saved == list(range(step)) else f"steps {saved} of {step} are left"
    return type(error).__name__, wrong or _fault_of(partial(_go_on, place, url, state, step))


def _go_on(place: Place, url: str, state: State, step: int) -> None:
    with _manager(place, url, keep_last=1) as manager:
        manager.restore(state(0))
        manager.save(state(step), step, timeout=300)
    saved = whole(url, place.options)
    assert saved == [step], f"the steps are {saved}"


def _state(step: int, nbytes: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(step)
    return {"x": torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=random)}


def _manager(place: Place, url: str, keep_last: int | None = None) -> CheckpointManager:
    return CheckpointManager(Tier(url, keep_last=keep_last, options=dict(place.options)))


def _put(key: str, start: threading.Barrier, backend: StorageBackend, text: str) -> object:
    start.wait()
    try:
        backend.put(key, [text.encode()], if_absent=True)
    except CkptError as error:
        return error
    return None


def _name(error: object) -> str:
    return type(error).__name__


def _fault_of(work: Callable[[], object]) -> str:
    try:
        work()
    except (CkptError, AssertionError) as error:
        return f"{type(error).__name__}: {error}"[:300]
    return ""


if __name__ == "__main__":
    torch.set_num_threads(1)
    done = measure(msgspec.json.decode(sys.argv[1], type=Place))
    print(MARK + msgspec.json.encode(done).decode(), flush=True)

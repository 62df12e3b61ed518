"""What the code does for devices, tested without one; ``tests/device`` needs a device."""

from __future__ import annotations

import pytest
import torch

from ckpt.errors import StagingError
from ckpt.staging import device
from ckpt.staging.slot import Slot

CPU, OTHER = torch.device("cpu"), torch.device("xla", 0)


def test_only_host_memory_is_ordered_where_there_is_no_accelerator(monkeypatch):
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available=False: None
    )
    device.side_stream.cache_clear()
    assert device.is_ordered(CPU)
    assert not device.is_ordered(OTHER)
    assert not device.is_capturing(OTHER)
    device.side_stream.cache_clear()


@pytest.mark.parametrize("missing", ["streams", "events", "a stream of its own"])
def test_a_device_that_lacks_something_is_not_ordered(monkeypatch, missing):
    class Stream:
        def __init__(self, *, device):
            if missing == "streams":
                raise NotImplementedError

        def record_event(self):
            if missing == "events":
                raise RuntimeError("no events")
            return torch.Event

        def __eq__(self, other):
            return missing == "a stream of its own"

        __hash__ = None  # type: ignore[assignment]

    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("mps")
    )
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda _: "the only one")
    monkeypatch.setattr(torch, "Stream", Stream)
    monkeypatch.setattr(
        torch, "Event", type("Event", (), {"synchronize": staticmethod(lambda: None)})
    )
    device.side_stream.cache_clear()
    assert not device.is_ordered(torch.device("mps", 0))
    device.side_stream.cache_clear()


def test_a_call_during_a_capture_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(device, "is_capturing", lambda at: at == OTHER)
    device.refuse_capture([CPU], "save_async")
    with pytest.raises(
        StagingError, match=r"save_async\(\) was called while a graph is captured on xla:0"
    ):
        device.refuse_capture([CPU, OTHER], "save_async")


def test_draining_asks_each_device_for_what_it_has(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.cpu, "synchronize", lambda: waited.append("cpu"))
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available=False: None
    )
    device.drain([CPU, OTHER, torch.device("meta")])
    assert waited == ["cpu"]


class Runtime:
    """A record of CUDA's calls on host memory."""

    def __init__(self, monkeypatch, *, code: int = 0) -> None:
        self.calls: list[str] = []
        at = "ckpt.staging.slot.cuda"
        monkeypatch.setattr(
            f"{at}.register", lambda address, size: self.calls.append(f"pin {size}") or code
        )
        monkeypatch.setattr(f"{at}.unregister", lambda address: self.calls.append("unpin"))
        monkeypatch.setattr("ckpt.staging.slot.background", self._on)

    def _on(self, place):
        self.calls.append(f"on {place}")
        return torch.no_grad()


def test_a_slot_is_pinned_once_for_the_first_cuda_device_and_not_for_others(monkeypatch):
    runtime = Runtime(monkeypatch)
    slot = Slot(2 << 20, None)
    slot.pin([])
    slot.pin([CPU, OTHER])
    assert not slot.is_pinned
    for _ in range(2):
        slot.pin([OTHER, torch.device("cuda", 1), torch.device("cuda", 0)])
    assert slot.is_pinned
    slot.close()
    slot.pin([torch.device("cuda", 0)])
    assert runtime.calls == ["on cuda:1", f"pin {2 << 20}", "on cuda:1", "unpin"]


def test_a_slot_that_cannot_be_pinned_is_tried_once_and_said_once(monkeypatch, caplog):
    runtime = Runtime(monkeypatch, code=801)
    slot = Slot(2 << 20, None)
    for _ in range(2):
        slot.pin([torch.device("cuda", 0)])
    slot.close()
    assert runtime.calls == ["on cuda:0", f"pin {2 << 20}"]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "could not pin a slot of 2 MiB (CUDA error 801)" in caplog.text

from __future__ import annotations

import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from ckpt.errors import StagingError, TensorChanged
from ckpt.staging.copies import Copy, LateCopies, copy_now
from ckpt.staging.digest import digest
from ckpt.staging.snapshot import Batch, Check, Snapshot


def copy_of(name: str, source: torch.Tensor) -> Copy:
    return Copy(name, source, torch.zeros_like(source), source)


def snapshot_of(*, eager=(), late=(), checks=(), step=7) -> Snapshot:
    return Snapshot(
        step, [Batch(eager=tuple(eager), late_copies=tuple(late), checks=tuple(checks))]
    )


def test_eager_sources_are_copied_before_the_call_returns():
    copy = copy_of("x", torch.arange(5.0))
    snapshot = snapshot_of(eager=[copy])
    snapshot.copy_eager()
    copy.source.zero_()
    assert snapshot.has_landed
    snapshot.wait_landed(0)
    assert copy.target.tolist() == [0, 1, 2, 3, 4]


def test_late_sources_are_copied_later():
    early, late = copy_of("e", torch.ones(2)), copy_of("l", torch.ones(3))
    snapshot = snapshot_of(eager=[early], late=[late])
    snapshot.copy_eager()
    assert early.target.tolist() == [1, 1]
    assert late.target.tolist() == [0, 0, 0]
    assert not snapshot.has_landed
    with pytest.raises(TimeoutError, match="step 7 is not staged"):
        snapshot.wait_landed(0.01)
    snapshot.copy_late()
    assert snapshot.has_landed
    assert late.target.tolist() == [1, 1, 1]


def test_a_part_of_a_tensor_goes_to_its_place_whatever_its_strides():
    whole = torch.arange(24.0).reshape(4, 6)
    part = whole.t()[1:3]
    copy = Copy("x", part, torch.zeros(2, 4), whole)
    snapshot = snapshot_of(late=[copy])
    snapshot.copy_late()
    snapshot.wait_landed(0)
    assert torch.equal(copy.target, whole.t()[1:3])


def test_batches_are_copied_together():
    copies = [copy_of(name, torch.ones(1)) for name in "abcd"]
    batches = [
        Batch(eager=(copies[0],), late_copies=(copies[1],), checks=()),
        Batch(eager=(copies[2],), late_copies=(copies[3],), checks=()),
    ]
    snapshot = Snapshot(1, batches)
    snapshot.copy_eager()
    assert [copy.target.item() for copy in copies] == [1, 0, 1, 0]
    snapshot.copy_late()
    assert [copy.target.item() for copy in copies] == [1, 1, 1, 1]


@pytest.mark.parametrize(
    "change",
    [lambda x: x.add_(1), lambda x: x.__setitem__(0, 5), lambda x: x[1:].zero_(), lambda x: x.copy_(torch.zeros(3)), lambda x: x.detach().mul_(1)],  # noqa: E501
    ids=["in place", "item", "view", "copy", "detached"],
)  # fmt: skip
@pytest.mark.parametrize("parameter", [True, False])
def test_a_tensor_changed_before_its_copy_fails_the_save_with_its_name(change, parameter):
    kept = copy_of("kept", torch.ones(3))
    source = torch.nn.Parameter(torch.ones(3)) if parameter else torch.ones(3)
    changed = Copy("model/weight", source.detach(), torch.zeros(3), source)
    snapshot = snapshot_of(late=[kept, changed])
    snapshot.copy_eager()
    with torch.no_grad():
        change(source)
    snapshot.copy_late()
    with pytest.raises(TensorChanged, match="'model/weight' was changed while step 7") as caught:
        snapshot.wait_landed(0)
    assert (caught.value.name, caught.value.step) == ("model/weight", 7)
    assert snapshot.has_landed


def test_a_change_after_the_copy_is_no_fault():
    copy = copy_of("x", torch.ones(2))
    snapshot = snapshot_of(late=[copy])
    snapshot.copy_late()
    copy.source.zero_()
    snapshot.wait_landed(0)
    assert copy.target.tolist() == [1, 1]


def test_a_copy_that_cannot_be_made_is_an_error_of_the_save_and_the_fence_opens():
    snapshot = snapshot_of(late=[Copy("x", torch.ones(3), torch.zeros(4), torch.ones(3))])
    snapshot.copy_late()
    snapshot.fence()
    with pytest.raises(StagingError, match="step 7 could not be copied"):
        snapshot.wait_landed(0)


def test_sources_are_let_go_when_all_has_landed():
    import gc
    import weakref

    source = torch.ones(4)
    alive = weakref.ref(source)
    snapshot = snapshot_of(
        late=[Copy("x", source, torch.zeros(4), source)],
        checks=[Check("x", "b", (source,), is_late=True)],
    )
    snapshot.copy_eager()
    snapshot.copy_late()
    snapshot.settle()
    del source
    gc.collect()
    assert alive() is None


def test_the_fence_waits_for_the_copy_and_no_longer():
    copy = copy_of("x", torch.ones(2))
    snapshot = snapshot_of(late=[copy])
    snapshot.copy_eager()
    passed = threading.Event()
    waiter = threading.Thread(target=lambda: (snapshot.fence(), passed.set()), daemon=True)
    waiter.start()
    assert not passed.wait(0.05)
    snapshot.copy_late()
    assert passed.wait(5)
    waiter.join()


# -- digests ---------------------------------------------------------------------------------------


def test_digests_are_taken_with_the_copies_they_belong_to():
    early, late = torch.ones(3), torch.ones(3)
    snapshot = snapshot_of(
        late=[copy_of("l", late)],
        checks=[
            Check("e", "all", (early,), is_late=False),
            Check("l", "all", (late,), is_late=True),
        ],
    )
    snapshot.copy_eager()
    assert snapshot.digests == {"e": f"all={digest(early)}"}
    snapshot.copy_late()
    assert snapshot.digests == {"e": f"all={digest(early)}", "l": f"all={digest(late)}"}


def test_a_rank_that_copies_nothing_late_still_takes_late_digests():
    """Another replica writes the tensor. This rank must still report whether it holds the same
    values.
    """
    tensor = torch.ones(3)
    snapshot = snapshot_of(checks=[Check("w", "all", (tensor,), is_late=True)])
    snapshot.copy_eager()
    snapshot.copy_late()
    snapshot.wait_landed(0)
    assert snapshot.digests == {"w": f"all={digest(tensor)}"}


class Queued:
    """A device that queues copies at once, as a substitute for ``LateCopies``."""

    thread_context = staticmethod(nullcontext)

    def wait_for_queued_work(self) -> None: ...
    def run(self, copies) -> None: ...
    def mark_launched(self) -> None: ...
    def hold_current_streams(self) -> None: ...

    def events(self) -> dict:
        return {}

    def on_stream(self, tensor) -> nullcontext:
        return nullcontext()


def stand_in(snapshot: Snapshot, device: Any) -> None:
    """Let ``device`` take the part of the late copies on an accelerator."""
    snapshot._device_copies = device


def test_a_fence_holds_the_stream_alone_and_waits_for_no_late_digest(monkeypatch):
    """The host reads the digest on an accelerator when the fence has let the step go on."""
    passed, waited = threading.Event(), list[bool]()

    def read(parts):
        waited.append(passed.wait(20))
        return "read"

    monkeypatch.setattr("ckpt.staging.snapshot.digest_of", read)
    monkeypatch.setattr("ckpt.staging.snapshot.fold", lambda _: ())
    snapshot = snapshot_of(
        checks=[Check("w", "all", (torch.ones(3, device="meta"),), is_late=True)]
    )
    stand_in(snapshot, Queued())
    copying = threading.Thread(target=snapshot.copy_late)
    copying.start()
    snapshot.fence()
    passed.set()
    copying.join()
    snapshot.wait_landed(0)
    assert (waited, snapshot.digests) == ([True], {"w": "all=read"})


TENSORS = {
    "normal": torch.randn(1000, generator=torch.Generator().manual_seed(1)),
    "odd bytes": torch.arange(13, dtype=torch.uint8),
    "one": torch.tensor(3.5),
    "matrix": torch.randn(33, 65, generator=torch.Generator().manual_seed(2)),
    "bf16": torch.randn(17, generator=torch.Generator().manual_seed(3)).bfloat16(),
    "bool": torch.tensor([True, False, True]),
    "large": torch.randn(300_001, generator=torch.Generator().manual_seed(4)),
}


@pytest.mark.parametrize("name", TENSORS)
def test_equal_tensors_have_equal_digests_wherever_they_lie(name):
    tensor = TENSORS[name]
    room = torch.zeros(tensor.numel() + 3, dtype=tensor.dtype)
    shifted = room[3:]
    shifted.copy_(tensor.reshape(-1))
    assert (
        digest(tensor)
        == digest(tensor.clone())
        == digest(shifted)
        == digest(tensor.t().contiguous().t() if tensor.dim() == 2 else tensor)
    )


@pytest.mark.parametrize("name", TENSORS)
def test_one_flipped_bit_gives_another_digest(name):
    tensor = TENSORS[name]
    for place in {0, tensor.nbytes // 2, tensor.nbytes - 1}:
        other = tensor.clone()
        other.view(-1).view(torch.uint8)[place] ^= 1
        assert digest(other) != digest(tensor)


@pytest.mark.parametrize("size", [2, 4, 16, 64, 1000, 4096, 1 << 16, 1 << 20])
def test_constant_tensors_of_different_values_have_different_digests(size):
    """A fresh bias is all zeros and a fresh norm all ones. The digest must show a replica that was
    never loaded.
    """
    values = [torch.full((size,), value) for value in (0.0, 1.0, 2.0, -1.0, 0.5, 3.0)]
    assert len({digest(value) for value in values}) == len(values)


@pytest.mark.parametrize("size", [16, 1000, 1 << 16])
def test_halves_that_are_swapped_give_another_digest(size):
    tensor = torch.randn(size, generator=torch.Generator().manual_seed(5))
    assert digest(torch.cat([tensor[size // 2 :], tensor[: size // 2]])) != digest(tensor)


@pytest.mark.parametrize("size", [3, 100_000])
def test_a_tensor_whose_digest_was_taken_may_still_be_resized(size):
    tensor = torch.ones(size)
    digest(tensor)
    tensor.untyped_storage().resize_(0)


def test_an_empty_tensor_has_a_digest():
    assert digest(torch.zeros(0)) == digest(torch.zeros(3, 0))


class Launched:
    """Copies from a GPU as a snapshot sees them: they run until a wait for them ends."""

    under_way = False

    def thread_context(self) -> nullcontext[None]:
        return nullcontext()

    def wait_for_queued_work(self) -> None: ...

    def run(self, copies: list[Copy]) -> None:
        self.under_way = True
        copy_now(copies)

    def events(self) -> dict[torch.device, torch.Event]:
        return {}

    def synchronize(self) -> None:
        self.under_way = False


def test_a_save_that_fails_is_over_when_the_gpu_writes_to_its_slot_no_more(monkeypatch):
    """Another save has the slot then."""
    monkeypatch.setattr("ckpt.staging.window.Window.piece_bytes", 8)
    broken = Copy("x", torch.ones(3), torch.zeros(4), torch.ones(3), end=40)
    snapshot = snapshot_of(late=[copy_of("w", torch.ones(2)), broken])
    gpu = Launched()
    stand_in(snapshot, gpu)
    snapshot.copy_late()
    with pytest.raises(StagingError, match="could not be copied"):
        snapshot.wait_landed(0)
    assert not gpu.under_way


def test_what_is_lazy_is_resolved_before_a_copy_that_is_only_launched(monkeypatch):
    """Torch resolves it in the target, which an asynchronous copy has not filled by then.

    The CPU stands for the device.
    """
    lazy = {
        "conj": torch.complex(torch.ones(3), torch.arange(3.0)).conj(),
        "neg": torch._neg_view(torch.ones(3)),
    }
    copies = [
        Copy(name, value, torch.zeros_like(value.resolve_conj().resolve_neg()), value)
        for name, value in lazy.items()
    ]
    launched = []
    copy = torch._foreach_copy_
    monkeypatch.setattr(
        torch,
        "_foreach_copy_",
        lambda to, of, non_blocking=False: (launched.extend(of), copy(to, of)),
    )
    late: Any = LateCopies(())
    late._streams = {torch.device("cpu"): None}
    late.run(copies)
    assert not any(value.is_conj() or value.is_neg() for value in launched)
    assert all(torch.equal(copy.target, copy.source) for copy in copies)


def test_a_source_that_lost_its_memory_under_an_asynchronous_copy_fails_the_save_by_name():
    """It is checked after the event too, since the copy was only launched before."""
    source = torch.ones(4)
    copy = Copy("w", source, torch.zeros(4), source, end=16, address=source.data_ptr())
    snapshot = snapshot_of(late=[copy])

    class Frees(Launched):
        def events(self):
            return {torch.device("meta"): self}

        def mark_launched(self) -> None: ...

        def hold_current_streams(self) -> None: ...

        def synchronize(self) -> None:
            source.untyped_storage().resize_(0)

    stand_in(snapshot, Frees())
    snapshot.copy_late()
    with pytest.raises(TensorChanged, match="'w'"):
        snapshot.wait_landed(0)

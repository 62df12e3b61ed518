from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from ckpt.model.box import Box, split_rows
from ckpt.plan.restore import ChunkRead, Target
from ckpt.state.match.sink import TensorSink
from ckpt.state.tensors.layout import leaf_of
from ckpt.state.tensors.local_shards import LocalShards
from ckpt.storage.api import aligned_memory


def chunk(
    source: torch.Tensor, dtype: str, box: Box, *, targets: int = 1
) -> tuple[ChunkRead, memoryview]:
    """Return a chunk of a tensor that was saved whole, and its bytes."""
    part = source[box.slices()].contiguous().reshape(-1).view(torch.uint8)
    data = memoryview(bytearray(part.numpy().tobytes()))
    read = ChunkRead(
        rank=0, index=0, offset=0, nbytes=data.nbytes, checksum="", dtype=dtype, box=box,
        targets=tuple(Target(leaf=k, piece=0, part=box) for k in range(targets)),
    )  # fmt: skip
    return read, data


def numbers(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    raw = torch.arange(torch.Size(shape).numel() * dtype.itemsize, dtype=torch.int64) % 120
    return raw.to(torch.uint8).view(dtype).view(shape)


@pytest.mark.parametrize("most", [7, 40, 1000, 10**6])
@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float8_e8m0fnu, torch.complex64, torch.bool, torch.int64],
)
@pytest.mark.parametrize("shape", [(), (5,), (40, 30), (3, 4, 5)])
def test_chunks_of_any_size_make_the_tensor(
    shape: tuple[int, ...], dtype: torch.dtype, most: int
) -> None:
    source = torch.ones(shape, dtype=dtype) if dtype is torch.bool else numbers(shape, dtype)
    target = torch.zeros(source.nbytes, dtype=torch.uint8).view(dtype).view(shape)
    name = str(dtype).removeprefix("torch.")
    sink = TensorSink([leaf_of("x", target, ())], [target])
    for box in split_rows(Box.whole(shape), most):
        sink.place(*chunk(source, name, box))
    assert torch.equal(target.reshape(-1).view(torch.uint8), source.reshape(-1).view(torch.uint8))


def test_a_chunk_in_one_piece_is_given_its_own_memory() -> None:
    target = torch.zeros(40, 30)
    sink = TensorSink([leaf_of("x", target, ())], [target])
    read, _ = chunk(torch.ones(40, 30), "float32", Box((3, 0), (2, 30)))
    memory = sink.direct(read)
    assert memory is not None
    assert memory.nbytes == 2 * 30 * 4
    memory[:] = b"\x01" * memory.nbytes
    assert target.view(torch.uint8).sum() == memory.nbytes
    assert target[3:5].view(torch.uint8).sum() == memory.nbytes


@pytest.mark.parametrize("piece", [0, 1])
def test_rows_of_each_piece_of_a_tensor_have_their_own_memory(piece: int) -> None:
    memories = torch.zeros(3, 4), torch.zeros(4, 4)
    target = LocalShards((12, 8), [((2, 0), memories[0]), ((8, 4), memories[1])])
    sink = TensorSink([leaf_of("x", target, ())], [target])
    first, column = target.boxes[piece].offsets

    def direct(box: Box) -> memoryview | None:
        held = Target(leaf=0, piece=piece, part=box)
        read, _ = chunk(torch.zeros(12, 8), "float32", box)
        return sink.direct(replace(read, targets=(held,)))

    rows = direct(Box((first + 1, column), (2, 4)))
    assert rows is not None
    rows[:] = b"\x01" * rows.nbytes
    assert memories[piece].view(torch.uint8).sum(dim=1).tolist()[1:3] == [16, 16]
    assert memories[piece].view(torch.uint8).sum() == 32
    assert direct(Box((first, column + 1), (2, 2))) is None


ODD: dict[str, Callable[[], torch.Tensor]] = {
    "transposed": lambda: torch.zeros(6, 4, dtype=torch.complex64).T,
    "strided": lambda: torch.zeros(4, 12, dtype=torch.complex64)[:, ::2],
    "conjugated": lambda: torch.zeros(4, 6, dtype=torch.complex64).conj(),
}


@pytest.mark.parametrize("kind", ODD)
def test_memory_that_is_not_the_tensor_byte_for_byte_is_filled_by_a_copy(kind: str) -> None:
    target = ODD[kind]()
    source = torch.arange(6).expand(4, 6) + 1j
    source = source.to(torch.complex64)
    sink = TensorSink([leaf_of("x", target, ())], [target])
    read, data = chunk(source, "complex64", Box.whole((4, 6)))
    assert sink.direct(read) is None
    sink.place(read, data)
    assert torch.equal(target.resolve_conj(), source)


def test_a_chunk_wanted_twice_is_placed_twice() -> None:
    targets = [torch.zeros(4, 6), torch.zeros(4, 6)]
    sink = TensorSink(
        [leaf_of(name, t, ()) for name, t in zip("xy", targets, strict=True)], targets
    )
    read, data = chunk(torch.arange(24.0).view(4, 6), "float32", Box.whole((4, 6)), targets=2)
    assert sink.direct(read) is None
    sink.place(read, data)
    assert all(torch.equal(target, torch.arange(24.0).view(4, 6)) for target in targets)


def test_one_element_with_a_stride_is_filled() -> None:
    target = torch.zeros(4, 3)[:1, 1]
    sink = TensorSink([leaf_of("x", target, ())], [target])
    sink.place(*chunk(torch.ones(1), "float32", Box((0,), (1,))))
    assert target.item() == 1


@pytest.mark.parametrize("lead", [1, 4, 8])
@pytest.mark.parametrize("wanted", [torch.complex64, torch.complex128])
def test_a_chunk_may_begin_anywhere_in_memory(wanted: torch.dtype, lead: int) -> None:
    source = torch.arange(34) * (1 + 2j)
    source = source.to(torch.complex128)
    target = torch.zeros(34, dtype=wanted)
    sink = TensorSink([leaf_of("x", source, ())], [target])
    read, data = chunk(source, "complex128", Box.whole((34,)))
    room = aligned_memory(lead + data.nbytes)[lead:]
    room[:] = data
    sink.place(read, room)
    assert torch.equal(target, source.to(wanted))

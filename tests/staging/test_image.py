from __future__ import annotations

import pytest
import safetensors.torch
import torch

from ckpt.model.box import Box
from ckpt.model.dtype import DTYPES
from ckpt.plan.leaf import Leaf
from ckpt.plan.save import plan_save
from ckpt.staging.image import Image, copyable, view_as
from ckpt.staging.slot_pool import SlotPool
from ckpt.staging.window import begin_image


@pytest.fixture
def slot():
    pool = SlotPool(1)
    yield pool.acquire(1 << 20, wait=False)
    pool.close()


def random(dtype: str, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Return a tensor of random bits (of 0 and 1 for bool)."""
    count = DTYPES[dtype].itemsize
    for n in shape:
        count *= n
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(
        0, 2 if dtype == "bool" else 256, (count,), generator=generator, dtype=torch.uint8
    )
    return raw.view(getattr(torch, dtype)).view(shape)


def views(image: Image) -> list[torch.Tensor]:
    """Return the place of each item, none of which is cut here."""
    return [
        target.view for i in range(len(image.plan.items)) for target in image.targets(i, flat=True)
    ]


def written(image: Image) -> memoryview:
    window = begin_image(image.slot, image.plan.size, image.plan.header)
    window.land(window.size)
    return window.view(0, window.size)


def same_bits(one: torch.Tensor, two: torch.Tensor) -> bool:
    return torch.equal(
        one.contiguous().view(-1).view(torch.uint8), two.contiguous().view(-1).view(torch.uint8)
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1,), (3, 5)])
def test_copying_to_a_view_is_serializing_bit_for_bit(slot, dtype, shape):
    tensors = {
        "one": torch.ones(1, dtype=torch.uint8),
        "x": random(dtype, shape),
        "y": random(dtype, shape, 1),
    }
    leaves = [
        Leaf(n, str(t.dtype).removeprefix("torch."), tuple(t.shape), (Box.whole(t.shape),))
        for n, t in tensors.items()
    ]
    plan = plan_save(leaves, rank=0, chunk_bytes=1 << 20)
    image = Image(plan, leaves, slot)
    for item, view in zip(plan.items, views(image), strict=True):
        leaf = leaves[item.leaf]
        view.copy_(copyable(tensors[leaf.name], leaf.dtype))
    assert len(written(image)) == plan.size
    assert bytes(written(image)[: len(plan.header)]) == plan.header
    for item in plan.items:
        expected = tensors[leaves[item.leaf].name].view(-1).view(torch.uint8)
        assert bytes(written(image)[item.offset : item.offset + item.nbytes]) == bytes(
            expected.tolist()
        )


@pytest.mark.parametrize(
    "dtypes",
    [
        ("float64", "complex128"),
        ("float16", "complex32"),
        ("float32", "complex64"),
        ("uint8", "bits16"),
    ],
)
def test_odd_neighbours_do_not_break_the_alignment_that_views_need(slot, dtypes):
    leaves = [Leaf(f"{i}", dtype, (1,), (Box((0,), (1,)),)) for i, dtype in enumerate(dtypes)]
    image = Image(plan_save(leaves, rank=0, chunk_bytes=64), leaves, slot)
    assert [view.shape for view in views(image)] == [(1,), (1,)]


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3)])
def test_0d_and_empty_tensors_have_views(slot, shape):
    leaves = [Leaf("x", "float32", shape, (Box.whole(shape),))]
    [view] = views(Image(plan_save(leaves, rank=0, chunk_bytes=64), leaves, slot))
    assert view.shape == shape


def test_safetensors_reads_the_image_as_it_lies_in_memory(slot):
    tensors = {
        "w": torch.randn(4, 3),
        "b": torch.arange(3),
        "h": torch.randn(5).bfloat16(),
        "m": torch.tensor([True, False]),
    }
    leaves = [
        Leaf(n, str(t.dtype).removeprefix("torch."), tuple(t.shape), (Box.whole(t.shape),))
        for n, t in tensors.items()
    ]
    plan = plan_save(leaves, rank=0, chunk_bytes=64)
    image = Image(plan, leaves, slot)
    for item, view in zip(plan.items, views(image), strict=True):
        view.copy_(tensors[leaves[item.leaf].name])
    found = safetensors.torch.load(bytes(written(image)))
    assert set(found) == set(tensors)
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_seen_as_a_tensor_are_the_tensor(dtype):
    tensor = random(dtype, (2, 3))
    memory = tensor.view(-1).view(torch.uint8)
    assert same_bits(view_as(memory, dtype, (2, 3)), copyable(tensor, dtype))

from __future__ import annotations

from ckpt.model.box import Box
from ckpt.plan.leaf import Leaf


def test_a_leaf_counts_the_bytes_of_its_boxes_only():
    leaf = Leaf("x", "complex64", (10, 4), (Box((0, 0), (2, 4)), Box((5, 0), (1, 4))))
    assert (leaf.itemsize, leaf.nbytes) == (8, 96)
    assert Leaf("x", "float16", (10,), ()).nbytes == 0
    assert Leaf("x", "float64", (), (Box((), ()),)).nbytes == 8

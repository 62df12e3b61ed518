"""Put what one rank makes durable, without a save."""

from __future__ import annotations

import numpy as np

from ckpt.coordination.commit_state_machine import Durable
from ckpt.model.box import Box, even_slab
from ckpt.model.checksum import checksum
from ckpt.model.fragment_columns import pack_fragment
from ckpt.model.keys import StepRef, data_name, fragment_name
from ckpt.model.manifest import FragmentRef
from ckpt.model.record_encoding import pack
from ckpt.plan.leaf import Leaf
from tests.plan.worlds import fragment_of

REF = StepRef(5, "abcxyz")
ARRAY = np.arange(24, dtype=np.float32).reshape(12, 2)


def make_durable(
    store, rank: int, size: int, *, array=ARRAY, boxes: tuple[Box, ...] | None = None, **changes
) -> Durable:
    slab = even_slab(Box.whole(ARRAY.shape), size, rank)
    assert slab is not None
    leaf = Leaf("x", "float32", ARRAY.shape, boxes or (slab,))
    image, fragment = fragment_of(rank, size, [leaf], {"x": array}, **changes)
    store.put(REF.key(data_name(rank)), [image])
    data = pack(pack_fragment(fragment))
    store.put(REF.key(fragment_name(rank)), [data])
    return Durable(FragmentRef(fragment_name(rank), rank, len(data), checksum(data)))

"""The differences between two checkpoints. Data is read only where checksums give no answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from ckpt.catalog.tensor_reader import Piece, StepReader
from ckpt.model.manifest import Tensor

_PIECE_BYTES: Final = 32 << 20


@dataclass(slots=True)
class Difference:
    """Names of tensors.

    Attributes:
        kinds: name -> dtype and shape in each.
        values: Same dtype and shape, other bytes.
        equal: How many are the same to the bit.
        read_names: How many had to be read for that.
        unread: Those whose data has to be read for an answer.
    """

    only_one: list[str] = field(default_factory=list[str])
    only_two: list[str] = field(default_factory=list[str])
    kinds: dict[str, tuple[Tensor, Tensor]] = field(
        default_factory=dict[str, tuple[Tensor, Tensor]]
    )
    values: list[str] = field(default_factory=list[str])
    equal: int = 0
    read_names: int = 0
    unread: list[str] = field(default_factory=list[str])

    @property
    def compared(self) -> int:
        """Tensors of the same dtype and shape in both."""
        return self.equal + len(self.values)

    @property
    def any(self) -> bool:
        return bool(self.only_one or self.only_two or self.kinds or self.values)


def compare(
    one: StepReader,
    two: StepReader,
    *,
    on_name: Callable[[int, int], None] = lambda _done, _total: None,
    read: bool = True,
) -> Difference:
    """Compare all tensors, tied names by what they stand for.

    Args:
        one: A checkpoint.
        two: Another one.
        on_name: Called with how many names are done, of how many.
        read: Whether tensors are read where checksums do not tell.

    Raises:
        IntegrityError, StorageError: What had to be read cannot be.
    """
    found = Difference(
        only_one=sorted(one.tensors.keys() - two.tensors.keys()),
        only_two=sorted(two.tensors.keys() - one.tensors.keys()),
    )
    common = sorted(one.tensors.keys() & two.tensors.keys())
    for done, name in enumerate(common):
        a, b = one.tensors[name], two.tensors[name]
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            found.kinds[name] = (a, b)
            continue
        same = _by_checksums(one, two, name)
        if same is None and not read:
            found.unread.append(name)
            continue
        if same is None:
            found.read_names += 1
            same = _by_bytes(one, two, name)
        if same:
            found.equal += 1
        else:
            found.values.append(name)
        on_name(done + 1, len(common))
    return found


def _by_checksums(one: StepReader, two: StepReader, name: str) -> bool | None:
    """Compare checksums: equal boxes with equal checksums have equal bytes.

    Returns None if the boxes differ, and no difference is known.
    """
    a, b = one.checksums(name), two.checksums(name)
    if any(b[box] != a[box] for box in a.keys() & b.keys()):
        return False
    return True if a.keys() == b.keys() else None


def _by_bytes(one: StepReader, two: StepReader, name: str) -> bool:
    return all(a.data == b.data for a, b in pairs(one, two, name))


def pairs(one: StepReader, two: StepReader, name: str) -> zip[tuple[Piece, Piece]]:
    """Yield the same piece of a tensor from both, one piece after another."""
    a, b = one.tensors[name], two.tensors[name]
    return zip(
        one.stream([a], most_bytes=_PIECE_BYTES),
        two.stream([b], most_bytes=_PIECE_BYTES),
        strict=True,
    )

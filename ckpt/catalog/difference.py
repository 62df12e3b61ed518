"""Compare the tensors of two checkpoints. Data is read only where checksums cannot decide."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from ckpt.catalog.tensor_reader import Piece, StepReader
from ckpt.model.manifest import Tensor

_PIECE_BYTES: Final = 32 << 20


@dataclass(slots=True)
class Difference:
    """The result of a comparison of two checkpoints.

    Attributes:
        only_one: The names of tensors that only the first checkpoint has.
        only_two: The names of tensors that only the second checkpoint has.
        kinds: The tensors of both checkpoints, by name, for each name whose tensors differ in dtype
            or shape.
        values: The names of tensors with the same dtype and shape, but different bytes.
        equal: The number of tensors that are equal bit for bit.
        read_names: The number of tensors whose data was read.
        unread: The names of tensors that were not compared, since their checksums do not decide and
            the caller did not let their data be read.
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
        """Return the number of tensors whose bytes were compared, by checksum or by reading."""
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
    """Compare all tensors of two checkpoints. A tied name stands for the tensor it is tied to.

    Args:
        one: The first checkpoint.
        two: The second checkpoint.
        on_name: Called after each common name, with the number of common names that are done and
            the number of all common names.
        read: Whether to read the data of a tensor if checksums cannot decide. Otherwise its name
            goes to ``unread``.

    Raises:
        IntegrityError, StorageError: The data of a tensor cannot be read.
    """
    found = Difference(
        only_one=sorted(one.tensors.keys() - two.tensors.keys()),
        only_two=sorted(two.tensors.keys() - one.tensors.keys()),
    )
    common = sorted(one.tensors.keys() & two.tensors.keys())
    for done, name in enumerate(common):
        _compare_tensor(found, one, two, name, read=read)
        on_name(done + 1, len(common))
    return found


def _compare_tensor(
    found: Difference, one: StepReader, two: StepReader, name: str, *, read: bool
) -> None:
    """Compare a tensor that both checkpoints have, and add the result to ``found``."""
    a, b = one.tensors[name], two.tensors[name]
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        found.kinds[name] = (a, b)
        return
    same = _by_checksums(one, two, name)
    if same is None and not read:
        found.unread.append(name)
        return
    if same is None:
        found.read_names += 1
        same = _by_bytes(one, two, name)
    if same:
        found.equal += 1
    else:
        found.values.append(name)


def _by_checksums(one: StepReader, two: StepReader, name: str) -> bool | None:
    """Return True if a tensor is equal in both checkpoints, judged by the checksums of its chunks.

    Returns None if checksums cannot decide: the boxes of the chunks differ, and all boxes that both
    checkpoints have are equal.
    """
    a, b = one.checksums(name), two.checksums(name)
    if any(b[box] != a[box] for box in a.keys() & b.keys()):
        return False
    return True if a.keys() == b.keys() else None


def _by_bytes(one: StepReader, two: StepReader, name: str) -> bool:
    return all(a.data == b.data for a, b in pairs(one, two, name))


def pairs(one: StepReader, two: StepReader, name: str) -> zip[tuple[Piece, Piece]]:
    """Yield all pieces of a tensor in order, each as a pair from the two checkpoints."""
    a, b = one.tensors[name], two.tensors[name]
    return zip(
        one.stream([a], most_bytes=_PIECE_BYTES),
        two.stream([b], most_bytes=_PIECE_BYTES),
        strict=True,
    )

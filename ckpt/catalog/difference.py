"""Compare the tensors of two checkpoints. Data is read only where checksums cannot decide.

A tensor is stored in chunks. Each chunk has a checksum, and holds a *box*, a rectangular region of
the tensor. A `Piece` is a run of consecutive elements of a tensor.
"""

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
        other_kinds: The tensors of both checkpoints, by name, for each name whose tensors differ in
            dtype or shape.
        other_values: The names of tensors with the same dtype and shape, but different bytes.
        equal: The number of tensors that are equal bit for bit.
        read_count: The number of tensors whose data was read.
        other_layouts: The names of tensors that were not compared, since their checksums do not
            decide and the caller did not let their data be read.
    """

    only_one: list[str] = field(default_factory=list[str])
    only_two: list[str] = field(default_factory=list[str])
    other_kinds: dict[str, tuple[Tensor, Tensor]] = field(
        default_factory=dict[str, tuple[Tensor, Tensor]]
    )
    other_values: list[str] = field(default_factory=list[str])
    equal: int = 0
    read_count: int = 0
    other_layouts: list[str] = field(default_factory=list[str])

    @property
    def compared_count(self) -> int:
        """Return the number of tensors whose bytes were compared, by checksum or by reading."""
        return self.equal + len(self.other_values)

    @property
    def exists(self) -> bool:
        return bool(self.only_one or self.only_two or self.other_kinds or self.other_values)


def compare(
    reader_a: StepReader,
    reader_b: StepReader,
    *,
    on_name: Callable[[int, int], None] = lambda _count, _total: None,
    read: bool = True,
) -> Difference:
    """Compare all tensors of two checkpoints. A tied name stands for the tensor it is tied to.

    Args:
        reader_a: The first checkpoint.
        reader_b: The second checkpoint.
        on_name: Called after each common name, with the number of common names that are done and
            the number of all common names.
        read: Whether to read the data of a tensor if checksums cannot decide. Otherwise its name
            goes to ``other_layouts``.

    Raises:
        IntegrityError, StorageError: The data of a tensor cannot be read.
    """
    difference = Difference(
        only_one=sorted(reader_a.tensors.keys() - reader_b.tensors.keys()),
        only_two=sorted(reader_b.tensors.keys() - reader_a.tensors.keys()),
    )
    common = sorted(reader_a.tensors.keys() & reader_b.tensors.keys())
    for index, name in enumerate(common):
        _compare_tensor(difference, reader_a, reader_b, name, read=read)
        on_name(index + 1, len(common))
    return difference


def _compare_tensor(
    difference: Difference, reader_a: StepReader, reader_b: StepReader, name: str, *, read: bool
) -> None:
    """Compare a tensor that both checkpoints have, and add the result to ``difference``."""
    tensor_a, tensor_b = reader_a.tensors[name], reader_b.tensors[name]
    if (tensor_a.dtype, tensor_a.shape) != (tensor_b.dtype, tensor_b.shape):
        difference.other_kinds[name] = (tensor_a, tensor_b)
        return
    is_equal = _by_checksums(reader_a, reader_b, name)
    if is_equal is None and not read:
        difference.other_layouts.append(name)
        return
    if is_equal is None:
        difference.read_count += 1
        is_equal = _by_bytes(reader_a, reader_b, name)
    if is_equal:
        difference.equal += 1
    else:
        difference.other_values.append(name)


def _by_checksums(reader_a: StepReader, reader_b: StepReader, name: str) -> bool | None:
    """Return True if a tensor is equal in both checkpoints, judged by the checksums of its chunks.

    Returns None if checksums cannot decide: the boxes of the chunks differ, and all boxes that both
    checkpoints have are equal.
    """
    checksums_a, checksums_b = reader_a.checksums(name), reader_b.checksums(name)
    common_boxes = checksums_a.keys() & checksums_b.keys()
    if any(checksums_b[box] != checksums_a[box] for box in common_boxes):
        return False
    return True if checksums_a.keys() == checksums_b.keys() else None


def _by_bytes(reader_a: StepReader, reader_b: StepReader, name: str) -> bool:
    return all(a.data == b.data for a, b in piece_pairs(reader_a, reader_b, name))


def piece_pairs(reader_a: StepReader, reader_b: StepReader, name: str) -> zip[tuple[Piece, Piece]]:
    """Yield all pieces of a tensor in order, each as a pair from the two checkpoints."""
    return zip(
        reader_a.stream([reader_a.tensors[name]], most_bytes=_PIECE_BYTES),
        reader_b.stream([reader_b.tensors[name]], most_bytes=_PIECE_BYTES),
        strict=True,
    )

"""The delta file of a rank: the differences between its chunks and those of an earlier step.

The file is the length of a record (8 bytes, little-endian), the record, and the differences of the
chunks, back to back (see ``codec.word_difference``). The difference of a chunk is also called its
*code*.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

import msgspec

from ckpt.errors import ConfigError, ManifestCorrupt
from ckpt.errors.base import few
from ckpt.model.keys import StepRef, parse_folder
from ckpt.model.manifest import FORMAT
from ckpt.model.record_encoding import pack, unpack

_LENGTH_BYTES: Final = 8


class _DeltaHead(msgspec.Struct, frozen=True, kw_only=True):
    """The record of a delta.

    Attributes:
        base: The folder of the base.
        chunks: The index of each chunk with a difference, and the bytes of the difference.
    """

    format: int
    step: int
    attempt: str
    rank: int
    base: str
    chunks: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """The delta of a rank.

    Attributes:
        base: The step whose chunks the differences change.
        codes: The difference of each chunk, by the index of the chunk in the file of the rank. It
            is empty if the chunk is the same. A chunk that is not here has no difference.
        nbytes: The size of the file.
    """

    base: StepRef
    codes: Mapping[int, memoryview]
    nbytes: int


def is_in_part(part: str, name: str) -> bool:
    """Return True if the tensor ``name`` is in ``part`` of the state, which has deltas."""
    return name == part or name.startswith(f"{part}/")


def check_part(part: str, names: Iterable[str]) -> None:
    """Raise ``ConfigError`` if no tensor of a state is in ``part``. ``names`` are those of all
    tensors of the state.
    """
    outermost_names: set[str] = set()
    for name in names:
        if is_in_part(part, name):
            return
        outermost_names.add(name.partition("/")[0])
    present = f"it has {few(sorted(outermost_names))}" if outermost_names else "it has no tensor"
    raise ConfigError(f"deltas={part!r} fits no tensor of the state: {present}")


def pack_delta(
    ref: StepRef, rank: int, base: StepRef, codes: Mapping[int, Sequence[memoryview]]
) -> list[memoryview]:
    """Return the parts of the delta file of ``rank`` at the step ``ref``.

    ``codes`` has the pieces of the difference of each chunk, by the index of the chunk.
    """
    indices = sorted(codes)
    head = pack(
        _DeltaHead(
            format=FORMAT,
            step=ref.step,
            attempt=ref.attempt,
            rank=rank,
            base=base.folder,
            chunks=tuple((index, sum(piece.nbytes for piece in codes[index])) for index in indices),
        )
    )
    length = len(head).to_bytes(_LENGTH_BYTES, "little")
    return [memoryview(length + head), *(piece for index in indices for piece in codes[index])]


def unpack_delta(data: bytes, ref: StepRef, rank: int) -> Delta:
    """Return the delta that ``data`` holds, of ``rank`` at the step ``ref``.

    Raises:
        ManifestCorrupt: The file is damaged, or belongs to another step or rank.
        FormatUnsupported: The file is in another format.
    """
    key = ref.delta(rank)
    begin = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
    head = unpack(data[_LENGTH_BYTES:begin], _DeltaHead, key=key)
    base = parse_folder(head.base)
    if (head.step, head.attempt, head.rank) != (ref.step, ref.attempt, rank) or base is None:
        raise ManifestCorrupt(key, "it is that of another step or rank")
    lengths = [length for _, length in head.chunks]
    ends = list(accumulate(lengths, initial=begin))
    if min(lengths, default=0) < 0 or ends[-1] != len(data):
        raise ManifestCorrupt(key, "the lengths of its differences do not add up")
    view = memoryview(data)
    codes = {
        index: view[start : start + length]
        for (index, length), start in zip(head.chunks, ends, strict=False)
    }
    return Delta(base, codes, len(data))

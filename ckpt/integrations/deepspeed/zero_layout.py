"""Compute which elements of each parameter a rank's flat partition holds, under ZeRO 1, 2 and 3.

ZeRO 1 and 2 put all parameters of a group one after the other into a flat buffer, and cut the
buffer into one equal part per rank. ZeRO 3 cuts every parameter by itself, and puts the parts of a
rank one after the other, for each *sub-group*: the parameters that it steps at once. Under ZeRO 1
and 2, this module computes the position of a parameter from its address, since DeepSpeed's own
tables have another order with ``round_robin_gradients``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed as dist

from ckpt.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Span:
    """The range of a parameter that a partition holds.

    Attributes:
        start: The index of the first element of the range in the flattened parameter.
        offset: The index of the same element in the partition.
        length: The number of elements; 0 if the partition holds none.
    """

    start: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """A parameter, its whole shape, and the span of the parameter that a partition holds."""

    parameter: torch.nn.Parameter
    shape: tuple[int, ...]
    span: Span


@dataclass(frozen=True, slots=True, eq=False)
class Partition:
    """A flat tensor of master weights that the inner optimizer of this rank steps.

    Attributes:
        flat: The tensor.
        group: The index of the tensor's parameter group in the inner optimizer.
        pieces: A piece for each parameter of the group, or of the sub-group under ZeRO 3, in
            DeepSpeed's order.
    """

    flat: torch.Tensor
    group: int
    pieces: tuple[Piece, ...]


def span_within(begin: int, numel: int, part_begin: int, size: int) -> Span:
    """Return the span of a parameter that a partition of a flat buffer holds.

    In the buffer, the parameter has ``numel`` elements from ``begin`` on, and the partition has
    ``size`` elements from ``part_begin`` on.
    """
    low, high = max(begin, part_begin), min(begin + numel, part_begin + size)
    return Span(low - begin, low - part_begin, high - low) if low < high else Span(0, 0, 0)


def span_of_rank(numel: int, rank: int, size: int, offset: int) -> Span:
    """Return the span of a ZeRO 3 parameter that the partition of ``rank`` holds.

    The parameter has ``numel`` elements, and each rank has a part of ``size`` elements. The part of
    ``rank`` begins at index ``offset`` of its partition. The span does not include the padding at
    the end of the last part.
    """
    start = min(rank * size, numel)
    return Span(start, offset, min(size, numel - start))


def partitions_of(optimizer: Any) -> tuple[Partition, ...]:
    """Return the partitions of this rank, in the order of the DeepSpeed optimizer.

    Args:
        optimizer: ``engine.optimizer``.

    Raises:
        ConfigError: DeepSpeed has moved parameters out of its flat buffers, as it does in
            ``offload_states()``.
    """
    match type(optimizer).__name__:
        case "DeepSpeedZeroOptimizer":
            return tuple(
                _group_partitions(
                    optimizer.bit16_groups,
                    optimizer.bit16_groups_flat,
                    optimizer.single_partition_of_fp32_groups,
                    optimizer.real_dp_process_group,
                )
            )
        case "BF16_Optimizer":
            return tuple(
                _group_partitions(
                    optimizer.bf16_groups,
                    optimizer.bf16_groups_flat,
                    optimizer.fp32_groups_flat_partition,
                    optimizer.real_dp_process_group,
                )
            )
        case _:
            return tuple(_subgroup_partitions(optimizer))


def _group_partitions(
    groups: Sequence[Sequence[torch.nn.Parameter]],
    buffers: Sequence[torch.Tensor],
    masters: Sequence[torch.Tensor],
    process_groups: Sequence[Any],
) -> Iterator[Partition]:
    """Yield the partitions under ZeRO 1 and 2.

    Args:
        groups: The parameters of each group.
        buffers: The flat buffer of each group, with all its parameters.
        masters: This rank's partition of each buffer, as master weights.
        process_groups: For each group of parameters the process group that shares its buffer.
    """
    for index, (group, buffer, master) in enumerate(zip(groups, buffers, masters, strict=True)):
        part_begin = dist.get_rank(process_groups[index]) * master.numel()
        pieces: list[Piece] = []
        for parameter in group:
            begin, remainder = divmod(
                parameter.data_ptr() - buffer.data_ptr(), buffer.element_size()
            )
            if remainder or not 0 <= begin <= buffer.numel() - parameter.numel():
                raise ConfigError(
                    "DeepSpeed has moved parameters out of its flat buffers: call "
                    "engine.reload_states() first"
                )
            span = span_within(begin, parameter.numel(), part_begin, master.numel())
            pieces.append(Piece(parameter, tuple(parameter.shape), span))
        yield Partition(master, index, tuple(pieces))


def _subgroup_partitions(optimizer: Any) -> Iterator[Partition]:
    """Yield the partitions under ZeRO 3, one for each sub-group."""
    for index, (group, master) in enumerate(
        zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True)
    ):
        pieces: list[Piece] = []
        offset = 0
        for parameter in group:
            pieces.append(
                Piece(parameter, tuple(parameter.ds_shape), span_of_shard(parameter, offset))
            )
            offset += parameter.ds_tensor.ds_numel
        yield Partition(master, optimizer.sub_group_to_group_id[index], tuple(pieces))


def span_of_shard(parameter: Any, offset: int = 0) -> Span:
    """Return the span of a ZeRO 3 parameter that this rank's ``ds_tensor`` holds.

    The span begins at index ``offset`` of this rank's partition.
    """
    rank = dist.get_rank(parameter.ds_process_group)
    return span_of_rank(parameter.ds_numel, rank, parameter.ds_tensor.ds_numel, offset)

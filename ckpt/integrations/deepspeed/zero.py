"""DeepSpeed: the state of an engine under ZeRO 1, 2 or 3, with the names of plain PyTorch.

    state = {**zero_state(engine), "step": 0}          # "model" and "optimizer"
    manager.restore(state)
    ...
    manager.save_async(state)

The fp32 master weights of a parameter are saved under the parameter's name, and each rank saves its
own part of them. The 16-bit weights are not saved: a restore computes them from the master weights.
So a checkpoint restores under any other stage and number of ranks. It also restores into the state
``{"model": model, "optimizer": AdamW(...)}`` of plain PyTorch in fp32, and a checkpoint of such a
state restores into an engine. Parameters that are not trained are saved unchanged, and buffers are
saved with the values of rank 0. The optimizer's entry contains the learning rate schedule, the loss
scale and the engine's counters.

In this module, the inner optimizer is the torch optimizer inside of DeepSpeed's own optimizer, and
a partition is a flat tensor of master weights (see ``deepspeed.zero_layout``). It consists of
pieces, and the *span* of a piece says which elements of its parameter they are. A ``LocalShards``
is the view of a piece in the shape of its parameter. DeepSpeed gives a parameter of ZeRO 3 the
attributes ``ds_shape``, its whole shape, and ``ds_tensor``, the part of this rank. Master weights
and optimizer state are copied while training goes on: only a step of the inner optimizer changes
them, and this step waits for the copy. Everything else is copied before ``save_async`` returns.

This module does not import deepspeed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

import torch
from torch import distributed as dist
from torch import nn
from torch.optim import Optimizer

from ckpt.errors import ConfigError, RestoreError
from ckpt.exchange.foreign.deepspeed_files import COUNTER_NAMES
from ckpt.integrations.deepspeed.zero_layout import Partition, Piece, partitions_of, span_of_shard
from ckpt.state.tensors.local_shards import LocalShards, TensorOrShards
from ckpt.state.tensors.sharded import ranks_of
from ckpt.state.walk.module_entries import Entry, ModuleItems, Part
from ckpt.state.walk.modules import entries_of
from ckpt.state.walk.stand_in import ModuleStandIn, OptimizerStandIn

_ZERO_CLASSES: Final = ("DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3", "BF16_Optimizer")
_SCALER_FIELDS: Final = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
_STEP: Final = "step"

_log = logging.getLogger("ckpt")


def zero_state(engine: Any) -> dict[str, Any]:
    """Return ``{"model": ..., "optimizer": ...}`` for an engine, as entries of a state.

    Call this once, after ``deepspeed.initialize`` has returned ``engine``.

    A restore also sets the 16-bit weights, the partitions of ZeRO 3, the learning rate schedule,
    the loss scale and the counters of the engine. All ranks must restore together, since a restore
    gathers weights from all ranks.

    Raises:
        ConfigError: The engine does not use ZeRO, or uses a feature that this module does not
            support, such as model parallelism, experts, pipelines, state on NVMe, ZenFlow,
            SuperOffload or MiCS. The error names the feature, or the class of the engine's
            optimizer. Or DeepSpeed has moved parameters out of its flat buffers.
    """
    zero = _ZeroEngine(engine)
    return {"model": ZeroModel(zero), "optimizer": ZeroOptimizer(zero)}


class _ZeroEngine:
    """The partitions of an engine, and views of them in the shapes of its parameters."""

    def __init__(self, engine: Any) -> None:
        _check_engine(engine)
        self.engine, self.optimizer = engine, engine.optimizer
        self.ranks = ranks_of(engine.seq_data_parallel_group)
        self.partitions = partitions_of(self.optimizer)
        self._views: dict[object, tuple[object, tuple[LocalShards, ...]]] = {}
        """By partition and key (see ``views``), the memory of a flat tensor and its views."""

    @property
    def inner_optimizer(self) -> Optimizer:
        """The inner optimizer, which steps the partitions."""
        optimizer: Optimizer = self.optimizer.optimizer
        return optimizer

    def views(
        self, partition: Partition, key: object, flat: torch.Tensor
    ) -> tuple[LocalShards, ...]:
        """Return a view of ``flat`` for each parameter of ``partition``, in order.

        Args:
            partition: A partition.
            key: The name of the optimizer state that ``flat`` holds; None for master weights.
            flat: A tensor with the layout of ``partition``.

        Returns:
            The views. If ``flat`` has the same memory as in the last call for ``partition`` and
            ``key``, they are the same objects.
        """
        memory = (flat.data_ptr(), flat.dtype, flat.device)
        last_memory, views = self._views.get((partition, key), (None, ()))
        if last_memory != memory:
            views = tuple(_view(piece, flat) for piece in partition.pieces)
            self._views[(partition, key)] = (memory, views)
        return views

    def master_views(self, partition: Partition) -> tuple[LocalShards, ...]:
        """Return the views of the master weights, one for each parameter of ``partition``."""
        return self.views(partition, None, partition.flat)


def _view(piece: Piece, flat: torch.Tensor) -> LocalShards:
    span = piece.span
    return LocalShards.of_range(
        piece.shape, span.start, flat.detach()[span.offset : span.offset + span.length]
    )


class ZeroModel(ModuleStandIn):
    """The model of an engine, with the fp32 master weights as its trained parameters."""

    def __init__(self, zero: _ZeroEngine) -> None:
        super().__init__()
        self._zero = zero
        self._frozen_parts: dict[int, tuple[int, TensorOrShards]] = {}
        self._last_items: tuple[tuple[int, ...], str, ModuleItems] | None = None

    def refresh(self) -> None:
        """Do nothing, since each call of ``items`` takes the present tensors of the engine."""

    def items(self, path: str) -> ModuleItems:
        """Return the entries of the module's state dict to save, with the path ``path`` in the
        state. Master weights take the place of trained parameters.

        The ``replica_ranks`` of an entry are the ranks that have it too. If ``is_delegated`` is
        True, another one of them saves the entry.
        """
        module = self._zero.engine.module
        views_by_parameter = {
            id(piece.parameter): view
            for partition in self._zero.partitions
            for piece, view in zip(
                partition.pieces, self._zero.master_views(partition), strict=True
            )
        }
        master_entries = tuple(
            replace(
                entry,
                value=views_by_parameter.get(id(entry.value)) or self._value_without_master(entry),
            )
            for entry in entries_of(path, module)
        )
        ids = tuple(id(entry.value) for entry in master_entries)
        if self._last_items is None or self._last_items[:2] != (ids, path):
            ranks = self._zero.ranks
            parts_by_id = {
                id(entry.value): (Part(f"{path}/{entry.fqn}"),)
                for entry in reversed(master_entries)
                if isinstance(entry.value, LocalShards)
            }
            # DeepSpeed does not keep buffers equal on all ranks. The first rank saves its buffers,
            # as in DeepSpeed's own checkpoints.
            buffers, is_first = set(map(id, module.buffers())), dist.get_rank() == ranks[0]
            rank_entries = tuple(
                entry
                if (is_buffer := id(entry.value) in buffers) and is_first
                else replace(entry, replica_ranks=ranks, is_delegated=is_buffer)
                for entry in master_entries
            )
            items = ModuleItems(
                entries=rank_entries, parts=parts_by_id, holders=dict.fromkeys(parts_by_id, ranks)
            )
            self._last_items = (ids, path, items)
        return self._last_items[2]

    def _value_without_master(self, entry: Entry) -> Any:
        """Return the value to save of an entry that has no master weights, such as a buffer.

        If the entry is a parameter that ZeRO 3 has partitioned, return this rank's part of it. The
        view of the part is made again only if the part has moved.
        """
        value = entry.value
        if not hasattr(value, "ds_tensor"):
            return value
        part = value.ds_tensor
        last_address, view = self._frozen_parts.get(id(value), (None, part))
        if last_address != part.data_ptr():
            shape, span = tuple(value.ds_shape), span_of_shard(value)
            memory = part.detach().view(-1)[: span.length]
            view = (
                LocalShards.of_range(shape, span.start, memory)
                if value.ds_numel
                else memory.new_empty(shape)
            )
            self._frozen_parts[id(value)] = (part.data_ptr(), view)
        return view

    def named_parameters(self, *args: Any, **options: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Return the named parameters of the engine's module."""
        return self._zero.engine.module.named_parameters(*args, **options)  # type: ignore[no-any-return]

    def named_buffers(self, *args: Any, **options: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the named buffers of the engine's module."""
        return self._zero.engine.module.named_buffers(*args, **options)  # type: ignore[no-any-return]

    def key_module(self) -> nn.Module:
        """Return the engine's module."""
        return self._zero.engine.module  # type: ignore[no-any-return]

    def take_restored_values(self) -> None:
        """Compute the 16-bit weights from the master weights. All ranks must call this."""
        optimizer = self._zero.optimizer
        if hasattr(optimizer, "update_lp_params"):
            optimizer.update_lp_params()
            return
        optimizer.checkpoint_event_prologue()  # It releases gathered parameters with old values
        for index in range(len(optimizer.fp16_groups)):
            optimizer._reassign_or_swap_out_partitioned_parameters(index)
        optimizer.checkpoint_event_epilogue()


class ZeroOptimizer(OptimizerStandIn):
    """The optimizer of an engine, with its state by parameter instead of by partition.

    In ``state`` and ``param_groups``, the views of the master weights from `ZeroModel` take the
    place of the parameters.
    """

    def __init__(self, zero: _ZeroEngine) -> None:
        # ``Optimizer.__init__`` is not called, since it takes tensors and no ``LocalShards``.
        self._zero = zero
        self.defaults = {}
        self.state = {}  # type: ignore[assignment]
        self.param_groups = []
        self._new_flat_tensors: dict[tuple[Partition, object], torch.Tensor] = {}
        """Restored state that the inner optimizer does not have yet, by partition and name."""

    def refresh(self) -> None:
        """Take the present groups and the present state of the inner optimizer."""
        self._new_flat_tensors.clear()
        self.param_groups[:] = [
            {
                **{key: value for key, value in group.items() if key not in ("params", _STEP)},
                "params": [
                    view
                    for partition in self._zero.partitions
                    if partition.group == index
                    for view in self._zero.master_views(partition)
                ],
            }
            for index, group in enumerate(self._zero.inner_optimizer.param_groups)
        ]
        old_state = self.state
        self.state = {}  # type: ignore[assignment]
        for partition in self._zero.partitions:
            self._refresh_state(partition, old_state)

    def _refresh_state(self, partition: Partition, old_state: Mapping[Any, dict[str, Any]]) -> None:
        """Take the state of one partition, as views in the shapes of its parameters.

        ``old_state`` is the state by master weights as of the last call.
        """
        inner_state = dict(self._zero.inner_optimizer.state.get(partition.flat, {}))
        step = inner_state.pop(_STEP, None)
        master_views = self._zero.master_views(partition)
        for key, value in inner_state.items():
            if not isinstance(value, torch.Tensor) or value.shape != partition.flat.shape:
                raise ConfigError(
                    f"DeepSpeed: {key!r} in the state of "
                    f"{type(self._zero.inner_optimizer).__name__} belongs to no parameter: of such "
                    "optimizers the model alone can be saved"
                )
        if not inner_state and step is None:
            return
        views = {key: self._zero.views(partition, key, value) for key, value in inner_state.items()}
        for index, master in enumerate(master_views):
            values: dict[str, Any] = {key: view[index] for key, view in views.items()}
            if step is not None:
                # Each parameter has a step counter of its own, as in plain PyTorch. The counter
                # stays the same tensor, so that the plan of the last save still fits.
                values[_STEP] = old_state.get(master, {}).get(_STEP, torch.zeros(()))
                if float(values[_STEP]) != float(step):
                    values[_STEP].fill_(float(step))
            self.state[master] = values  # type: ignore[index]

    def new_state(
        self, parameter: Any, key: object, dtype: torch.dtype, shape: tuple[int, ...]
    ) -> TensorOrShards:
        """Return zeros for the value ``key`` of a parameter's state, which the inner optimizer does
        not have yet.

        The zeros are a part of a flat tensor, which ``take_restored_values`` puts into the inner
        optimizer. The step counter is a tensor of its own.

        Raises:
            RestoreError: The checkpoint has the value with another shape than the parameter.
        """
        if key == _STEP:
            return torch.zeros(shape, dtype=dtype)
        for partition in self._zero.partitions:
            master_views = self._zero.master_views(partition)
            index = next((i for i, master in enumerate(master_views) if master is parameter), None)
            if index is not None and shape == parameter.shape:
                if (partition, key) not in self._new_flat_tensors:
                    self._new_flat_tensors[(partition, key)] = torch.zeros_like(
                        partition.flat, dtype=dtype, requires_grad=False
                    )
                return _view(partition.pieces[index], self._new_flat_tensors[(partition, key)])
        raise RestoreError(
            f"DeepSpeed: {key!r} of shape {shape} in the checkpoint has another shape than its "
            "parameter: of such optimizers the model alone can be restored"
        )

    def extra(self) -> dict[str, Any]:
        """Return the learning rate schedule, the loss scale and the counters of the engine."""
        engine, scheduler = self._zero.engine, self._zero.engine.lr_scheduler
        scaler = getattr(self._zero.optimizer, "loss_scaler", None)
        extra: dict[str, Any] = {
            "counters": {name: getattr(engine, name) for name in COUNTER_NAMES},
            "loss_scaler": {
                name: getattr(scaler, name) for name in _SCALER_FIELDS if hasattr(scaler, name)
            },
        }
        if hasattr(scheduler, "state_dict"):
            extra["scheduler"] = {"kind": type(scheduler).__name__, "state": scheduler.state_dict()}
        return extra

    def load_extra(self, extra: dict[str, Any]) -> None:
        """Set what ``extra`` has returned."""
        engine, scheduler = self._zero.engine, self._zero.engine.lr_scheduler
        scaler = getattr(self._zero.optimizer, "loss_scaler", None)
        for name in COUNTER_NAMES:
            if name in extra["counters"]:
                setattr(engine, name, extra["counters"][name])
        if getattr(scaler, "dynamic", False):
            for name in _SCALER_FIELDS:
                if name in extra["loss_scaler"] and hasattr(scaler, name):
                    setattr(scaler, name, extra["loss_scaler"][name])
        if (schedule := extra.get("scheduler")) is None or scheduler is None:
            return
        if schedule["kind"] == type(scheduler).__name__:
            scheduler.load_state_dict(schedule["state"])
        else:
            _log.warning(
                "ckpt: the checkpoint has the state of a %s, the engine a %s: its learning rate "
                "schedule starts again",
                schedule["kind"],
                type(scheduler).__name__,
            )

    def take_restored_values(self) -> None:
        """Set the hyperparameters and the state of the inner optimizer to the restored values."""
        inner_groups = self._zero.inner_optimizer.param_groups
        for group, inner_group in zip(self.param_groups, inner_groups, strict=True):
            inner_group.update({key: value for key, value in group.items() if key != "params"})
        for partition in self._zero.partitions:
            self._apply_restored_state(partition)
        self._new_flat_tensors.clear()
        if hasattr(self._zero.optimizer, "_hp_optimizer_states_linked"):
            # With False, DeepSpeed links the new state to the parameters at the next step.
            self._zero.optimizer._hp_optimizer_states_linked = False

    def _apply_restored_state(self, partition: Partition) -> None:
        """Put the restored state of the parameters of one partition into the inner optimizer."""
        inner_optimizer = self._zero.inner_optimizer
        states = [self.state.get(master, {}) for master in self._zero.master_views(partition)]  # type: ignore[call-overload]
        keys = sorted({key for values in states for key in values if key != _STEP})
        steps = [float(values[_STEP]) for values in states if _STEP in values]
        if not keys and not steps:
            inner_optimizer.state.pop(partition.flat, None)
            return
        inner_state = inner_optimizer.state.get(partition.flat, {})
        new_flats = {
            key: flat for (owner, key), flat in self._new_flat_tensors.items() if owner is partition
        }
        flats: dict[str, Any] = {
            key: new_flats[key] if key in new_flats else inner_state[key] for key in keys
        }
        for values, piece in zip(states, partition.pieces, strict=True):
            for key in keys:
                # In a partition, a parameter that was never stepped has zeros as its state.
                if key not in values:
                    flats[key][piece.span.offset : piece.span.offset + piece.span.length].zero_()
        if steps:
            if min(steps) != max(steps):
                _log.warning(
                    "ckpt: parameters that DeepSpeed steps together were saved after %d to %d "
                    "steps; all go on from the last",
                    min(steps),
                    max(steps),
                )
            flats[_STEP] = _step_like(
                inner_state.get(_STEP), inner_optimizer, partition, max(steps)
            )
        inner_optimizer.state[partition.flat] = flats

    # -- hooks of the inner optimizer, for the fence -----------------------------------------------

    def register_step_pre_hook(self, hook: Callable[..., Any]) -> Any:
        return self._zero.inner_optimizer.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Callable[..., Any]) -> Any:
        return self._zero.inner_optimizer.register_step_post_hook(hook)


def _step_like(counter: Any, inner_optimizer: Optimizer, partition: Partition, step: float) -> Any:
    """Return ``step`` in the form in which the inner optimizer counts its steps.

    Optimizers of torch count in a tensor, and optimizers of DeepSpeed in an integer. ``counter`` is
    the present counter; None if there is none.
    """
    if isinstance(counter, torch.Tensor):
        return counter.fill_(step)
    if counter is not None or not type(inner_optimizer).__module__.startswith("torch."):
        return int(step)
    group = inner_optimizer.param_groups[partition.group]
    on_device = group.get("capturable") or group.get("fused")
    return torch.tensor(step, device=partition.flat.device if on_device else "cpu")


def _check_engine(engine: Any) -> None:
    """Raise ``ConfigError`` if the engine uses a feature that this module does not support."""
    optimizer = getattr(engine, "optimizer", None)
    kind = type(optimizer).__name__
    if kind not in _ZERO_CLASSES or not isinstance(
        getattr(optimizer, "optimizer", None), Optimizer
    ):
        raise ConfigError(
            "zero_state takes the engine of deepspeed.initialize under ZeRO 1, 2 or 3; this "
            f"one's optimizer is {kind}. "
            'Without ZeRO put {"model": engine.module, "optimizer": engine.optimizer} into the '
            "state"
        )
    ranks = dist.get_process_group_ranks(engine.seq_data_parallel_group)
    unsupported_features = {
        "parallelism of another kind than that of data and sequences": len(ranks)
        < dist.get_world_size(),
        "a pipeline": type(engine).__name__ == "PipelineEngine",
        "experts": engine.has_moe_layers,
        "quantized parameters that are not trained": getattr(
            optimizer, "zero_quantized_nontrainable_weights", False
        ),
        "ZenFlow": getattr(optimizer, "zenflow", False),
        "optimizer state on NVMe": getattr(optimizer, "swap_optimizer", False),
        "parameters on NVMe": getattr(optimizer, "params_in_nvme_and_cpu", False),
        "an optimizer offloaded in part (ratio)": getattr(optimizer, "offload_optimizer", False)
        and getattr(optimizer, "partial_offload", 1.0) != 1.0,
    }
    if reasons := [reason for reason, present in unsupported_features.items() if present]:
        raise ConfigError(
            f"zero_state cannot save an engine with {' and '.join(reasons)}: use "
            "engine.save_checkpoint, or put LocalShards of its tensors into the state"
        )

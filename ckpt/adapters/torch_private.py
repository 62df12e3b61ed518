"""The private names of torch that ckpt uses, since torch has no public ones for what they do.

All other modules use them through this one. A name that a tested release lacks has a second way
here. The import of this module refuses a torch without a name that has none, and the call does so
for a name that only an object of FSDP has.

Some names stay where they are used, since they are the same in all tested releases: those that a
save reads of thousands of tensors (``Tensor._version``, ``DTensor._local_tensor`` and
``DTensor._spec``), and those of ``nn.Module`` that subclasses use (``_modules`` and
``_save_to_state_dict``).
"""

from __future__ import annotations

import logging
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import reduce
from importlib import import_module
from typing import Any, Final, NamedTuple, cast

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from ckpt.errors import ConfigError

_log = logging.getLogger("ckpt")
_warned: Final[set[str]] = set()
TESTED_TORCH: Final = ((2, 9), (2, 15))
"""The first and the last release of torch that the tests run on (docs/versions.md)."""
REQUIRED: Final = (
    "torch:accelerator.device_index",
    "torch:optim.Optimizer.register_step_pre_hook",
    "torch:utils.swap_tensors",
    "torch:Tensor._version",
    "torch:Tensor._use_count",
    "torch:Tensor._backward_hooks",
    "torch:Tensor._post_accumulate_grad_hooks",
    "torch:UntypedStorage._cdata",
    "torch:nn.Module._save_to_state_dict",
    "torch:_C.DisableTorchFunctionSubclass",
    "torch:_C._DisableTorchDispatch",
    "torch.distributed.tensor:DTensor._local_tensor",
    "torch.distributed.tensor:DTensor._spec",
    "torch.distributed.tensor.placement_types:_StridedShard",
    "torch.distributed._functional_collectives:AsyncCollectiveTensor",
    "torch.distributed.distributed_c10d:_get_default_store",
    "torch.utils.data._utils:worker",
)
"""Names without a second way, as ``module:attributes``."""
_FSDP1: Final = "_fsdp_wrapped_module"


def tested_range() -> str:
    """Return the tested releases, as an error or a log line gives them."""
    return " to ".join(f"{major}.{minor}" for major, minor in TESTED_TORCH)


def is_tested(version: str) -> bool:
    """Return True for a version of torch of a tested release."""
    major, minor = version.split(".")[:2]
    first, last = TESTED_TORCH
    return first <= (int(major), int(minor)) <= last


def warn_of_untested(version: str) -> None:
    """Log a warning, once in a process, if ``version`` of torch is not of a tested release."""
    release = ".".join(version.split(".")[:2])
    if not is_tested(version) and release not in _warned:
        _warned.add(release)
        _log.warning(
            "ckpt: torch %s is installed, and this version of ckpt was tested with torch %s only: "
            "save and restore once and compare before you rely on it",
            version,
            tested_range(),
        )


def missing(name: str) -> ConfigError:
    """Return the error for a torch that has no ``name``."""
    return ConfigError(
        f"torch {torch.__version__} has no {name}, which ckpt needs: install torch {tested_range()}"
    )


def find(name: str) -> Any:
    """Return what a name of ``REQUIRED`` stands for.

    Raises:
        ConfigError: This torch does not have it.
    """
    module, _, path = name.partition(":")
    try:
        return reduce(getattr, path.split("."), import_module(module))
    except (ImportError, AttributeError):
        raise missing(name.replace(":", ".")) from None


_found: Final = {name.rpartition(".")[2].rpartition(":")[2]: find(name) for name in REQUIRED}
StridedShard: Final[Any] = _found["_StridedShard"]
get_default_store: Final[Callable[[], Any]] = _found["_get_default_store"]


# -- loaders ---------------------------------------------------------------------------------------


@contextmanager
def outside_of_workers() -> Generator[None]:
    """Let ``get_worker_info()`` say that this is no worker of a loader."""
    worker = _found["worker"]
    info, worker._worker_info = worker._worker_info, None
    try:
        yield
    finally:
        worker._worker_info = info


# -- tensors ---------------------------------------------------------------------------------------


def waited(tensor: torch.Tensor) -> torch.Tensor:
    """Return the result of the collective that ``tensor`` is waiting for, or ``tensor`` itself."""
    if isinstance(tensor, _found["AsyncCollectiveTensor"]):
        return cast("Any", tensor).wait()  # type: ignore[no-any-return]
    return tensor


def plain_alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return a plain tensor with the memory and the version counter of a subclass' tensor.

    No code of the subclass runs.
    """
    with torch._C.DisableTorchFunctionSubclass(), torch._C._DisableTorchDispatch():
        return tensor.detach()


def storage_identity(tensor: torch.Tensor) -> int:
    """Return a number that two tensors share if and only if they share a storage, also an empty
    one.
    """
    return int(tensor.untyped_storage()._cdata)


def with_versions(values: Mapping[str, Any], of: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """Return ``values`` as a state dict with the versions that ``of`` has of its modules."""
    found: Any = OrderedDict(values)
    found._metadata = getattr(of, "_metadata", {})
    return cast("OrderedDict[str, Any]", found)


def has_hooks(tensor: torch.Tensor) -> bool:
    """Return True if a hook of the backward pass is registered on ``tensor``."""
    hooked: Any = tensor  # Torch's stubs do not declare the hooks
    return bool(hooked._backward_hooks or hooked._post_accumulate_grad_hooks)


def use_count(tensor: torch.Tensor) -> int:
    """Return how many references C++ and Python together hold to ``tensor``; Python's are one."""
    held: Any = tensor  # Torch's stubs do not declare this method
    return int(held._use_count())


def guards_of(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """Return torch's own comparison of many tensors in one call, as ``torch.compile`` uses it.

    It compares types, dtypes, shapes, strides and lazy views. It is False if it cannot tell: for a
    tensor that comes twice, and if this version of torch does not have it.
    """
    core: Any = torch._C
    try:
        guards = core._dynamo.guards.TensorGuards(
            *tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None
        )
    except (AttributeError, TypeError, RuntimeError):
        return always_unknown
    check: Callable[..., bool] = guards.check
    return check


def always_unknown(*_: torch.Tensor) -> bool:
    """Compare for a torch that has no such function. It finds nothing equal."""
    return False


# -- meshes and FSDP2 ------------------------------------------------------------------------------


def root_mesh(mesh: Any) -> Any:
    """Return the mesh that ``mesh`` was cut from, or ``mesh`` itself."""
    if (ask := getattr(mesh, "_get_root_mesh", None)) is not None:
        return ask()
    # until torch 2.9
    return find("torch.distributed.device_mesh:_mesh_resources.get_root_mesh")(mesh)


def fsdp2_groups(module: nn.Module) -> Sequence[Any]:
    """Return the groups of parameters that ``fully_shard`` has made of ``module``.

    Modules of one call of ``fully_shard`` have the same groups.
    """
    sharded: Any = module
    state = sharded._get_fsdp_state()
    if (groups := getattr(state, "_fsdp_param_groups", None)) is not None:
        return tuple(groups)
    try:
        group = state._fsdp_param_group  # until torch 2.11
    except AttributeError:
        raise missing(f"{type(state).__name__}._fsdp_param_groups") from None
    return () if group is None else (group,)


def may_be_gathering(group: Any) -> bool:
    """Return True if an all-gather of an FSDP2 group may be under way."""
    return getattr(group, "_all_gather_result", group) is not None


def has_frozen_graphs() -> bool:
    """Return True if inductor may have frozen parameters into a graph of this process."""
    # Inductor imports this module when it freezes the first graph.
    return "torch._inductor.freezing" in sys.modules


# -- optimizers ------------------------------------------------------------------------------------


def stand_in_of(optimizer: Optimizer, settings: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return another optimizer of the same class with a copy of ``settings``, and the copy.

    It has deep copies of the attributes of ``optimizer``, and no hooks, groups or state. Device
    meshes and process groups stay the same objects.
    """
    made: Any = object.__new__(type(optimizer))
    memo: dict[int, Any] = {id(optimizer): made}
    attributes = dict(vars(optimizer))
    for name, value in attributes.items():
        if name == "state":
            memo[id(value)] = defaultdict[Any, dict[Any, Any]](dict)
        elif name == "param_groups":
            memo[id(value)] = []
        elif name.startswith("_optimizer_") and name.endswith("_hooks"):
            memo[id(value)] = OrderedDict[int, Any]()
        elif isinstance(value, DeviceMesh | ProcessGroup):
            memo[id(value)] = value
    vars(made).update(deepcopy(attributes, memo))
    return made, deepcopy(dict(settings), memo)


# -- ZeroRedundancyOptimizer -----------------------------------------------------------------------


def overlaps_with_ddp(optimizer: Optimizer) -> bool:
    """Return True for a ``ZeroRedundancyOptimizer`` that steps inside of ``backward()``."""
    return bool(getattr(optimizer, "_overlap_with_ddp", False))


# -- FSDP1 -----------------------------------------------------------------------------------------


class FlatPart(NamedTuple):
    """The part of a parameter of ``shape`` that a flat parameter of FSDP1 holds on this rank.

    Its ``length`` elements are at ``start`` of the parameter and at ``at`` of the flat one.
    """

    fqn: str
    shape: tuple[int, ...]
    start: int
    at: int
    length: int


class FlatParameter(NamedTuple):
    """A flat parameter of FSDP1.

    Attributes:
        held: The flat parameter, or with ``use_orig_params`` the parameter of each part.
        parts: The parameters that it consists of.
        size: Elements of the flat parameter on this rank; None with ``use_orig_params``.
        tied: Names of further parameters -> the names of those in ``parts`` with the same memory.
    """

    held: Sequence[torch.Tensor]
    parts: Sequence[FlatPart]
    size: int | None
    tied: dict[str, str]


def fsdp1_wrappers(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the names of FSDP1's wrappers in ``module``, each with the wrapper."""
    if "torch.distributed.fsdp" in sys.modules:
        for name, child in module.named_modules():
            if _FSDP1 in child._modules:
                yield name, child


def fsdp1_handle(wrapper: Any) -> Any:
    """Return the handle of a wrapper's flat parameter; None if it has no parameters of its own."""
    return wrapper._handle


def fsdp1_ignored(wrapper: Any) -> Sequence[torch.Tensor]:
    """Return the parameters that a wrapper leaves alone."""
    return tuple(wrapper._ignored_params)


def fsdp1_copies(wrapper: Any) -> Any:
    """Return the process group of the ranks that replicate this rank's shard, if there is one."""
    return getattr(wrapper, "_inter_node_pg", None)


def fsdp1_over_dtensors(handle: Any) -> Iterator[str]:
    """Yield the names of the parameters of a handle that were DTensors before they were
    flattened.
    """
    flat = handle.flat_param
    for fqn, extension in zip(flat._fqns, flat._param_extensions, strict=True):
        if extension is not None:
            yield fqn


def fsdp1_flat(handle: Any) -> FlatParameter | None:
    """Return the flat parameter of a handle; None if its parameters are ordinary ones."""
    flat, is_sharded = handle.flat_param, bool(handle.uses_sharded_strategy)
    if handle._use_orig_params and not is_sharded:
        return None
    parts = [
        FlatPart(
            fqn,
            tuple(shape),
            info.intra_param_start_idx or 0,
            info.offset_in_shard or 0,
            info.numel_in_shard or 0,
        )
        for fqn, info, shape in zip(flat._fqns, flat._shard_param_infos, flat._shapes, strict=True)
    ]
    if handle._use_orig_params:
        return FlatParameter(flat._params, parts, None, {})
    size = flat._sharded_size if is_sharded else flat._unpadded_unsharded_size
    tied = {
        _name(shared.module_name, shared.param_name): _name(
            shared.prim_module_name, shared.prim_param_name
        )
        for shared in flat._shared_param_infos
    }
    return FlatParameter((flat,), parts, size.numel(), tied)


def _name(*parts: str) -> str:
    return ".".join(filter(None, parts))


def fsdp1_reshard(handle: Any) -> None:
    """Free what a handle has gathered, except inside of ``summon_full_params()``."""
    state = type(handle._training_state)
    if not handle.uses_sharded_strategy or handle._training_state == state.SUMMON_FULL_PARAMS:
        return
    # SHARD_GRAD_OP skips the sharded views after a forward that a backward may follow.
    if handle._skipped_use_sharded_views:
        handle._use_sharded_views()
    handle._prefetched = False
    for name in ("_full_param_padded", "_full_prec_full_param_padded"):
        memory: torch.Tensor | None = getattr(handle.flat_param, name, None)
        if memory is not None and memory.untyped_storage().size():
            if memory.device.type != "cpu":  # Queued work may still read it
                memory.record_stream(handle._device_handle.current_stream())
            memory.untyped_storage().resize_(0)

"""Give access to private names of torch, where torch has no public name for the same purpose.

If one of the tested releases lacks a name, a function of this module gets the same result in
another way, or returns a result that is safe in any case, such as ``always_false``. There is no
other way for the names in ``REQUIRED``: the import of this module raises ``ConfigError`` if torch
lacks one of them. Attributes of FSDP's objects can be checked only when such an object exists. If
they are missing, ``fsdp2_groups`` raises ``ConfigError``, and the functions for FSDP1 raise
``AttributeError``. A *handle* is the object in which FSDP1 keeps a flat parameter, the concatenated
parameters of a module.

Other modules use private names through this module. They use a few directly that are the same in
all tested releases. Among these are the attributes that a save reads of thousands of tensors (such
as ``Tensor._version`` and ``DTensor._local_tensor``), and the attributes of ``nn.Module`` that
subclasses use (such as ``_modules`` and ``_save_to_state_dict``).
"""

from __future__ import annotations

import logging
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import cache, reduce
from importlib import import_module
from typing import Any, Final, NamedTuple, cast

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from ckpt.errors import ConfigError

_log = logging.getLogger("ckpt")
_releases_with_warning: Final[set[str]] = set()
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
"""The names of torch without which ckpt cannot work, as ``module:attribute.attribute``."""
_FSDP1_CHILD: Final = "_fsdp_wrapped_module"


def tested_range() -> str:
    """Return the range of tested releases as text for an error or a log line: "2.9 to 2.15"."""
    return " to ".join(f"{major}.{minor}" for major, minor in TESTED_TORCH)


def is_tested(version: str) -> bool:
    """Return True if ``version`` of torch belongs to a tested release."""
    major, minor = version.split(".")[:2]
    oldest, last = TESTED_TORCH
    return oldest <= (int(major), int(minor)) <= last


def warn_of_untested(version: str) -> None:
    """Log a warning if ``version`` of torch belongs to no tested release.

    The warning appears once in a process for each release.
    """
    release = ".".join(version.split(".")[:2])
    if not is_tested(version) and release not in _releases_with_warning:
        _releases_with_warning.add(release)
        _log.warning(
            "ckpt: torch %s is installed, and this version of ckpt was tested with torch %s only: "
            "save and restore once and compare before you rely on it",
            version,
            tested_range(),
        )


def missing_name_error(name: str) -> ConfigError:
    """Return the error to raise if torch has no ``name``."""
    return ConfigError(
        f"torch {torch.__version__} has no {name}, which ckpt needs: install torch {tested_range()}"
    )


def find(name: str) -> Any:
    """Return the object that ``name`` (``module:attribute.attribute``) stands for.

    Raises:
        ConfigError: The installed torch does not have this name.
    """
    module, _, path = name.partition(":")
    try:
        return reduce(getattr, path.split("."), import_module(module))
    except (ImportError, AttributeError):
        raise missing_name_error(name.replace(":", ".")) from None


# Each required object by the last part of its name.
_private_objects: Final = {
    name.rpartition(".")[2].rpartition(":")[2]: find(name) for name in REQUIRED
}
StridedShard: Final[Any] = _private_objects["_StridedShard"]
get_default_store: Final[Callable[[], Any]] = _private_objects["_get_default_store"]


# -- loaders ---------------------------------------------------------------------------------------


@contextmanager
def outside_of_workers() -> Generator[None]:
    """Make ``torch.utils.data.get_worker_info()`` return None within the block, as it does outside
    of the workers of a ``DataLoader``.
    """
    worker = _private_objects["worker"]
    info, worker._worker_info = worker._worker_info, None
    try:
        yield
    finally:
        worker._worker_info = info


# -- tensors ---------------------------------------------------------------------------------------


def wait_for(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor``. If it is the result of an asynchronous collective, wait for the collective
    and return the tensor with the result.
    """
    if isinstance(tensor, _private_objects["AsyncCollectiveTensor"]):
        return cast("Any", tensor).wait()  # type: ignore[no-any-return]
    return tensor


def plain_alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return a plain tensor that shares the memory and the version counter of ``tensor``.

    If ``tensor`` is of a subclass, no code of the subclass runs.
    """
    with torch._C.DisableTorchFunctionSubclass(), torch._C._DisableTorchDispatch():
        return tensor.detach()


def storage_identity(tensor: torch.Tensor) -> int:
    """Return a number that is equal for two tensors if and only if they have the same storage, even
    if the storage is empty.
    """
    return int(tensor.untyped_storage()._cdata)


def has_hooks(tensor: torch.Tensor) -> bool:
    """Return True if a hook of the backward pass is registered on ``tensor``."""
    target: Any = tensor  # Torch's stubs do not declare the hooks
    return bool(target._backward_hooks or target._post_accumulate_grad_hooks)


def use_count(tensor: torch.Tensor) -> int:
    """Return the number of references to ``tensor`` in C++ code, where all references in Python
    together count as one.
    """
    target: Any = tensor  # Torch's stubs do not declare this method
    return int(target._use_count())


def guards_of(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """Return a function that returns True if its arguments have the properties that ``tensors``
    have now.

    ``torch.compile`` has such a function, which compares types, dtypes, shapes, strides and lazy
    views of many tensors in one call. If it cannot be used, the result is ``always_false``. This
    is so if ``tensors`` has a tensor twice, or if this torch lacks the function.
    """
    core: Any = torch._C
    try:
        guards = core._dynamo.guards.TensorGuards(
            *tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None
        )
    except (AttributeError, TypeError, RuntimeError):
        return always_false
    check: Callable[..., bool] = guards.check
    return check


def always_false(*_: torch.Tensor) -> bool:
    """Return False. ``guards_of`` returns this function if torch cannot compare the tensors."""
    return False


# -- meshes and FSDP2 ------------------------------------------------------------------------------


def root_mesh(mesh: Any) -> Any:
    """Return the mesh that ``mesh`` was cut from, or ``mesh`` itself if it is not a part of one."""
    if (get_root := getattr(mesh, "_get_root_mesh", None)) is not None:
        return get_root()
    # Torch up to 2.9 has this function instead of the method.
    return find("torch.distributed.device_mesh:_mesh_resources.get_root_mesh")(mesh)


def ranks_of_mesh(mesh: Any) -> torch.Tensor:
    """Return the ranks of ``mesh`` and of the meshes beside it that a root mesh was cut into. The
    first dimension has a mesh each.

    ``DeviceMesh.mesh`` has only the mesh with the rank of this process, which needs a process
    group. A mesh from a file may have no process group.
    """
    if (ranks := getattr(mesh, "_rank_map", None)) is not None:
        root_ranks: torch.Tensor = mesh._layout.remap_to_tensor(ranks)
        return root_ranks
    # Torch up to 2.9 keeps the tensor itself.
    return torch.unsqueeze(mesh.mesh, 0)


def writer_of_mesh(mesh: Any) -> int | None:
    """Return the rank of the process that has written ``mesh`` to a file; None if it is unknown."""
    rank: int | None = vars(mesh).get("_rank")
    return rank


def fsdp2_groups(module: nn.Module) -> Sequence[Any]:
    """Return the groups of parameters that ``fully_shard(module)`` has made.

    Modules that were given to ``fully_shard`` in one call have the same groups. The result is empty
    if the module has no parameters of its own.

    Raises:
        ConfigError: The state that FSDP2 keeps for the module has neither of the attributes that
            may hold the groups.
    """
    sharded: Any = module
    state = sharded._get_fsdp_state()
    if (groups := getattr(state, "_fsdp_param_groups", None)) is not None:
        return tuple(groups)
    try:
        group = state._fsdp_param_group  # Torch up to 2.11 has this attribute instead
    except AttributeError:
        raise missing_name_error(f"{type(state).__name__}._fsdp_param_groups") from None
    return () if group is None else (group,)


def may_be_gathering(group: Any) -> bool:
    """Return False if no all-gather of this FSDP2 group is under way. Return True if one is, or if
    this torch does not show it.
    """
    return getattr(group, "_all_gather_result", group) is not None


def has_frozen_graphs() -> bool:
    """Return True if inductor may have frozen parameters into a graph of this process."""
    # Inductor imports this module when it freezes the first graph.
    return "torch._inductor.freezing" in sys.modules


# -- modules ---------------------------------------------------------------------------------------


@cache
def harmless_loads() -> frozenset[Any]:
    """Return the methods ``_load_from_state_dict`` of torch that change nothing if the state dict
    has all names of the module.
    """
    names = (
        "torch.nn:Module",
        "torch.nn.modules.batchnorm:_NormBase",
        "torch.nn.modules.instancenorm:_InstanceNorm",
    )
    return frozenset(find(f"{name}._load_from_state_dict") for name in names)


def load_method(module: nn.Module) -> Any:
    """Return the function by which ``module`` loads its own part of a state dict."""
    method: Any = module._load_from_state_dict
    return getattr(method, "__func__", method)


def module_hooks(module: nn.Module, method: str) -> tuple[Callable[..., Any], ...]:
    """Return the hooks of ``module`` for ``method``, such as "load_state_dict_post"."""
    hooks: Mapping[int, Any] = getattr(module, f"_{method}_hooks")
    return tuple(hooks.values())


def own_tensor(module: nn.Module, name: str) -> torch.Tensor | None:
    """Return the parameter or buffer ``name`` of ``module`` itself; None if there is none."""
    return module._parameters.get(name, module._buffers.get(name))


def version_of(module: nn.Module) -> Any:
    """Return the version that the state dict of ``module`` has."""
    return module._version


def forget_post_hooks(module: nn.Module) -> None:
    """Remove the post-hooks of ``load_state_dict()`` from ``module``, but not from its children."""
    module._load_state_dict_post_hooks.clear()


def no_incompatible_keys() -> Any:
    """Return what ``Module.load_state_dict`` passes to post-hooks if all keys fit."""
    return find("torch.nn.modules.module:_IncompatibleKeys")([], [])


# -- optimizers ------------------------------------------------------------------------------------


def hookless_copy_of(
    optimizer: Optimizer, settings: Mapping[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Return a new optimizer of the same class as ``optimizer``, and a deep copy of ``settings``.

    The new optimizer has deep copies of the attributes of ``optimizer``, but no hooks, parameter
    groups or state. An attribute that is a device mesh or a process group is not copied, so both
    optimizers share it. An object that is in the attributes and in ``settings`` is also one object
    in the copies.
    """
    stand_in: Any = object.__new__(type(optimizer))
    memo: dict[int, Any] = {id(optimizer): stand_in}
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
    vars(stand_in).update(deepcopy(attributes, memo))
    return stand_in, deepcopy(dict(settings), memo)


def optimizer_hooks(optimizer: Optimizer, method: str) -> tuple[Callable[..., Any], ...]:
    """Return the hooks of ``optimizer`` for ``method``, such as "state_dict_post"."""
    hooks: Mapping[int, Any] = getattr(optimizer, f"_optimizer_{method}_hooks", {})
    return tuple(hooks.values())


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Return True if ``optimizer`` has the attributes that ``Optimizer.__init__`` makes for hooks
    of ``step()``.
    """
    return hasattr(optimizer, "_optimizer_step_pre_hooks")


# -- ZeroRedundancyOptimizer -----------------------------------------------------------------------


def is_zero_redundancy(optimizer: Optimizer) -> bool:
    """Return True if ``optimizer`` is torch's ``ZeroRedundancyOptimizer``."""
    api = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return api is not None and isinstance(optimizer, api.ZeroRedundancyOptimizer)


def overlaps_with_ddp(optimizer: Optimizer) -> bool:
    """Return True if ``optimizer`` is a ``ZeroRedundancyOptimizer`` that steps during
    ``backward()``.
    """
    return bool(getattr(optimizer, "_overlap_with_ddp", False))


# -- FSDP1 -----------------------------------------------------------------------------------------


class FlatPart(NamedTuple):
    """The part of one parameter that a flat parameter of FSDP1 holds on this rank.

    Attributes:
        fqn: The name of the parameter in the wrapped module.
        shape: The shape of the whole parameter.
        start: The index of the part's first element in the flattened parameter.
        shard_start: The index of the part's first element in this rank's shard of the flat
            parameter.
        length: The number of elements of the part; 0 if this rank holds none.
    """

    fqn: str
    shape: tuple[int, ...]
    start: int
    shard_start: int
    length: int


class FlatParameter(NamedTuple):
    """A flat parameter of FSDP1.

    Attributes:
        tensors: The tensor that is the flat parameter, or with ``use_orig_params`` the tensors of
            the original parameters, one for each of ``parts``.
        parts: The parts of the original parameters.
        size: The number of elements of the flat parameter on this rank; None with
            ``use_orig_params``.
        ties: The name of each further parameter that shares its memory with a parameter in
            ``parts`` -> the name of the parameter in ``parts``; empty with ``use_orig_params``.
    """

    tensors: Sequence[torch.Tensor]
    parts: Sequence[FlatPart]
    size: int | None
    ties: dict[str, str]


def fsdp1_wrappers(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the name and the object of each FSDP1 wrapper in ``module``."""
    if "torch.distributed.fsdp" in sys.modules:
        for name, child in module.named_modules():
            if _FSDP1_CHILD in child._modules:
                yield name, child


def is_fsdp1(module: nn.Module) -> bool:
    """Return True if any part of the module is wrapped in FSDP1."""
    return any(True for _ in fsdp1_wrappers(module))


def fsdp1_handle(wrapper: Any) -> Any:
    """Return the handle of the flat parameter of an FSDP1 wrapper, or None if the wrapper has no
    parameters of its own.
    """
    return wrapper._handle


def fsdp1_ignored(wrapper: Any) -> Sequence[torch.Tensor]:
    """Return the parameters that an FSDP1 wrapper ignores."""
    return tuple(wrapper._ignored_params)


def fsdp1_copies(wrapper: Any) -> Any:
    """Return the process group of the ranks that hold the same shard as this rank (hybrid
    sharding), or None if each shard is on one rank only.
    """
    return getattr(wrapper, "_inter_node_pg", None)


def fsdp1_over_dtensors(handle: Any) -> Iterator[str]:
    """Yield the names of those parameters of a handle that were DTensors before FSDP1 flattened
    them.
    """
    flat = handle.flat_param
    for fqn, extension in zip(flat._fqns, flat._param_extensions, strict=True):
        if extension is not None:
            yield fqn


def fsdp1_flat(handle: Any) -> FlatParameter | None:
    """Return the flat parameter of a handle, or None if the module keeps its original parameters
    whole.
    """
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
    ties = {
        _joined_name(info.module_name, info.param_name): _joined_name(
            info.prim_module_name, info.prim_param_name
        )
        for info in flat._shared_param_infos
    }
    return FlatParameter((flat,), parts, size.numel(), ties)


def _joined_name(*parts: str) -> str:
    return ".".join(filter(None, parts))


def fsdp1_reshard(handle: Any) -> None:
    """Free the parameters that a handle has gathered, except inside of ``summon_full_params()``."""
    state = type(handle._training_state)
    if not handle.uses_sharded_strategy or handle._training_state == state.SUMMON_FULL_PARAMS:
        return
    # Under SHARD_GRAD_OP, FSDP1 keeps the views of the gathered parameters after a forward pass,
    # since a backward pass may follow.
    if handle._skipped_use_sharded_views:
        handle._use_sharded_views()
    handle._prefetched = False
    for name in ("_full_param_padded", "_full_prec_full_param_padded"):
        memory: torch.Tensor | None = getattr(handle.flat_param, name, None)
        if memory is not None and memory.untyped_storage().size():
            if memory.device.type != "cpu":  # Queued work may still read the memory
                memory.record_stream(handle._device_handle.current_stream())
            memory.untyped_storage().resize_(0)
